"""Named masks against their plain formulas, composition, and wrong arguments."""

import itertools
import pickle

import pytest
import torch

import foci
from foci import masks
from foci.mask_examples import Sizes
from foci.mask_mods import create_block_mask, create_mask
from foci.masks import EXAMPLES
from foci.trace_functions import bind
from foci.variant import Mask, Score

SIZES = (
    Sizes(B=2, Hq=3, Sq=40, Skv=40),
    Sizes(B=3, Hq=2, Sq=29, Skv=53),
    Sizes(B=1, Hq=1, Sq=53, Skv=17),
    Sizes(B=2, Hq=2, Sq=1, Skv=80),
    Sizes(B=2, Hq=2, Sq=80, Skv=80),
)
CASES = [pytest.param(e, s, id=f"{e.name}-{s.B}x{s.Hq}x{s.Sq}x{s.Skv}") for e in EXAMPLES for s in SIZES if e.fits(s)]


def dense(mask: Mask, s: Sizes) -> torch.Tensor:
    return create_mask(mask, s.B, s.Hq, s.Sq, s.Skv, device="cpu")


# FLEX-05
@pytest.mark.parametrize("example, sizes", CASES)
def test_mask_equals_its_formula(example, sizes):
    assert torch.equal(dense(example.build(sizes), sizes), example.expected(sizes))


# FLEX-05
@pytest.mark.parametrize("example, sizes", CASES)
def test_blocks_hold_what_the_formula_says(example, sizes):
    block_q, block_kv = 16, 8
    blocks = create_block_mask(example.build(sizes), sizes.B, sizes.Hq, sizes.Sq, sizes.Skv, device="cpu", BLOCK_SIZE=(block_q, block_kv))
    padded = torch.nn.functional.pad(example.expected(sizes), (0, -sizes.Skv % block_kv, 0, -sizes.Sq % block_q))
    some = padded.unflatten(-1, (-1, block_kv)).unflatten(-3, (-1, block_q)).any(-1).any(-2)
    assert torch.equal(blocks.to_dense().bool(), some)


def test_every_named_mask_has_an_example():
    used = set(masks.__all__)
    assert {name for name in used if not any(e.name.startswith(name) for e in EXAMPLES)} == set()
    assert len({e.name for e in EXAMPLES}) == len(EXAMPLES)


def test_examples_have_something_to_hide_and_to_show():
    sizes = SIZES[0]
    for example in EXAMPLES:
        if example.fits(sizes) and example.name != "everything":
            attend = example.expected(sizes)
            assert attend.any(), example.name
            assert not attend.all(), example.name


@pytest.mark.parametrize("first, second", list(itertools.combinations(["causal", "window_both", "document", "padding", "natten_2d"], 2)))
def test_composition_is_boolean_logic(first, second):
    sizes = SIZES[0]
    by_name = {e.name: e for e in EXAMPLES}
    a, b = by_name[first].build(sizes), by_name[second].build(sizes)
    x, y = by_name[first].expected(sizes), by_name[second].expected(sizes)
    assert torch.equal(dense(a & b, sizes), x & y)
    assert torch.equal(dense(a | b, sizes), x | y)
    assert torch.equal(dense(~a, sizes), ~x)
    assert torch.equal(dense(~(a & ~b) | b, sizes), ~(x & ~y) | y)


def test_everything_is_neutral():
    mask = masks.causal()
    assert bind(None, mask & masks.everything(), torch.device("cpu")).variant == bind(None, mask, torch.device("cpu")).variant
    assert bind(None, masks.everything(), torch.device("cpu")).variant.is_plain


def test_a_mask_composes_with_a_function():
    sizes = SIZES[0]
    mask = masks.causal() & (lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0)
    even = torch.arange(sizes.Skv) % 2 == 0
    assert torch.equal(dense(mask, sizes)[0, 0], torch.ones(40, 40, dtype=torch.bool).tril() & even)


