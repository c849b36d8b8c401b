"""/tokenize, /detokenize and /server_info: what a prompt is to the model, and what the server runs with."""

# Fixtures are imported by name, then taken as arguments.
# ruff: noqa: F401, F811

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import to_plain
from core.config_codec import config_sha256
from core.errors import RequestRejected
from core.server.text import TextProcessor
from core.server.tokenization import detokenize, tokenize
from metrics.stats import StepStats
from tests.fake_engine import write_text_model
from tests.http_rig import MAX_MODEL_LEN, TOKENIZER, Rig, assert_error, make_rig, rig
from tests.test_protocol import JSON, RULES

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hï 👋"}]


def post(rig: Rig, path: str, **body: Any) -> httpx.Response:
    return rig.client.post(path, json=body)


def test_text_has_the_tokens_that_generation_would_use(rig: Rig) -> None:
    for text in ("Hello, wörld 👋", "", "<|im_end|>x", "a" * 10_000):
        answer = post(rig, "/tokenize", prompt=text).json()
        assert answer == {
            "count": len(answer["tokens"]),
            "max_model_len": MAX_MODEL_LEN,
            "tokens": TOKENIZER.encode(text).ids,
            "token_strs": None,
        }
        assert post(rig, "/detokenize", tokens=answer["tokens"]).json() == {"prompt": text}
    rig.complete(prompt="Hello")
    assert (
        list(rig.engine.added[-1].prompt_token_ids) == post(rig, "/tokenize", prompt="Hello").json()["tokens"]
    )


def test_a_conversation_has_the_tokens_that_generation_would_use(rig: Rig) -> None:
    for extra in ({}, {"add_generation_prompt": False}):
        rig.chat(messages=MESSAGES, **extra)
        answer = post(rig, "/tokenize", model="tiny", messages=MESSAGES, **extra).json()
        assert answer["tokens"] == list(rig.engine.added[-1].prompt_token_ids)
        assert (
            post(rig, "/detokenize", tokens=answer["tokens"])
            .json()["prompt"]
            .startswith("<|im_start|>system")
        )


def test_tokens_as_strings(rig: Rig) -> None:
    answer = post(rig, "/tokenize", prompt="ab<|im_end|>", return_token_strs=True).json()
    assert answer["token_strs"] == ["a", "b", "<|im_end|>"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        (
            "/tokenize",
            {"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}},
            "chat_template_kwargs",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
    ],
)
def test_refusals_name_the_field(rig: Rig, path: str, body: dict[str, Any], param: str) -> None:
    response = rig.client.post(path, content=json.dumps(body).encode())
    error = assert_error(response, 400)
    assert str(error["param"]).startswith(param)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return TextProcessor(write_text_model(tmp_path_factory.mktemp("model")))


FIELDS = st.sampled_from(
    ["prompt", "messages", "tokens", "chat_template_kwargs", "return_token_strs", "model", "x"]
)


@settings(max_examples=300, deadline=None)
@given(fields=st.dictionaries(FIELDS, JSON, max_size=3), answer=st.sampled_from([tokenize, detokenize]))
def test_any_json_is_answered_or_refused_never_an_error(
    text: TextProcessor, fields: dict[str, Any], answer: Callable[..., Any]
) -> None:
    base = {"tokens": [5]} if answer is detokenize else {"messages": MESSAGES}
    refusal = None
    try:
        json.dumps(answer(json.dumps({**base, **fields}).encode(), text, RULES), allow_nan=False)
    except RequestRejected as error:
        refusal = error
    assert refusal is None or refusal.status in (400, 404)


def test_another_model_is_404(rig: Rig) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert assert_error(post(rig, path, model="nope", **body), 404, "model")["code"] == "model_not_found"
    assert_error(rig.client.get("/tokenize"), 405)


def test_padded_vocabulary_has_no_text(rig: Rig) -> None:
    assert post(rig, "/detokenize", tokens=[319, *TOKENIZER.encode("a").ids, 319]).json() == {"prompt": "a"}
    assert post(rig, "/detokenize", tokens=[]).json() == {"prompt": ""}


def test_tokens_need_no_engine(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(announce_ready=False)
    assert post(rig, "/tokenize", prompt="abc").json()["count"] == 3
    info = rig.client.get("/server_info").json()
    assert (info["state"], info["geometry"], info["calibration"]) == ("starting", None, None)


def test_server_info_says_what_runs(make_rig: Callable[..., Rig]) -> None:
    effective = {
        "captured_request_buckets": [1, 2, 4],
        "captured_target_rows": {"1": [1, 2, 4, 8]},
        "kv_pages": 100,
        "settings": {"server": "the rank's own copy"},
        "calibration": {"model": "additive", "fit": [{"max_relative_error": 0.01}]},
    }
    rig = make_rig(adaptive=True, api_keys=("sk-secret",), effective=effective)
    response = rig.client.get("/server_info", headers={"authorization": "Bearer sk-secret"})
    info = response.json()
    assert info["state"] == "ready"
    assert info["geometry"] == {
        name: effective[name] for name in ("captured_request_buckets", "captured_target_rows", "kv_pages")
    }
    assert info["calibration"] == effective["calibration"]
    assert info["configuration"] == to_plain(rig._config)
    assert info["configuration"]["server"]["api_key_digests"] == "<redacted>"
    assert info["config_sha256"] == config_sha256(rig._config)
    assert rig._config.server.api_key_digests[0] not in response.text
    assert info["speculation"]["acceptance_length"] is None
    assert_error(rig.client.get("/server_info"), 401)


def test_server_info_has_the_acceptance_so_far(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(adaptive=True)
    stats = StepStats(
        step=0,
        num_sequences=2,
        prefill_tokens=0,
        speculative_sequence_steps=2,
        proposed=14,
        verified=10,
        accepted=5,
        emitted=7,
        position_verified=[2, 2, 2, 2, 2],
        position_accepted=[2, 2, 1],
    )
    rig.call(rig.metrics.observe_step, stats)
    rig.until(lambda: rig.client.get("/server_info").json()["speculation"]["sequence_steps"] == 2)
    assert rig.client.get("/server_info").json()["speculation"] == {
        "proposed_tokens": 14,
        "verified_tokens": 10,
        "accepted_tokens": 5,
        "emitted_tokens": 7,
        "sequence_steps": 2,
        "acceptance_length": 3.5,
    }


def test_without_a_drafter_there_is_no_speculation(rig: Rig) -> None:
    assert rig.client.get("/server_info").json()["speculation"] is None
