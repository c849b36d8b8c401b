"""The HTTP server over a scripted engine: real sockets on both sides, no model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from core.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    ServerConfig,
    SpeculationConfig,
)
from core.errors import AddressInUse
from core.server.app import bind_socket, create_app, serve_http
from core.server.frontend import Frontend
from core.server.text import TextProcessor
from core.types import Request
from metrics.prometheus import ServerMetrics
from tests.fake_engine import FakeEngine, byte_tokenizer, write_text_model

TOKENIZER = byte_tokenizer()
REPLY = "Hello, wörld 👋 and more"
MAX_MODEL_LEN = 512


def steps_of(text: str, size: int = 3) -> list[list[int]]:
    """The tokens of `text` in steps of `size`."""
    ids = TOKENIZER.encode(text).ids
    return [ids[at : at + size] for at in range(0, len(ids), size)]


def make_config(*, adaptive: bool, max_queue: int) -> EngineConfig:
    speculation = SpeculationConfig(
        algorithm="DSpark",
        draft_model=None,
        num_speculative_tokens=7,
        adaptive_draft_step=False,
        adaptive_target_verify=True,
        unified_graph=False,
        calibration=None,
        cost_table=None,
        cost_table_output=None,
    )
    return EngineConfig(
        model=ModelConfig(path=None, served_name="tiny", dtype="float32", max_model_len=MAX_MODEL_LEN),
        cache=CacheConfig(page_size=16, kv_cache_bytes=None),
        schedule=ScheduleConfig(
            max_seqs_per_batch=4,
            prefill_chunk_tokens=64,
            request_buckets=(1, 2, 4),
            overlap=True,
            task_pipeline=True,
        ),
        speculation=speculation if adaptive else None,
        parallel=ParallelConfig(),
        device=DeviceConfig(
            kind="cpu", graph_backend="none", graph_warmup=False, num_threads=1, npu_kernel_backend=None
        ),
        server=ServerConfig(
            host="127.0.0.1",
            port=0,
            drain_timeout_seconds=1,
            max_queue=max_queue,
            log_format="auto",
            log_level="info",
            decision_log=None,
        ),
    )


class Rig:
    """Server and scripted engine; the server's event loop runs in a thread of its own."""

    def __init__(
        self,
        model_directory: Path,
        *,
        script: Callable[[Request], list[list[int]]] | None = None,
        adaptive: bool = False,
        max_queue: int = 60,
        **engine_options: Any,
    ) -> None:
        config = make_config(adaptive=adaptive, max_queue=max_queue)
        self.metrics = ServerMetrics(model_name="tiny", max_draft_tokens=7, max_model_len=MAX_MODEL_LEN)
        # Not under pytest's directory: socket paths have room for about a hundred characters.
        self._sockets = tempfile.TemporaryDirectory(prefix="xspec-test-")
        to_engine, from_engine = f"ipc://{self._sockets.name}/to", f"ipc://{self._sockets.name}/from"
        self.socket = bind_socket("127.0.0.1", 0)
        self.socket_port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.socket_port}"
        self._text = TextProcessor(write_text_model(model_directory))
        self._config = config
        self._up = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(to_engine, from_engine)), daemon=True
        )
        self._thread.start()
        assert self._up.wait(10)
        self.engine = FakeEngine(
            to_engine, from_engine, script or (lambda request: steps_of(REPLY)), **engine_options
        ).start()
        self.client = httpx.Client(base_url=self.url, timeout=10)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="x", max_retries=0, timeout=10)
        if self.engine.announce_ready:
            self.until(lambda: self.client.get("/ready").status_code == 200)

    async def _serve(self, to_engine: str, from_engine: str) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        capacity = self._config.schedule.max_seqs_per_batch + self._config.server.max_queue
        self.frontend = Frontend(
            to_engine=to_engine,
            from_engine=from_engine,
            model_name="tiny",
            capacity=capacity,
            metrics=self.metrics,
        )
        await self.frontend.start()
        app = create_app(self.frontend, self._text, self._config, self.metrics)
        self._up.set()
        await serve_http(app, self.socket, self._stop, graceful_seconds=1)
        await self.frontend.stop()

    def until(self, condition: Callable[[], bool], seconds: float = 5) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "condition not met in time"
            time.sleep(0.005)

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Run a function on the server's event loop."""
        self.loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        self.client.close()
        self.openai.close()
        self.call(self._stop.set)
        self._thread.join(timeout=10)
        self.engine.stop()
        self._sockets.cleanup()
        assert not self._thread.is_alive()

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100, **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "hi", "max_tokens": 100, **fields}
        )

    def text_of_good_request(self) -> str:
        return self.complete().json()["choices"][0]["text"]

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Every sample of /metrics by name and labels, without those that all series share."""
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        shared = ("model_name", "engine")
        return {
            (
                sample.name,
                frozenset(item for item in sample.labels.items() if item[0] not in shared),
            ): sample.value
            for family in families
            for sample in family.samples
        }

    def sample(self, name: str, **labels: str) -> float:
        return self.samples()[name, frozenset(labels.items())]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("rig"))
    yield rig
    assert rig.frontend.num_active == 0, "a request was left behind"
    rig.close()


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(tmp_path / str(len(rigs)), **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def events_of(response: httpx.Response) -> list[Any]:
    """The decoded events of a stream; [DONE] stays text."""
    payloads = [line[len("data: ") :] for line in response.text.split("\n\n") if line]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


# The official client


def test_chat_with_the_official_client(rig: Rig) -> None:
    answer = rig.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    assert answer.choices[0].message.content == REPLY
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    prompt = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n").ids
    assert answer.usage.prompt_tokens == len(prompt) == len(rig.engine.added[-1].prompt_token_ids)
    assert answer.usage.completion_tokens == len(REPLY.encode()) + 1  # the end-of-sequence token counts


def test_streamed_chat_with_the_official_client(rig: Rig) -> None:
    stream = rig.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == REPLY
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(REPLY.encode()) + 1
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_with_the_official_client(rig: Rig) -> None:
    answer = rig.openai.completions.create(model="tiny", prompt=["a", "b"], max_tokens=5)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, "Hello", "length"),
        (1, "Hello", "length"),
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 10)
    texts = {0: "", 1: ""}
    for chunk in rig.openai.completions.create(model="tiny", prompt=[[5, 6], [7]], max_tokens=9, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "Hello, w\ufffd", 1: "Hello, w\ufffd"}
    assert [model.id for model in rig.openai.models.list()] == ["tiny"]
    assert rig.openai.models.retrieve("tiny").id == "tiny"


def test_errors_with_the_official_client(rig: Rig) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        rig.openai.completions.create(model="nope", prompt="a")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        rig.openai.completions.create(model="tiny", prompt="a", max_tokens=-1)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        rig.openai.models.retrieve("nope")


# Streams


def test_stream_and_whole_answer_agree(rig: Rig) -> None:
    for fields in (
        {},
        {"max_tokens": 9},
        {"stop": ["and"]},
        {"stop": "ö"},
        {"stop": [" 👋", "more"]},
        {"max_tokens": 1},
    ):
        whole = rig.complete(**fields).json()
        events = events_of(rig.complete(**fields, stream=True, stream_options={"include_usage": True}))
        choices = [event["choices"][0] for event in events[:-2]]
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert events[-2]["usage"] == whole["usage"]
        assert all(event["usage"] is None for event in events[:-2])
        assert events[-1] == "[DONE]"


def test_continuous_usage_counts_every_token(rig: Rig) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(rig.chat(stream=True, stream_options=options))[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == len(REPLY.encode()) + 1


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [("world", "Hello ", 11), (["lo wor"], "Hel", 9), (["zzz", "o"], "Hell", 5), (["d!"], "Hello world", 12)],
)
def test_stop_strings_cut_text_and_usage_alike_at_any_step_size(
    make_rig: Callable[..., Rig], stop: Any, text: str, tokens: int
) -> None:
    rig = make_rig(script=lambda request: steps_of("Hello world", len(request.prompt_token_ids)))
    for size in (1, 2, 3, 7, 50):
        answer = rig.complete(stop=stop, prompt="x" * size).json()
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == tokens
        streamed = events_of(rig.complete(stop=stop, prompt="x" * size, stream=True))[:-1]
        assert "".join(event["choices"][0]["text"] for event in streamed) == text


def test_a_stop_string_ends_the_engines_work(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(script=lambda request: steps_of("ab" * 100, 1), step_seconds=0.002)
    assert rig.complete(stop="ba", ignore_eos=True).json()["choices"][0]["text"] == "a"
    rig.until(lambda: rig.engine.num_running == 0)
    assert rig.engine.aborted == [0]
    assert rig.engine.steps_of[0] < 50


def test_stop_before_the_limit_in_the_same_step_is_a_stop(make_rig: Callable[..., Rig]) -> None:
    script = [[20, 21, 99, 30, 31, 32]]
    rig = make_rig(script=lambda request: [list(step) for step in script])
    for limit, reason, tokens in [(2, "length", 2), (3, "stop", 3), (5, "stop", 3)]:
        answer = rig.complete(max_tokens=limit, stop_token_ids=[99]).json()
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == (
            reason,
            tokens,
        )
        assert answer["choices"][0]["text"] == TOKENIZER.decode([20, 21])


# Refusals


BAD_BODIES = [
    "",
    "{",
    "[]",
    "\x00",
    '{"model": "tiny", "prompt": "a", "temperature": NaN}',
    '{"model": "tiny", "prompt": "a", "temperature": 1e999}',
    '{"model": "tiny", "prompt": "a", "top_p": -Infinity}',
    '{"model": "tiny", "prompt": "a", "presence_penalty": NaN}',
    '{"model": "tiny", "prompt": "a", "seed": NaN}',
    '{"model": "tiny", "prompt": "a", "max_tokens": true}',
    '{"model": "tiny", "prompt": "a", "max_tokens": -1}',
    '{"model": "tiny", "prompt": "a", "logit_bias": {"5": NaN}}',
    '{"model": "tiny", "prompt": "\\ud800"}',
    '{"model": "tiny", "prompt": "a", "\\ud800": 1}',
    '{"model": "\\ud800", "prompt": "a"}',
    '{"model": "tiny", "prompt": ""}',
    '{"model": "tiny", "prompt": [""]}',
    '{"model": "tiny", "prompt": []}',
    '{"model": "tiny", "prompt": [[]]}',
    '{"model": "tiny", "prompt": null}',
    '{"model": "tiny", "prompt": ["good", ""]}',
    '{"model": "tiny", "prompt": [320]}',
    '{"model": "tiny", "prompt": [-1]}',
    json.dumps({"model": "tiny", "prompt": "x" * MAX_MODEL_LEN}),
    json.dumps({"model": "tiny", "prompt": "x", "max_tokens": MAX_MODEL_LEN}),
    '{"model": "tiny", "prompt": ' + "[" * 5000,
]


def assert_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert response.headers["x-request-id"]
    if param is not None:
        assert error["param"] == param
    return error


@pytest.mark.parametrize("body", BAD_BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_refused_and_the_next_one_works(rig: Rig, body: str, stream: bool) -> None:
    if stream and body.startswith('{"'):
        body = '{"stream": true, ' + body[1:]
    response = rig.client.post("/v1/completions", content=body.encode("utf-8", "surrogatepass"))
    assert_error(response, 404 if '"\\ud800", "prompt"' in body else 400)
    assert rig.frontend.num_active == 0
    assert rig.text_of_good_request() == REPLY


def test_adaptive_verification_refuses_by_name_and_serves_on(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(adaptive=True)
    for name, value in [("seed", 1), ("logprobs", True), ("presence_penalty", 1), ("min_tokens", 2)]:
        error = assert_error(rig.chat(temperature=0, **{name: value}), 400, name)
        assert "adaptive target verification" in error["message"]
    neutral = {"seed": None, "logprobs": False, "logit_bias": {}, "response_format": {"type": "text"}}
    assert rig.chat(**neutral).status_code == 200


def test_unknown_models_routes_and_methods(rig: Rig) -> None:
    for stream in (False, True):
        for model in ("nope", "TINY", "tiny/", ""):
            assert (
                assert_error(rig.chat(model=model, stream=stream), 404, "model")["code"] == "model_not_found"
            )
    assert_error(rig.client.get("/nope"), 404)
    assert_error(rig.client.get("/v1/chat/completions"), 405)
    assert_error(rig.client.get("/metrics/"), 404)
    assert_error(rig.client.get("/v1/models/a/b"), 404, "model")
    assert_error(rig.chat(messages=[]), 400, "messages")


def test_large_bodies_are_refused_announced_or_not(rig: Rig) -> None:
    body = b'{"prompt": "' + b"x" * (9 * 2**20) + b'"}'
    assert_error(rig.client.post("/v1/completions", content=body), 413)
    chunks = (body[at : at + 2**20] for at in range(0, len(body), 2**20))
    with contextlib.suppress(httpx.WriteError):  # the server may close while the client still writes
        assert_error(rig.client.post("/v1/completions", content=chunks), 413)
    assert rig.text_of_good_request() == REPLY


def test_request_ids_are_echoed_when_harmless(rig: Rig) -> None:
    def returned(given: str) -> str:
        return rig.client.get("/health", headers={"X-Request-Id": given}).headers["x-request-id"]

    assert returned("abc-1.2:3_4") == "abc-1.2:3_4"
    for given in ("a b", "x" * 200, "<script>"):
        assert returned(given) != given
    response = rig.client.post(
        "/v1/completions", json={"model": "tiny", "prompt": "a"}, headers={"X-Request-Id": "mine"}
    )
    assert response.json()["id"] == "cmpl-mine"


def test_a_full_queue_is_429(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_queue=0)
    rig.engine.paused.set()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(rig.complete) for _ in range(4)]
        rig.until(lambda: rig.frontend.num_active == 4)
        response = rig.complete()
        rig.engine.paused.clear()
        assert {future.result().status_code for future in waiting} == {200}
    assert assert_error(response, 429)["code"] == "queue_full"
    assert response.headers["retry-after"] == "1"
    assert_error(rig.complete(prompt=["a"] * 5), 400, "prompt")
    assert rig.sample("xspec_requests_rejected_total", reason="queue_full") == 1


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
    assert {"CompletionRequest", "ChatMessage", "StreamOptions"} <= set(schemas)
    assert rig.client.get("/version").json()["version"]
