"""Life and death of a launch: real processes, sockets and signals around a scripted rank without a model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from core.config_codec import encode_config
from core.errors import ExitCode
from core.ranks import ErrorReport, RankDeath, rank_environment
from metrics.status import Snapshot
from tests.fake_engine import write_text_model
from tests.test_config_codec import make_config

ROOT = Path(__file__).resolve().parents[1]


class LaunchedServer:
    """A launch as a child process. Its temporary directory is ours, so that what stays behind is seen."""

    def __init__(
        self,
        tmp_path: Path,
        script: str,
        *,
        port: int = 0,
        drain_timeout: float = 5.0,
        silent_seconds: float | None = None,
    ) -> None:
        self.script = script
        self.tmp = tmp_path / "t"
        self.tmp.mkdir()
        config = make_config(model_path=write_text_model(tmp_path / "model"))
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, served_name=script),
            server=dataclasses.replace(config.server, port=port, drain_timeout_seconds=drain_timeout),
        )
        config_file = tmp_path / "config.json"
        config_file.write_bytes(encode_config(config))
        more = [] if silent_seconds is None else [str(silent_seconds)]
        self._stderr = tmp_path / "stderr"
        with self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.launch_fake", str(config_file), *more],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(self.tmp)},
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        self.url = ""
        # One client without TLS: making it anew for every poll costs more than the poll.
        self.http = httpx.Client(verify=False, timeout=5, limits=httpx.Limits(max_keepalive_connections=0))

    def wait_ready(self) -> LaunchedServer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert line.startswith("xspec is ready: http://127.0.0.1:"), (line, self.stderr())
        self.url = line.split()[3].removesuffix("/v1")
        return self

    def stderr(self) -> str:
        return self._stderr.read_text()

    def rank_pids(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def status(self, path: str) -> int:
        return self.http.get(self.url + path).status_code

    def heartbeat(self) -> float:
        """Unix time at which the rank was last heard."""
        page = self.http.get(self.url + "/metrics").text
        return Snapshot.parse(page).sum("xspec_rank_last_heartbeat_timestamp_seconds")

    def exit_code(self, timeout: float = 10) -> int:
        return self.process.wait(timeout)

    def complete(self, max_tokens: int) -> Completion:
        return Completion(self.url, model=self.script, max_tokens=max_tokens)


class Completion:
    """A streaming request in a thread; made when its first token has come."""

    def __init__(self, url: str, *, model: str, max_tokens: int) -> None:
        self.chunks: list[str] = []
        self._body = {"model": model, "prompt": [5, 6], "max_tokens": max_tokens, "stream": True}
        self._url = url
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_until(lambda: bool(self.chunks))
        assert self.chunks[0].startswith("data: {"), self.chunks

    def _run(self) -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", self._url + "/v1/completions", json=self._body, timeout=20) as response,
        ):
            self.chunks += (line for line in response.iter_lines() if line)

    def wait(self) -> list[str]:
        self._thread.join(10)
        return self.chunks


def wait_until(condition: Callable[[], bool], seconds: float = 8) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LaunchedServer]]:
    """Start launches; at the end of the test nothing of them may be left."""
    launches: list[LaunchedServer] = []

    def start(script: str, **options: float) -> LaunchedServer:
        launches.append(LaunchedServer(tmp_path, script, **options))  # type: ignore[arg-type]
        return launches[-1]

    yield start
    for launch in launches:
        if launch.process.poll() is None:
            launch.process.kill()
            launch.process.wait()


def assert_nothing_left(launch: LaunchedServer, ranks: list[int]) -> None:
    assert not [pid for pid in ranks if is_alive(pid)]
    assert not list(launch.tmp.iterdir())
    if launch.url:
        with pytest.raises(httpx.ConnectError):
            launch.status("/health")


def test_port_in_use_starts_nothing(start: Callable[..., LaunchedServer]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launch = start("serve", port=port)
        assert launch.exit_code() == ExitCode.ADDRESS_IN_USE
    assert f"--port={port}" in launch.stderr()
    assert "fake rank" not in launch.stderr()


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("raise-in-load", ExitCode.RANK_DIED, ["rank 0", "'load'", "RuntimeError", "marker: the weights"]),
        ("refuse-in-load", ExitCode.MODEL_LOAD, ["rank 0", "'load'", "config.json has no vocab_size"]),
        ("segfault-in-load", ExitCode.RANK_DIED, ["rank 0", "'load'", "SIGSEGV", "Fatal Python error"]),
    ],
)
def test_death_at_start_tells_its_cause(
    start: Callable[..., LaunchedServer], script: str, code: ExitCode, words: list[str]
) -> None:
    launch = start(script)
    assert launch.exit_code() == code
    account = launch.stderr()[launch.stderr().rindex("rank 0") - 200 :]
    assert all(word in launch.stderr() for word in words), account
    assert launch.stderr().count("Traceback") == (1 if script == "raise-in-load" else 0)
    assert_nothing_left(launch, [])


def test_killed_rank_ends_the_launch(start: Callable[..., LaunchedServer]) -> None:
    launch = start("serve").wait_ready()
    ranks = launch.rank_pids()
    assert len(ranks) == 1
    assert launch.status("/health") == launch.status("/ready") == 200
    completion = launch.complete(max_tokens=200)
    os.kill(ranks[0], signal.SIGKILL)
    wait_until(lambda: launch.status("/health") == 503, seconds=1.5)
    assert "error" in "".join(completion.wait()[-2:])
    assert launch.exit_code() == ExitCode.RANK_DIED
    assert launch.stderr().count("killed by signal SIGKILL") == 2  # in the log, and in the account
    assert launch.stderr().count("xspec: rank 0 failed in phase 'serve'") == 1
    assert_nothing_left(launch, ranks)


def test_a_stopped_rank_is_noticed_and_may_come_back(start: Callable[..., LaunchedServer]) -> None:
    launch = start("serve", silent_seconds=2.0).wait_ready()
    ranks = launch.rank_pids()
    wait_until(lambda: launch.heartbeat() > time.time() - 2)
    assert launch.status("/health") == launch.status("/ready") == 200
    os.kill(ranks[0], signal.SIGSTOP)
    wait_until(lambda: launch.status("/health") == 503, seconds=4)
    ready = launch.http.get(launch.url + "/ready")
    assert ready.status_code == 503
    assert "rank 0 has been silent" in ready.json()["detail"]
    refused = launch.http.post(launch.url + "/v1/completions", json={"model": "serve", "prompt": [5]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_silent")
    wait_until(lambda: '"engine.silent"' in launch.stderr())
    os.kill(ranks[0], signal.SIGCONT)
    wait_until(lambda: launch.status("/health") == launch.status("/ready") == 200)
    wait_until(lambda: '"engine.heard_again"' in launch.stderr())
    assert launch.complete(max_tokens=2).wait()[-1] == "data: [DONE]"
    assert launch.stderr().count('"engine.silent"') == launch.stderr().count('"engine.heard_again"') == 1
    launch.signal(signal.SIGTERM)
    assert launch.exit_code() == ExitCode.OK
    assert_nothing_left(launch, ranks)


def test_interrupt_drains(start: Callable[..., LaunchedServer]) -> None:
    launch = start("serve").wait_ready()
    ranks = launch.rank_pids()
    completion = launch.complete(max_tokens=60)
    launch.signal(signal.SIGINT)
    wait_until(lambda: launch.status("/ready") == 503, seconds=1)
    assert launch.status("/health") == 200
    refused = launch.http.post(launch.url + "/v1/completions", json={"model": "serve", "prompt": [5]})
    assert refused.status_code == 503
    chunks = completion.wait()
    assert chunks[-1] == "data: [DONE]"
    assert json.loads(chunks[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert launch.exit_code() == ExitCode.OK
    assert_nothing_left(launch, ranks)


def test_drain_has_a_limit(start: Callable[..., LaunchedServer]) -> None:
    launch = start("ignore-shutdown", drain_timeout=0.5).wait_ready()
    ranks = launch.rank_pids()
    completion = launch.complete(max_tokens=200)
    launch.signal(signal.SIGTERM)
    assert launch.exit_code() == ExitCode.DRAIN_FORCED
    assert "error" in "".join(completion.wait()[-2:])
    assert_nothing_left(launch, ranks)


def test_second_interrupt_stops_at_once(start: Callable[..., LaunchedServer]) -> None:
    launch = start("serve", drain_timeout=30).wait_ready()
    ranks = launch.rank_pids()
    launch.complete(max_tokens=200)
    launch.signal(signal.SIGINT)
    wait_until(lambda: launch.status("/ready") == 503)
    began = time.monotonic()
    launch.signal(signal.SIGINT)
    assert launch.exit_code() == ExitCode.INTERRUPTED
    assert time.monotonic() - began < 3
    assert_nothing_left(launch, ranks)


def test_interrupt_during_startup(start: Callable[..., LaunchedServer]) -> None:
    launch = start("hang-in-load")
    wait_until(lambda: "fake rank: loading" in launch.stderr())
    ranks = launch.rank_pids()
    launch.signal(signal.SIGINT)
    assert launch.exit_code(timeout=3) == ExitCode.INTERRUPTED
    assert_nothing_left(launch, ranks)


def test_ranks_die_with_a_killed_parent(start: Callable[..., LaunchedServer]) -> None:
    launch = start("hang-in-load")
    wait_until(lambda: "fake rank: loading" in launch.stderr())
    ranks = launch.rank_pids()
    assert all(is_alive(pid) for pid in ranks)
    launch.signal(signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in ranks), seconds=2)


def test_rank_environment_keeps_what_the_user_set(tmp_path: Path) -> None:
    config = make_config()
    error_file = tmp_path / "error.json"
    plain = rank_environment(config, local_rank=0, error_file=error_file, base={})
    assert plain["GOMP_SPINCOUNT"] == "1000"
    assert plain["OMP_NUM_THREADS"] == "1"
    assert (plain["RANK"], plain["WORLD_SIZE"], plain["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    passive = rank_environment(
        config, local_rank=0, error_file=error_file, base={"OMP_WAIT_POLICY": "PASSIVE"}
    )
    assert "GOMP_SPINCOUNT" not in passive


def test_error_file_round_trip(tmp_path: Path) -> None:
    report = ErrorReport(
        error_type="ValueError", message="no", traceback="Traceback ...", exit_code=8, timestamp=1.5
    )
    report.write(tmp_path / "error.json")
    assert ErrorReport.read(tmp_path / "error.json") == report
    (tmp_path / "error.json").write_text('{"message": ')
    assert ErrorReport.read(tmp_path / "error.json") is None


def test_reason_without_report() -> None:
    death = RankDeath(rank=1, phase="load", return_code=0, report=None, last_lines=())
    assert "exit status 0" in death.reason()
    assert death.exit_code == ExitCode.RANK_DIED
