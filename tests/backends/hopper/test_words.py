"""Masks of partial tiles as words: every bit, and which tiles rows need, natively or in the interpreter (TRITON_INTERPRET=1)."""

import os
from dataclasses import replace

import pytest
import torch

import foci
from foci import masks, weak_cache
from foci.backends.contract import Plan
from foci.problem import Formula, Layout, Operands, Outputs, Problem, Target
from foci.trace_functions import bind

forward_pass = pytest.importorskip("foci.backends.hopper.forward_pass", reason="needs a Triton with Gluon")
from foci.backends.hopper.kernel import build_kernel  # noqa: E402
from foci.backends.hopper.kernel_args import ForwardParams  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(), reason="needs a GPU or the interpreter"
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu")
OWNERS = (torch.arange(500, device=DEVICE) % 7 == 0).cumsum(0) // 9
REACH = torch.tensor([40, 150], device=DEVICE)
BLOCKS = torch.tensor([[0, 1, 2, 2], [2, 1, 0, 1], [1, 1, 1, 1], [2, 0, 0, 1]], dtype=torch.int8, device=DEVICE)[None, None]
CASES = {
    "document": {"mask": lambda b, h, q, k: OWNERS[q] == OWNERS[k]},
    "by head": {"mask": lambda b, h, q, k: abs(q - k) * (OWNERS[q] + 1) < REACH[h]},
    "blocks": {"mask": lambda b, h, q, k: q >= k, "blocks": BLOCKS},
    "jagged": {"mask": lambda b, h, q, k: (OWNERS[q] * k) % 3 == 0, "lengths": [130, 1, 0, 369]},
    "wide": {"mask": lambda b, h, q, k: OWNERS[q] == OWNERS[k], "dim": 256},
    "jagged, 128 keys": {"mask": lambda b, h, q, k: (OWNERS[q] * k) % 3 == 0, "lengths": [130, 1, 0, 369], "dim": 128},
}


def listed(mask, blocks=None, lengths=None, dim=64, dropout=0.0):
    """(table of the launch, its configuration, entry by entry what a mask keeps)."""
    query = torch.zeros(1 if lengths else 2, 2, 500, dim, dtype=torch.float16, device=DEVICE)
    bound, packed = bind(None, foci.Mask(mask), DEVICE), {}
    if lengths:
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=DEVICE)
        packed = {"cu_q": cu, "cu_kv": cu, "max_q": max(lengths), "max_kv": max(lengths)}
    operands = Operands(query, query, query, bound.captures, bound.ints, bound.floats, 0.1, dropout, None, blocks, **packed)
    if dropout:
        operands = replace(operands, seed=torch.tensor([7], device=DEVICE))
    layout, block_size = Layout.JAGGED if lengths else Layout.DENSE, (128, 128) if blocks is not None else None
    formula = Formula(bound.variant, layout, Outputs(lse=True), dropout > 0, block_size)
    grads = (False,) * len(bound.captures)
    asked = Problem(formula, torch.float16, dim, dim, 2, 2, len(lengths or (0, 0)), 500, 500, capture_grads=grads)
    return build_kernel(Plan("hopper", asked, Target("cuda", 90, frozenset({"triton", "triton-3.6"})))), operands


class Caught(Exception):
    """What the forward would be launched with."""


class Catching:
    signature = forward_pass.attention_forward.signature

    def warmup(self, *args, grid, **options):
        """Nothing is compiled, so that the launch goes through `__getitem__`."""

    def __getitem__(self, grid):
        def launch(*args, **options):
            raise Caught((*args, *next(arg for arg in args if isinstance(arg, ForwardParams))))

        return launch


def fewest(keep, tile):
    """How many tiles of keys hold all that any row attends to, each beginning where it is best to."""
    count, at = 0, 0
    while keep[:, at:].any():
        at += int(keep[:, at:].any(0).int().argmax()) + tile
        count += 1
    return count


def tile_tables_kept():
    return [table for _, table in weak_cache._derived["tile tables"]._found.values()]


