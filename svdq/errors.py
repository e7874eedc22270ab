"""Errors that a user can act on. Each message reads: where — found — wanted — do.

The command line prints the message alone and exits with 2; anything else that escapes is a bug in svdq.
"""


class SvdqError(Exception):
    """Base of every error that svdq raises on purpose."""


class ConfigError(SvdqError):
    """An option, a pattern or a combination of options cannot be honoured."""


class CheckpointError(SvdqError):
    """A file or a model directory is missing, malformed, hostile or of the wrong kind."""


class DataError(SvdqError):
    """Calibration or evaluation data cannot be read, or there is too little of it."""


class NumericsError(SvdqError):
    """A computation met a non-finite value or a matrix that no allowed repair makes definite."""
