"""Logging: what a record looks like, on a terminal and off it."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs

from core.logs import configure_logging, get_logger, log_effective_configuration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


def json_lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_off_a_terminal_with_rank_level_and_utc_time() -> None:
    stream = io.StringIO()
    configure_logging(rank=3, stream=stream)
    get_logger().info("rank.ready", pages=7)
    logging.getLogger("torch.thing").warning("old %s", "style", extra={"color_message": "\x1b[1m", "code": 4})
    own, foreign = json_lines(stream)
    assert own.items() >= {"event": "rank.ready", "pages": 7, "rank": 3, "level": "info"}.items()
    assert str(own["timestamp"]).endswith("Z")
    assert foreign.items() >= {"event": "old style", "code": 4, "rank": 3, "logger": "torch.thing"}.items()
    assert "color_message" not in foreign


def test_handlers_that_a_library_gave_to_torch_loggers_are_taken_away() -> None:
    theirs, ours = io.StringIO(), io.StringIO()
    logger = logging.getLogger("torch.other")
    logger.addHandler(logging.StreamHandler(theirs))
    logger.propagate = False
    configure_logging(stream=ours)
    logger.warning("slow path")
    assert [record["event"] for record in json_lines(ours)] == ["slow path"]
    assert theirs.getvalue() == ""


def test_exceptions_are_data_without_local_variables() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    prompt = "a secret prompt"
    try:
        raise ValueError(len(prompt))
    except ValueError:
        get_logger().exception("request.failed")
        logging.getLogger("uvicorn.error").exception("also here")
    assert "secret" not in stream.getvalue()
    for record in json_lines(stream):
        assert record["exception"][0]["exc_type"] == "ValueError"  # type: ignore[index]


def test_values_that_json_cannot_hold_still_give_one_valid_line() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    get_logger().info("odd", nan=float("nan"), thing=object(), text="two\nlines")
    get_logger().info("odder", lone="\udc80", keys={(1, 2): 3}, huge=2**200)
    first, second = json_lines(stream)
    assert first["nan"] is None
    assert first["text"] == "two\nlines"
    assert second["event"]


def test_level_filters_both_kinds() -> None:
    stream = io.StringIO()
    configure_logging(level="warning", stream=stream)
    get_logger().info("quiet")
    logging.getLogger("x").info("quiet")
    get_logger().warning("loud")
    assert [record["event"] for record in json_lines(stream)] == ["loud"]


def test_uvicorn_keeps_its_words_and_loses_its_access_lines() -> None:
    stream = io.StringIO()
    logging.getLogger("uvicorn").addHandler(logging.StreamHandler(stream))
    configure_logging(stream=stream)
    logging.getLogger("uvicorn.access").info("GET / 200")
    logging.getLogger("uvicorn.error").info("Started")
    assert [record["event"] for record in json_lines(stream)] == ["Started"]


def test_configuring_twice_does_not_print_twice() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    configure_logging(stream=stream)
    get_logger().info("once")
    assert len(json_lines(stream)) == 1


def test_warnings_become_records() -> None:
    stream = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logging(stream=stream)
        warnings.warn("deprecated thing", stacklevel=1)
    assert "deprecated thing" in str(json_lines(stream)[0]["event"])


def test_console_has_colours_on_a_terminal_unless_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    stream = Terminal()
    configure_logging(stream=stream)
    get_logger().info("engine.started")
    assert "\x1b[" in stream.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    configure_logging(stream=stream)
    get_logger().info("engine.started", rank=1)
    assert "\x1b[" not in stream.getvalue()
    assert "engine.started" in stream.getvalue()


def test_a_terminal_gets_the_beginning_of_a_long_value_and_a_file_all_of_it() -> None:
    settings = {f"setting_{i}": i for i in range(100)}
    terminal, file = Terminal(), io.StringIO()
    configure_logging(stream=terminal)
    get_logger().info("config.effective", settings=settings, few={"a": 1})
    configure_logging(stream=file, format="console")
    get_logger().info("config.effective", settings=settings)
    shown = terminal.getvalue()
    assert "setting_0" in shown
    assert "setting_99" not in shown
    assert "{'a': 1}" in shown
    assert f"({len(repr(settings))} characters; --log_format json shows all)" in shown
    assert "setting_99" in file.getvalue()


@pytest.mark.parametrize("algorithm", ["DSpark", "MTP"])
def test_effective_configuration_event(algorithm: str) -> None:
    effective = {"source": "preset", "window_steps": 8, "captured_target_rows": {"1": [1, 2]}}
    with capture_logs() as records:
        log_effective_configuration(get_logger(), algorithm, effective)
    assert records == [
        {
            "event": "adaptive.effective_configuration",
            "message": f"{algorithm} adaptive effective configuration",
            "algorithm": algorithm,
            "effective": effective,
            "log_level": "info",
        }
    ]


def test_every_line_of_a_process_off_a_terminal_is_json() -> None:
    script = """
import logging, warnings
from core.logs import configure_logging, get_logger
configure_logging(format="auto", level="debug", rank=0)
get_logger().info("a", n=1)
logging.getLogger("uvicorn.error").error("b\\nsecond line")
warnings.warn("c")
try:
    1 / 0
except ZeroDivisionError:
    get_logger().exception("d")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
    records = [json.loads(line) for line in done.stderr.splitlines()]
    assert len(records) == 4
    assert all(record["rank"] == 0 for record in records)