def forget_bits():
    for table in tile_tables_kept():
        table.derived.clear()


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_bit_says_what_the_mask_does(name, moves, monkeypatch):
    monkeypatch.setattr(forward_pass, "attention_forward", Catching())
    monkeypatch.setattr(forward_pass, "SHORT_FORWARD_TILES", 0 if moves else 1 << 30)
    forget_bits()  # of a mask, what is found first is kept
    case = CASES[name]
    compiled, operands = listed(**case)
    with pytest.raises(Caught) as caught:
        compiled.forward(operands)
    (args,) = caught.value.args
    table = next(arg for arg in args if hasattr(arg, "bits"))
    spans = next(arg for arg in args if hasattr(arg, "q_start"))
    config = next(arg for arg in args if hasattr(arg, "KEY_STARTS"))
    assert config.KEY_STARTS.value == (moves and "blocks" not in case)
    tile_kv = config.TILE_KV.value
    tile_q, tasks, width = table.bits.shape[1], len(table.counts), table.width >> 2
    tasks = tasks // 2 if table.h_stride != 3 else tasks
    seen = 0
    for row, (full, part) in enumerate(table.counts[:, :2].tolist()):
        h, task, length = row // tasks, row % tasks, 500
        if spans.tasks is not None:
            b, task = spans.tasks[row, :2].tolist()
            if b < 0:  # a spare task
                continue
            length = int(spans.q_length[b])
        q = task * tile_q + torch.arange(tile_q, device=DEVICE)[:, None]
        every = torch.arange(length, device=DEVICE)[None, :]
        left = case["mask"](0, h, q.clamp(max=length - 1), every) & (q < length)
        fewer = fewest(left, tile_kv)
        first = [int(entry) * (1 if config.KEY_STARTS.value else tile_kv) for entry in table.lists[row, : full + part] & ((1 << 30) - 1)]
        if moves and "blocks" not in case:
            assert full + part == min(fewer, (left.any(0).nonzero() // tile_kv).unique().numel())
        if table.order is not None:
            counts = table.counts[row // tasks * tasks :][:tasks, :2].sum(1)[table.order[row // tasks * tasks :][:tasks] % tasks]
            assert torch.equal(counts, counts.sort().values)
        for at in first[:full]:
            assert "blocks" in case or left[: length - task * tile_q, at : at + tile_kv].all()
            left[:, at : at + tile_kv] = False
        needed = []
        for i in range(full, full + part):
            forced = int(table.lists[row, i]) >= 1 << 30
            k = first[i] + torch.arange(tile_kv, device=DEVICE)[None, :]
            keep = case["mask"](0, h, q.clamp(max=length - 1), k.clamp(max=length - 1)) | forced
            column = torch.arange(tile_kv, device=DEVICE)
            word = table.bits[row * width + i][:, column % 8 // 2]
            bit = (word >> (column // 8 * 2 + column % 2)) & 1
            assert torch.equal(bit.bool(), keep & (q < length) & (k < length))
            needed.append((keep & (q < length) & (k < length)).view(tile_q // 64, -1).any(1))
            left[:, first[i] : first[i] + tile_kv] = False
            seen += 1
        assert "blocks" in case or not left.any()
        for limits, tiles in zip(table.limits[row].tolist(), zip(*needed, strict=True), strict=bool(needed)):
            those = [i for i, some in enumerate(tiles) if some]
            assert limits == ([part - min(those), max(those) + 1] if those else [0, 0])
    assert seen > 3


def launched_with(**case):
    """(what the tables of a launch are, whether tiles begin anywhere)."""
    compiled, operands = listed(**case)
    with pytest.raises(Caught) as caught:
        compiled.forward(operands)
    (args,) = caught.value.args
    table, config = (next(arg for arg in args if hasattr(arg, name)) for name in ("bits", "KEY_STARTS"))
    return table, config.KEY_STARTS.value


def test_tiles_stay_for_dropout_where_they_were_moved_without(monkeypatch):
    """Random numbers come for four keys at a time from the first of a tile, and the backward's tiles are never moved."""
    monkeypatch.setattr(forward_pass, "attention_forward", Catching())
    monkeypatch.setattr(forward_pass, "SHORT_FORWARD_TILES", 0)
    case = {"mask": lambda b, h, q, k: OWNERS[q] + 1 == OWNERS[k] + 1, "dim": 128}
    tables = []
    for dropout in (0.0, 0.5, 0.0, 0.5):
        table, moves = launched_with(**case, dropout=dropout)
        assert moves == (dropout == 0)
        tables.append(table)
    assert tables[0].lists is tables[2].lists and tables[1].lists is tables[3].lists  # found once each
    assert tables[0].bits is tables[2].bits and tables[1].bits is tables[3].bits


class Failing:
    def warmup(self, *args, grid, **options):
        """Nothing is compiled, so that the launch goes through `__getitem__`."""

    def __getitem__(self, grid):
        raise RuntimeError("no room")


def test_words_of_a_launch_that_failed_are_not_kept(monkeypatch):
    monkeypatch.setattr(forward_pass, "attention_forward", Catching())
    case = {"mask": lambda b, h, q, k: OWNERS[q] + 2 == OWNERS[k] + 2, "dim": 128}
    launched_with(**case)
    forget_bits()  # lists stay, bits are found anew
    with monkeypatch.context() as failing, pytest.raises(RuntimeError, match="no room"):
        failing.setattr(forward_pass, "pack_masks", Failing())
        listed(**case)[0].forward(listed(**case)[1])
    assert not any(table.derived for table in tile_tables_kept())
    table, _ = launched_with(**case)
    assert table.bits.any() and sum(len(kept.derived) for kept in tile_tables_kept()) == 1


def test_too_many_words_are_left_to_the_mask_itself(monkeypatch):
    monkeypatch.setattr(forward_pass, "attention_forward", Catching())
    monkeypatch.setattr(forward_pass, "MAX_MASK_BYTES", 1000)
    compiled, operands = listed(**CASES["document"])
    with pytest.raises(Caught) as caught:
        compiled.forward(operands)
    assert next(arg for arg in caught.value.args[0] if hasattr(arg, "bits")).bits is None


def test_masks_of_one_run_of_keys_have_no_words(monkeypatch):
    monkeypatch.setattr(forward_pass, "attention_forward", Catching())
    compiled, operands = listed(masks.window(100))
    with pytest.raises(Caught) as caught:
        compiled.forward(operands)
    assert next(arg for arg in caught.value.args[0] if hasattr(arg, "bits")).bits is None
