"""Fields of the OpenAI API and its relatives that xspec knows and does not serve, with their neutral values.

Clients send many of these with values that change nothing; those pass. Any other value is refused by name: an
answer that silently lacks what was asked for is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.errors import RequestRejected


@dataclass(frozen=True, slots=True)
class Unserved:
    """`adaptive`: adaptive target verification excludes the feature, whatever the engine learns later."""

    what: str
    neutral: tuple[Any, ...]
    adaptive: bool = False

    def is_neutral(self, value: Any) -> bool:
        # True == 1 and False == 0 in Python, but not in JSON.
        return value is None or any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in self.neutral
        )


_PENALTY = Unserved("penalties are", (0,), adaptive=True)
_STRUCTURED = Unserved("structured output is", (), adaptive=True)
_TOOLS = Unserved("tool calling is", ([], "none", "auto"))
_MEDIA = Unserved("output other than text is", (["text"],))

UNSERVED: Mapping[str, Unserved] = {
    "logprobs": Unserved("logprobs are", (False,), adaptive=True),
    "top_logprobs": Unserved("logprobs are", (0,), adaptive=True),
    "prompt_logprobs": Unserved("logprobs are", (), adaptive=True),
    "logit_bias": Unserved("logit bias is", ({},), adaptive=True),
    "min_tokens": Unserved("a minimum of tokens is", (0,), adaptive=True),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": Unserved("penalties are", (1,), adaptive=True),
    "response_format": Unserved("structured output is", ({"type": "text"},), adaptive=True),
    "structured_outputs": _STRUCTURED,
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "best_of": Unserved("choosing the best of several answers is", (1,)),
    "suffix": Unserved("insertion is", ("",)),
    "include_stop_str_in_output": Unserved("text that includes its stop string is", (False,)),
    "modalities": _MEDIA,
    "audio": _MEDIA,
    "prediction": Unserved("predicted output is", ()),
    "reasoning_effort": Unserved("reasoning effort is", ()),
    "verbosity": Unserved("verbosity is", ()),
    "web_search_options": Unserved("web search is", ()),
    "store": Unserved("storing completions is", (False,)),
    "service_tier": Unserved("service tiers are", ("auto", "default")),
}


def strip_neutral(body: Mapping[str, Any], *, adaptive_target_verify: bool) -> dict[str, Any]:
    """Return `body` without the fields of UNSERVED, or refuse the first one that is not neutral."""
    kept = {}
    for name, value in body.items():
        unserved = UNSERVED.get(name)
        if unserved is None:
            kept[name] = value
        elif not unserved.is_neutral(value):
            raise _refusal(name, value, unserved, adaptive_target_verify=adaptive_target_verify)
    return kept


def refuse_under_adaptive(name: str, what: str) -> RequestRejected:
    """Return the refusal of a field that adaptive target verification excludes."""
    return RequestRejected(
        f"{name}: {what} not supported while adaptive target verification is on "
        "(enable_adaptive_target_verify); leave the field out, or use a server that runs without it",
        param=name,
        code="unsupported_parameter",
    )


def _refusal(name: str, value: Any, unserved: Unserved, *, adaptive_target_verify: bool) -> RequestRejected:
    if unserved.adaptive and adaptive_target_verify:
        return refuse_under_adaptive(name, unserved.what)
    return RequestRejected(
        f"{name}: {unserved.what} not available yet (got {short_repr(value)}); leave the field out",
        param=name,
        code="unsupported_parameter",
    )


def short_repr(value: Any) -> str:
    """Return a value for a message: enough to recognise it, never a whole prompt."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
