"""Penalties, bias, minimum length, grammars and log-probabilities mean the same at any draft width.

The oracle is transformers' forward pass with the formulas written out token by token in plain Python.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import RequestRejected
from core.grammar import GrammarVocabulary, choice_grammar, json_grammar, regex_grammar
from core.types import Request, RequestOutput, SamplingParams
from tests.engines import ScriptedDrafter, engine_config, greedy, random_prompts, run, scripted_engine
from tests.tiny import VOCAB_SIZE, write_tiny_llama, write_tokenizer

MAX_TOKENS = 20
EOS = 2

PARAMS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": 1.5},
    "negative": {"presence_penalty": -1.0, "frequency_penalty": -0.3},
    "all": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.7,
        "logit_bias": ((5, 2.0),),
    },
    "bias": {"logit_bias": ((7, 3.5), (11, -100.0), (13, 100.0 / 30))},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_llama(tmp_path_factory.mktemp("target"))
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(5, VOCAB_SIZE, seed=8)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def shaped_logits(
    logits: torch.Tensor, prompt: list[int], generated: list[int], params: SamplingParams
) -> torch.Tensor:
    """The formulas, one token at a time."""
    values = logits.double().tolist()
    for token, bias in params.logit_bias:
        values[token] += bias
    if len(generated) < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))):
            values[token] = -math.inf
    for token in set(prompt + generated):
        penalty = params.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token, count in Counter(generated).items():
        values[token] -= params.frequency_penalty * count + params.presence_penalty
    return torch.tensor(values)


def expected(oracle: Any, prompt: list[int], params: SamplingParams) -> list[int]:
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    generated: list[int] = []
    while len(generated) < params.max_tokens:
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + generated])).logits[0, -1]
        generated.append(int(shaped_logits(logits, prompt, generated, params).argmax()))
        if generated[-1] in stops:
            break
    return generated


def outputs_of(
    model: Path,
    prompts: list[list[int]],
    params: list[SamplingParams],
    *,
    recorded: list[list[int]] | None = None,
    width: int = 0,
    wrong: Any = lambda position: position % 5 == 0,
    **options: Any,
) -> list[list[RequestOutput]]:
    """Everything that each request got, with drafts along the recorded answers."""
    drafter = None
    if width:
        assert recorded is not None
        sequences = [prompt + tokens for prompt, tokens in zip(prompts, recorded, strict=True)]
        drafter = ScriptedDrafter(width, sequences, vocab_size=VOCAB_SIZE, wrong=wrong)
    engine = scripted_engine(engine_config(model, width=width, **options), drafter)
    engine.grammars = GrammarVocabulary(model, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
    got: list[list[RequestOutput]] = [[] for _ in prompts]
    try:
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            engine.add(Request(request_id=index, prompt_token_ids=tuple(prompt), params=each))
        while engine.has_work:
            for output in engine.step():
                got[output.request_id].append(output)
        engine.loop.scheduler.check_idle()
    finally:
        engine.close()
    return got


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("width", [0, 1, 5])
@pytest.mark.parametrize("name", PARAMS)
def test_shaped_answers_equal_the_formulas(
    model: Path, prompts: list[list[int]], oracle: Any, name: str, width: int
) -> None:
    params = greedy(MAX_TOKENS, **PARAMS[name])
    answers = [expected(oracle, prompt, params) for prompt in prompts]
    plain = [expected(oracle, prompt, greedy(MAX_TOKENS)) for prompt in prompts]
    assert answers != plain, "the setting changes nothing here"
    got = outputs_of(model, prompts, [params] * len(prompts), recorded=answers, width=width)
    assert [tokens_of(outputs) for outputs in got] == answers


def test_neighbours_are_not_touched(model: Path, prompts: list[list[int]], oracle: Any) -> None:
    """One request of each kind in one batch, with preemption by a small cache, against each alone."""
    kinds = [
        greedy(MAX_TOKENS),
        *(greedy(MAX_TOKENS, **PARAMS[name]) for name in ("all", "bias", "frequency")),
    ]
    kinds.append(SamplingParams(temperature=0.9, top_k=8, seed=3, max_tokens=MAX_TOKENS, ignore_eos=True))
    alone = [
        tokens_of(outputs_of(model, [prompt], [each])[0]) for prompt, each in zip(prompts, kinds, strict=True)
    ]
    for width in (0, 5):
        together = outputs_of(model, prompts, kinds, recorded=alone, width=width)
        assert [tokens_of(outputs) for outputs in together] == alone


def test_penalties_survive_preemption(model: Path, prompts: list[list[int]], oracle: Any) -> None:
    params = greedy(40, **PARAMS["all"])
    answers = [expected(oracle, prompt, params) for prompt in prompts]
    config = engine_config(model, max_model_len=96)
    engine = scripted_engine(config, None)
    pages = engine.loop.scheduler.pages
    held = pages.take(pages.capacity - 32)
    assert held is not None
    preemptions = 0

    def count(stats: Any) -> None:
        nonlocal preemptions
        preemptions += stats.preemptions

    engine.loop.scheduler.check_idle = lambda: None  # the test holds pages
    try:
        got = run(engine, prompts, params, on_step=count)
    finally:
        engine.close()
    assert preemptions > 0
    assert [each.tokens for each in got] == answers


@pytest.mark.parametrize("width", [0, 5])
@pytest.mark.parametrize("min_tokens", [0, 1, 7, MAX_TOKENS])
def test_no_stop_token_before_min_tokens(
    model: Path, prompts: list[list[int]], oracle: Any, width: int, min_tokens: int
) -> None:
    plain = [expected(oracle, prompt, greedy(MAX_TOKENS)) for prompt in prompts]
    params = [
        greedy(MAX_TOKENS, ignore_eos=False, min_tokens=min_tokens, stop_token_ids=(tokens[2], tokens[5]))
        for tokens in plain
    ]
    answers = [expected(oracle, prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    got = [tokens_of(o) for o in outputs_of(model, prompts, params, recorded=answers, width=width)]
    assert got == answers
    assert all(len(tokens) > min_tokens or len(tokens) == MAX_TOKENS for tokens in got)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forbidden_token_appears_at_no_position(
    model: Path, prompts: list[list[int]], oracle: Any, temperature: float
) -> None:
    """The draft proposes it everywhere: accepted positions obey as the bonus does."""
    plain = [expected(oracle, prompt, greedy(MAX_TOKENS)) for prompt in prompts]
    forbidden = Counter(token for tokens in plain for token in tokens).most_common(1)[0][0]
    for seed in range(10):
        params = SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            logit_bias=((forbidden, -100.0),),
        )
        got = outputs_of(
            model, prompts, [params] * len(prompts), recorded=plain, width=5, wrong=lambda position: False
        )
        assert all(forbidden not in tokens_of(outputs) for outputs in got)


@pytest.mark.parametrize("width", [0, 5])
def test_log_probabilities_are_the_models_own(
    model: Path, prompts: list[list[int]], oracle: Any, width: int
) -> None:
    """Of generated and of prompt tokens, whatever shapes the draw, at any chunking."""
    params = greedy(MAX_TOKENS, logprobs=4, prompt_logprobs=2, logit_bias=((5, 2.0),))
    answers = [expected(oracle, prompt, params) for prompt in prompts]
    for chunk in (3, 16):
        got = outputs_of(
            model, prompts, [params] * len(prompts), recorded=answers, width=width, chunk=chunk, lag=2
        )
        for prompt, answer, outputs in zip(prompts, answers, got, strict=True):
            with torch.no_grad():
                table = oracle(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
            scores = [entry for output in outputs for entry in output.logprobs or []]
            assert [entry.token_id for entry in scores] == answer == tokens_of(outputs)
            _check(scores, table[len(prompt) - 1 : -1], count=4)
            assert all(output.prompt_logprobs is None for output in outputs[1:])
            prompt_scores = outputs[0].prompt_logprobs or []
            assert [entry.token_id for entry in prompt_scores] == prompt[1:]
            _check(prompt_scores, table[: len(prompt) - 1], count=2)


def _check(scores: list[Any], table: torch.Tensor, *, count: int) -> None:
    for entry, row in zip(scores, table, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        best = row.topk(count)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_nobody_gets_scores_that_it_did_not_ask_for(model: Path, prompts: list[list[int]]) -> None:
    params = [greedy(6, logprobs=0) if index == 1 else greedy(6) for index in range(len(prompts))]
    got = outputs_of(model, prompts, params)
    for index, outputs in enumerate(got):
        assert all((output.logprobs is None) == (index != 1) for output in outputs)
    assert all(entry.top == () for output in got[1] for entry in output.logprobs or [])


def test_scores_stop_where_the_tokens_stop(model: Path, prompts: list[list[int]], oracle: Any) -> None:
    plain = [expected(oracle, prompt, greedy(MAX_TOKENS)) for prompt in prompts]
    params = [greedy(MAX_TOKENS, logprobs=1, stop_token_ids=(tokens[3],)) for tokens in plain]
    for outputs in outputs_of(model, prompts, params, recorded=plain, width=5, wrong=lambda position: False):
        for output in outputs:
            assert output.logprobs is not None
            assert [entry.token_id for entry in output.logprobs] == output.token_ids


GRAMMARS = {
    "regex": (regex_grammar("[a-f]{3}x*y", param="response_format"), "[a-f]{3}x*y"),
    "choice": (choice_grammar(["yes", "no way", "no"], param="response_format"), "yes|no way|no"),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_hold_at_any_width_and_beside_free_neighbours(
    model: Path, prompts: list[list[int]], name: str, temperature: float
) -> None:
    grammar, expression = GRAMMARS[name]
    text = _text_of(model)
    params = [
        SamplingParams(
            temperature=temperature, seed=index, max_tokens=60, grammar=grammar, ignore_eos=index == 3
        )
        if index % 2
        else greedy(MAX_TOKENS)
        for index in range(len(prompts))
    ]
    plain = [tokens_of(outputs) for outputs in outputs_of(model, prompts, params)]
    for lag in (1, 2):
        got = outputs_of(
            model, prompts, params, recorded=plain, width=5, wrong=lambda position: False, lag=lag, chunk=5
        )
        assert [tokens_of(outputs) for outputs in got] == plain
        for index, outputs in enumerate(got):
            if index % 2 and outputs[-1].finish_reason == "stop":
                tokens = [token for token in tokens_of(outputs) if token != EOS]
                assert re.fullmatch(expression, text(tokens)), text(tokens)
    assert any(outputs[-1].finish_reason == "stop" for outputs in got[1::2])


def _text_of(model: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


def test_what_a_grammar_cannot_enforce_is_refused_by_name() -> None:
    for schema in ({"type": "nope"}, {"$ref": "http://host/schema"}, {"type": "array", "uniqueItems": True}):
        with pytest.raises(RequestRejected, match="response_format") as refusal:
            json_grammar(schema, param="response_format")
        assert refusal.value.param == "response_format"
    with pytest.raises(RequestRejected, match="look-around"):
        regex_grammar("(?=a)b", param="structured_outputs.regex")


def test_adaptive_verification_refuses_what_it_excludes(model: Path) -> None:
    drafter = ScriptedDrafter(5, [], vocab_size=VOCAB_SIZE)
    engine = scripted_engine(engine_config(model, width=5, adaptive=True), drafter)
    try:
        for more in ({"min_tokens": 2}, {"logprobs": 0}, *PARAMS.values(), {"grammar": GRAMMARS["regex"][0]}):
            with pytest.raises(RequestRejected, match="adaptive target verification"):
                engine.add(Request(request_id=1, prompt_token_ids=(3, 4), params=greedy(4, **more)))
        assert not engine.has_work
    finally:
        engine.close()
