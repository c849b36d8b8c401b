"""RMSNorm, rotary embedding (half-split layout) and the gated MLP's activation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from core.errors import ModelLoadError


class RMSNorm(nn.Module):
    """y = w * cast(x32 * rsqrt(mean(x32^2) + eps)): normalise in fp32, cast, then scale, as HF."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rope_theta(config: dict[str, Any]) -> float:
    """Read theta from either spelling of a Hugging Face config; an unknown scaling is refused."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ModelLoadError(
            f"rope_type {kind!r} in config.json is not supported (only 'default'); "
            "use a model without RoPE scaling"
        )
    return float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))


class RotaryTable(nn.Module):
    """cos and sin of all positions below `max_positions`, computed in fp32 and kept in the model's dtype."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, head_dim: int, max_positions: int, theta: float, dtype: torch.dtype) -> None:
        super().__init__()
        inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse)
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos().to(dtype), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin().to(dtype), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] -> cos, sin, each [T, 1, head_dim]. Later positions (padding) are clamped."""
        positions = positions.clamp(max=self.cos.shape[0] - 1)
        return self.cos.index_select(0, positions)[:, None], self.sin.index_select(0, positions)[:, None]


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (j, j + d/2) of x [T, heads, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2I] with the gate first -> silu(gate) * up [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
