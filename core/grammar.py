"""Structured output: schemas and expressions become grammars, grammars become masks of allowed tokens.

Grammars are strings, so that requests can carry them. The server checks them without a tokenizer; the engine's host
side walks them, one matcher per sequence, over committed tokens only. The parsing is llguidance's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from core.errors import RequestRejected


def json_grammar(schema: dict[str, Any] | bool, *, param: str) -> str:
    """The grammar of JSON documents that a schema admits; RequestRejected for schemas that can't be enforced."""
    return _checked(LLMatcher.grammar_from_json_schema(json.dumps(schema)), param)


def regex_grammar(expression: str, *, param: str) -> str:
    """The grammar of texts that a regular expression matches in full."""
    return _checked(LLMatcher.grammar_from_regex(expression), param)


def choice_grammar(choices: Sequence[str], *, param: str) -> str:
    """The grammar of exactly these texts."""
    alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return _checked(LLMatcher.grammar_from_lark(f"start: {alternatives}"), param)


def _checked(grammar: str, param: str) -> str:
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    # A warning says that a part of the schema would not be enforced: as good as an error here.
    if messages:
        kind = "can't be used" if is_error else "can't be enforced in full"
        raise RequestRejected(f"{param}: {kind}: {' '.join(messages[0].split())}", param=param)
    return grammar


class GrammarVocabulary:
    """A model's tokens as matchers see them. Loads tokenizer.json; about half a second."""

    def __init__(self, model_path: Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        self._tokenizer = LLTokenizer(
            str(model_path / "tokenizer.json"), n_vocab=vocab_size, eos_token=sorted(eos_token_ids)
        )

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A walk through a grammar that the functions above returned, at its start."""
        return GrammarMatcher(self, LLMatcher(self._tokenizer, grammar))


class GrammarMatcher:
    """Where one sequence stands in its grammar."""

    def __init__(self, vocabulary: GrammarVocabulary, matcher: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher

    @property
    def error(self) -> str | None:
        """Why the walk can't go on: the grammar is too large for its limits, or a token did not belong to it."""
        return self._matcher.get_error() or None

    @property
    def is_over(self) -> bool:
        """Whether no text can follow."""
        return bool(self._matcher.is_stopped())

    def advance(self, token_id: int) -> None:
        """Take a committed token. What goes wrong shows in `error`."""
        self._matcher.consume_token(token_id)

    def mask(self) -> np.ndarray:
        """[ceil(V / 32)] int32: bit t % 32 of word t // 32 says whether token t may come next."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        return words[: self._vocabulary.num_words]
