"""`xspec status` and `xspec top` as commands: over HTTP, on terminals, and against servers that misbehave."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result

from core.errors import ExitCode
from metrics.report import report_of
from tests.http_rig import Rig, make_rig, rig
from xspec_cli.main import cli
from xspec_cli.monitor import Probe, parse_url

__all__ = ["make_rig", "rig"]

from tests.status_readings import (
    ready_metrics,
)

# -- over HTTP --


def xspec(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


class Stub:
    """An HTTP server that answers with what `pages` holds: path -> (status, body)."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, str]] = {}
        self.paths: list[str] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stub.paths.append(self.path)
                status, body = stub.pages.get(self.path, (404, "none"))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    yield stub
    stub.server.shutdown()
    stub.server.server_close()


def test_status_of_a_real_server(rig: Rig) -> None:
    rig.text_of_good_request()
    done = xspec("status", rig.url)
    assert done.exit_code == ExitCode.OK, done.output
    assert done.stdout.startswith(f" READY        {rig.url}   xspec 0.1.0")
    assert "\x1b" not in done.stdout
    assert re.search(r"^model +tiny +no draft +up to 512 tokens$", done.stdout, re.MULTILINE)
    found = json.loads(xspec("status", "--json", f"{rig.url}/v1/").stdout)
    assert found["state"] == "ready"
    assert found["window"] is None
    assert found["total"]["generation_tokens"] > 0
    assert found["total"]["time_to_first_token"]["count"] >= 1
    assert found["uptime_seconds"] > 0
    assert found["server_info"]


def test_watching_a_real_server_into_a_pipe(rig: Rig) -> None:
    done = xspec("top", rig.url, "--interval", "0.1", "--count", "2")
    assert done.exit_code == ExitCode.OK
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for text in lines:
        fields = dict(item.split("=", 1) for item in text.split()[1:])
        assert fields["state"] == "ready"
        assert {"tokens_per_s", "running", "kv_used", "ttft_p95_ms", "acceptance_length", "budget"} <= set(
            fields
        )
    done = xspec("status", rig.url, "--json", "--watch", "--interval", "0.1", "--count", "2")
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["window"] is None
    assert second["window"]["seconds"] > 0


