"""A decoder-only language model out of an encoder's layers and a causal mask, from `torch.nn` or from `foci.nn`."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from data import BEGIN, VOCABULARY
from torch import Tensor

import foci.nn

__all__ = ["LanguageModel", "Sizes", "generate"]


@dataclass(frozen=True)
class Sizes:
    """Of a model and of its batches."""

    width: int = 128
    heads: int = 4
    layers: int = 4
    max_length: int = 320
    tokens: int = 2048


class LanguageModel(torch.nn.Module):
    """Logits of the next byte.

    Args:
        nn: `torch.nn` or `foci.nn`; the parameters have the same names and shapes.
        sizes: of the model.
    """

    def __init__(self, nn: ModuleType, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, sizes.width)
        self.places = torch.nn.Embedding(sizes.max_length, sizes.width)
        layer = nn.TransformerEncoderLayer(
            sizes.width, sizes.heads, 4 * sizes.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, sizes.layers, torch.nn.LayerNorm(sizes.width), enable_nested_tensor=nn is foci.nn)
        self.head = torch.nn.Linear(sizes.width, VOCABULARY)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(sizes.max_length)
        self.register_buffer("causal", mask, persistent=False)
        for parameter in self.encoder.parameters():
            if parameter.dim() > 1:
                torch.nn.init.xavier_uniform_(parameter)

    def forward(self, ids: Tensor, places: Tensor, padding: Tensor | None = None) -> Tensor:
        """[B, S, vocabulary] of ids and places [B, S]; nested ones of nested ones."""
        x = self.tokens(ids) + self.places(places)
        longest = self.causal.shape[0] if ids.is_nested else ids.shape[1]
        x = self.encoder(x, mask=self.causal[:longest, :longest], src_key_padding_mask=padding, is_causal=True)
        return self.head(x)

    def continued(self, ids: Tensor, cache: foci.nn.KVCache) -> Tensor:
        """[B, n, vocabulary] of n more ids of each row, behind those in the cache."""
        places = torch.arange(cache.length, cache.length + ids.shape[1], device=ids.device)
        return self.head(self.encoder(self.tokens(ids) + self.places(places), cache=cache))


@torch.no_grad()
def generate(model: LanguageModel, prompt: bytes, count: int, *, temperature: float = 0.7, seed: int = 0) -> bytes:
    """The prompt and `count` more bytes, each computed from itself and the cache; no temperature takes the likeliest."""
    generator = torch.Generator().manual_seed(seed)
    cache = foci.nn.KVCache(len(model.encoder.layers), model.places.num_embeddings)
    written, ids = list(prompt), torch.tensor([[BEGIN, *prompt]])
    for _ in range(count):
        logits = model.continued(ids, cache)[0, -1, :BEGIN]
        if temperature:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        else:
            token = int(logits.argmax())
        written.append(token)
        ids = torch.tensor([[token]])
    return bytes(written)
