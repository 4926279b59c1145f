"""What the backward kernels find done: rows' numbers in lines, turns and gaps cleared; dq of its sums; natively or in the interpreter."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from catching import DEVICE, gradients_with, launched_with, needs_gpu_or_interpreter

from foci.backends.hopper import backward_schedules
from foci.problem import Cotangents, Formula, Layout, Operands, Problem, Results
from foci.trace_functions import bind

pytestmark = needs_gpu_or_interpreter
LENGTHS, SPANS = [70, 0, 200, 1, 129], [90, 3, 200, 40, 131]


def posed(monkeypatch, dim, kv_heads, *, jagged, rows=None, dlse=False, p=0.0):
    """(problem, operands, results, cotangents) of random numbers; what is allocated afterwards is NaN, or -1."""
    heads, rows = 4, sum(SPANS) + 5 if jagged else rows
    batch = 1 if jagged else 2
    torch.manual_seed(0)
    q, out, dout = (torch.randn(batch, rows, heads, dim, device=DEVICE).half().transpose(1, 2) for _ in range(3))
    k = torch.randn(batch, rows, kv_heads, dim, device=DEVICE).half().transpose(1, 2)
    lse = torch.randn(batch, heads, rows, device=DEVICE)
    lse[0, 1, 5], out[0, 1, 5] = -math.inf, 0.0  # as the forward leaves a row that attends to nothing
    more = {}
    if jagged:
        cu = torch.tensor([0, *SPANS], device=DEVICE).cumsum(0)
        lengths = torch.tensor(LENGTHS, device=DEVICE)
        more = {"cu_q": cu, "cu_kv": cu, "q_lengths": lengths, "kv_lengths": lengths, "max_q": 200, "max_kv": 200}
    bound = bind(None, None, DEVICE)
    layout = Layout.JAGGED if jagged else Layout.DENSE
    asked = Problem(Formula(bound.variant, layout, dropout=p > 0), q.dtype, dim, dim, heads, kv_heads, 8, 256, 256, True, True, True)
    empty = torch.empty_strided

    def filled(*args, **options):
        tensor = empty(*args, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor.fill_(-1)

    monkeypatch.setattr(torch, "empty_strided", filled)
    flow = torch.randn_like(lse) if dlse else None
    operands = Operands(q, k, k, scale=0.1, dropout_p=p, seed=torch.tensor([1], device=DEVICE) if p else None, **more)
    return asked, operands, Results(out, lse), Cotangents(dout, flow)


def begun(*args, **options):
    """(out, dout, lse, gradient of lse, arguments of the kernel of all gradients)."""
    problem = posed(*args, **options)
    out, lse, dout, flow = problem[2].out, problem[2].lse, problem[3].out, problem[3].lse
    return out, dout, lse, flow, launched_with(*problem)


def expected(out, dout, lse, flow):
    delta = (out.float() * dout.float()).sum(-1) - (0 if flow is None else flow)
    # a row that attends to nothing has no delta, whatever flows into its logsumexp
    return torch.where(lse == -math.inf, math.inf, lse / math.log(2)), delta.masked_fill(lse == -math.inf, 0.0)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dlse", [False, True])
def test_packed_rows_lie_in_lines_and_gaps_and_turns_are_zero(dim, dlse, monkeypatch):
    out, dout, lse, flow, args = begun(monkeypatch, dim, 2, jagged=True, dlse=dlse)
    base2, delta = expected(out, dout, lse, flow)
    places = [name for name in args if name.startswith(("lse", "delta"))]
    lines, deltas = (args[name].base.view(4, -1) for name in places)
    start = [sum(SPANS[:n]) for n in range(len(SPANS))]
    for n, (at, length) in enumerate(zip(start, LENGTHS, strict=True)):
        to = (at // 128 + n) * 128
        tiles = -(-length // 128) * 128
        torch.testing.assert_close(lines[:, to : to + length], base2[0, :, at : at + length])
        torch.testing.assert_close(deltas[:, to : to + length], delta[0, :, at : at + length], rtol=1e-3, atol=1e-2)
        assert (lines[:, to + length : to + tiles] == math.inf).all()
        assert (deltas[:, to + length : to + tiles] == 0).all()
    assert (args["order"].turns == 0).all()
    within = torch.zeros(out.shape[2], dtype=torch.bool, device=DEVICE)
    for at, length in zip(start, LENGTHS, strict=True):
        within[at : at + length] = True
    for gradient in (args["dk"].base, args["dv"].base):
        assert (gradient[:, :, ~within] == 0).all()
        assert gradient[:, :, within].isnan().all()


@pytest.mark.parametrize("rows", [256, 300, 301])
def test_dense_rows_are_lines_themselves_where_they_may(rows, monkeypatch):
    out, dout, lse, flow, args = begun(monkeypatch, 64, 4, jagged=False, rows=rows)
    base2, delta = expected(out, dout, lse, flow)
    places = [name for name in args if name.startswith(("lse", "delta"))]
    pitch = rows if rows % 4 == 0 else -(-rows // 128) * 128
    lines, deltas = (args[name].base.view(8, pitch)[:, :rows] for name in places)
    torch.testing.assert_close(lines, base2.flatten(0, 1))
    torch.testing.assert_close(deltas, delta.flatten(0, 1), rtol=1e-3, atol=1e-2)
    assert (args["order"].turns == 0).all()


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_lines_hold_the_factor_of_what_dropout_keeps(p, monkeypatch):
    """In the weights, and so not in what is taken off beside them; nothing is kept where all is dropped."""
    out, dout, lse, flow, args = begun(monkeypatch, 64, 4, jagged=False, rows=256, p=p)
    base2, delta = expected(out, dout, lse, flow)
    lines, deltas = (args[name].base.view(8, 256) for name in args if name.startswith(("lse", "delta")))
    if p == 1:
        assert (lines == math.inf).all()
        assert (deltas == 0).all()
    else:
        torch.testing.assert_close(lines, (base2 + math.log2(1 - p)).flatten(0, 1))
        torch.testing.assert_close(deltas, (delta * (1 - p)).flatten(0, 1), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("dim", "sums", "jagged"),
    [(16, 1, False), (64, 1, False), (64, 2, True), (64, 4, False), (64, 8, True), (96, 2, False), (128, 1, True), (128, 2, False)],
)
def test_dq_is_the_sums_that_tiles_of_keys_have_added_to(dim, sums, jagged, monkeypatch):
    """Others, which nobody wrote, count for nothing."""
    problem = posed(monkeypatch, dim, 4, jagged=jagged, rows=301)
    wanted = torch.zeros(*problem[1].query.shape, device=DEVICE)
    starts = [sum(SPANS[:n]) for n in range(len(SPANS))] if jagged else [0]

    def add(args):
        order, tile_q = args["order"], args["c"].TILE_Q.value
        slots = args["dq"].base.view(sums, *wanted.shape[:2], order.slots >> 2, 2, -1)
        turns = order.turns[1:].view(slots.shape[:4])
        for b in range(wanted.shape[0]):
            for sequence, (start, length) in enumerate(zip(starts, LENGTHS if jagged else [301], strict=True)):
                first = start // tile_q + sequence if jagged else 0
                for h, tile in itertools.product(range(4), range(-(-length // tile_q))):
                    rows = slice(start + tile * tile_q, start + min((tile + 1) * tile_q, length))
                    # none, some or all
                    for n in range((h + tile) % (sums + 1)):
                        share = torch.randn(tile_q, -(-dim // 16) * 16, device=DEVICE)
                        for half, part in enumerate(share.split(64, 1) if tile_q == 64 else share.split(64)):
                            lies = part.reshape(4, 2, 8, -1, 4, 2).permute(3, 0, 2, 4, 1, 5).flatten()
                            slots[n, b, h, first + tile, half, : len(lies)] = lies
                        turns[n, b, h, first + tile] = 1
                        wanted[b, h, rows] += share[: rows.stop - rows.start, :dim]

    dq = gradients_with(add, *problem, sums=sums).query
    within = torch.zeros(dq.shape[2], dtype=torch.bool, device=DEVICE)
    for start, length in zip(starts, LENGTHS if jagged else [301], strict=True):
        within[start : start + length] = True
    assert torch.equal(dq[:, :, within], (wanted * problem[1].scale).half()[:, :, within])
    assert (dq[:, :, ~within] == 0).all()
    assert dq[:, :, within].any(-1).any(1).all()


@pytest.mark.parametrize(("dim", "keys", "shares"), [(64, 700, 11), (96, 130, 3), (128, 400, 7), (24, 64, 1)])
def test_dq_of_few_queries_is_the_shares_of_their_keys(dim, keys, shares, monkeypatch):
    """In order, and nothing of rows that are not there."""
    monkeypatch.setattr(backward_schedules, "SHORT_Q_SPLIT_KEYS", 8)
    monkeypatch.setattr(backward_schedules, "SHORT_Q_PROGRAMS", 1)
    asked, operands, results, cotangents = posed(monkeypatch, dim, 4, jagged=False, rows=101)
    asked, key = replace(asked, q_len=128, kv_len=1024), torch.zeros(2, 4, keys, dim, device=DEVICE).half()
    operands, partials = replace(operands, key=key, value=key), []

    def leave(args):
        if args["partials"] is None:
            assert args["dq"] is not None
            return
        sums, count, tiles = args["partials"]
        assert (count >> 2, tiles >> 2) == (shares, -(-keys // 64 // shares))
        partials.append(sums.view(2, 4, shares, 128, -1))
        partials[0][..., :101, :] = torch.randn(2, 4, shares, 101, partials[0].shape[-1], device=DEVICE)

    dq = gradients_with(leave, asked, operands, results, cotangents, few=True).query
    assert bool(partials) == (shares > 1)
    if partials:
        wanted = partials[0].sum(2)[..., :101, :dim] * operands.scale
        torch.testing.assert_close(dq.float(), wanted, rtol=2e-3, atol=1e-4)
