"""Logging of the parent and of every rank: one root handler, structured, JSON off a terminal.

Records of the standard library (uvicorn, torch, warnings) pass through the same processors as our own.
Configure in each process, after torch is imported if it is: cached loggers do not survive a spawn, and torch
sets its own loggers up.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO, cast

import msgspec
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

LogFormat = Literal["auto", "console", "json"]

EFFECTIVE_CONFIGURATION = "adaptive.effective_configuration"
CUT_CHARACTERS = 120  # of a nested value on a terminal


def configure_logging(
    *, format: LogFormat = "auto", level: str = "info", rank: int | None = None, stream: TextIO | None = None
) -> None:
    """Route all logging of this process to `stream` (stderr). `auto` is JSON except on a terminal."""
    stream = sys.stderr if stream is None else stream
    threshold = logging.getLevelNamesMapping()[level.upper()]
    as_console = format == "console" or (format == "auto" and stream.isatty())
    shared = _shared_processors(rank)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(), _drop_duplicates],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *(_console(stream) if as_console else _json()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]  # ours alone: a second handler would print everything twice
    root.setLevel(threshold)
    _quiet_uvicorn()
    _take_from_torch()
    logging.captureWarnings(True)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def get_logger(name: str = "xspec") -> FilteringBoundLogger:
    """Return a logger; the first argument of its methods is a stable event name, facts go into fields."""
    return cast(FilteringBoundLogger, structlog.get_logger(name))


def log_effective_configuration(
    logger: FilteringBoundLogger, algorithm: str, effective: Mapping[str, object]
) -> None:
    """Log once at startup what adaptive speculation really runs with: source, every setting, geometry."""
    logger.info(
        EFFECTIVE_CONFIGURATION,
        message=f"{algorithm} adaptive effective configuration",
        algorithm=algorithm,
        effective=dict(effective),
    )


def _shared_processors(rank: int | None) -> list[Processor]:
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if rank is not None:

        def add_rank(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
            event["rank"] = rank
            return event

        processors.append(add_rank)
    return processors


def _drop_duplicates(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Remove what uvicorn adds for its own formatter: the same message once more, with escape codes."""
    event.pop("color_message", None)
    return event


class _Cut:
    """The beginning of a long value, for a terminal."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return (
            f"{self._text[:CUT_CHARACTERS]} ... ({len(self._text)} characters; --log_format json shows all)"
        )


def _cut_long_values(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Nested facts (a whole configuration) would push everything else off the screen."""
    for key, value in event.items():
        if isinstance(value, dict | list | tuple) and len(text := repr(value)) > 2 * CUT_CHARACTERS:
            event[key] = _Cut(text)
    return event


def _console(stream: TextIO) -> list[Processor]:
    colors = stream.isatty() or bool(os.environ.get("FORCE_COLOR"))
    if os.environ.get("NO_COLOR"):
        colors = False
    # Plain tracebacks: the rich ones print local variables, and those may hold prompts.
    return [
        *([_cut_long_values] if stream.isatty() else []),
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback),
    ]


def _json() -> list[Processor]:
    transform = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [
        structlog.processors.ExceptionRenderer(transform),
        structlog.processors.JSONRenderer(serializer=_to_json),
    ]


def _to_json(event: EventDict, **_unused: Any) -> str:
    """Encode one event. msgspec writes null for NaN, which json would write as no JSON at all."""
    try:
        return msgspec.json.encode(event, enc_hook=repr).decode()
    except (TypeError, ValueError, OverflowError):  # odd keys, lone surrogates, huge integers: lose no record
        return json.dumps({str(key): repr(value) for key, value in event.items()})


def _quiet_uvicorn() -> None:
    """Take uvicorn's records through the root handler; drop its access lines, we write one per request."""
    for name in ("uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    access = logging.getLogger("uvicorn.access")
    access.handlers[:] = [logging.NullHandler()]
    access.propagate = False


def _take_from_torch() -> None:
    """Let torch's records reach the root handler: importing torch gives its loggers handlers of their own."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] != "torch" or name == "torch.__trace":  # a trace is no log
            continue
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()
            logger.propagate = True