def test_truth_values_are_refused():
    with pytest.raises(TypeError, match="compose masks with &"):
        masks.causal() and masks.window(3)
    with pytest.raises(TypeError, match="compose masks with &"):
        not masks.causal()
    with pytest.raises(TypeError, match="Score cannot be composed with a Mask"):
        masks.causal() & Score(lambda score, b, h, q_idx, kv_idx: score)


# FLEX-10
@pytest.mark.parametrize("make", [lambda n: masks.window(n, 4), lambda n: masks.prefix_lm(n), lambda n: masks.global_window(n, 4, 4)])
def test_new_sizes_are_the_same_variant(make):
    cpu = torch.device("cpu")
    assert bind(None, make(100), cpu).variant == bind(None, make(57), cpu).variant


@pytest.mark.parametrize("sizes", [(20, 24), (24, 20), (40, 40), (1, 20)])
def test_natten_of_another_grid_is_refused_before_anything_runs(sizes, monkeypatch):
    query, key = torch.randn(1, 2, sizes[0], 8), torch.randn(1, 2, sizes[1], 8)
    mask = masks.natten((4, 5), 3)
    said = rf"natten\(\(4, 5\), 3\) is for 20 queries and keys; (query and key have|got) {sizes[0]} and {sizes[1]}"
    monkeypatch.setattr("foci.trace_functions.bind", lambda *args: pytest.fail("it was bound"))
    for call in (
        lambda: foci.attention(query, key, key, mask=mask),
        lambda: foci.explain(query, key, key, mask=mask),
        lambda: foci.scaled_dot_product_attention(query, key, key, attn_mask=mask),
        lambda: create_block_mask(mask, 1, 2, *sizes, device="cpu"),
        lambda: foci.attention(query, key, key, mask=pickle.loads(pickle.dumps(mask))),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_natten_may_be_composed_for_more_tokens_than_its_grid():
    image = Mask(lambda b, h, q, k: (q < 20) & (k < 20))
    text = Mask(lambda b, h, q, k: (q >= 20) | (k >= 20))
    sizes = Sizes(B=1, Hq=1, Sq=24, Skv=24)
    attend = dense((masks.natten((4, 5), 3) & image) | text, sizes)[0, 0]
    assert torch.equal(attend[:20, :20], dense(masks.natten((4, 5), 3), Sizes(B=1, Hq=1, Sq=20, Skv=20))[0, 0])
    assert attend[20:].all()
    assert attend[:, 20:].all()
    query = torch.randn(1, 1, 24, 8)
    assert foci.attention(query, query, query, mask=(masks.natten((4, 5), 3) & image) | text).isfinite().all()


def test_natten_takes_packed_sequences_of_its_grid():
    packed, cu = torch.randn(40, 2, 8), torch.tensor([0, 20, 40], dtype=torch.int32)
    out = foci.varlen_attn(packed, packed, packed, cu, cu, 20, 20, mask=masks.natten((4, 5), 3))
    dense_ones = packed.view(2, 20, 2, 8).transpose(1, 2)
    right = foci.attention(dense_ones, dense_ones, dense_ones, mask=masks.natten((4, 5), 3))
    torch.testing.assert_close(out.view(2, 20, 2, 8).transpose(1, 2), right)


def test_natten_shifts_inside_at_borders():
    attend = dense(masks.natten((4, 5), 3), Sizes(B=1, Hq=1, Sq=20, Skv=20))[0, 0]
    assert attend.sum(1).eq(9).all()  # every token has the same number of neighbors, corners included
    assert attend[0].nonzero().flatten().tolist() == [0, 1, 2, 5, 6, 7, 10, 11, 12]
    assert attend[19].nonzero().flatten().tolist() == [7, 8, 9, 12, 13, 14, 17, 18, 19]


LONG = torch.zeros(4, dtype=torch.int64)
WRONG = [
    (lambda: masks.window(-1), ValueError, "left must not be negative, got -1"),
    (lambda: masks.window(1, -2), ValueError, "right must not be negative, got -2"),
    (lambda: masks.window(1.5), TypeError, "left must be an integer, got 1.5 of type float"),
    (lambda: masks.window(True), TypeError, "left must be an integer, got True of type bool"),
    (lambda: masks.window(1, align="middle"), ValueError, "align must be 'upper_left' or 'lower_right', got 'middle'"),
    (lambda: masks.dilated_window(4, dilation=0), ValueError, "dilation must be at least 1, got 0"),
    (lambda: masks.global_window(4, 4, LONG), TypeError, "global_tokens must be bool, got torch.int64"),
    (lambda: masks.global_window(4, 4, LONG[0] > 0), ValueError, r"global_tokens must be \[S\] or \[B, S\], got shape \[\]"),
    (lambda: masks.global_window(4, 4, -1), ValueError, "global_tokens must not be negative, got -1"),
    (lambda: masks.block_diffusion(0, block=4), ValueError, "length must be at least 1, got 0"),
    (lambda: masks.block_diffusion(8, block=0), ValueError, "block must be at least 1, got 0"),
    (lambda: masks.prefix_lm("9"), TypeError, r"prefix must be an integer or an integer tensor \[B\], got str"),
    (lambda: masks.prefix_lm(-9), ValueError, "prefix must not be negative, got -9"),
    (lambda: masks.prefix_lm(LONG.float()), TypeError, "prefix must be int32 or int64, got torch.float32"),
    (lambda: masks.prefix_lm(LONG[None]), ValueError, r"prefix must be an integer or \[B\], got shape \[1, 4\]"),
    (lambda: masks.causal_or_bidirectional(3), TypeError, r"bounds must be a tensor \[B\], got int"),
    (lambda: masks.document(LONG.float()), TypeError, "ids must be int32 or int64, got torch.float32"),
    (lambda: masks.document(LONG, LONG[None, None]), ValueError, r"kv_ids must be \[Skv\] or \[B, Skv\], got shape \[1, 1, 4\]"),
    (lambda: masks.document_offsets(LONG[None]), ValueError, r"offsets must be \[documents \+ 1\], got shape \[1, 4\]"),
    (lambda: masks.document_offsets(LONG, LONG[:3]), ValueError, r"name as many documents, got shapes \[4\] and \[3\]"),
    (lambda: masks.padding(LONG > 0), TypeError, "lengths must be int32 or int64, got torch.bool"),
    (lambda: masks.padding(LONG, LONG[0]), ValueError, r"q_lengths must be \[B\], got shape \[\]"),
    (lambda: masks.key_padding(LONG[None]), TypeError, "keep must be bool, got torch.int64"),
    (lambda: masks.key_padding(LONG > 0), ValueError, r"keep must be \[B, Skv\], got shape \[4\]"),
    (lambda: masks.dense(LONG), TypeError, "mask must be bool, got torch.int64"),
    (lambda: masks.dense(torch.ones(1, 1, 1, 1, 1).bool()), ValueError, "of 1 to 4 dims, got shape"),
    (lambda: masks.dense([[True]]), TypeError, "mask must be a tensor broadcastable"),
    (lambda: masks.natten((), 3), ValueError, "extent must have 1 to 3 sizes"),
    (lambda: masks.natten(16, 3), TypeError, "extent must be integers, one for each dimension; got 16"),
    (lambda: masks.natten((8, 8), 3.0), TypeError, "kernel must be integers, one for each dimension; got 3.0"),
    (lambda: masks.natten((8, 8), 3, dilation=(1, "2")), TypeError, "dilation must be integers"),
    (lambda: masks.natten((8, 8), 4), ValueError, "kernel must be odd"),
    (lambda: masks.natten((8, 8), (3, 3, 3)), ValueError, "kernel must be one integer or 2 of them"),
    (lambda: masks.natten((8, 8), 5, dilation=2), ValueError, "at most the size of its dimension; got 5 \\* 2 over 8"),
]


@pytest.mark.parametrize("call, error, message", WRONG)
def test_wrong_arguments_say_what_is_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()
