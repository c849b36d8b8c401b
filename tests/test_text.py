"""Tokenizer, chat template, incremental decoding and stop strings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from core.errors import ModelLoadError, RequestRejected
from core.server.text import IncrementalDetokenizer, StopChecker, TextProcessor
from tests.fake_engine import CHAT_TEMPLATE, EOS_TOKEN_ID, byte_tokenizer, write_text_model

TOKENIZER = byte_tokenizer()
# Byte-level tokenizers write a byte as a visible character: itself, or one from 256 on.
VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
VOCABULARY = TOKENIZER.get_vocab()
ID_OF_BYTE = {byte: VOCABULARY[chr(byte)] for byte in VISIBLE} | {
    byte: VOCABULARY[chr(256 + index)] for index, byte in enumerate(HIDDEN)
}


def ids_of_bytes(data: bytes) -> list[int]:
    """Token ids of arbitrary bytes, valid UTF-8 or not."""
    return [ID_OF_BYTE[byte] for byte in data]


def split(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Cut `ids` into steps of the given sizes (cycled)."""
    steps, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        steps.append(ids[at : at + size])
        at, turn = at + size, turn + 1
    return steps


def stream(tokenizer: Tokenizer, steps: list[list[int]], prompt: list[int] | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt or [])
    return [*(detokenizer.push(step) for step in steps), detokenizer.flush()]


SIZES = st.lists(st.integers(1, 8), min_size=1, max_size=6)
PIECES = st.lists(
    st.one_of(
        st.text(max_size=6).map(str.encode),
        st.binary(max_size=5),
        st.sampled_from(["👩‍👩‍👧", "é", "한", "\ufffd"]).map(str.encode),
    ),
    max_size=30,
).map(b"".join)


@settings(max_examples=300, deadline=None)
@given(data=PIECES, sizes=SIZES, prompt=st.binary(max_size=12))
def test_deltas_joined_are_the_whole_text(data: bytes, sizes: list[int], prompt: bytes) -> None:
    ids = ids_of_bytes(data)
    whole = TOKENIZER.decode(ids)
    assert "".join(stream(TOKENIZER, split(ids, sizes))) == whole
    if not TOKENIZER.decode(ids_of_bytes(prompt)).endswith("\ufffd"):
        assert "".join(stream(TOKENIZER, split(ids, sizes), ids_of_bytes(prompt))) == whole


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), sizes=SIZES)
def test_valid_text_never_shows_part_of_a_character(text: str, sizes: list[int]) -> None:
    deltas = stream(TOKENIZER, split(ids_of_bytes(text.encode()), sizes))
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text


def test_a_prompt_that_ends_inside_a_character_does_not_leak() -> None:
    half, rest = ids_of_bytes("😀".encode()[:2]), ids_of_bytes("😀".encode()[2:] + b" ok")
    assert "".join(stream(TOKENIZER, [rest], half)).endswith(" ok")
    assert "😀" not in "".join(stream(TOKENIZER, [rest], half))


def test_output_that_ends_inside_a_character_ends_with_one_replacement() -> None:
    ids = ids_of_bytes(b"ok " + "😀".encode()[:3])
    assert "".join(stream(TOKENIZER, [[i] for i in ids])) == TOKENIZER.decode(ids) == "ok \ufffd"


def test_cost_stays_bounded_on_endless_invalid_bytes_and_special_tokens() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER, hidden_ids=frozenset({EOS_TOKEN_ID}))
    ids = ids_of_bytes(b"\xff\xc0\x80\xe2\x82" * 200)
    deltas = []
    for token in ids:
        deltas.append(detokenizer.push([token]))
        assert len(detokenizer._window) < 80
    assert "".join(deltas) + detokenizer.flush() == TOKENIZER.decode(ids)
    for _ in range(500):
        assert detokenizer.push([EOS_TOKEN_ID]) == ""
    assert len(detokenizer._window) < 80


