"""EngineConfig as JSON bytes and back: how the launcher hands the effective configuration to its ranks.

The schema is the dataclasses themselves, so a field added to `core.config` needs nothing here. Decoding is strict:
an unknown value or a missing field is a bug of ours (parent and ranks run the same code) and raises.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from core.config import EngineConfig, without_secrets


def _encode_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"cannot encode {type(value).__name__} in a configuration")


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"cannot decode {kind.__name__} in a configuration")


_encoder = msgspec.json.Encoder(enc_hook=_encode_path)
_decoder = msgspec.json.Decoder(EngineConfig, dec_hook=_decode_path)


def encode_config(config: EngineConfig) -> bytes:
    """Encode a configuration as JSON."""
    return _encoder.encode(config)


def decode_config(data: bytes) -> EngineConfig:
    """Decode what `encode_config` wrote."""
    return _decoder.decode(data)


def config_sha256(config: EngineConfig) -> str:
    """Name a configuration, secrets apart: equal settings from equal sources have equal names."""
    return hashlib.sha256(encode_config(without_secrets(config))).hexdigest()
