"""is_causal: a hint that needs its mask, found by encoders and decoders, which changes no number."""

# MOD-03

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import foci.nn

E, H, B, S = 16, 4, 3, 5
SQUARE = torch.nn.Transformer.generate_square_subsequent_mask


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def causal_masks(n, dtype=torch.float32):
    floating = SQUARE(n, dtype=dtype)
    return {"floating": floating, "bool": floating == -torch.inf}


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_the_hint_alone_is_refused_by_attention(batch_first, need_weights, training, batched):
    attention = foci.nn.MultiheadAttention(E, H, batch_first=batch_first).train(training)
    x = torch.randn(B, S, E) if batched else torch.randn(S, E)
    with pytest.raises(RuntimeError, match="attn_mask"):
        attention(x, x, x, is_causal=True, need_weights=need_weights)
    padding = torch.zeros((B if batch_first else S, S if batch_first else B) if batched else (S,), dtype=torch.bool)
    with pytest.raises(RuntimeError, match="attn_mask"):
        attention(x, x, x, key_padding_mask=padding, is_causal=True, need_weights=need_weights)


def test_the_hint_alone_is_refused_with_nested_inputs():
    attention = foci.nn.MultiheadAttention(E, H, batch_first=True)
    x = torch.nested.nested_tensor([torch.randn(n, E) for n in (3, 5)], layout=torch.jagged)
    with pytest.raises(RuntimeError, match="attn_mask"):
        attention(x, x, x, is_causal=True, need_weights=False)


@pytest.mark.parametrize("module", ["encoder layer", "decoder layer", "decoder layer, memory"])
def test_the_hint_alone_is_refused_by_layers(module):
    x, memory = torch.randn(B, S, E), torch.randn(B, 7, E)
    with pytest.raises(RuntimeError, match="attn_mask"):
        if module == "encoder layer":
            foci.nn.TransformerEncoderLayer(E, H, 32, batch_first=True)(x, is_causal=True)
        elif module == "decoder layer":
            foci.nn.TransformerDecoderLayer(E, H, 32, batch_first=True)(x, memory, tgt_is_causal=True)
        else:
            foci.nn.TransformerDecoderLayer(E, H, 32, batch_first=True)(x, memory, memory_is_causal=True)


@pytest.mark.parametrize("module", ["encoder", "decoder", "transformer source", "transformer target"])
def test_the_hint_alone_is_refused_by_stacks(module):
    x = torch.randn(B, S, E)
    encoder = foci.nn.TransformerEncoder(foci.nn.TransformerEncoderLayer(E, H, 32, batch_first=True), 2)
    decoder = foci.nn.TransformerDecoder(foci.nn.TransformerDecoderLayer(E, H, 32, batch_first=True), 2)
    transformer = foci.nn.Transformer(E, H, 1, 1, 32, batch_first=True)
    calls = {
        "encoder": lambda: encoder(x, is_causal=True),
        "decoder": lambda: decoder(x, x, tgt_is_causal=True),
        "transformer source": lambda: transformer(x, x, src_is_causal=True),
        "transformer target": lambda: transformer(x, x, tgt_is_causal=True),
    }
    with pytest.raises(RuntimeError, match="attn_mask"):
        calls[module]()


@pytest.mark.parametrize("kind", ["floating", "bool"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_the_hint_changes_nothing_in_attention(kind, need_weights, padded, batched):
    attention = foci.nn.MultiheadAttention(E, H, batch_first=True)
    theirs = torch.nn.MultiheadAttention(E, H, batch_first=True)
    theirs.load_state_dict(attention.state_dict())
    mask = causal_masks(S)[kind]
    x = torch.randn(B, S, E) if batched else torch.randn(S, E)
    padding = None
    if padded:
        padding = torch.arange(S) >= torch.tensor([[S], [3], [1]]) if batched else torch.arange(S) >= 3
    options = {"attn_mask": mask, "key_padding_mask": padding, "need_weights": need_weights}
    outputs = [attention(x, x, x, is_causal=hint, **options) for hint in (False, True)]
    close(outputs[0], outputs[1])
    with sdpa_kernel(SDPBackend.MATH):
        expected = theirs(x, x, x, is_causal=False, **options)
    close(outputs[1], expected)


def seen_by_layers(stack, name):
    """What each layer is called with under that name."""
    seen = []
    for layer in stack.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs.get(name)), with_kwargs=True)
    return seen


