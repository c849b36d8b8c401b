"""Everything about text that depends on the model directory: tokenizer, chat template, generation defaults.

No torch, no transformers, no network. A directory is read once, at startup; whatever is wrong with it is a
ModelLoadError that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from core.errors import ModelLoadError, RequestRejected
from core.server.detokenizer import IncrementalDetokenizer, StopChecker
from core.vocabulary import eos_token_ids

__all__ = ["GenerationDefaults", "IncrementalDetokenizer", "StopChecker", "TextProcessor"]

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Names that a template's caller may not overwrite: they are ours or the environment's.
RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", *SPECIAL_TOKEN_NAMES}
)
# Keys of generation_config.json that change output and that xspec does not apply; value = neutral.
UNAPPLIED_DEFAULTS = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "typical_p": 1.0, "num_beams": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling of requests that leave a field out, from generation_config.json."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    unapplied: tuple[str, ...] = ()  # settings of the file that have no effect here, as "name=value"


class TextProcessor:
    """Encode, render chats and decode for one model directory. Safe to use from several threads."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.tokenizer = _load_tokenizer(model_dir / "tokenizer.json")
        self._tokenizer_config = _read_json(model_dir / "tokenizer_config.json")
        model_config = _read_json(model_dir / "config.json")
        generation_config = _read_json(model_dir / "generation_config.json")
        self.defaults = _generation_defaults(generation_config, model_dir / "generation_config.json")
        self.eos_token_ids = tuple(sorted(eos_token_ids(model_dir)))
        tokenizer_size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        # Embedding tables are often padded: what counts for token-id prompts is the model's own size.
        vocab_size = model_config.get("vocab_size") or tokenizer_size
        if type(vocab_size) is not int or vocab_size < 1:
            raise ModelLoadError(f"{model_dir / 'config.json'}: vocab_size is {vocab_size!r}")
        self.vocab_size: int = vocab_size
        added = self.tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._unknown_ids = frozenset(range(tokenizer_size, self.vocab_size))
        self._special_tokens = _special_tokens(
            self._tokenizer_config, _read_json(model_dir / "special_tokens_map.json")
        )
        source = _find_chat_template(model_dir, self._tokenizer_config)
        self._template = _compile_template(source) if source is not None else None

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; text that is no valid Unicode is refused."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestRejected(
                "the text holds an unpaired surrogate, which is not valid Unicode"
            ) from None
        # `encode` holds the interpreter all the while (seconds for a megabyte); the batch call lets others run.
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's own spelling of each token; empty for one that it does not have."""
        return [self.tokenizer.id_to_token(token) or "" for token in token_ids]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation. Encode it without adding special tokens."""
        if self._template is None:
            raise RequestRejected(
                "this model has no chat template; use /v1/completions with a complete prompt",
                param="messages",
            )
        extra = dict(template_kwargs or {})
        if reserved := sorted(RESERVED_TEMPLATE_NAMES & extra.keys()):
            raise RequestRejected(
                f"chat_template_kwargs may not set {', '.join(reserved)}", param="chat_template_kwargs"
            )
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **extra,
            )
        except Exception as error:
            # A template is a program that came with the model and runs over the client's data. Whatever it
            # raises (its own refusals, a missing key, a type it did not expect) concerns this request only.
            raise RequestRejected(
                f"the chat template refused these messages: {error}", param="messages"
            ) from error

    def detokenizer(
        self, *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        hidden_ids = self._special_ids | self._unknown_ids if skip_special_tokens else self._unknown_ids
        return IncrementalDetokenizer(self.tokenizer, prompt_ids=prompt_ids, hidden_ids=hidden_ids)


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ModelLoadError(f"{path} does not exist; xspec needs the tokenizer as tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path} is not a tokenizer that can be read: {error}") from error
    # Files saved by training runs may truncate or pad; a server does neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in `path`, or an empty one when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _generation_defaults(config: dict[str, Any], file: Path) -> GenerationDefaults:
    def number(name: str, default: float, low: float, high: float) -> float:
        value = default if config.get(name) is None else config[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ModelLoadError(f"{file}: {name} must be a number from {low:g} to {high:g}, not {value!r}")
        return value

    unapplied = tuple(
        f"{name}={config[name]}"
        for name, neutral in UNAPPLIED_DEFAULTS.items()
        if config.get(name) is not None and config[name] != neutral
    )
    return GenerationDefaults(
        temperature=float(number("temperature", 1.0, 0.0, 100.0)),
        # Hugging Face writes both 0 and -1 for "off".
        top_k=max(0, int(number("top_k", 0, -1, 2**31))),
        top_p=float(number("top_p", 1.0, 0.0, 1.0)),
        min_p=float(number("min_p", 0.0, 0.0, 1.0)),
        unapplied=unapplied,
    )


def _special_tokens(*configs: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens that templates may name, as text. The first file that knows a token wins."""

    def text_of(value: Any) -> str | None:
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None

    tokens: dict[str, Any] = {}
    for config in configs:
        for name in SPECIAL_TOKEN_NAMES:
            if name not in tokens and (text := text_of(config.get(name))) is not None:
                tokens[name] = text
    return tokens


def _find_chat_template(model_dir: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_json(model_dir / "chat_template.json").get("chat_template")
    template = template or tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named templates; "default" is the one for plain chats
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


class _GenerationTag(jinja2.ext.Extension):
    """Accept `{% generation %}`, with which templates mark what the assistant said. It has no effect here."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile_template(source: str) -> jinja2.Template:
    """Compile a chat template in the environment that Hugging Face templates are written for.

    Templates come with model files, so they are untrusted code: the sandbox denies access to the interpreter.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    # Jinja's own tojson escapes HTML, which would change the prompt.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelLoadError(f"the model's chat template cannot be compiled: {error}") from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
