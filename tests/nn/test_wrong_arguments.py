"""Arguments that torch.nn has not: a wrong one is named when a module is made, not when it first runs."""

import math

import pytest
import torch

import foci
import foci.fusion
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
    "program": (lambda: foci.fusion.fuse_exported("model"), TypeError, r"^program must be a torch.export.ExportedProgram; got str"),
}


@pytest.mark.parametrize("name", CASES)
def test_message(name):
    call, kind, message = CASES[name]
    with pytest.raises(kind, match=message):
        call()


HIDDEN = torch.tensor([[False] * 3, [False, True, True]])
X, PACKED = torch.randn(2, 3, 16), torch.randn(4, 16)
NESTED = torch.nested.nested_tensor([torch.randn(2, 16), torch.randn(3, 16)], layout=torch.jagged)


OTHERS = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(2, 16)], layout=torch.jagged)


def packing():
    return foci.nn.Packing.from_mask(HIDDEN)


def module(name):
    options = {"dropout": 0.0, "batch_first": True}
    if name == "attention":
        return foci.nn.MultiheadAttention(16, 4, **options)
    kind = "Decoder" if "decoder" in name else "Encoder"
    layer = getattr(foci.nn, f"Transformer{kind}Layer")(16, 4, 8, **options)
    return layer if "layer" in name else getattr(foci.nn, f"Transformer{kind}")(layer, 2)


