"""Errors a user can act on: one line of cause, one line of remedy, one exit code each.

Anything that is not an `UllageError` is a bug and exits with code 1.
"""

from typing import ClassVar


class UllageError(Exception):
    """Base of every expected failure; `code` is the process exit code."""

    code: ClassVar[int] = 1

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.cause}\n{self.remedy}" if self.remedy else self.cause


class UsageError(UllageError):
    """The command line itself is wrong."""

    code = 2


class DataError(UllageError):
    """Training or evaluation data cannot be used."""

    code = 65


class ModelError(UllageError):
    """A model or tokenizer is missing, damaged or of an unsupported kind."""

    code = 66


class ServiceError(UllageError):
    """A reward or rollout service failed past its budget."""

    code = 69


class NumericsError(UllageError):
    """Too many non-finite losses or gradients."""

    code = 70


class WriteError(UllageError):
    """Something could not be written: read-only folder, full disk, existing run, damaged checkpoint."""

    code = 74


class PreemptedError(UllageError):
    """Asked to stop (SIGTERM); a checkpoint was written and the run can be resumed."""

    code = 75


class ConfigError(UllageError):
    """The configuration is invalid; the cause lists every problem found."""

    code = 78


class DoesNotFitError(UllageError):
    """The run does not fit the memory it was given."""

    code = 79


class PeerLostError(UllageError):
    """Another rank died or hung."""

    code = 80


class InterruptedRunError(UllageError):
    """Ctrl-C; a checkpoint was written and the run can be resumed."""

    code = 130
