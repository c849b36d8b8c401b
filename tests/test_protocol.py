"""Requests: what is accepted, and that every refusal is a 400 that names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import RequestRejected
from core.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    RequestRules,
    check_prompt_tokens,
    parse_request,
    to_sampling_params,
)
from core.server.text import GenerationDefaults
from core.types import SamplingParams

DEFAULTS = GenerationDefaults(temperature=0.7, top_k=20, top_p=0.9)
RULES = RequestRules(served_name="m", max_model_len=64, vocab_size=320, defaults=DEFAULTS)
ADAPTIVE = RequestRules(served_name="m", max_model_len=64, vocab_size=320, adaptive_target_verify=True)
GREEDY = RequestRules(served_name="m", max_model_len=64, vocab_size=320, greedy_only=True)


def completion(raw: str = "", rules: RequestRules = RULES, **fields: Any) -> CompletionRequest:
    """Parse a completion request with `fields` and, verbatim, `raw` as further JSON members."""
    body = json.dumps({"model": "m", "prompt": "hi", **fields})
    return parse_request(CompletionRequest, (body[:-1] + (", " + raw if raw else "") + "}").encode(), rules)


def chat(rules: RequestRules = RULES, **fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_request(ChatCompletionRequest, json.dumps(body).encode(), rules)


NUMBERS = ["temperature", "top_p", "min_p", "top_k", "max_tokens", "seed", "n"]
PENALTIES = ["presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens"]


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"nan"', '"1"', "true", "[]", "{}"]
)
@pytest.mark.parametrize("name", NUMBERS + PENALTIES)
def test_what_is_no_finite_number_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        completion(f'"{name}": {value}')
    assert (caught.value.param, caught.value.status) == (name, 400)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -1),
        ("min_p", 1.5),
        ("top_k", -2),
        ("top_k", 2.0),
        ("top_k", 10**30),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop", 3),
        ("stop", ["a", 1]),
        ("stop", "x" * 1000),
        ("stop_token_ids", [320]),
        ("stop_token_ids", [-1]),
        ("stream", "yes"),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("prompt", None),
        ("prompt", []),
        ("prompt", [[1], "a"]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", {"a": 1}),
        ("n", 0),
        ("n", -1),
        ("n", 129),
        ("n", 2.0),
        ("best_of", 2),
        ("echo", 1),
        ("suffix", "x"),
        ("logprobs", 0),
        ("logprobs", True),
        ("logit_bias", {"1": 5}),
        ("tools", [{}]),
        ("response_format", {"type": "json_object"}),
        ("presence_penalty", 0.1),
        ("repetition_penalty", 1.1),
        ("min_tokens", 3),
        ("guided_json", {}),
        ("no_such_field", 1),
        ("logit_bias", False),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestRejected) as caught:
        completion(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


NEUTRAL: dict[str, list[Any]] = {
    "logprobs": [None, False],
    "top_logprobs": [None, 0],
    "logit_bias": [None, {}],
    "min_tokens": [None, 0],
    "presence_penalty": [None, 0, 0.0],
    "frequency_penalty": [None, 0],
    "repetition_penalty": [None, 1, 1.0],
    "response_format": [None, {"type": "text"}],
    "seed": [None],
    "n": [None, 1, 3],
    "best_of": [None, 1],
    "echo": [None, False],
    "tools": [None, []],
    "user": [None, "me"],
    "metadata": [None, {"a": "b"}],
    "stop": [None, [], "x"],
}
EXCLUDED: dict[str, list[Any]] = {
    "logprobs": [True, 0, 2],
    "top_logprobs": [3],
    "logit_bias": [{"5": 1}],
    "min_tokens": [1],
    "presence_penalty": [0.5],
    "frequency_penalty": [-0.5],
    "repetition_penalty": [1.2, 0],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
    "guided_regex": ["a+"],
    "seed": [0, 42],
}


@pytest.mark.parametrize("rules", [RULES, ADAPTIVE])
@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_values_are_accepted(rules: RequestRules, name: str) -> None:
    for value in NEUTRAL[name]:
        chat(rules, **{name: value})
        completion(rules=rules, **{name: value})


@pytest.mark.parametrize("name", EXCLUDED)
def test_adaptive_verification_excludes_by_name_even_at_temperature_zero(name: str) -> None:
    for value in EXCLUDED[name]:
        with pytest.raises(RequestRejected, match="adaptive target verification") as caught:
            chat(ADAPTIVE, temperature=0, **{name: value})
        assert caught.value.param == name


def test_without_adaptive_verification_a_seed_reaches_the_engine() -> None:
    assert to_sampling_params(chat(seed=42), RULES, prompt_tokens=4).seed == 42
    with pytest.raises(RequestRejected, match="not available yet"):
        chat(logprobs=True)


def test_each_choice_of_a_prompt_has_a_seed_of_its_own() -> None:
    def seeds(seed: int) -> list[int | None]:
        request = chat(seed=seed, n=3)
        return [to_sampling_params(request, RULES, prompt_tokens=4, sibling=n).seed for n in range(3)]

    assert seeds(42) == [42, 43, 44]
    assert seeds(-1) == [-1, 0, 1]
    assert seeds(2**63 - 2) == [2**63 - 2, 2**63 - 1, -(2**63)]
    unseeded = to_sampling_params(chat(n=3), RULES, prompt_tokens=4, sibling=2)
    assert unseeded.seed is None


def test_the_unified_graph_refuses_a_positive_temperature() -> None:
    assert chat(GREEDY, temperature=0).temperature == 0
    for fields in ({"temperature": 0.5}, {}):
        with pytest.raises(RequestRejected, match="greedily") as caught:
            chat(GREEDY, **fields)
        assert caught.value.param == "temperature"


def test_omitted_fields_take_the_models_defaults() -> None:
    assert to_sampling_params(completion(), RULES, prompt_tokens=4) == SamplingParams(
        temperature=0.7, top_k=20, top_p=0.9, max_tokens=60
    )
    request = chat(
        temperature=0, top_k=-1, top_p=1, max_completion_tokens=3, stop_token_ids=[5, 5], ignore_eos=True
    )
    assert to_sampling_params(request, RULES, prompt_tokens=4) == SamplingParams(
        temperature=0, max_tokens=3, stop_token_ids=(5,), ignore_eos=True
    )


def test_the_context_bounds_prompt_and_answer() -> None:
    check_prompt_tokens([1] * 63, RULES, param="prompt")
    for ids, match in [
        ([], "no tokens"),
        ([1] * 64, "no room"),
        ([1, 320], "vocabulary"),
        ([-1], "vocabulary"),
    ]:
        with pytest.raises(RequestRejected, match=match) as caught:
            check_prompt_tokens(ids, RULES, param="prompt")
        assert caught.value.param == "prompt"
    assert to_sampling_params(completion(max_tokens=60), RULES, prompt_tokens=4).max_tokens == 60
    with pytest.raises(RequestRejected, match="at most 60") as caught:
        to_sampling_params(completion(max_tokens=61), RULES, prompt_tokens=4)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")


def test_prompts_have_four_shapes() -> None:
    assert completion(prompt="a").prompt == ["a"]
    assert completion(prompt=["a", "b"]).prompt == ["a", "b"]
    assert completion(prompt=[1, 2]).prompt == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompt == [[1], [2, 3]]


def test_messages_are_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(
        messages=[
            {"role": "developer", "content": "d"},
            {"role": "user", "content": parts, "name": "n"},
            {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []},
        ]
    )
    assert [message.for_template() for message in request.messages] == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb", "name": "n"},
        {"role": "assistant", "content": "x"},
    ]
    image = {"type": "image_url", "image_url": {"url": "x"}}
    for messages, param in [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": [image]}], "messages[1].content"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ]:
        with pytest.raises(RequestRejected) as caught:
            chat(messages=messages)
        assert caught.value.param == param


@pytest.mark.parametrize("name", ["other", "", "M", "m/", None, 3])
def test_unknown_models_are_refused(name: Any) -> None:
    with pytest.raises(RequestRejected) as caught:
        completion(model=name)
    assert caught.value.param == "model"
    if isinstance(name, str):
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe{", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_bad_json_is_refused(body: bytes) -> None:
    with pytest.raises(RequestRejected) as caught:
        parse_request(CompletionRequest, body, RULES)
    assert caught.value.status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *EXCLUDED, "x"]
)


@settings(max_examples=300, deadline=None)
@given(
    fields=st.dictionaries(NAMES, JSON, max_size=4),
    kind=st.sampled_from([ChatCompletionRequest, CompletionRequest]),
)
def test_any_json_is_accepted_or_refused_never_an_error(fields: dict[str, Any], kind: Any) -> None:
    body = {"model": "m", "prompt": "hi"} if kind is CompletionRequest else {"model": "m", "messages": []}
    refusal = None
    try:
        request = parse_request(kind, json.dumps({**body, **fields}).encode(), RULES)
        to_sampling_params(request, RULES, prompt_tokens=3)
    except RequestRejected as error:
        refusal = error
    assert refusal is None or refusal.status in (400, 404)
    json.dumps({"message": str(refusal), "param": refusal and refusal.param}, allow_nan=False)
