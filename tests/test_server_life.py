"""Clients that leave, engines that die, and what metrics and logs say of it."""

# Fixtures are imported by name, then taken as arguments.
# ruff: noqa: F401, F811

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from structlog.testing import capture_logs

from core.errors import AddressInUse
from core.server import pulse
from core.server.app import bind_socket
from tests.http_rig import REPLY, Rig, assert_error, events_of, make_rig, rig

# Disconnects


def cut_connection(rig: Rig, *, stream: bool, after_bytes: int) -> None:
    """Send a request over a raw socket and close it, at once or after some of the answer."""
    body = json.dumps(
        {"model": "tiny", "prompt": "hi", "max_tokens": 400, "ignore_eos": True, "stream": stream}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", rig.socket_port)) as connection:
        connection.sendall(head + body)
        if after_bytes:
            received = b""
            while len(received) < after_bytes:
                received += connection.recv(4096)
        else:
            count = len(rig.engine.added)
            rig.until(lambda: rig.frontend.num_active > 0 or len(rig.engine.added) > count)
            time.sleep(0.05)


@pytest.mark.parametrize(("stream", "after_bytes"), [(True, 600), (True, 0), (False, 0)])
def test_a_client_that_leaves_aborts_its_request(
    make_rig: Callable[..., Rig], stream: bool, after_bytes: int
) -> None:
    rig = make_rig(script=lambda request: [[40]] * 400, step_seconds=0.01)
    with capture_logs() as logs:
        cut_connection(rig, stream=stream, after_bytes=after_bytes)
        rig.until(lambda: rig.frontend.num_active == 0)
        rig.until(lambda: rig.engine.num_running == 0, seconds=0.5)
    assert rig.engine.aborted == [0]
    assert rig.engine.steps_of[0] < 100
    line = next(entry for entry in logs if entry["event"] == "request.finished")
    assert (line["finish_reason"], line["status"]) == ("abort", 499)
    assert rig.sample("xspec_requests_finished_total", finish_reason="abort") == 1


def test_a_client_that_leaves_while_queued_aborts_its_request(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.engine.paused.set()
    for stream in (True, False):
        cut_connection(rig, stream=stream, after_bytes=0)
        rig.until(lambda: rig.frontend.num_active == 0)
    rig.until(lambda: rig.engine.aborted == [0, 1])


def test_finished_requests_issue_no_abort(rig: Rig) -> None:
    before = len(rig.engine.aborted)
    for _ in range(20):
        rig.complete()
        rig.complete(stream=True)
    assert len(rig.engine.aborted) == before
    assert rig.frontend.num_active == 0


# Life and death


def test_states_of_a_starting_and_draining_server(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(announce_ready=False)
    rig.until(lambda: rig.client.get("/ready").json()["phase"] == "load")
    ready = rig.client.get("/ready")
    assert (ready.status_code, ready.json()) == (
        503,
        {"state": "starting", "phase": "load", "detail": "weights 1/2"},
    )
    assert rig.client.get("/health").status_code == 200
    response = rig.complete()
    assert assert_error(response, 503)["type"] == "service_unavailable"
    assert response.headers["retry-after"] == "5"
    rig.call(rig.frontend.drain)
    rig.until(lambda: rig.client.get("/ready").json()["state"] == "draining")
    assert_error(rig.complete(), 503)
    assert rig.client.get("/health").status_code == 200


def test_draining_finishes_what_runs(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.engine.paused.set()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(rig.complete)
        rig.until(lambda: rig.frontend.num_active == 1)
        rig.call(rig.frontend.drain)
        rig.until(lambda: rig.client.get("/ready").status_code == 503)
        assert_error(rig.complete(), 503)
        rig.engine.paused.clear()
        assert running.result().json()["choices"][0]["text"] == REPLY
    asyncio.run_coroutine_threadsafe(rig.frontend.wait_idle(), rig.loop).result(2)


def test_engine_failure_ends_every_stream_with_an_error(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(script=lambda request: [[40]] * 300, step_seconds=0.005, fail_after_steps=20)
    with ThreadPoolExecutor(2) as pool:
        streamed = pool.submit(lambda: rig.complete(stream=True, max_tokens=300))
        whole = pool.submit(lambda: rig.complete(max_tokens=300))
        events = events_of(streamed.result())
        assert "scripted" in events[-1]["error"]["message"]
        assert events[-1]["error"]["type"] == "service_unavailable"
        assert "[DONE]" not in events
        assert_error(whole.result(), 503)
        assert whole.result().headers["x-should-retry"] == "false"
    assert rig.client.get("/health").status_code == 503
    assert rig.client.get("/ready").json()["state"] == "failed"
    response = rig.complete()
    assert_error(response, 503)
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_an_answer_with_a_status(
    make_rig: Callable[..., Rig], stream: bool
) -> None:
    rig = make_rig(refuse="needs more pages than there are")
    for _ in range(2):
        assert "more pages" in assert_error(rig.complete(stream=stream), 400, "prompt")["message"]
    assert rig.sample("xspec_requests_finished_total", finish_reason="error") == 2


def test_an_engine_that_stops_stepping_is_not_healthy(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "STALLED_SECONDS", 0.3)
    rig = make_rig()
    time.sleep(0.4)
    assert rig.client.get("/health").status_code == 200, "an idle engine owes nothing"
    rig.engine.paused.set()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(rig.complete)
        rig.until(lambda: rig.frontend.num_active == 1)
        assert rig.client.get("/health").status_code == 200
        rig.until(lambda: rig.client.get("/health").status_code == 503)
        assert "no step" in rig.client.get("/ready").json()["detail"]
        assert assert_error(rig.complete(), 503)["code"] == "engine_silent"
        rig.engine.paused.clear()
        assert running.result().json()["choices"][0]["text"] == REPLY
    assert rig.client.get("/health").status_code == 200
    assert rig.text_of_good_request() == REPLY


def test_each_rank_is_judged_by_its_own_beats() -> None:
    now = 0.0
    heart = pulse.Pulse(lambda: now)
    now = 1000.0
    assert heart.fault(is_busy=False) is None, "a rank that never beat is still starting"
    heart.step()
    heart.beat(0)
    heart.beat(1)
    now += pulse.SILENT_SECONDS
    assert heart.fault(is_busy=True) is None
    heart.beat(0)
    now += 1
    assert heart.fault(is_busy=False) == "rank 1 has been silent for 31 seconds"
    heart.beat(1)
    assert heart.fault(is_busy=True) is None
    now += pulse.STALLED_SECONDS
    heart.beat(0)
    heart.beat(1)
    assert heart.fault(is_busy=False) is None
    assert "no step for 151 seconds" in str(heart.fault(is_busy=True))


def test_the_launcher_may_declare_the_engine_dead(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.engine.paused.set()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(rig.complete)
        rig.until(lambda: rig.frontend.num_active == 1)
        rig.call(rig.frontend.fail, "rank 0 was killed")
        assert "rank 0 was killed" in assert_error(running.result(), 503)["message"]


def test_a_taken_port_is_noticed_before_anything_else(rig: Rig) -> None:
    with pytest.raises(AddressInUse, match="in use"):
        bind_socket("127.0.0.1", rig.socket_port)


# Metrics and logs


def test_series_do_not_grow_with_what_clients_write(rig: Rig) -> None:
    rig.client.get("/nope")
    rig.chat(model="nope")
    before = rig.samples()
    names = ["a" * 300, 'quo"te', "new\nline", "ünï", *(f"m{index}" for index in range(100))]
    for index, name in enumerate(names):
        rig.chat(model=name)
        rig.client.request(f"M{index}", "/health")
        rig.client.get(f"/x/{index}")
        rig.client.get(f"/v1/models/{index}")
    after = rig.samples()
    assert set(after) == set(before)
    for handler in ("other", "/v1/models/{model}"):
        labels = frozenset({"handler": handler, "method": "GET", "code": "404"}.items())
        counted = ("xspec_http_requests_total", labels)
        assert after[counted] - before[counted] == len(names)


def test_metrics_count_requests_and_tokens(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    tokens = sum(
        rig.complete(stop=stop).json()["usage"]["completion_tokens"] for stop in (None, "wör", "zzz")
    )
    assert rig.sample("xspec_generation_tokens_total") == tokens
    assert rig.sample("xspec_time_to_first_token_seconds_count") == 3
    assert rig.sample("xspec_requests_in_flight") == 0
    assert rig.sample("xspec_requests_finished_total", finish_reason="stop") == 3


def test_a_fault_in_metrics_stops_no_token(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ValueError("scripted")

    monkeypatch.setattr(rig.metrics.series, "add", broken)
    monkeypatch.setattr(rig.metrics.series, "observe", broken)
    assert rig.text_of_good_request() == REPLY


def test_one_line_per_request_without_its_text(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    with capture_logs() as logs:
        rig.client.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "secret words", "stream": True},
            headers={"X-Request-Id": "mine"},
        )
        # The line is written once the response has left.
        rig.until(lambda: any(entry["event"] == "request.finished" for entry in logs))
    lines = [entry for entry in logs if entry["event"] == "request.finished"]
    assert len(lines) == 1
    line = lines[0]
    assert (line["request_id"], line["endpoint"], line["model"]) == ("mine", "/v1/completions", "tiny")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (12, len(REPLY.encode()) + 1)
    assert (line["finish_reason"], line["status"]) == ("stop", 200)
    assert (line["spec_verified"], line["spec_accepted"]) == (7, 3)
    assert 0 <= line["ttft_seconds"] <= line["e2e_seconds"]
    assert line["tpot_seconds"] >= 0
    assert "secret" not in json.dumps(logs, default=str)
    assert "Hello" not in json.dumps(logs, default=str)


def test_the_openapi_document_describes_the_requests(rig: Rig) -> None:
    document = rig.client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert "temperature" in schemas["ChatCompletionRequest"]["properties"]
    assert {"CompletionRequest", "ChatMessage", "StreamOptions", "TokenizeChatRequest"} <= set(schemas)
    assert rig.client.get("/version").json()["version"]
