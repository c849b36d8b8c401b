"""Rank processes seen from the parent: start them, relay what they print, notice how they end, stop them.

Why this and not torch.distributed.elastic.multiprocessing: importing it loads torch into the parent,
measured at 1.4 s of start-up and 190 MB (45 -> 237 MB resident), and on an NPU machine it would load the
device backend there. Its redirects grow a log file without bound, it takes over the parent's signal
handlers, and its `poll` blocks up to 30 s while it stops peers. What we would take from it is kept:
torchrun's environment variables and its error-file format, so that ranks look the same to torch. Like
torch's, each rank leads a session of its own: Ctrl-C in the terminal reaches the parent only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import core
from core.api_keys import VARIABLE as API_KEY_VARIABLE
from core.config import EngineConfig
from core.config_codec import encode_config
from core.errors import ExitCode

TAIL_LINES = 20
TAIL_LINE_CHARS = 2000

Relay = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """What a failing rank wrote into its error file about its own end."""

    error_type: str
    message: str
    traceback: str  # empty for errors whose message is meant for users
    exit_code: int
    timestamp: float

    @classmethod
    def read(cls, path: Path) -> ErrorReport | None:
        """Read an error file; None when the rank wrote none, or only half of one."""
        try:
            message = json.loads(path.read_bytes())["message"]
            extra = message["extraInfo"]
            return cls(
                error_type=str(extra.get("error_type", "Exception")),
                message=str(message["message"]),
                traceback=str(extra.get("py_callstack", "")),
                exit_code=int(message.get("errorCode", ExitCode.RANK_DIED)),
                timestamp=float(extra["timestamp"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Write the file in torch elastic's format, with our keys inside `extraInfo`."""
        extra = {
            "error_type": self.error_type,
            "py_callstack": self.traceback,
            "timestamp": str(self.timestamp),
        }
        message = {"message": self.message, "errorCode": self.exit_code, "extraInfo": extra}
        path.write_text(json.dumps({"message": message}))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDeath:
    """The first rank that ended without being asked, and all that is known about why."""

    rank: int
    phase: str
    return_code: int  # negative: killed by that signal
    report: ErrorReport | None
    last_lines: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """The exit code of the launch: the rank's own account where it gave one."""
        return self.report.exit_code if self.report is not None else ExitCode.RANK_DIED

    @property
    def is_user_error(self) -> bool:
        """Whether the message alone says what to do, so that a traceback would only hide it."""
        return self.report is not None and not self.report.traceback

    def reason(self) -> str:
        """One line: the exception's type and message, or the signal's name, or the exit status."""
        if self.report is not None:
            return f"{self.report.error_type}: {self.report.message}"
        if self.return_code < 0:
            name = _signal_name(-self.return_code)
            hint = " (the kernel's out-of-memory killer, or a kill by hand)" if name == "SIGKILL" else ""
            return f"killed by signal {name}{hint}"
        return f"ended with exit status {self.return_code} without being asked"


