"""Entry point of a rank process: `python -m core.rank_main CONFIG TO_ENGINE FROM_ENGINE PARENT_PID`.

Sets up what must stand before torch loads, runs the engine, and turns whatever goes wrong into one account of
it: an EngineFailure message, an error file and an exit code. Nothing is printed here; the parent tells people
once.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from core.config_codec import decode_config
from core.errors import ExitCode, XspecError
from core.ranks import ErrorReport

PR_SET_PDEATHSIG = 1
PARENT_POLL_SECONDS = 1.0
HEARTBEAT_SECONDS = 1.0
SEND_LINGER_MS = 500


def run(config_file: Path, to_engine: str, from_engine: str) -> None:
    """Load the configuration and hand over to the engine. Imports torch."""
    config = decode_config(config_file.read_bytes())

    from core.engine.service import run_rank  # imports torch, which sets up loggers of its own
    from core.logs import configure_logging

    server = config.server
    configure_logging(format=server.log_format, level=server.log_level, rank=int(os.environ["RANK"]))
    run_rank(config, to_engine, from_engine)


def main(argv: list[str], *, run: Callable[[Path, str, str], None] = run) -> int:
    """Run one rank until Shutdown; return its exit code."""
    config_file, to_engine, from_engine, parent_pid = argv
    faulthandler.enable(all_threads=True)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the parent decides when to stop, also when a whole group is signalled
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(int(parent_pid))
    start_heartbeat(int(os.environ["RANK"]), from_engine)
    try:
        run(Path(config_file), to_engine, from_engine)
    except Exception as error:  # the edge of the rank: every failure must reach the parent
        report = describe(error)
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if error_file:
            report.write(Path(error_file))
        send_failure(report, from_engine)
        return report.exit_code
    return ExitCode.OK


def describe(error: Exception) -> ErrorReport:
    """Account for a failure. Errors written for users carry their message only."""
    is_user_error = isinstance(error, XspecError)
    return ErrorReport(
        error_type=type(error).__name__,
        message=str(error) or repr(error),
        traceback="" if is_user_error else traceback.format_exc(),
        exit_code=int(error.exit_code) if isinstance(error, XspecError) else int(ExitCode.RANK_DIED),
        timestamp=time.time(),
    )


def send_failure(report: ErrorReport, from_engine: str) -> None:
    """Tell the parent at once, best effort: it also finds the error file when it sees the process gone."""
    import zmq

    from core.server.wire import EngineFailure, encode

    failure = EngineFailure(
        phase="", error_type=report.error_type, message=report.message, exit_code=report.exit_code
    )
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, SEND_LINGER_MS)
    try:
        socket.connect(from_engine)
        socket.send(encode(failure), zmq.NOBLOCK)
    except zmq.ZMQError:
        pass
    finally:
        context.destroy(linger=SEND_LINGER_MS)


def start_heartbeat(rank: int, from_engine: str) -> None:
    """Tell the parent every second that this process runs, from a thread that ends with it."""
    import zmq

    from core.server.wire import Heartbeat, encode

    def beat() -> None:
        socket = zmq.Context().socket(zmq.PUSH)  # of this thread alone: sockets are not shared
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(from_engine)
        while True:
            with contextlib.suppress(zmq.Again):  # nobody reads; the parent watch deals with that
                socket.send(encode(Heartbeat(rank=rank)), zmq.NOBLOCK)
            time.sleep(HEARTBEAT_SECONDS)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def die_with_parent(parent_pid: int) -> None:
    """Make sure that this process ends when the parent does, however the parent ends.

    The kernel's signal comes even while a kernel of torch holds the interpreter; the polling thread covers
    systems without prctl and a parent that was gone before the call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_POLL_SECONDS)
        os._exit(ExitCode.RANK_DIED)

    if os.getppid() != parent_pid:
        os._exit(ExitCode.RANK_DIED)
    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def exit_process(exit_code: int) -> NoReturn:
    """Leave at once. After a failure the engine's own threads may wait for something that never comes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
