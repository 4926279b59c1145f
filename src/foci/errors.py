"""The errors of wrong arguments. Each is the type that Python's convention asks for, and a RuntimeError as well: torch raises that for the
same mistakes, so code that handles torch's errors handles foci's under `foci.patch()`."""

__all__ = ["ArgumentError", "DtypeError"]


class ArgumentError(ValueError, RuntimeError):
    """An argument of a wrong shape, device or value."""


class DtypeError(TypeError, RuntimeError):
    """A tensor of a wrong dtype or layout."""
