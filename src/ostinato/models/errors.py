"""Errors between a model's name and its weights in memory."""


class ModelError(ValueError):
    """A model cannot be used as given; the message names the file or field and says what to do."""


class UnsupportedModelError(ModelError):
    """The engine does not run this kind of model; the message lists the kinds that it runs."""


class WeightsError(ModelError):
    """The weights do not fit the configuration, or a weights file is broken or missing."""


class DownloadError(RuntimeError):
    """A model that is not on this machine could not be downloaded."""
