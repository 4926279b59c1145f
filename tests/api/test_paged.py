"""Keys and values in pages against the same keys and values in one piece."""

# FLEX-14

import functools
import os

import pytest
import torch

import foci
from compiled import several
from foci import masks, scores

B, HQ, HKV, D, DV, PAGE = 3, 4, 2, 16, 12, 8
LENGTHS = (37, 0, 16)
TABLES = {  # entries behind a row's last page mean nothing
    8: ((4, 0, 9, 2, 11), (7, 7, 7, 7, 7), (1, 10, -5, 99, 3)),
    12: ((4, 0, 9, 11), (7, 7, 7, 7), (1, 10, -5, 99)),
    32: ((4, 11), (7, 7), (1, -5)),
}
PLACES = [("reference", "cpu"), ("blocked", "cpu"), ("cpu", "cpu")]
if os.environ.get("TRITON_INTERPRET") == "1":
    PLACES.append(("triton", "cpu"))
PLACES += [pytest.param(backend, "cuda", marks=pytest.mark.gpu) for backend in ("triton", "blocked")]


def inputs(length, page=PAGE, dtype=torch.float32, device="cpu"):
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    query, pools = draw(B, HQ, length, D), [draw(12, HKV, page, width) for width in (D, DV)]
    for pool in pools:
        pool[[5, 6, 8]] = torch.nan  # pages of other rows
        pool[11, :, 37 % page :] = torch.nan  # places behind the end of row 0
    tensors = (t.to(device, dtype) for t in (query, *pools))
    return *tensors, torch.tensor(TABLES[page], device=device), torch.tensor(LENGTHS, device=device)