CALLS = {
    "no query": ("attention", (None, X, X), {}, TypeError, "^query must be a tensor; got NoneType"),
    "no key": ("attention", (X, [1.0], X), {}, TypeError, "^key must be a tensor; got list"),
    "keys of one row": ("attention", (X, X[:1], X[:1]), {}, AssertionError, "^query and key must have one batch size; got 2 and 1"),
    "a query of one row": ("attention", (X[:1], X, X), {}, AssertionError, "^query and key must have one batch size; got 1 and 2"),
    "padding": ("attention", (X, X, X, [[True]]), {}, TypeError, "^key_padding_mask must be a tensor; got list"),
    "a mask": ("attention", (X, X, X), {"attn_mask": foci.masks.causal()}, TypeError, "^attn_mask must be a tensor; got Mask"),
    "nested rows": ("attention", (NESTED, X[:1], X[:1]), {}, AssertionError, "^query and key must have one batch size; got 2 and 1"),
    "nested, a cache": ("attention", (NESTED,) * 3, {"cache": foci.nn.KVCache(1, 8)[0]}, ValueError, "^cache .* padded batches only"),
    "packed, a cache": (
        "attention", (PACKED,) * 3, {"key_padding_mask": packing(), "need_weights": False, "cache": foci.nn.KVCache(1, 8)[0]}, ValueError,
        "^cache .* padded batches only",
    ),
    "packed, a padded batch": (
        "attention", (X,) * 3, {"key_padding_mask": packing(), "need_weights": False}, ValueError, "tokens .* got 3, 3, 3 dimensions",
    ),
    "packed, features": (
        "attention", (PACKED[:, :15],) * 3, {"key_padding_mask": packing(), "need_weights": False}, AssertionError, "dimension of 16, but got 15",
    ),
    "features of keys": ("attention", (X, X[..., :15], X[..., :15]), {}, RuntimeError, "^was expecting a key of 16 features, but got 15"),
    "nested, features": ("attention", (NESTED[..., :15],) * 3, {"need_weights": False}, AssertionError, "dimension of 16, but got 15"),
    "nested, features of a value": (
        "attention", (NESTED, NESTED, NESTED[..., :15]), {"need_weights": False}, RuntimeError, "a value of 16 features, but got 15",
    ),
    "nested, a value of other lengths": (
        "attention", (NESTED, NESTED, OTHERS), {"need_weights": False}, ValueError, r"^key and value .* lengths \[2, 3\] and \[3, 2\]",
    ),
    "nested, a dense value": ("attention", (NESTED, NESTED, X), {}, ValueError, "nested together; got a nested key and a dense value"),
    "packed source, features": ("encoder", (PACKED[:, :15],), {"src_key_padding_mask": packing()}, AssertionError, "of 16, but got 15"),
    "nested source, features": ("encoder", (NESTED[..., :15],), {}, AssertionError, "of 16, but got 15"),
    "offsets of a packing": (
        "encoder", (PACKED,), {"src_key_padding_mask": foci.nn.Packing([0, 3, 4], 3, (2, 3))}, ValueError,
        r"^offsets of a Packing of 2 sequences must be a tensor \[3\]; got list",
    ),
    "more offsets": (
        "encoder", (PACKED,), {"src_key_padding_mask": foci.nn.Packing(torch.tensor([0, 1, 3, 4]), 3, (2, 3))}, ValueError,
        r"must be a tensor \[3\]; got \[4\]",
    ),
    "packed, weights among statistics": (
        "attention", (PACKED,) * 3, {"key_padding_mask": packing(), "return_aux": foci.AuxRequest(lse=True, weights=True)}, ValueError,
        "^return_aux asks for the weights .*: need_weights=True gives them",
    ),
    "nested, statistics of another type": ("attention", (NESTED,) * 3, {"return_aux": True}, TypeError, "a foci.AuxRequest; got bool"),
    "no source": ("encoder", (None,), {}, TypeError, "^src must be a tensor; got NoneType"),
    "no source of a layer": ("encoder layer", (None,), {}, TypeError, "^src must be a tensor; got NoneType"),
    "features alone": ("encoder", (X[0, 0],), {}, AssertionError, "^src must have 2 or 3 dimensions; got 1"),
    "a batch of batches": ("encoder layer", (X[None],), {}, AssertionError, "^src must have 2 or 3 dimensions; got 4"),
    "unbatched, padding of a batch": (
        "encoder", (X[0],), {"src_key_padding_mask": HIDDEN}, AssertionError, r"to be \(3,\), but got \(2, 3\)",
    ),
    "a layer's, unbatched": (
        "encoder layer", (X[0],), {"src_key_padding_mask": HIDDEN}, AssertionError, r"to be \(3,\), but got \(2, 3\)",
    ),
    "unbatched, other length": (
        "encoder", (X[0],), {"src_key_padding_mask": HIDDEN[0, :2]}, AssertionError, r"to be \(3,\), but got \(2,\)",
    ),
    "a nested source, a cache": ("encoder", (NESTED,), {"cache": foci.nn.KVCache(2, 8)}, ValueError, "^cache .* padded batches only"),
    "a packed source, a cache": (
        "encoder layer", (PACKED,), {"src_key_padding_mask": packing(), "cache": foci.nn.KVCache(1, 8)[0]}, ValueError, "padded batches only",
    ),
    "no target": ("decoder", ([1.0], X), {}, TypeError, "^tgt must be a tensor; got list"),
    "no memory": ("decoder layer", (X, None), {}, TypeError, "^memory must be a tensor; got NoneType"),
    "memory of one row": ("decoder", (X, X[:1]), {}, AssertionError, "^query and key must have one batch size; got 2 and 1"),
    "memory of one row, padding": (
        "decoder", (X, X[:1]), {"tgt_key_padding_mask": HIDDEN}, AssertionError, "^query and key must have one batch size; got 2 and 1",
    ),
    "a nested target, a cache": ("decoder", (NESTED, X), {"cache": foci.nn.KVCache(2, 8)}, ValueError, "^cache .* padded batches only"),
    "packed ones, a cache": (
        "decoder layer", (PACKED, PACKED),
        {"tgt_key_padding_mask": packing(), "memory_key_padding_mask": packing(), "cache": foci.nn.KVCache(1, 8)[0]}, ValueError,
        "padded batches only",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_message_of_a_call(name):
    kind, arguments, options, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        module(kind)(*arguments, **options)


def test_rotary_positions_of_more_features_than_a_head_has():
    with pytest.raises(ValueError, match="^rotary turns 8 features of a head; there are 4"):
        foci.nn.MultiheadAttention(16, 4, rotary=foci.nn.RotaryEmbedding(8))
    with pytest.raises(ValueError, match="^x must have at least 8 features; got 4"):
        foci.nn.RotaryEmbedding(8)(torch.randn(1, 1, 3, 4), torch.arange(3))


@pytest.mark.parametrize("rows", [[0], torch.tensor([0.0]), torch.tensor([[0]]), torch.tensor(0), torch.tensor([True, False])], ids=str)
def test_rows_of_a_cache(rows):
    cache = foci.nn.KVCache(2, 8, page_size=2)
    module("encoder")(X, cache=cache)
    with pytest.raises(TypeError, match="^rows must be an int32 or int64 tensor of one dimension; got"):
        cache.select(rows)
    with pytest.raises(IndexError):
        cache.select(torch.tensor([2]))
    cache.select(torch.tensor([1, 1]))


def test_batches_that_a_packing_is_not_of():
    for wrong in (X.transpose(0, 1), torch.randn(4, 3, 16), PACKED):
        with pytest.raises(ValueError, match=r"^the batch to pack must be \[2, 3\] and features; got"):
            packing().pack(wrong)
    with pytest.raises(ValueError, match=r"^tokens to pad must be 4 rows, of 2 sequences; got \[5, 16\]"):
        packing().pad(torch.randn(5, 16))
    with pytest.raises(ValueError, match=r"^tokens to pad must be 6 rows, of 2 sequences; got \[4, 16\]"):
        foci.nn.Packing(torch.tensor([0, 3, 4]), 3, (2, 3)).pad(PACKED)