@pytest.mark.parametrize(
    ("mask", "hint", "expected"),
    [
        (SQUARE(S), None, True),
        (SQUARE(S), True, True),
        (SQUARE(S), False, False),
        (None, None, False),
        (SQUARE(S).t(), None, False),
        (torch.zeros(S, S), None, False),
        (SQUARE(S).masked_fill(torch.eye(S, dtype=torch.bool), -1.0), None, False),
    ],
)
@pytest.mark.parametrize("batch_first", [False, True])
def test_stacks_find_causal_masks_and_pass_the_hint_on(mask, hint, expected, batch_first):
    x = torch.randn(B, S, E) if batch_first else torch.randn(S, B, E)
    for ours in (False, True):
        nn = foci.nn if ours else torch.nn
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 32, batch_first=batch_first), 2, enable_nested_tensor=False)
        seen = seen_by_layers(encoder, "is_causal")
        encoder(x, mask=mask, is_causal=hint)
        assert seen == [expected, expected], nn
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 32, batch_first=batch_first), 2)
        seen = seen_by_layers(decoder, "tgt_is_causal")
        decoder(x, x, tgt_mask=mask, tgt_is_causal=hint)
        assert seen == [expected, expected], nn


@pytest.mark.parametrize("kind", ["floating", "bool"])
@pytest.mark.parametrize("hint", [None, False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_gives_the_numbers_of_the_mask(kind, hint, padded, norm_first, training):
    ours = foci.nn.TransformerEncoder(foci.nn.TransformerEncoderLayer(E, H, 32, 0.0, batch_first=True, norm_first=norm_first), 2)
    theirs = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(E, H, 32, 0.0, batch_first=True, norm_first=norm_first), 2, enable_nested_tensor=False
    )
    theirs.load_state_dict(ours.state_dict())
    ours.train(training)
    padding = torch.arange(S) >= torch.tensor([[S], [3], [1]]) if padded else torch.zeros(B, S, dtype=torch.bool)
    x, y = (t.requires_grad_() for t in torch.randn(1, B, S, E).repeat(2, 1, 1, 1).unbind())
    mask = causal_masks(S)[kind]
    actual = ours(x, mask=mask, src_key_padding_mask=padding if padded else None, is_causal=hint)
    expected = theirs(y, mask=mask, src_key_padding_mask=padding if padded else None, is_causal=False)
    close(actual[~padding], expected[~padding])
    weights = torch.randn_like(actual[~padding])
    (actual[~padding] * weights).sum().backward()
    (expected[~padding] * weights).sum().backward()
    close(x.grad, y.grad)
    for ours_p, theirs_p in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(ours_p.grad, theirs_p.grad)


@pytest.mark.parametrize("hints", list(itertools.product([None, True, False], [True, False])))
def test_a_decoder_gives_the_numbers_of_its_masks(hints):
    tgt_hint, memory_hint = hints
    ours = foci.nn.TransformerDecoder(foci.nn.TransformerDecoderLayer(E, H, 32, 0.0, batch_first=True), 2)
    theirs = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(E, H, 32, 0.0, batch_first=True), 2)
    theirs.load_state_dict(ours.state_dict())
    x, memory = torch.randn(B, S, E), torch.randn(B, S, E)
    masks = {"tgt_mask": SQUARE(S), "memory_mask": SQUARE(S)}
    actual = ours(x, memory, **masks, tgt_is_causal=tgt_hint, memory_is_causal=memory_hint)
    close(actual, theirs(x, memory, **masks, tgt_is_causal=False))


@pytest.mark.parametrize("hint", [None, True, False])
def test_a_transformer_gives_the_numbers_of_its_masks(hint):
    ours = foci.nn.Transformer(E, H, 1, 1, 32, 0.0, batch_first=True)
    theirs = torch.nn.Transformer(E, H, 1, 1, 32, 0.0, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    x, y = torch.randn(B, S, E), torch.randn(B, 7, E)
    masks = {"src_mask": SQUARE(S), "tgt_mask": SQUARE(7)}
    actual = ours(x, y, **masks, src_is_causal=hint, tgt_is_causal=hint)
    close(actual, theirs(x, y, **masks, src_is_causal=False, tgt_is_causal=False))


@pytest.mark.parametrize("hint", [None, True])
def test_the_hint_with_nested_inputs(hint):
    ours = foci.nn.TransformerEncoder(foci.nn.TransformerEncoderLayer(E, H, 32, 0.0, batch_first=True), 2)
    rows = [torch.randn(n, E) for n in (3, 5, 1)]
    actual = ours(torch.nested.nested_tensor(rows, layout=torch.jagged), mask=SQUARE(5), is_causal=hint)
    for row, one in zip(rows, actual.unbind(), strict=True):
        close(one, ours(row[None], mask=SQUARE(len(row)))[0])
