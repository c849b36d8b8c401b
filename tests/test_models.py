"""Target models against transformers (fp32, eager), and checkpoint loading; all tiny and random."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ModelLoadError
from core.models.llama import LlamaModel
from core.models.weights import fingerprint, load_config, load_target
from tests.ragged import PagedRunner, Rows
from tests.tiny import tiny_llama_config, write_tensors, write_tiny_llama

CPU = torch.device("cpu")
TOLERANCE = 1e-4

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "one kv head": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 6},
    "head_dim from hidden": {"head_dim": None},
    "new rope spelling": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    },
}


def tokens(count: int, *, seed: int = 1) -> list[int]:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def load(path: Path, dtype: torch.dtype = torch.float32) -> LlamaModel:
    model = load_target(path, dtype=dtype, device=CPU)
    assert isinstance(model, LlamaModel)
    return model


def oracle(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def oracle_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def write_variant(path: Path, overrides: dict[str, Any]) -> Path:
    write_tiny_llama(path, **overrides)
    config = load_config(path)
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", attention_bias=True)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return oracle(checkpoint)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    path = write_variant(tmp_path / "model", VARIANTS[name])
    ids = tokens(37)
    runner = PagedRunner(load(path), num_seqs=1, max_len=40)
    found = runner.logits(chunks=[Rows(seq=0, start=0, ids=ids)])
    expected = oracle_logits(oracle(path), ids)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert expected.std() > 0.5  # differences would show


@pytest.mark.parametrize(
    "damage",
    [
        {"rope_theta": 101.0},
        {"rms_norm_eps": 1e-2},
        {"tie_word_embeddings": True},
    ],
)
def test_comparison_notices_a_wrong_config(damage: dict[str, Any], tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model")
    expected = oracle_logits(oracle(path), tokens(37))
    (path / "config.json").write_text(json.dumps(tiny_llama_config(**damage)))
    runner = PagedRunner(load(path), num_seqs=1, max_len=40)
    found = runner.logits(chunks=[Rows(seq=0, start=0, ids=tokens(37))])
    assert (found - expected).abs().max() > 30 * TOLERANCE


@pytest.mark.parametrize(
    "name", ["input_layernorm.weight", "post_attention_layernorm.weight", "q_proj.bias", "v_proj.bias"]
)
def test_comparison_notices_a_lost_tensor(name: str, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model", attention_bias=True)
    expected = oracle_logits(oracle(path), tokens(37))
    tensors = load_file(path / "model.safetensors")
    lost = next(key for key in tensors if key.endswith(name))
    neutral = torch.zeros_like if name.endswith("bias") else torch.ones_like
    write_tensors(path, {**tensors, lost: neutral(tensors[lost])})
    runner = PagedRunner(load(path), num_seqs=1, max_len=40)
    found = runner.logits(chunks=[Rows(seq=0, start=0, ids=tokens(37))])
    assert (found - expected).abs().max() > 30 * TOLERANCE


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 16])
def test_chunked_prefill_equals_whole_prompt(chunk_size: int, checkpoint: Path, reference: Any) -> None:
    ids = tokens(37)
    runner = PagedRunner(load(checkpoint), num_seqs=1, max_len=40)
    parts = [
        runner.logits(chunks=[Rows(seq=0, start=start, ids=ids[start : start + chunk_size])])
        for start in range(0, len(ids), chunk_size)
    ]
    expected = oracle_logits(reference, ids)
    torch.testing.assert_close(torch.cat(parts), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("padding", [0, 3])
def test_mixed_batch_equals_single_sequences(padding: int, checkpoint: Path, reference: Any) -> None:
    """Three sequences verify 4, 1 and 3 rows while two others prefill a first and a later chunk."""
    lengths = (21, 9, 30, 14, 26)
    prompts = [tokens(length, seed=seed) for seed, length in enumerate(lengths)]
    runner = PagedRunner(load(checkpoint), num_seqs=5, max_len=32)
    before = (17, 8, 27, 0, 13)
    for seq, stop in enumerate(before):
        if stop:
            runner.run(chunks=[Rows(seq=seq, start=0, ids=prompts[seq][:stop])])
    rows = [Rows(seq=seq, start=before[seq], ids=prompts[seq][before[seq] :]) for seq in range(5)]
    found = runner.logits(decode=[rows[2], rows[0], rows[1]], chunks=rows[3:], padding=padding)
    assert torch.isfinite(found).all()
    expected = [oracle_logits(reference, ids)[stop:] for ids, stop in zip(prompts, before, strict=True)]
    decoded = len(rows[0].ids) + len(rows[1].ids) + len(rows[2].ids)
    grid, chunks = found[:decoded], found[decoded + padding :]
    torch.testing.assert_close(
        grid, torch.cat([expected[2], expected[0], expected[1]]), atol=TOLERANCE, rtol=TOLERANCE
    )
    torch.testing.assert_close(chunks, torch.cat(expected[3:]), atol=TOLERANCE, rtol=TOLERANCE)


def test_rejected_rows_leave_no_trace(checkpoint: Path, reference: Any) -> None:
    ids = tokens(30)
    runner = PagedRunner(load(checkpoint), num_seqs=1, max_len=32)
    runner.run(chunks=[Rows(seq=0, start=0, ids=ids[:20])])
    runner.run(decode=[Rows(seq=0, start=20, ids=[ids[20], 7, 8, 9, 10])])  # four wrong drafts
    steps = [runner.logits(decode=[Rows(seq=0, start=at, ids=ids[at : at + 2])]) for at in range(21, 29, 2)]
    expected = oracle_logits(reference, ids)[21:29]
    torch.testing.assert_close(torch.cat(steps), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_rows_outside_the_batch_parts_stay_finite(checkpoint: Path) -> None:
    """Padding rows behind the last chunk belong to nothing, yet their KV lands in the shared dummy page."""
    runner = PagedRunner(load(checkpoint), num_seqs=1, max_len=8)
    batch = runner.batch(decode=[], chunks=[Rows(seq=0, start=0, ids=[5, 6])], padding=0)
    padded = type(batch)(
        input_ids=torch.cat([batch.input_ids, torch.zeros(3, dtype=torch.int64)]),
        positions=torch.cat([batch.positions, torch.zeros(3, dtype=torch.int64)]),
        slot_mapping=torch.cat([batch.slot_mapping, torch.arange(3)]),
        decode=None,
        chunks=batch.chunks,
    )
    with torch.inference_mode():
        hidden = runner.model.forward(padded, runner.caches).hidden
        torch.testing.assert_close(hidden[:2], runner.model.forward(batch, runner.caches).hidden)
    assert torch.isfinite(hidden).all()
    assert all(
        torch.isfinite(cache.key).all() and torch.isfinite(cache.value).all() for cache in runner.caches
    )


def test_features_are_layer_outputs(checkpoint: Path, reference: Any) -> None:
    ids = tokens(19)
    runner = PagedRunner(load(checkpoint), num_seqs=1, max_len=20)
    layers = (1, -1, 0)  # in the order asked for
    output = runner.run(chunks=[Rows(seq=0, start=0, ids=ids)], feature_layers=layers)
    with torch.inference_mode():
        states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer + 1][0] for layer in layers], dim=-1)
    assert output.features is not None
    torch.testing.assert_close(output.features, expected, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(output.hidden, states[-1][0], atol=TOLERANCE, rtol=TOLERANCE)
    assert runner.run(chunks=[Rows(seq=0, start=0, ids=ids)]).features is None


@pytest.mark.parametrize("layer", [2, 3, -2])
def test_last_and_unknown_layers_are_refused(layer: int, checkpoint: Path) -> None:
    runner = PagedRunner(load(checkpoint), num_seqs=1, max_len=4)
    with pytest.raises(ModelLoadError, match=rf"\[{layer}\].*3 layers.*-1 \(embedding\) to 1"):
        runner.run(chunks=[Rows(seq=0, start=0, ids=[5])], feature_layers=(0, layer))


def test_bfloat16_agrees_where_the_choice_is_clear(checkpoint: Path, reference: Any) -> None:
    ids = tokens(37)
    runner = PagedRunner(load(checkpoint, torch.bfloat16), num_seqs=1, max_len=40, dtype=torch.bfloat16)
    found = runner.logits(chunks=[Rows(seq=0, start=0, ids=ids)])
    assert found.dtype == torch.bfloat16
    best = oracle_logits(reference, ids).topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > 0.5
    assert clear.sum() > 5
    assert torch.equal(found.argmax(-1)[clear], best.indices[clear, 0])


def test_model_describes_itself(checkpoint: Path) -> None:
    model = load_target(checkpoint, dtype=torch.float32, device=CPU, max_positions=64)
    assert (model.vocab_size, model.hidden_size, model.num_layers, model.max_positions) == (320, 96, 3, 64)
    assert [(layer.num_kv_heads, layer.head_dim) for layer in model.kv_layers] == [(2, 20)] * 3
    assert load(checkpoint).max_positions == 512
    embedded = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"][[7, 3]]
    assert torch.equal(model.embed(torch.tensor([7, 3])), embedded)


# Loading


def state(model: LlamaModel) -> dict[str, torch.Tensor]:
    return {name: slot.clone() for name, slot in model.weight_slots().items()}


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    one = state(load(write_tiny_llama(tmp_path / "one", mlp_bias=True)))
    three = state(load(write_tiny_llama(tmp_path / "three", mlp_bias=True, shards=3)))
    assert one.keys() == three.keys()
    assert all(torch.equal(one[name], three[name]) for name in one)


def test_extra_rotary_buffers_and_a_stored_tied_head_are_ignored(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(10)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write_tensors(path, tensors)
    load(path)


def change_tensors(path: Path, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(K_PROJ), rf"missing tensors: {K_PROJ}"),
        (lambda t: t.pop("lm_head.weight"), r"missing tensors: lm_head\.weight"),
        (lambda t: t.update(extra=torch.ones(2)), r"unexpected tensors: extra"),
        (
            lambda t: t.update({K_PROJ: torch.ones(41, 96)}),
            rf"model\.safetensors: tensor '{K_PROJ}' has shape \[41, 96\], .* implies \[40, 96\]",
        ),
        (lambda t: t.update({K_PROJ: torch.ones(40, 96, dtype=torch.int8)}), rf"{K_PROJ}' is torch.int8"),
    ],
)
def test_wrong_tensors_are_named(change: Any, message: str, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model")
    change_tensors(path, change)
    with pytest.raises(ModelLoadError, match=message):
        load(path)


@pytest.mark.parametrize("keep", [0, 4, 500, -1])
def test_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model", shards=2)
    file = path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors.*truncated"):
        load(path)


def test_broken_shard_index_is_named(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model", shards=2)
    index = path / "model.safetensors.index.json"
    good = index.read_text()
    (path / "model-00001-of-00002.safetensors").rename(path / "away")
    with pytest.raises(ModelLoadError, match=r"model-00001-of-00002\.safetensors: .*missing"):
        load(path)
    index.write_text(good.replace("model-00001-of-00002.safetensors", "../away"))
    with pytest.raises(ModelLoadError, match="not a plain file name"):
        load(path)
    index.write_text("{}")
    with pytest.raises(ModelLoadError, match="weight_map"):
        load(path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model", shards=2)
    files = [path / f"model-0000{shard}-of-00002.safetensors" for shard in (1, 2)]
    first, second = (load_file(file) for file in files)
    name = next(iter(first))
    save_file({**second, name: first[name]}, files[1])
    with pytest.raises(ModelLoadError, match=f"{name}' was already found"):
        load(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*supported: LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 4}, "6 attention heads are not a multiple of 4"),
        ({"head_dim": 21}, "head_dim 21 is odd"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"hidden_size": "96"}, "hidden_size must be a whole number from 1, not '96'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number"),
        ({"intermediate_size": -5}, "intermediate_size must be a whole number"),
        ({"num_key_value_heads": 2.0}, "num_key_value_heads must be a whole number"),
        ({"head_dim": True}, "head_dim must be a whole number"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised with 'fp8'"),
    ],
)
def test_unsupported_configs_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_variant(tmp_path / "model", {})
    merged = {k: v for k, v in tiny_llama_config(**config).items() if v is not None}
    (path / "config.json").write_text(json.dumps(merged))
    with pytest.raises(ModelLoadError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "cannot be read as JSON"), ("[]", "object is expected, found list")]
)
def test_broken_config_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=rf"config\.json: .*{message}"):
        load_config(tmp_path)


def test_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere is not a directory"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"config\.json does not exist"):
        load_config(tmp_path)
    path = write_tiny_llama(tmp_path / "model")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="only safetensors"):
        load(path)


def test_fingerprint_sees_config_and_weights(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "a", shards=2)
    same = fingerprint(write_tiny_llama(tmp_path / "b", shards=2))
    assert fingerprint(path) == same
    assert len(same) == 64
    other_seed = fingerprint(write_tiny_llama(tmp_path / "c", shards=2, seed=1))
    other_config = fingerprint(write_tiny_llama(tmp_path / "d", shards=2, rms_norm_eps=1e-6))
    assert len({same, other_seed, other_config}) == 3
    file = path / "model-00002-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert fingerprint(path) != same
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors: it is damaged"):
        fingerprint(path)


def test_reading_configs_needs_no_torch() -> None:
    code = "import sys, core.models.weights, core.models.builtin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
