"""Tiny random Hugging Face checkpoints that can fail: a missing norm weight, a wrong rotary layout, a lost
bias or two swapped dimensions all show in the logits. No network, no transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
EOS_TOKEN_ID = 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "the cat sat on the mat and the dog lay near the door while the rain fell on the roof of the house",
    "one two three four five six seven eight nine ten, counting forward and counting back again",
    "return the value of the function and print the result in the order of the list",
)


def tiny_llama_config(**overrides: Any) -> dict[str, Any]:
    """config.json of a small llama in which all dimensions differ and heads * head_dim != hidden."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "intermediate_size": 112,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,  # small, so that rotary embedding matters at test lengths
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    return {**config, **overrides}


def tiny_llama_tensors(config: dict[str, Any], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random fp32 weights under their Hugging Face names."""
    random = torch.Generator().manual_seed(seed)

    def linear(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) / math.sqrt(columns)

    def norm(size: int) -> torch.Tensor:
        return torch.rand(size, generator=random) + 0.5

    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    key_size = config["num_key_value_heads"] * head_dim
    tensors = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=random),
        "model.norm.weight": norm(hidden),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = linear(config["vocab_size"], hidden)
    attention = {
        "q_proj": (heads * head_dim, hidden),
        "k_proj": (key_size, hidden),
        "v_proj": (key_size, hidden),
        "o_proj": (hidden, heads * head_dim),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = norm(hidden)
        tensors[prefix + "post_attention_layernorm.weight"] = norm(hidden)
        for block, shapes, bias in (
            ("self_attn", attention, config["attention_bias"]),
            ("mlp", mlp, config["mlp_bias"]),
        ):
            for name, (rows, columns) in shapes.items():
                tensors[f"{prefix}{block}.{name}.weight"] = linear(rows, columns)
                if bias:
                    tensors[f"{prefix}{block}.{name}.bias"] = 0.5 * torch.randn(rows, generator=random)
    return tensors


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], *, shards: int = 1) -> None:
    """Save as model.safetensors, or as `shards` files with an index."""
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, path / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file_name))
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(path: Path) -> None:
    """Write a byte-level BPE tokenizer of VOCAB_SIZE tokens with a ChatML template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def write_tiny_llama(path: Path, *, seed: int = 0, shards: int = 1, **overrides: Any) -> Path:
    """Write a complete Hugging Face directory (config, weights, tokenizer) and return it."""
    path.mkdir(parents=True, exist_ok=True)
    config = tiny_llama_config(**overrides)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [config["eos_token_id"]]}))
    write_tensors(path, tiny_llama_tensors(config, seed=seed), shards=shards)
    write_tokenizer(path)
    return path
