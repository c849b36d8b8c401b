"""Several answers to one prompt: independent choices, interleaved streams, usage, and their end together."""

# Fixtures are imported by name, then taken as arguments.
# ruff: noqa: F401, F811

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai.types.chat import ChatCompletion
from structlog.testing import capture_logs

from core.types import Request
from tests.fake_engine import EOS_TOKEN_ID
from tests.http_rig import TOKENIZER, Rig, assert_error, events_of, make_rig, rig, steps_of

TEXTS = ["first answer", "the second one is longer", "third"]


def answers(request: Request) -> list[list[int]]:
    """A reply per choice, told apart by the seed as an engine would."""
    return steps_of(TEXTS[(request.params.seed or 0) % 3])


@pytest.fixture
def choosing(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(script=answers)


def test_choices_of_a_chat(choosing: Rig) -> None:
    answer = choosing.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], n=3, seed=30
    )
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == TEXTS
    assert [request.params.seed for request in choosing.engine.added] == [30, 31, 32]
    prompts = {request.prompt_token_ids for request in choosing.engine.added}
    assert len(prompts) == 1
    assert answer.usage is not None
    # The prompt counts once, every answer counts, each with its end-of-sequence token.
    assert answer.usage.prompt_tokens == len(prompts.pop())
    assert answer.usage.completion_tokens == sum(len(text) + 1 for text in TEXTS)


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(choosing: Rig) -> None:
    answer = choosing.complete(prompt=["a", "bcd"], n=2, seed=0).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [TEXTS[0], TEXTS[1]] * 2
    assert answer["usage"]["prompt_tokens"] == 1 + 3
    # The same prompt alone has the same seeds, so the same answers.
    alone = choosing.complete(prompt="bcd", n=2, seed=0).json()
    assert [choice["text"] for choice in alone["choices"]] == TEXTS[:2]


def test_streamed_choices_are_interleaved_and_whole(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(script=answers, step_seconds=0.002)
    for post in (rig.complete, rig.chat):
        options = {"include_usage": True}
        events = events_of(post(n=3, seed=0, stream=True, stream_options=options))
        assert events.pop() == "[DONE]"
        assert events.pop()["usage"]["completion_tokens"] == sum(len(text) + 1 for text in TEXTS)
        choices = [event["choices"][0] for event in events]
        texts, reasons = [""] * 3, [""] * 3
        for choice in choices:
            assert not reasons[choice["index"]], "nothing follows the end of a choice"
            texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            reasons[choice["index"]] = choice["finish_reason"] or ""
        assert texts == TEXTS
        assert reasons == ["stop"] * 3
        runs = [index for index, _ in itertools.groupby(choice["index"] for choice in choices)]
        assert len(runs) > 3, "one choice after the other is no stream"


def test_each_choice_stops_for_its_own_reason(choosing: Rig) -> None:
    answer = choosing.complete(n=3, seed=0, stop="second", max_tokens=10).json()
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [
        ("first answ", "length"),
        ("the ", "stop"),
        ("third", "stop"),
    ]
    assert answer["usage"]["completion_tokens"] == 10 + 10 + 6
    choosing.until(lambda: choosing.engine.num_running == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_every_choice(make_rig: Callable[..., Rig], stream: bool) -> None:
    rig = make_rig(script=lambda request: [[40]] * 400, step_seconds=0.005)
    body = {"model": "tiny", "prompt": "a", "n": 3, "max_tokens": 400, "stream": stream}
    with (
        contextlib.suppress(httpx.ReadTimeout),
        rig.client.stream("POST", "/v1/completions", json=body, timeout=0.3) as response,
    ):
        next(response.iter_bytes())
    rig.until(lambda: rig.frontend.num_active == 0)
    rig.until(lambda: sorted(rig.engine.aborted) == [0, 1, 2])
    assert rig.sample("xspec_requests_finished_total", finish_reason="abort") == 3


def test_a_failure_of_the_engine_ends_all_choices_at_once(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(script=lambda request: [[40]] * 300, step_seconds=0.005, fail_after_steps=10)
    events = events_of(rig.complete(n=2, stream=True, max_tokens=300))
    assert [event for event in events if "error" in event] == events[-1:]
    assert rig.frontend.num_active == 0


def test_more_choices_than_the_server_holds(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_queue=4)  # and four that run
    assert_error(rig.complete(n=9), 400, "n")
    assert_error(rig.chat(n=9), 400, "n")
    assert_error(rig.complete(prompt=["a", "b", "c"], n=3), 400, "n")
    assert not rig.engine.added
    rig.engine.paused.set()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(rig.complete, n=5)
        rig.until(lambda: rig.frontend.num_active == 5)
        assert assert_error(rig.complete(n=4), 429)["code"] == "queue_full"
        rig.engine.paused.clear()
        assert len(running.result().json()["choices"]) == 5


def test_one_log_line_for_all_choices(choosing: Rig) -> None:
    with capture_logs() as logs:
        choosing.complete(n=3, seed=0)
        choosing.until(lambda: any(entry["event"] == "request.finished" for entry in logs))
    (line,) = [entry for entry in logs if entry["event"] == "request.finished"]
    assert (line["choices"], line["prompt_tokens"]) == (3, 2)
    assert line["completion_tokens"] == sum(len(text) + 1 for text in TEXTS)
    assert choosing.sample("xspec_generation_tokens_total") == line["completion_tokens"]


def test_n_is_served_under_adaptive_verification(make_rig: Callable[..., Rig]) -> None:
    assert len(make_rig(adaptive=True).chat(n=2).json()["choices"]) == 2
