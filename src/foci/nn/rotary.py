"""Rotary positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["RotaryEmbedding"]


class RotaryEmbedding(torch.nn.Module):
    """Turns pairs of query and key features by an angle that grows with the position (Su et al., 2021, equation 34).

    Has no parameters and adds nothing to a state dict. Angles are float32 (float64 for float64 inputs).

    Args:
        dim: how many leading features of a head are turned; even. The others pass unchanged.
        base: ratio of the slowest to the fastest wavelength.
        interleaved: pairs are neighbours (2i, 2i + 1), as in the paper; else halves (i, i + dim / 2), as in GPT-NeoX and Llama.

    Raises:
        TypeError: for a dim that is no integer, or an interleaved that is neither True nor False.
        ValueError: for an odd or non-positive dim, or a base that is not positive and finite.

    Example:
        >>> import torch, foci.nn
        >>> rotary = foci.nn.RotaryEmbedding(16)
        >>> rotary(torch.randn(2, 4, 10, 16), torch.arange(10)).shape
        torch.Size([2, 4, 10, 16])
    """

    def __init__(self, dim: int, *, base: float = 10000.0, interleaved: bool = False) -> None:
        super().__init__()
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"dim must be an integer; got {type(dim).__name__}")
        if dim <= 0 or dim % 2:
            raise ValueError(f"dim must be positive and even; got {dim}")
        if not isinstance(base, (int, float)) or not 0 < base < math.inf:
            raise ValueError(f"base must be a positive and finite number; got {base!r}")
        if not isinstance(interleaved, bool):
            raise TypeError(f"interleaved must be True or False; got {type(interleaved).__name__}")
        self.dim = dim
        self.base = base
        self.interleaved = interleaved

    def extra_repr(self) -> str:
        """The arguments."""
        return f"{self.dim}, base={self.base}, interleaved={self.interleaved}"

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turned features.

        Args:
            x: [B, H, S, D], D at least `dim`.
            positions: integers [S], or [B, S].

        Returns:
            [B, H, S, D] in the dtype of x.

        Raises:
            ValueError: for fewer features than `dim`.
        """
        if x.shape[-1] < self.dim:
            raise ValueError(f"x must have at least {self.dim} features; got {x.shape[-1]}")
        acc = torch.float64 if x.dtype == torch.float64 else torch.float32
        steps = torch.arange(0, self.dim, 2, device=x.device, dtype=acc)
        angles = positions.to(acc).unsqueeze(-1) * self.base ** (-steps / self.dim)
        if positions.dim() == 2:
            angles = angles.unsqueeze(1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        turned, rest = x[..., : self.dim], x[..., self.dim :]
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        else:
            first, second = turned.chunk(2, dim=-1)
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)
