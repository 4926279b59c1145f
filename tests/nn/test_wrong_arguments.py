"""Arguments that torch.nn has not: a wrong one is named when a module is made, not when it first runs."""

import math

import pytest
import torch

import foci
import foci.graph
import foci.nn


def attention(**options):
    return lambda: foci.nn.MultiheadAttention(16, 4, **options)


CASES = {
    "heads": (attention(num_kv_heads="two"), TypeError, r"^num_kv_heads must be an integer or None; got str"),
    "half a head": (attention(num_kv_heads=2.0), TypeError, r"^num_kv_heads must be an integer or None; got float"),
    "rotary": (attention(rotary=3), TypeError, r"^rotary must be a foci.nn.RotaryEmbedding or None; got int"),
    "mask": (attention(mask="causal"), TypeError, r"^mask must be a foci.Mask, a function .* or a module that returns one; got str"),
    "a tensor as mask": (attention(mask=torch.ones(4, 4)), TypeError, r"^mask must be a foci.Mask, .*; got Tensor"),
    "a score as mask": (attention(mask=foci.scores.softcap(3.0)), TypeError, r"^mask must be a foci.Mask, .*; got Score"),
    "score": (attention(score=3), TypeError, r"^score must be a foci.Score, a function .* or a module that returns one; got int"),
    "a mask as score": (attention(score=foci.masks.causal()), TypeError, r"^score must be a foci.Score, .*; got Mask"),
    "a layer's": (lambda: foci.nn.TransformerEncoderLayer(16, 4, rotary="yes"), TypeError, r"^rotary must be"),
    "a decoder layer's": (lambda: foci.nn.TransformerDecoderLayer(16, 4, score="yes"), TypeError, r"^score must be"),
    "features": (lambda: foci.nn.RotaryEmbedding("8"), TypeError, r"^dim must be an integer; got str"),
    "base": (lambda: foci.nn.RotaryEmbedding(8, base=math.nan), ValueError, r"^base must be a positive and finite number; got nan"),
    "base of text": (
        lambda: foci.nn.RotaryEmbedding(8, base="fast"),
        ValueError,
        r"^base must be a positive and finite number; got 'fast'",
    ),
    "interleaved": (lambda: foci.nn.RotaryEmbedding(8, interleaved="yes"), TypeError, r"^interleaved must be True or False; got str"),
    "layers": (lambda: foci.nn.KVCache("two", 8), TypeError, r"^num_layers must be an integer; got str"),
    "pages": (lambda: foci.nn.KVCache(2, 8, page_size=2.5), TypeError, r"^page_size must be an integer; got float"),
    "convert": (lambda: foci.nn.convert("model"), TypeError, r"^model must be a torch.nn.Module; got str"),
    "padding": (lambda: foci.nn.Packing.from_mask([True]), TypeError, r"^padding must be a tensor; got list"),
    "masks": (
        lambda: foci.nn.TransformerEncoder(foci.nn.TransformerEncoderLayer(16, 4), 2, masks=3),
        TypeError,
        r"^masks must be a sequence, one for each of 2 layers; got int",
    ),
    "program": (lambda: foci.graph.fuse_exported("model"), TypeError, r"^program must be a torch.export.ExportedProgram; got str"),
}


@pytest.mark.parametrize("name", CASES)
def test_message(name):
    call, kind, message = CASES[name]
    with pytest.raises(kind, match=message):
        call()