class RankProcess:
    """One child process, the pipe behind its stdout and stderr, and the last lines that came through it."""

    def __init__(
        self, *, rank: int, command: list[str], env: dict[str, str], error_file: Path, relay: Relay
    ) -> None:
        self.rank = rank
        self.error_file = error_file
        self._relay = relay
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        # PR_SET_PDEATHSIG in the rank follows the thread that forks here: this must be the main thread.
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # A thread, not asyncio: a rank must never block on a full pipe because the event loop is busy.
        self._reader = threading.Thread(target=self._pump, name=f"rank-{rank}-output", daemon=True)
        self._reader.start()

    def _pump(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            self._tail.append(line[:TAIL_LINE_CHARS])
            self._relay(line)

    def death(self, phase: str) -> RankDeath | None:
        """Describe how the process ended; None while it runs."""
        return_code = self.process.poll()
        if return_code is None:
            return None
        self._reader.join(timeout=1.0)  # the last lines are still in the pipe when the process is gone
        return RankDeath(
            rank=self.rank,
            phase=phase,
            return_code=return_code,
            report=ErrorReport.read(self.error_file),
            last_lines=tuple(self._tail),
        )

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the rank's whole process group, if it still runs."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class LocalRanks:
    """All ranks of this node. `phase` is kept up to date by the launcher and names the place of a death."""

    def __init__(self, config: EngineConfig, *, directory: Path, module: str, relay: Relay) -> None:
        self.config = config
        self.phase = "start"
        self._directory = directory
        self._module = module
        self._relay = relay
        self._ranks: list[RankProcess] = []

    def start(self, *, to_engine: str, from_engine: str) -> None:
        """Start every local rank. Call from the main thread."""
        config_file = self._directory / "config.json"
        config_file.write_bytes(encode_config(self.config))
        for local_rank in range(self.config.parallel.nproc_per_node):
            error_file = self._directory / f"error-{local_rank}.json"
            # -P: a folder named `core` in the user's working directory must not shadow ours.
            command = [sys.executable, "-P", "-u", "-m", self._module]
            command += [str(config_file), to_engine, from_engine, str(os.getpid())]
            env = rank_environment(self.config, local_rank=local_rank, error_file=error_file, base=os.environ)
            rank = RankProcess(
                rank=int(env["RANK"]), command=command, env=env, error_file=error_file, relay=self._relay
            )
            self._ranks.append(rank)

    def first_death(self) -> RankDeath | None:
        """The rank that failed first, or None while all run. Victims of another rank's failure come later."""
        deaths = [death for rank in self._ranks if (death := rank.death(self.phase)) is not None]
        if not deaths:
            return None
        return min(deaths, key=lambda death: death.report.timestamp if death.report else float("inf"))

    async def stop(self, grace_seconds: float) -> None:
        """Wait for the ranks to end by themselves, then SIGTERM, then SIGKILL. Afterwards none is left."""
        if not await self._ended_within(grace_seconds):
            self._signal_all(signal.SIGTERM)
            await self._ended_within(1.0)
        self.kill()

    def kill(self) -> None:
        """End every rank at once and reap it."""
        self._signal_all(signal.SIGKILL)
        for rank in self._ranks:
            # Bounded: a process in uninterruptible sleep inside a driver must not hold us.
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(timeout=5.0)

    def _signal_all(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            rank.send_signal(number)

    async def _ended_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(rank.process.poll() is None for rank in self._ranks):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True


def rank_environment(
    config: EngineConfig, *, local_rank: int, error_file: Path, base: Mapping[str, str]
) -> dict[str, str]:
    """The environment of one rank: torchrun's variables, how OpenMP threads wait, where the code is."""
    env = {name: value for name, value in base.items() if name != API_KEY_VARIABLE}
    parallel = config.parallel
    address, _, port = parallel.master_node_addr.rpartition(":")
    env |= {
        "RANK": str(parallel.node_rank * parallel.nproc_per_node + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(parallel.world_size),
        "LOCAL_WORLD_SIZE": str(parallel.nproc_per_node),
        "GROUP_RANK": str(parallel.node_rank),
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }
    env |= openmp_environment(config.device.num_threads, base=base)
    # The module is found where ours is, whether installed or run from a checkout.
    root = str(Path(core.__file__).resolve().parents[1]) if core.__file__ else ""
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))
    return env


def openmp_environment(num_threads: int, *, base: Mapping[str, str]) -> dict[str, str]:
    """What must stand in the environment before torch loads its OpenMP runtime.

    A bounded spin keeps a small step fast on an idle machine without starving the server process on a busy
    one (measured: 17 ms idle and 33 ms beside a busy process, against 15 and 65 with unbounded spinning).
    Whoever set a policy keeps it.
    """
    env = {"OMP_NUM_THREADS": str(num_threads)}
    if "OMP_WAIT_POLICY" not in base and "GOMP_SPINCOUNT" not in base:
        env["GOMP_SPINCOUNT"] = "1000"
    return env


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