def test_a_server_that_starts_and_fails(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(announce_ready=False)
    rig.until(lambda: rig.client.get("/ready").json()["phase"] == "load")
    done = xspec("status", rig.url)
    assert done.exit_code == ExitCode.OK
    assert done.stdout.splitlines()[1].split() == ["phase", "load", "weights", "1/2"]
    rig.call(rig.frontend.fail, "rank 0 was killed")
    rig.until(lambda: rig.client.get("/ready").json()["state"] == "failed")
    done = xspec("status", rig.url)
    assert done.exit_code == ExitCode.RANK_DIED
    assert "rank 0 was killed" in done.stdout
    assert " FAILED " in done.stdout


def test_a_server_that_says_it_is_not_well_is_stale(stub: Stub) -> None:
    stub.pages = {
        "/metrics": (200, ready_metrics().render(None)[1].decode()),
        "/ready": (503, '{"state": "ready", "phase": "ready", "detail": "rank 0 is silent"}'),
        "/health": (503, "{}"),
    }
    found = json.loads(xspec("status", stub.url, "--json").stdout)
    assert (found["state"], found["error"]) == ("stale", "rank 0 is silent")
    assert found["model"] == "tiny", "from the labels: the routes that tell more may want a key"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_an_unreachable_server_is_one_line_and_exit_code_1() -> None:
    port = free_port()
    done = xspec("status", f":{port}")
    assert done.exit_code == ExitCode.UNEXPECTED
    assert done.stdout == ""
    expected = f"error: http://127.0.0.1:{port}: connection refused; is a server running there?\n"
    assert done.stderr == expected
    done = xspec("status", f":{port}", "--json")
    assert done.exit_code == ExitCode.UNEXPECTED
    assert json.loads(done.stdout)["state"] == "down"
    done = xspec("top", f":{port}", "--count", "1")
    assert done.exit_code == ExitCode.OK
    assert "state=down" in done.stdout


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (404, "none", "answers 404; is this an xspec server?"),
        (200, "<html>", "is no Prometheus text"),
        (200, "vllm:num_requests_running 3\n", "has no xspec_server_state"),
    ],
)
def test_other_servers_are_named(stub: Stub, status: int, body: str, fault: str) -> None:
    stub.pages["/metrics"] = status, body
    done = xspec("status", stub.url)
    assert done.exit_code == ExitCode.UNEXPECTED
    assert fault in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("sent", "fault"),
    [(b"SSH-2.0-OpenSSH\r\n", "no HTTP"), (b"", "no HTTP"), (None, "no answer within 0.2 s")],
)
def test_ports_that_do_not_speak_http(sent: bytes | None, fault: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            if sent is None:
                time.sleep(0.4)
            else:
                connection.recv(1000)
                connection.sendall(sent)
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        found = Probe(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=0.2).read()
        thread.join()
    assert found.error is not None
    assert fault in found.error
    assert found.timed_out == (sent is None)


def test_an_answer_that_trickles_is_cut_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            try:
                for _ in range(40):
                    connection.sendall(b"x")
                    time.sleep(0.05)
            except OSError:
                pass
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        begun = time.monotonic()
        found = Probe(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=0.2).read()
        assert time.monotonic() - begun < 1
        thread.join()
    assert found.timed_out


def test_what_does_not_change_is_asked_once(stub: Stub) -> None:
    metrics = ready_metrics()
    stub.pages = {
        "/metrics": (200, metrics.render(None)[1].decode()),
        "/ready": (200, '{"state": "ready", "phase": "ready", "detail": ""}'),
        "/v1/models": (200, '{"data": [{"id": "m", "max_model_len": 99}]}'),
        "/version": (200, '{"version": "9.9"}'),
        "/server_info": (200, '{"device": {"kind": "cpu"}}'),
    }
    probe = Probe(stub.url, timeout_seconds=5)
    first = probe.read()
    assert (first.model, first.max_model_len, first.version) == ("m", 99, "9.9")
    assert first.server_info == {"device": {"kind": "cpu"}}
    second = probe.read(first)
    assert second.server_info == first.server_info
    every_time = ["/ready", "/health", "/metrics"]
    assert stub.paths == [*every_time, "/v1/models", "/version", "/server_info", *every_time]
    # Behind a proxy that shows /metrics alone, it is enough.
    stub.pages = {"/metrics": stub.pages["/metrics"], "/ready": (200, "<html>")}
    third = probe.read()
    assert third.error is None
    assert (third.state, third.model) == ("ready", None)
    assert report_of(third).model == "tiny"


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("http://host:9000/v1/", "http://host:9000"),
        ("https://host/xspec/metrics?x=1#y", "https://host/xspec"),
        ("host:9000", "http://host:9000"),
        ("localhost", "http://localhost"),
        (":9000", "http://127.0.0.1:9000"),
        ("9000", "http://127.0.0.1:9000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(written: str, url: str) -> None:
    assert parse_url(written) == url


@pytest.mark.parametrize(
    "written",
    ["file:///etc/passwd", "http://", "http://[::1", "http://h:99999", "http://user:secret@h", ":0", ""],
)
def test_what_is_no_address_is_a_usage_error(written: str) -> None:
    done = xspec("status", written)
    assert done.exit_code == ExitCode.USAGE, done.output
    assert done.stderr.count("\n") == 1
    assert "secret" not in done.stderr


def test_options_without_effect_are_refused() -> None:
    assert xspec("status", "--interval", "1").exit_code == ExitCode.USAGE
    assert xspec("status", "--count", "1").exit_code == ExitCode.USAGE


# -- terminals and processes --


def on_terminal(
    *arguments: str, signal_after: tuple[str, signal.Signals] | None = None, **environ: str
) -> tuple[int, str]:
    """Run xspec on a terminal of its own: (exit code, all that it wrote). The signal follows a text."""
    master, slave = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-m", "xspec_cli", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**environment, "TERM": "xterm-256color", **environ},
    )
    os.close(slave)
    written = b""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 0.1)[0]:
            continue
        try:
            part = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
        if signal_after is not None and signal_after[0].encode() in written:
            process.send_signal(signal_after[1])
            signal_after = None
    os.close(master)
    return process.wait(timeout=5), written.decode()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_leaving_top_restores_the_screen(rig: Rig, sent: signal.Signals) -> None:
    code, written = on_terminal("top", rig.url, signal_after=("speculation", sent))
    assert code == ExitCode.OK
    assert written.startswith("\x1b[?1049h"), "the alternate screen"
    assert written.rstrip().endswith("\x1b[?1049l")
    assert "\x1b[?25h" in written, "the cursor is back"
    assert "READY" in written
    assert "Traceback" not in written


def test_no_color_and_dumb_terminals(rig: Rig) -> None:
    code, written = on_terminal("top", rig.url, "--count", "1", TERM="dumb")
    assert code == ExitCode.OK
    assert "\x1b" not in written
    assert "state=ready" in written
    code, written = on_terminal("status", rig.url, NO_COLOR="1")
    assert code == ExitCode.OK
    assert "READY" in written
    assert not re.search(r"\x1b\[[0-9;]*(3[0-8]|4[0-8])", written), "no colour"


def test_status_imports_no_engine() -> None:
    code = (
        "import sys\nfrom xspec_cli.main import cli\n"
        f"try: cli(['status', ':{free_port()}'], prog_name='xspec')\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'numpy', 'scipy', 'fastapi', 'httpx', 'zmq', 'core.launcher', 'core.engine.loop'}\n"
        "found = heavy & set(sys.modules)\nprint(found)\nsys.exit(50 if found else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.UNEXPECTED, (done.stdout, done.stderr)