def metaspace_tokenizer() -> Tokenizer:
    """A SentencePiece-like tokenizer: the first token's space is dropped, byte tokens for what is unknown."""
    pieces = ["<unk>", "▁", "▁Hello", "▁world", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_sentencepiece_decoders_keep_inner_spaces(data: st.DataObject) -> None:
    tokenizer = metaspace_tokenizer()
    word = st.sampled_from(
        [[1], [2], [3], [4], [5 + byte for byte in "é".encode()], [5 + b for b in "😀".encode()]]
    )
    ids = [token for piece in data.draw(st.lists(word, max_size=15)) for token in piece]
    steps = split(ids, data.draw(SIZES))
    assert "".join(stream(tokenizer, steps)) == tokenizer.decode(ids)
    assert "".join(stream(tokenizer, steps, [2])) == tokenizer.decode([2, *ids])[len("Hello") :]


def reference_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first stop string that is complete ends the text."""
    for end in range(1, len(text) + 1):
        if matches := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4),
    sizes=SIZES,
)
def test_stop_strings_cut_alike_however_the_text_arrives(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    checker, shown, found = StopChecker(stops), "", None
    for chunk in split([ord(character) for character in text], sizes):
        delta, found = checker.push("".join(map(chr, chunk)))
        shown += delta
        expected, _ = reference_stop(text, stops)
        assert expected.startswith(shown), "text of a stop string leaked"
        if found:
            break
    shown += "" if found else checker.flush()
    assert (shown, found) == reference_stop(text, stops)


def test_reads_the_model_directory(tmp_path: Path) -> None:
    text = TextProcessor(write_text_model(tmp_path))
    assert text.eos_token_ids == (0, 2)
    assert (text.defaults.temperature, text.defaults.top_k, text.defaults.top_p) == (0.7, 20, 0.9)
    assert text.vocab_size == 320
    assert text.decode(text.encode("grüße 👋")) == "grüße 👋"
    prompt = text.render_chat([{"role": "user", "content": "<b>&'"}])
    assert prompt == "<|im_start|>user\n<b>&'<|im_end|>\n<|im_start|>assistant\n"
    assert text.encode(prompt, add_special_tokens=False)[0] == 1
    with pytest.raises(RequestRejected, match="surrogate"):
        text.encode("\ud800")


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json does not exist"):
        TextProcessor(tmp_path)
    write_text_model(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json is not valid JSON"):
        TextProcessor(tmp_path)


@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("generation_config.json", {"temperature": "hot"}),
        ("generation_config.json", {"temperature": -1}),
        ("generation_config.json", {"top_k": [5]}),
        ("generation_config.json", {"top_p": float("nan")}),
        ("generation_config.json", {"min_p": True}),
        ("generation_config.json", {"eos_token_id": "x"}),
        ("generation_config.json", {"eos_token_id": [[1]]}),
        ("config.json", {"eos_token_id": 1.5}),
        ("config.json", {"vocab_size": "many"}),
    ],
)
def test_values_of_a_wrong_kind_are_named(tmp_path: Path, file: str, field: dict[str, Any]) -> None:
    write_text_model(tmp_path)
    path = tmp_path / file
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **field}))
    with pytest.raises(ModelLoadError, match=rf"{file}: {next(iter(field))}"):
        TextProcessor(tmp_path)


TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "blocks": (
        "{% for m in messages %}\n  {% if m.role == 'user' %}\nU: {{ m.content | tojson }}\n  {% endif %}\n"
        "{% endfor %}\n"
    ),
    "loopcontrols": (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}{{ eos_token }}"
    ),
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "now": "{{ strftime_now('%Y') }}{{ bos_token }}{{ extra | default('none') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    write_text_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = [
        {"role": r, "content": c} for r, c in [("system", "a<b"), ("user", "é\n&"), ("assistant", "x")]
    ]
    for prompt in (False, True):
        expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert TextProcessor(tmp_path).render_chat(messages, add_generation_prompt=prompt) == expected


def test_the_built_in_model_tokenizes_and_renders_as_in_transformers() -> None:
    builtin = pytest.importorskip("core.models.builtin")
    directories = sorted(builtin.cache_root().glob("SmolLM2*/tokenizer.json"))
    if not directories:
        pytest.skip("the built-in model is not in the cache")
    transformers = pytest.importorskip("transformers")
    directory = directories[0].parent
    text, oracle = TextProcessor(directory), transformers.AutoTokenizer.from_pretrained(directory)
    conversations: list[list[dict[str, str]]] = [
        [{"role": "user", "content": "What is 2+2? <|im_end|> é 👋"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  hi\n"}],
    ]
    for messages in conversations:
        expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text.render_chat(messages) == expected
        ids = text.encode(expected, add_special_tokens=False)
        assert ids == oracle.encode(expected, add_special_tokens=False)
        assert text.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert oracle.eos_token_id in text.eos_token_ids


def test_templates_refuse_and_are_sandboxed(tmp_path: Path) -> None:
    write_text_model(tmp_path)
    for source, match in [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "refused"),
    ]:
        (tmp_path / "chat_template.jinja").write_text(source)
        with pytest.raises(RequestRejected, match=match):
            TextProcessor(tmp_path).render_chat([{"role": "user", "content": "x"}])
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelLoadError, match="chat template"):
        TextProcessor(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    with pytest.raises(RequestRejected, match="no chat template"):
        TextProcessor(tmp_path).render_chat([{"role": "user", "content": "x"}])
