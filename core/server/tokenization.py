"""POST /tokenize and /detokenize, in the shapes that vLLM gave them: what a prompt is to the model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from core.errors import RequestRejected
from core.server.protocol import (
    ChatMessage,
    RequestRules,
    StrictModel,
    Unavailable,
    check_model,
    check_vocabulary,
    parse_json_object,
    validated,
)
from core.server.text import TextProcessor


class TokenizeRequest(StrictModel):
    """Tokenize text as /v1/completions would."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(StrictModel):
    """Tokenize a conversation as /v1/chat/completions would."""

    model: str | None = None
    messages: list[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: Literal[False] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Unavailable = None
    return_token_strs: bool | None = None


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: list[int]


def tokenize(body: bytes, text: TextProcessor, rules: RequestRules) -> dict[str, Any]:
    """Answer /tokenize. Special tokens are added as generation adds them, unless the request says otherwise."""
    raw = _parse(body, rules)
    request: TokenizeRequest | TokenizeChatRequest
    if "messages" in raw:
        request = validated(TokenizeChatRequest, raw)
        prompt = text.render_chat(
            [message.for_template() for message in request.messages],
            add_generation_prompt=request.add_generation_prompt is not False,
            template_kwargs=request.chat_template_kwargs,
        )
        add_special_tokens, param = request.add_special_tokens is True, "messages"
    else:
        request = validated(TokenizeRequest, raw)
        prompt, add_special_tokens, param = request.prompt, request.add_special_tokens is not False, "prompt"
    try:
        tokens = text.encode(prompt, add_special_tokens=add_special_tokens)
    except RequestRejected as error:
        raise RequestRejected(f"{param}: {error}", param=param) from None
    return {
        "count": len(tokens),
        "max_model_len": rules.max_model_len,
        "tokens": tokens,
        "token_strs": text.token_strings(tokens) if request.return_token_strs else None,
    }


def detokenize(body: bytes, text: TextProcessor, rules: RequestRules) -> dict[str, Any]:
    """Answer /detokenize: the text of tokens, special ones included."""
    request = validated(DetokenizeRequest, _parse(body, rules))
    check_vocabulary(request.tokens, rules, param="tokens")
    return {"prompt": text.decode(request.tokens, skip_special_tokens=False)}


def _parse(body: bytes, rules: RequestRules) -> dict[str, Any]:
    raw = parse_json_object(body)
    if raw.get("model") is not None:
        check_model(raw, rules)
    return raw
