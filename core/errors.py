"""Exceptions and exit codes. A message says what, the value, and what to do."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every xspec command (docs/design.md, Exit codes)."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    CONFIG = 3
    MODEL_LOAD = 4
    DEVICE = 5
    ADDRESS_IN_USE = 6
    CALIBRATION = 7
    RANK_DIED = 8
    DRAIN_FORCED = 9
    INTERRUPTED = 130


class XspecError(Exception):
    """Base of all errors that users are meant to read; `exit_code` is what a command ends with."""

    exit_code = ExitCode.UNEXPECTED


class ConfigError(XspecError):
    """One or more settings are refused. `problems` holds one full sentence each."""

    exit_code = ExitCode.CONFIG

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ModelLoadError(XspecError):
    exit_code = ExitCode.MODEL_LOAD


class DeviceUnavailable(XspecError):
    exit_code = ExitCode.DEVICE


class AddressInUse(XspecError):
    exit_code = ExitCode.ADDRESS_IN_USE


class CalibrationError(XspecError):
    exit_code = ExitCode.CALIBRATION


class EngineFailed(XspecError):
    exit_code = ExitCode.RANK_DIED


class RequestRejected(XspecError):
    """A request is refused before execution. `param` names the field; `status` is the HTTP status."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
