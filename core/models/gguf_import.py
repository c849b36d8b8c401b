"""Turn a llama-family GGUF file with a GPT-2 style tokenizer into a Hugging Face directory.

Weights are dequantised to bfloat16. Written for the built-in model; anything it does not know is refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from core.errors import ModelLoadError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(gguf_file: Path, directory: Path) -> None:
    """Fill an empty directory: configs, weights, tokenizer and chat template."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = hf_tensors(reader, metadata)
        config = hf_config(metadata, tied="lm_head.weight" not in tensors)
        tokenizer = build_tokenizer(metadata)
        tokenizer_config = _tokenizer_config(metadata)
    except (ValueError, IndexError, KeyError) as error:
        raise ModelLoadError(
            f"{gguf_file}: cannot be converted ({error}); install the package again"
        ) from error
    generation_config = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation_config["eos_token_id"] = [config["eos_token_id"]]
    _write_weights(directory / "model.safetensors", tensors)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", generation_config)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    (directory / "chat_template.jinja").write_text(tokenizer_config["chat_template"], encoding="utf-8")


def hf_config(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """config.json of the GGUF's llama parameters."""
    if metadata["general.architecture"] != "llama":
        raise ModelLoadError(
            f"GGUF architecture {metadata['general.architecture']!r} is not supported (only 'llama')"
        )
    heads, hidden_size = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    # The float32 1e-05 reads as 9.999999747378752e-06: take the shortest decimal of the same float32.
    shortest = {
        name: float(str(np.float32(metadata[name])))
        for name in ("llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base")
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "vocab_size": metadata["llama.vocab_size"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": shortest["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": shortest["llama.rope.freq_base"],
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def hf_tensors(reader: GGUFReader, metadata: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All weights in bfloat16 under their Hugging Face names."""
    from gguf.quants import dequantize

    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    tensors = {}
    for tensor in reader.tensors:
        name, kind = hf_name(tensor.name)
        # F32 tensors are views of the read-only file; only those are copied here.
        values = np.require(dequantize(tensor.data, tensor.tensor_type), requirements=["C", "W"])
        weight = torch.from_numpy(values)
        if kind in heads:
            weight = half_split_rows(weight, heads[kind])
        tensors[name] = weight.to(torch.bfloat16)
    return tensors


def hf_name(name: str) -> tuple[str, str]:
    """`blk.3.attn_q.weight` -> (`model.layers.3.self_attn.q_proj.weight`, `attn_q`)."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if match:
        layer, kind = match.groups()
        if layer is None and kind in _TENSORS:
            return f"{_TENSORS[kind]}.weight", kind
        if layer is not None and kind in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[kind]}.weight", kind
    raise ModelLoadError(f"GGUF tensor {name!r} is not known")


def half_split_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of q and k: rotary pairs (2j, 2j + 1) of each head become (j, j + d/2)."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """A byte-level BPE tokenizer with the pre-tokenizer that the file names."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, pre = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if (kind, pre) != ("gpt2", "smollm"):
        raise ModelLoadError(
            f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported (gpt2, smollm)"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    # Digits come first: "a  1" is "a", two spaces, "1". The GPT-2 rule alone would give "a", " ", " 1".
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    def token(role: str) -> str:
        return metadata["tokenizer.ggml.tokens"][metadata[f"tokenizer.ggml.{role}_token_id"]]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "add_bos_token": metadata["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": metadata["tokenizer.ggml.add_space_prefix"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _write_weights(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # which hides the OSError of a full disk
        raise OSError(f"{file}: {error}") from error


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
