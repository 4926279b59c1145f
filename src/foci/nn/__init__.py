"""Transformer modules: torch.nn's, with one semantics, no work on padding, and what torch.nn's have not.

Example:
    >>> import torch, foci.nn
    >>> layer = foci.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> encoder = foci.nn.TransformerEncoder(layer, 2)
    >>> padding = torch.tensor([[False] * 6, [False] * 3 + [True] * 3])
    >>> encoder(torch.randn(2, 6, 32), src_key_padding_mask=padding).shape
    torch.Size([2, 6, 32])
"""

from foci.nn.attention import MultiheadAttention
from foci.nn.cache import KVCache
from foci.nn.convert import convert
from foci.nn.cuda_graphs.capture import capture, release
from foci.nn.decoder import TransformerDecoder, TransformerDecoderLayer
from foci.nn.encoder import TransformerEncoder, TransformerEncoderLayer
from foci.nn.linear import PaddedLinear
from foci.nn.packing import Packing
from foci.nn.rotary import RotaryEmbedding
from foci.nn.sliding_window import SlidingWindowAttention
from foci.nn.transformer import Transformer

__all__ = [
    "KVCache",
    "MultiheadAttention",
    "Packing",
    "PaddedLinear",
    "RotaryEmbedding",
    "SlidingWindowAttention",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "capture",
    "convert",
    "release",
]


def __dir__() -> list[str]:
    return sorted(__all__)
