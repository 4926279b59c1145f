"""Classes of blocks by intervals, and BlockMask against torch's own."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_flex

import foci
from compiled import several
from foci.block_mask import BlockMask, block_classes
from foci.blocks import EMPTY, FULL, PARTIAL, Extent, classify, combine, from_lists, resize, to_lists, transpose_lists
from foci.mask_examples import Sizes
from foci.masks import EXAMPLES
from foci.normalize import mask_parts
from foci.trace_functions import bind
from foci.variant import kv_len, q_len

CPU = torch.device("cpu")
LISTS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class ByHead:
    """A mask_mod that is an object, with a window for each head."""

    def __init__(self, widths):
        self.widths = widths

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= self.widths[h])


def window(b, h, q_idx, kv_idx, size):
    return (q_idx - kv_idx).abs() <= size


DOCUMENT = torch.randint(0, 5, (400,), generator=generator()).sort().values
SCATTERED = torch.randint(0, 3, (400,), generator=generator(1))
LENGTHS = torch.tensor([37, 300])
RANDOM = torch.rand(400, 400, generator=generator(2)) < 0.002
BLOCKS = torch.rand(2, 3, 13, 13, generator=generator(3)) < 0.3
WIDTHS = torch.tensor([5, 64, 200])
TOPK = torch.stack([torch.randperm(7, generator=generator(4))[:2] for _ in range(7)])
MASKS = {
    "noop": torch_flex.noop_mask,
    "causal": lambda b, h, q, kv: q >= kv,
    "inverse causal": lambda b, h, q, kv: q <= kv,
    "window": functools.partial(window, size=50),
    "causal window": lambda b, h, q, kv: (q >= kv) & (q - kv < 70),
    "prefix": lambda b, h, q, kv: (kv < 90) | (q >= kv),
    "document": lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv],
    "causal document": lambda b, h, q, kv: (DOCUMENT[q] == DOCUMENT[kv]) & (q >= kv),
    "scattered ids": lambda b, h, q, kv: SCATTERED[q] == SCATTERED[kv],
    "padding per batch": lambda b, h, q, kv: kv < LENGTHS[b],
    "prefix per batch": lambda b, h, q, kv: (q >= kv) | (kv < LENGTHS[b]),
    "window per head": ByHead(WIDTHS),
    "one head only": lambda b, h, q, kv: (h == 1) & (q >= kv),
    "batch and head": lambda b, h, q, kv: (kv < LENGTHS[b]) & (q - kv <= WIDTHS[h]),
    "dilated": lambda b, h, q, kv: (q - kv) % 3 == 0,
    "strided blocks": lambda b, h, q, kv: (kv // 32) % 4 == 1,
    "random": lambda b, h, q, kv: RANDOM[q, kv],
    "random blocks": lambda b, h, q, kv: BLOCKS[b, h, q // 32, kv // 32],
    "top blocks": lambda b, h, q, kv: (TOPK[q // 64] == kv // 64).any(-1),
    "hash": lambda b, h, q, kv: (q * 31 + kv * 17) % 97 < 2,
    "nothing": lambda b, h, q, kv: q < 0,
    "float": lambda b, h, q, kv: torch.sin(q * 0.05) * 100 >= kv,
    "and_masks": torch_flex.and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv]),
    "or_masks": torch_flex.or_masks(lambda b, h, q, kv: q == kv, lambda b, h, q, kv: kv < 20),
}
SHAPES = [((256, 256), 64), ((300, 200), (32, 64)), ((129, 385), 128), ((40, 400), (16, 128)), ((400, 7), 128)]


def same(ours, theirs):
    for name in LISTS:
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype == b.dtype == torch.int32
            assert torch.equal(a, b), name
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert tuple(ours.shape) == tuple(theirs.shape)
    assert ours.seq_lengths == theirs.seq_lengths


# FLEX-01, FLEX-06
@pytest.mark.parametrize("lengths, block", SHAPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_block_mask_is_that_of_torch(name, lengths, block):
    mask = MASKS[name]
    args = (mask, 2, 3, *lengths)
    ours = foci.create_block_mask(*args, device="cpu", BLOCK_SIZE=block)
    theirs = torch_flex.create_block_mask(*args, device="cpu", BLOCK_SIZE=block)
    same(ours, theirs)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert ours.sparsity() == pytest.approx(theirs.sparsity(), abs=1e-3)
    assert ours.numel() == theirs.numel()
    assert torch.equal(foci.create_mask(*args, device="cpu"), torch_flex.create_mask(*args, device="cpu"))


@pytest.mark.parametrize("name", ["causal", "document", "batch and head", "random"])
def test_together_instead_of_apart(name):
    args = (MASKS[name], 2, 3, 300, 300)
    ours = foci.create_block_mask(*args, device="cpu", BLOCK_SIZE=64, separate_full_blocks=False)
    theirs = foci.create_block_mask(*args, device="cpu", BLOCK_SIZE=64)
    assert ours.full_kv_num_blocks is None
    assert torch.equal(ours.to_dense(), theirs.to_dense())


# FLEX-06
def test_none_is_one():
    ours = foci.create_block_mask(MASKS["causal"], None, None, 200, 200, device="cpu")
    same(ours, torch_flex.create_block_mask(MASKS["causal"], None, None, 200, 200, device="cpu"))


# FLEX-01
def test_combiners_are_those_of_torch():
    parts = (MASKS["causal"], MASKS["window"], MASKS["document"])
    for ours, theirs in ((foci.and_masks, torch_flex.and_masks), (foci.or_masks, torch_flex.or_masks)):
        for n in range(4):
            args = (None, None, 150, 150)
            assert torch.equal(
                foci.create_mask(ours(*parts[:n]), *args, device="cpu"), torch_flex.create_mask(theirs(*parts[:n]), *args, device="cpu")
            )
        with pytest.raises(RuntimeError, match="number 1 is of type int"):
            ours(parts[0], 3)


# FLEX-01
def test_create_mask_of_a_score_function():
    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score * 2, -float("inf"))

    args = (score_mod, 2, 3, 40, 50)
    assert torch.equal(foci.create_mask(*args, device="cpu"), torch_flex.create_mask(*args, device="cpu"))


# FLEX-06
def test_slicing_is_that_of_torch():
    args = (MASKS["batch and head"], 2, 3, 300, 300)
    ours, theirs = (f(*args, device="cpu", BLOCK_SIZE=64) for f in (foci.create_block_mask, torch_flex.create_block_mask))
    for index in [
        1,
        -1,
        (0, 2),
        (slice(None), slice(1, 3)),
        (0, slice(None), slice(2, 4)),
        (slice(None), slice(None), torch.tensor([3, 1])),
        (0, 0, -1),
        (0, 0, 2),
        (0, 0, slice(3, None)),
        (0, 0, slice(0, None, 2)),
        (0, 0, slice(1, 1)),
        (slice(None), slice(None), slice(-2, 99)),
    ]:
        same(ours[index], theirs[index])
        if ours[index].numel():
            assert ours[index].sparsity() == pytest.approx(theirs[index].sparsity(), abs=1e-3)
    with pytest.raises(RuntimeError, match="has no mask_mod"):
        ours[0].mask_mod(0, 0, 0, 0)
    with pytest.raises(IndexError, match="index 2 is out of range for a dimension of size 2"):
        ours[2]
    with pytest.raises(IndexError, match="at most 3 indices"):
        ours[0, 0, 0, 0]


# FLEX-06
def test_a_slice_of_block_rows_is_attended_as_in_torch():
    query, key, value = torch.randn(3, 1, 2, 300, 16, dtype=torch.float64).unbind()
    scores = (query @ key.mT / 4).masked_fill(torch.ones(300, 300, dtype=torch.bool).triu(1), -torch.inf)
    wanted = scores.softmax(-1) @ value
    block_mask = foci.create_block_mask(MASKS["causal"], None, None, 300, 300, device="cpu", BLOCK_SIZE=64)
    for first, last in ((0, 2), (2, 4), (4, 5)):
        rows = block_mask[:, :, first:last]
        start = first * 64
        rows.mask_mod = lambda b, h, q, kv, start=start: q + start >= kv
        queries = query[:, :, start : last * 64]
        if torch.__version__ < "2.14":  # the lengths stay those of the whole
            rows = rows.adjust(queries.shape[2], 300)
        out = foci.flex_attention(queries, key, value, block_mask=rows)
        torch.testing.assert_close(out, wanted[:, :, start : last * 64])


# FLEX-06
@pytest.mark.parametrize("name", ["causal", "window", "batch and head", "scattered ids"])
def test_adjusting_equals_creating_anew(name):
    long = foci.create_block_mask(MASKS[name], 2, 3, 384, 384, device="cpu", BLOCK_SIZE=64)
    for lengths in ((384, 384), (128, 256), (320, 64)):
        same(long.adjust(*lengths), foci.create_block_mask(MASKS[name], 2, 3, *lengths, device="cpu", BLOCK_SIZE=64))
    with pytest.raises(ValueError, match="cannot grow"):
        long.adjust(400, 384)


# FLEX-06
def test_picture_and_text():
    ours = foci.create_block_mask(MASKS["causal"], 2, 1, 512, 512, device="cpu", BLOCK_SIZE=64)
    theirs = torch_flex.create_block_mask(MASKS["causal"], 2, 1, 512, 512, device="cpu", BLOCK_SIZE=64)
    for grid, limit in itertools.product([20, (3, 8), 5], [1, 4]):
        drawn, wanted = (m.to_string(grid, limit=limit).splitlines() for m in (ours, theirs))
        assert [line for line in drawn if set(line) & set("█░")] == [line for line in wanted if set(line) & set("█░")]
    assert ours.to_string(-1).splitlines()[1] == "██" + " " * 14
    assert "sparsity=43.75%" in repr(ours)
    assert "sparsity=43.75%" in str(ours)


# FLEX-06
def test_moving_and_tuples():
    ours = foci.create_block_mask(MASKS["causal"], 2, 1, 512, 512, device="cpu", BLOCK_SIZE=64)
    assert ours.to("meta").kv_indices.device.type == "meta"
    same(ours.to("cpu"), ours)
    flat, nested = ours.as_tuple(), ours.as_tuple(flatten=False)
    assert flat[:2] == nested[0] == (512, 512)
    assert flat[-3:] == (64, 64, ours.mask_mod)
    assert nested[-2:] == ((64, 64), ours.mask_mod)
    assert all(a is b for a, b in zip(flat[2:10], nested[1:9]))


# FLEX-01
@pytest.mark.parametrize("apart", [True, False], ids=["full blocks apart", "one list"])
def test_torch_block_masks_are_read_as_they_are(apart):
    calls = []

    def mask_mod(b, h, q_idx, kv_idx):
        calls.append(1)
        return q_idx >= kv_idx

    q = torch.randn(2, 3, 300, 8)
    theirs = torch_flex.create_block_mask(mask_mod, 2, 3, 300, 300, device="cpu")
    if not apart:
        lists = theirs.kv_num_blocks, theirs.kv_indices
        theirs = torch_flex.BlockMask.from_kv_blocks(*lists, mask_mod=mask_mod, seq_lengths=(300, 300))
    calls.clear()
    function, classes, block = mask_parts(theirs, q, q, name="block_mask")
    assert not calls
    assert (function, block) == (mask_mod, (128, 128))
    ours = BlockMask((300, 300), *(getattr(theirs, name) for name in LISTS), (128, 128), mask_mod)
    same(ours, theirs)
    assert torch.equal(classes, block_classes(ours))


def test_what_looks_like_a_block_mask_is_refused():
    theirs = torch_flex.create_block_mask(MASKS["causal"], None, None, 128, 128, device="cpu")
    q = torch.randn(1, 1, 128, 8)
    alike = SimpleNamespace(**{name: getattr(theirs, name) for name in LISTS}, BLOCK_SIZE=(128, 128), mask_mod=MASKS["causal"])
    with pytest.raises(TypeError, match="block_mask must be a BlockMask of foci or of torch, got SimpleNamespace"):
        foci.flex_attention(q, q, q, block_mask=alike)
    theirs.kv_num_blocks = theirs.kv_num_blocks[..., None]
    with pytest.raises(ValueError, match=r"kv_indices must be \[..., rows, columns\]"):
        foci.flex_attention(q, q, q, block_mask=theirs)


# FLEX-01
def test_from_kv_blocks_is_that_of_torch():
    theirs = torch_flex.create_block_mask(MASKS["random blocks"], 2, 3, 256, 256, device="cpu", BLOCK_SIZE=32)
    lists = (theirs.kv_num_blocks, theirs.kv_indices, theirs.full_kv_num_blocks, theirs.full_kv_indices)
    same(BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=32), torch_flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=32))
    assert BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=32, compute_q_blocks=False).q_indices is None
    dense = BlockMask.from_kv_blocks(*lists[:2], BLOCK_SIZE=(32, 16))
    assert dense.shape == (2, 3, 256, 128)
    assert bool(dense.mask_mod(*torch.zeros(4)))


def test_block_classes_hold_both_lists():
    mask = foci.create_block_mask(MASKS["batch and head"], 2, 3, 300, 300, device="cpu", BLOCK_SIZE=32)
    dense = foci.create_mask(MASKS["batch and head"], 2, 3, 300, 300, device="cpu")
    assert torch.equal(block_classes(mask), by_counting(dense, (32, 32), overhang_is_full=False))


def by_counting(dense, block, *, overhang_is_full):
    """Classes from the dense mask."""
    q, kv = dense.shape[-2:]

    def tiles(x):
        padded = torch.nn.functional.pad(x, (0, -kv % block[1], 0, -q % block[0]))
        return padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0])).transpose(-2, -3).flatten(-2).sum(-1)

    attended, present = tiles(dense), tiles(torch.ones(q, kv, dtype=torch.int64)) if overhang_is_full else block[0] * block[1]
    return torch.where(attended == 0, EMPTY, torch.where(attended == present, FULL, PARTIAL)).to(torch.int8)


def classes_of(mask, sizes, block, **options):
    bound = bind(None, mask, CPU)
    return classify(bound.variant.mask, sizes=sizes, block=block, captures=bound.captures, ints=bound.ints, floats=bound.floats, **options)


# FLEX-05
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
@pytest.mark.parametrize("block", [(8, 8), (16, 5), (40, 80)], ids=str)
def test_classes_of_examples(example, block):
    sizes = next(s for s in (Sizes(B=2, Hq=2, Sq=37, Skv=53), Sizes(B=2, Hq=2, Sq=80, Skv=80)) if example.fits(s))
    mask, extent = example.build(sizes), Extent(sizes.B, sizes.Hq, sizes.Sq, sizes.Skv)
    truth = by_counting(example.expected(sizes), block, overhang_is_full=True)
    exact = classes_of(mask, extent, block, exact=True)
    assert torch.equal(exact.expand_as(truth), truth)
    quick = classes_of(mask, extent, block)
    assert bool(((quick == truth) | (quick == PARTIAL)).all())  # intervals may not decide, but never decide wrongly


DECIDED = ["causal", "inverse_causal", "causal_lower_right", "window_left", "window_both", "window_open", "window_lower_right"]
DECIDED += ["prefix_lm", "prefix_lm_batch", "causal_or_bidirectional", "padding", "padding_both", "everything"]


# FLEX-05
@pytest.mark.parametrize("name", DECIDED)
def test_intervals_alone_decide_simple_masks(name):
    example = next(e for e in EXAMPLES if e.name == name)
    sizes = Sizes(B=2, Hq=2, Sq=75, Skv=90)
    truth = by_counting(example.expected(sizes), (16, 16), overhang_is_full=True)
    quick = classes_of(example.build(sizes), Extent(sizes.B, sizes.Hq, sizes.Sq, sizes.Skv), (16, 16))
    assert torch.equal(quick.expand_as(truth), truth)


# FLEX-05
def test_intervals_decide_all_but_the_borders_of_documents():
    ids = torch.arange(1 << 14) // 1000
    quick = classes_of(foci.masks.document(ids) & foci.masks.causal(), Extent(1, 1, 1 << 14, 1 << 14), (128, 128))
    exact = classes_of(foci.masks.document(ids) & foci.masks.causal(), Extent(1, 1, 1 << 14, 1 << 14), (128, 128), exact=True)
    assert int((quick != exact).sum()) <= 2 * 17
    assert int((exact != EMPTY).sum()) < 128 * 12


def test_dims_appear_only_where_the_mask_depends_on_them():
    sizes = Extent(3, 4, 64, 64)
    assert classes_of(MASKS["causal"], sizes, (32, 32)).shape == (1, 1, 2, 2)
    assert classes_of(lambda b, h, q, kv: kv < torch.tensor([1, 40, 64])[b], sizes, (32, 32)).shape == (3, 1, 2, 2)
    assert classes_of(lambda b, h, q, kv: q - kv < h, sizes, (32, 32)).shape == (1, 4, 2, 2)


def test_lengths_of_each_sequence_bound_its_blocks():
    q_lengths, kv_lengths = torch.tensor([70, 0, 128, 5]), torch.tensor([100, 60, 0, 5])
    extent = Extent(4, 1, 128, 100, q_lengths, kv_lengths)
    actual = classes_of(lambda b, h, q, kv: q + (kv_len() - q_len()) >= kv, extent, (32, 32), exact=True)
    for b, (n, m) in enumerate(zip(q_lengths.tolist(), kv_lengths.tolist())):
        inside = (torch.arange(128)[:, None] < n) & (torch.arange(100) < m)
        attend = (torch.arange(128)[:, None] + (m - n) >= torch.arange(100)) & inside
        some = by_counting(attend, (32, 32), overhang_is_full=False) != EMPTY
        full = (by_counting(inside & ~attend, (32, 32), overhang_is_full=False) == EMPTY) & some
        assert torch.equal(actual[b, 0], some.to(torch.int8) + full.to(torch.int8))


def test_no_blocks():
    assert classes_of(MASKS["causal"], Extent(2, 3, 0, 64), (32, 32)).shape == (1, 1, 0, 2)
    assert classes_of(MASKS["causal"], Extent(2, 3, 64, 0), (32, 32), exact=True).shape == (1, 1, 2, 0)
    assert foci.create_block_mask(MASKS["causal"], 2, 3, 0, 64, device="cpu").kv_indices.shape == (2, 3, 0, 1)


def test_wide_reductions_stay_within_bounds():
    table = torch.arange(5000).remainder(7)
    mask = classes_of(lambda b, h, q, kv: (table == q % 9).any(-1), Extent(1, 1, 64, 64), (64, 64), exact=True)
    assert mask.tolist() == [[[[PARTIAL]]]]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_resizing_never_lies(data):
    lengths = data.draw(st.tuples(st.integers(1, 70), st.integers(1, 70)))
    blocks = [data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40))) for _ in range(2)]
    seed = data.draw(st.integers(0, 10**6))
    coarse = torch.rand(2, 1, 5, 5, generator=generator(seed)) < 0.4
    dense = coarse.repeat_interleave(14, -2).repeat_interleave(14, -1)[..., : lengths[0], : lengths[1]]
    actual = resize(by_counting(dense, blocks[0], overhang_is_full=True), *blocks, lengths)
    truth = by_counting(dense, blocks[1], overhang_is_full=True)
    assert actual.shape == truth.shape
    assert bool(((actual == truth) | (actual == PARTIAL)).all())
    if all(new % old == 0 for old, new in zip(*blocks)):
        assert torch.equal(actual, truth)


def test_combining_is_intersection():
    a, b = (torch.rand(64, 64, generator=generator(n)).ge(0.8 * n / 5).repeat_interleave(2, 0) for n in (1, 2))
    classes = combine(*(by_counting(m, (4, 4), overhang_is_full=True) for m in (a, b)))
    truth = by_counting(a & b, (4, 4), overhang_is_full=True)
    assert bool(((classes == truth) | (classes == PARTIAL)).all())
    assert torch.equal(classes == FULL, truth == FULL)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_lists_and_back(rows, columns, seed):
    present = torch.rand(2, rows, columns, generator=generator(seed)) < 0.4
    counts, indices = to_lists(present)
    assert torch.equal(from_lists(counts, indices, columns), present)
    assert torch.equal(indices.sort(-1).values.long(), torch.arange(columns).expand(2, rows, columns))
    turned = transpose_lists(counts, indices)
    assert torch.equal(from_lists(*turned, rows), present.mT)


WRONG = [
    (lambda: foci.create_block_mask(lambda q, kv: q >= kv, 1, 1, 8, 8, "cpu"), TypeError, r"must be a function \(b, h, q_idx, kv_idx\)"),
    (lambda: foci.create_block_mask(3, 1, 1, 8, 8, "cpu"), TypeError, "got 3"),
    (lambda: foci.create_block_mask(MASKS["causal"], 1, 1, 8.5, 8, "cpu"), TypeError, "Q_LEN must be an integer, got 8.5 of type float"),
    (lambda: foci.create_mask(MASKS["causal"], True, 1, 8, 8, "cpu"), TypeError, "B must be an integer, got True of type bool"),
    (lambda: foci.create_block_mask(MASKS["causal"], 1, 1, -8, 8, "cpu"), ValueError, "Q_LEN must not be negative, got -8"),
    (lambda: foci.create_block_mask(MASKS["causal"], 1, 1, 8, 8, "cpu", BLOCK_SIZE=0), ValueError, "BLOCK_SIZE must be at least 1, got 0"),
    (lambda: foci.create_block_mask(lambda b, h, q, kv: q - kv, 1, 1, 8, 8, "cpu"), TypeError, "must return a boolean"),
    (lambda: foci.create_mask(lambda a: a, 1, 1, 8, 8, "cpu"), TypeError, r"or \(score, b, h, q_idx, kv_idx\)"),
    (lambda: BlockMask.from_kv_blocks(torch.zeros(3), torch.zeros(3)), ValueError, r"got \[3\] and \[3\]"),
    (
        lambda: BlockMask.from_kv_blocks(torch.zeros(2), torch.zeros(2, 2), torch.zeros(2)),
        ValueError,
        "full_kv_num_blocks and full_kv_indices",
    ),
    (lambda: classes_of(MASKS["causal"], Extent(1, 1, 8, 8), (0, 4)), ValueError, r"block must be two sizes of at least 1, got \(0, 4\)"),
]


@pytest.mark.parametrize("call, error, message", WRONG)
def test_wrong_arguments_say_what_is_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_block_masks_and_compiled_functions():
    query = torch.randn(1, 2, 40, 8, generator=generator())
    causal_blocks = foci.create_block_mask(MASKS["causal"], None, None, 40, 40, device="cpu", BLOCK_SIZE=16)

    def outside(query, block_mask):
        return foci.flex_attention(query * 1, query, query, block_mask=block_mask)

    def inside(query):
        block_mask = foci.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
        return outside(query, block_mask)

    wanted = outside(query, causal_blocks)
    compiled = torch.compile(outside, backend="eager", fullgraph=True)
    for length in several(40, 48, 70):
        longer = torch.randn(1, 2, length, 8, generator=generator())
        of_length = foci.create_block_mask(MASKS["causal"], None, None, length, length, device="cpu", BLOCK_SIZE=16)
        torch.testing.assert_close(compiled(longer, of_length), outside(longer, of_length))
    torch.testing.assert_close(torch.compile(inside, backend="eager")(query), wanted)
    same(torch.compile(foci.create_block_mask, backend="eager")(MASKS["causal"], None, None, 40, 40, "cpu", 16), causal_blocks)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="make block masks outside"):
        torch.compile(inside, backend="eager", fullgraph=True)(query)
