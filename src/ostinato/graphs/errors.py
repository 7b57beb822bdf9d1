"""All exceptions that the runtime raises for its users. Asserts elsewhere check internal invariants."""


class OstinatoError(Exception):
    """Base class of all errors of Ostinato."""


class ConfigError(OstinatoError, ValueError):
    """A setting is unknown, invalid or contradicts another one."""


class BatchError(OstinatoError, ValueError):
    """A batch does not fit the declared inputs: a field, type, device, shape or count is wrong."""


class CaptureError(OstinatoError, RuntimeError):
    """Something cannot be captured. Has the line of user code at fault, if there is one."""

    def __init__(self, message: str, *, where: str | None = None, inside: str | None = None) -> None:
        """`inside`: the line of a library that the user's line called, if that is at fault."""
        place = "; inside ".join(line for line in (where, inside) if line)
        super().__init__(f"{message} (at {place})" if place else message)
        self.message, self.where, self.inside = message, where, inside


class ColdKernelError(CaptureError):
    """A kernel was compiled during recording: it was not warmed up for the captured arguments."""


class AddressError(OstinatoError, RuntimeError):
    """A tensor that captured graphs read has moved since the capture."""


class StaleOutputError(OstinatoError, RuntimeError):
    """An output was used after a later replay had overwritten its memory."""


class VerifyError(OstinatoError, AssertionError):
    """A replay disagrees with the eager step, or padding changed the result."""
