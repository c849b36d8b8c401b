"""The HTTP server over a scripted engine, for tests: real sockets on both sides, no model.

Test modules import the fixtures `rig` (one per module) and `make_rig` (as many as a test asks for).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

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


def make_config(*, adaptive: bool, max_queue: int, **server_options: Any) -> EngineConfig:
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
            **server_options,
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
        api_keys: tuple[str, ...] = (),
        **engine_options: Any,
    ) -> None:
        digests = tuple(hashlib.sha256(key.encode()).hexdigest() for key in api_keys)
        config = make_config(adaptive=adaptive, max_queue=max_queue, api_key_digests=digests)
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