def one_row(query, key, value, table, lengths, b, **options):
    """Row b as a dense call."""
    count, page = int(lengths[b]), key.shape[2]
    dense = [p[table[b, : -(-count // page)]].transpose(0, 1).flatten(1, 2)[None, :, :count] for p in (key, value)]
    return foci.attention(query[b : b + 1], *dense, **options)


VARIANTS = {
    "plain": {},
    "decoding": {"mask": masks.causal_lower_right()},
    "window": {"mask": masks.causal_lower_right() & foci.Mask(lambda b, h, q, kv: kv >= foci.kv_len() - 9)},
    "score": {"score": scores.softcap(3.0), "mask": masks.causal_lower_right()},
}


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize(("length", "page"), [(1, 8), (5, 12), (1, 32), (16, 32), (20, 32), (40, 8), (40, 32), (260, 32)])
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_each_row_in_one_piece(backend, device, length, page, name):
    arguments = inputs(length, page, device=device)
    # Triton reads pages where they lie, but for the longest queries; it adds up their columns from gathered ones
    asked = foci.AuxRequest(lse=True, row_max=True, column_sums=backend != "triton")
    with foci.use(backend), foci.observe() as log:
        out, aux = foci.paged_attention(*arguments, **VARIANTS[name], return_aux=asked)
    assert [call.backend for call in log.calls] == [backend]
    assert out.shape == (B, HQ, length, DV)
    for b in range(B):
        with foci.use("reference"):
            wanted, other = one_row(*arguments, b, **VARIANTS[name], return_aux=asked)
        torch.testing.assert_close(out[b : b + 1], wanted)
        torch.testing.assert_close(aux.lse[b : b + 1], other.lse)
        torch.testing.assert_close(aux.row_max[b : b + 1], other.row_max)
        if asked.column_sums:
            assert aux.column_sums.shape[2] == arguments[3].shape[1] * page
            torch.testing.assert_close(aux.column_sums[b : b + 1, :, : LENGTHS[b]], other.column_sums)
            assert not aux.column_sums[b, :, LENGTHS[b] :].any()


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_gradients_of_query_captures_and_sink(backend, device):
    query, key, value, table, lengths = inputs(4, device=device)
    scale, sink = torch.linspace(0.5, 2.0, HQ, device=device), torch.zeros(HQ, device=device)
    leaves = [t.clone().requires_grad_() for t in (query, scale, sink)]

    def score(s, b, h, q, kv):
        return s * leaves[1][h]

    with foci.use(backend):
        out = foci.paged_attention(leaves[0], key, value, table, lengths, score=score, sink=leaves[2])
    gradients = torch.autograd.grad(out.sin().sum(), leaves)
    with foci.use("reference"):
        dense = torch.cat([one_row(leaves[0], key, value, table, lengths, b, score=score, sink=leaves[2]) for b in range(B)])
    for a, b in zip(gradients, torch.autograd.grad(dense.sin().sum(), leaves)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_bound_of_lengths_limits_what_is_read():
    arguments = inputs(1)
    out, aux = foci.paged_attention(*arguments, max_kv=39, return_aux=foci.AuxRequest(column_sums=True))
    torch.testing.assert_close(out, foci.paged_attention(*arguments))
    assert aux.column_sums.shape[2] == 39


def test_dropout_is_that_of_the_row():
    arguments = inputs(5)
    torch.manual_seed(3)
    out = foci.paged_attention(*arguments, dropout_p=0.4)
    torch.manual_seed(3)
    with foci.use("reference"):
        torch.testing.assert_close(out, foci.paged_attention(*arguments, dropout_p=0.4))


@pytest.mark.parametrize("dynamic", [False, True])
def test_under_torch_compile(dynamic):
    def decode(query, key, value, table, lengths):
        return foci.paged_attention(query, key, value, table, lengths, mask=masks.causal_lower_right())

    compiled = torch.compile(decode, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in several(1, 3, 5):
        arguments = inputs(length)
        torch.testing.assert_close(compiled(*arguments), decode(*arguments))


def test_passes_opcheck():
    from foci.operator.op_schema import flatten
    from foci.prepare import Extras, prepare
    from foci.problem import Outputs

    query, key, value, table, lengths = inputs(2)
    extras = Extras(Outputs(lse=True, column_sums=True), kv_lengths=lengths, page_table=table, max_kv=40, exact_lengths=False)
    formula, operands = prepare((query.requires_grad_(), key, value), None, masks.causal_lower_right().function, extras)
    torch.library.opcheck(torch.ops.foci.attention.default, flatten(formula, operands, None))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"page_table": torch.zeros(3, 5)}, TypeError, "page_table must be int32 or int64"),
        ({"page_table": torch.zeros(2, 5, dtype=torch.int64)}, ValueError, "page_table must be"),
        ({"kv_lengths": torch.zeros(4, dtype=torch.int64)}, ValueError, "kv_lengths must be"),
        ({"key": torch.zeros(12, HKV, PAGE)}, ValueError, "key must have 4 dimensions"),
        ({"value": torch.zeros(11, HKV, PAGE, DV)}, ValueError, "one number of pages"),
        ({"value": torch.zeros(12, HKV, PAGE + 1, DV)}, ValueError, "one length"),
        ({"key": torch.zeros(12, HKV, PAGE, D, requires_grad=True)}, ValueError, "key requires grad"),
        ({"max_kv": 41}, ValueError, "max_kv must be an integer from 0 to 40"),
        ({"max_kv": 7.5}, ValueError, "max_kv must be an integer from 0 to 40"),
        ({"max_kv": 3}, ValueError, "kv_lengths must be from 0 to max_kv, 3"),
        ({"page_table": torch.full((3, 5), 12)}, ValueError, "page_table must hold numbers of the pool's 12 pages; got 12 for row 0"),
        ({"mask": torch.ones(1, 8, dtype=torch.bool)}, TypeError, "mask must be"),
        ({"return_aux": foci.AuxRequest(weights=True)}, ValueError, "column_sums"),
    ],
)
def test_bad_arguments_are_named(changes, error, words):
    arguments = dict(zip(("query", "key", "value", "page_table", "kv_lengths"), inputs(1)))
    with pytest.raises(error, match=words):
        foci.paged_attention(**(arguments | changes))


# JAG-09
def test_aten_declines():
    with foci.use("aten"), pytest.raises(foci.NoViableBackend, match="dense layout"):
        foci.paged_attention(*inputs(1))
