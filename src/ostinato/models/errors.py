"""What can go wrong between the name of a model and its weights in memory."""


class ModelError(ValueError):
    """A model cannot be used as given; the text names the file or field and what to do."""


class UnsupportedModelError(ModelError):
    """The model is of a kind this engine does not run; the text lists the kinds it does."""


class WeightsError(ModelError):
    """The weights do not fit the configuration, or a weights file is broken or absent."""


class DownloadError(RuntimeError):
    """A model that is not on this machine could not be fetched."""
