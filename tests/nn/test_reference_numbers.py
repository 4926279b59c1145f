"""Fixed parameters give torch.nn's numbers, also where sizes coincide, so that no dimension is taken for another."""

# MOD-09

import pytest
import torch

import foci.nn

E, H, F = 8, 2, 12
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
SIZES = {
    "batch 3, length 5": (3, 5),
    "batch and length 4": (4, 4),
    "batch and length those of the width": (8, 8),
    "length the heads of a batch": (3, 6),
    "batch the heads": (2, 5),
    "batch of one": (1, 4),
    "length one": (4, 1),
    "all one": (1, 1),
}
EQUAL = ("batch and length 4", "batch and length those of the width", "length the heads of a batch", "length one")


def wave(*shape, by=1.0):
    """Numbers that are the same in every version and process."""
    n = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(n * by + 0.3 * by).reshape(shape).float()


def fixed(module):
    """The same module with parameters that are written down."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(0.4 * wave(*parameter.shape, by=0.7 + 0.13 * number) + (1.0 if parameter.dim() == 1 and number % 2 else 0.0))
    return module


def pair(make):
    return fixed(make(foci.nn)), fixed(make(torch.nn))


def both(make, training, *tensors, masks=None, keep=None, **options):
    """Outputs and gradients of ours and theirs agree at the places to keep."""
    results = []
    for module in pair(make):
        module.train(training)
        inputs = [t.clone().requires_grad_() for t in tensors]
        result = module(*inputs, **(masks or {}), **options)
        out, *rest = result if isinstance(result, tuple) else (result,)
        kept = out if keep is None else out[keep]
        (kept * wave(*kept.shape, by=0.9)).sum().backward()
        results.append([kept.detach(), *(t for t in rest if t is not None), *(t.grad for t in (*inputs, *module.parameters()))])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, **TOLERANCE)


def shaped(b, s, batch_first, by):
    return wave(b, s, E, by=by) if batch_first else wave(s, b, E, by=by)


def padding_of(b, s):
    return torch.arange(s) >= (torch.arange(b)[:, None] % s + 1)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["none", "padding", "floating padding", "2-D", "2-D bool", "3-D", "3-D bool and padding"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_attention(sizes, batch_first, kind, need_weights):
    b, s = SIZES[sizes]
    x, y = shaped(b, s, batch_first, 0.5), shaped(b, s, batch_first, 0.8)
    padding, later = padding_of(b, s), torch.ones(s, s).triu(1).bool()
    each = later.expand(b * H, s, s).clone()
    each[::2] = False
    masks = {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "floating padding": {"key_padding_mask": wave(b, s)},
        "2-D": {"attn_mask": wave(s, s)},
        "2-D bool": {"attn_mask": later},
        "3-D": {"attn_mask": wave(b * H, s, s)},
        "3-D bool and padding": {"attn_mask": each, "key_padding_mask": padding},
    }[kind]
    for averaged in (True, False) if need_weights else (True,):
        both(
            lambda nn: nn.MultiheadAttention(E, H, batch_first=batch_first), True, x, y, y,
            masks=masks, need_weights=need_weights, average_attn_weights=averaged,
        )  # fmt: skip


@pytest.mark.parametrize("options", [{"kdim": 4, "vdim": 6}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_attention_with_options(options, sizes):
    b, s = SIZES[sizes]
    keys, values = wave(b, s, options.get("kdim", E), by=0.6), wave(b, s, options.get("vdim", E), by=0.4)
    make = lambda nn: nn.MultiheadAttention(E, H, batch_first=True, **options)
    both(make, True, wave(b, s, E), keys, values)
    both(make, True, wave(b, s, E), keys, values, masks={"key_padding_mask": padding_of(b, s)})


@pytest.mark.parametrize("sizes", EQUAL)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(("norm_first", "activation"), [(False, "relu"), (True, "gelu")])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["none", "causal", "padding", "both"])
def test_encoder(sizes, batch_first, norm_first, activation, training, kind):
    b, s = SIZES[sizes]
    masks, keep = {}, None
    if kind in ("causal", "both"):
        masks["mask"] = torch.nn.Transformer.generate_square_subsequent_mask(s)
    if kind in ("padding", "both"):
        masks["src_key_padding_mask"] = padding_of(b, s)
        keep = ~padding_of(b, s) if batch_first else ~padding_of(b, s).t()

    def make(nn):
        layer = nn.TransformerEncoderLayer(E, H, F, 0.0, activation, batch_first=batch_first, norm_first=norm_first)
        return nn.TransformerEncoder(layer, 2, norm=torch.nn.LayerNorm(E), enable_nested_tensor=False)

    both(make, training, shaped(b, s, batch_first, 0.5), masks=masks, keep=keep)


@pytest.mark.parametrize("sizes", EQUAL)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", ["none", "causal", "padding"])
def test_decoder(sizes, batch_first, norm_first, kind):
    b, s = SIZES[sizes]
    masks, keep = {}, None
    if kind == "causal":
        masks = {"tgt_mask": torch.nn.Transformer.generate_square_subsequent_mask(s), "memory_mask": wave(s, s)}
    if kind == "padding":
        masks = {"tgt_key_padding_mask": padding_of(b, s), "memory_key_padding_mask": padding_of(b, s)}
        keep = ~padding_of(b, s) if batch_first else ~padding_of(b, s).t()

    def make(nn):
        layer = nn.TransformerDecoderLayer(E, H, F, 0.0, batch_first=batch_first, norm_first=norm_first)
        return nn.TransformerDecoder(layer, 2, norm=torch.nn.LayerNorm(E))

    both(make, True, shaped(b, s, batch_first, 0.5), shaped(b, s, batch_first, 0.8), masks=masks, keep=keep)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer(sizes, batch_first):
    b, s = SIZES[sizes]
    square = torch.nn.Transformer.generate_square_subsequent_mask(s)
    both(
        lambda nn: nn.Transformer(E, H, 1, 2, F, 0.0, batch_first=batch_first), True,
        shaped(b, s, batch_first, 0.5), shaped(b, s, batch_first, 0.8), masks={"src_mask": square, "tgt_mask": square, "memory_mask": square},
    )  # fmt: skip


def test_the_numbers_themselves():
    # attention of two tokens of width 2, one head, identity projections: written out by hand
    attention = foci.nn.MultiheadAttention(2, 1, batch_first=True)
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.eye(2).repeat(3, 1))
        attention.in_proj_bias.zero_()
        attention.out_proj.weight.copy_(torch.eye(2))
        attention.out_proj.bias.zero_()
    x = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    out, weights = attention(x, x, x)
    near = 1 / (1 + torch.tensor(-1 / 2**0.5).exp())
    far = 1 / (1 + torch.tensor(-4 / 2**0.5).exp())
    torch.testing.assert_close(weights[0], torch.stack([torch.stack([near, 1 - near]), torch.stack([1 - far, far])]), **TOLERANCE)
    expected = torch.stack([torch.stack([near, 2 * (1 - near)]), torch.stack([1 - far, 2 * far])])
    torch.testing.assert_close(out[0], expected, **TOLERANCE)
