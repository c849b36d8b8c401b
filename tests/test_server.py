"""The OpenAI API over a scripted engine: answers, streams, refusals."""

# Fixtures are imported by name, then taken as arguments.
# ruff: noqa: F401, F811

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from structlog.testing import capture_logs

from core.server import responses
from tests.http_rig import (
    MAX_MODEL_LEN,
    REPLY,
    TOKENIZER,
    Rig,
    assert_error,
    events_of,
    make_rig,
    rig,
    steps_of,
)

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
    with capture_logs() as logs:
        assert rig.complete(stop="ba", ignore_eos=True).json()["choices"][0]["text"] == "a"
    line = next(entry for entry in logs if entry["event"] == "request.finished")
    assert (line["finish_reason"], line["completion_tokens"]) == ("stop", 3)
    assert (line["spec_steps"], line["spec_verified"], line["queue_seconds"]) == (3, 7, 0.25)
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


def test_echo_puts_the_prompt_in_front(rig: Rig) -> None:
    ids = TOKENIZER.encode("<|im_end|>wör").ids
    for prompt, shown in [
        ("a prompt", ["a prompt"]),
        (["one", "two"], ["one", "two"]),
        ([ids], ["wör"]),
        ("<|im_end|>x", ["<|im_end|>x"]),
    ]:
        plain = rig.complete(prompt=prompt, n=2).json()
        echoed = rig.complete(prompt=prompt, n=2, echo=True, stop="ompt").json()
        texts = [choice["text"] for choice in echoed["choices"]]
        assert texts == [text + REPLY for text in shown for _ in range(2)], (
            "a stop string is looked for in answers"
        )
        assert echoed["usage"] == plain["usage"]
        events = events_of(rig.complete(prompt=prompt, n=2, echo=True, stream=True))[:-1]
        streamed = [""] * len(texts)
        for event in events:
            choice = event["choices"][0]
            streamed[choice["index"]] += choice["text"]
        assert streamed == texts
    assert (
        rig.complete(prompt=[ids], echo=True, skip_special_tokens=False)
        .json()["choices"][0]["text"]
        .startswith("<|im_end|>wör")
    )
    for prompt in ([320], [[-1]], [[5], [2**70]], ""):
        assert_error(rig.complete(prompt=prompt, echo=True), 400, "prompt")
    assert_error(rig.chat(echo=True), 400, "echo")


@pytest.mark.parametrize("refuse", [None, "needs more pages"])
def test_a_silent_stream_is_kept_alive(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, refuse: str | None
) -> None:
    monkeypatch.setattr(responses, "KEEP_ALIVE_SECONDS", 0.03)
    rig = make_rig(refuse=refuse)
    rig.engine.paused.set()
    body = {"model": "tiny", "prompt": "hi", "stream": True, "max_tokens": 100}
    with rig.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        blocks = response.iter_lines()
        for _ in range(3):
            assert (next(blocks), next(blocks)) == (": keep-alive", "")
        rig.engine.paused.clear()
        lines = [line for line in blocks if line and not line.startswith(":")]
    if refuse is None:
        assert lines[-1] == "data: [DONE]"
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == REPLY
    else:  # too late for a status of its own
        assert refuse in json.loads(lines[-1][6:])["error"]["message"]


def test_the_official_client_skips_what_keeps_a_stream_alive(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "KEEP_ALIVE_SECONDS", 0.001)
    rig = make_rig(step_seconds=0.01)
    stream = rig.openai.completions.create(model="tiny", prompt="hi", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == REPLY


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


LARGE_BODIES = {
    "text": '"prompt": "' + "a b " * 10**6 + '"',
    "prompts": '"prompt": [' + ", ".join(['"a b c"'] * 400_000) + "]",
    "token lists": '"prompt": [' + ", ".join(["[1]"] * 400_000) + "]",
    "messages": '"messages": [' + ", ".join(['{"role": "user", "content": "a"}'] * 100_000) + "]",
}


@pytest.mark.parametrize("fields", LARGE_BODIES.values(), ids=LARGE_BODIES)
def test_a_large_body_does_not_hold_up_the_others(rig: Rig, fields: str) -> None:
    """Bodies below the limit that are refused late: meanwhile the server's loop must go round."""
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(
            httpx.post, rig.url + path, content=f'{{"model": "tiny", {fields}}}'.encode(), timeout=60
        )
        started, pauses = time.monotonic(), []
        while not large.done():
            sent = time.monotonic()
            assert rig.client.get("/health").status_code == 200
            pauses.append(time.monotonic() - sent)
    assert_error(large.result(), 400)
    # A pause as long as the work itself would stop every stream for seconds.
    assert max(pauses) < max(1.0, 0.5 * (time.monotonic() - started))


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


def test_pages_of_other_origins_are_not_invited(rig: Rig) -> None:
    asking = {"origin": "https://example.org", "access-control-request-method": "POST"}
    preflight = rig.client.options("/v1/completions", headers=asking)
    assert_error(preflight, 405)
    for response in (preflight, rig.client.get("/v1/models", headers=asking)):
        assert not [name for name in response.headers if name.startswith("access-control")]


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
