"""Tiles that a tile of keys visits and their ranks, by which shares in dq are added in order: natively or in the interpreter."""

import pytest
import torch
from catching import DEVICE, launched_with, needs_gpu_or_interpreter

import foci
from foci.problem import Cotangents, Formula, Layout, Operands, Problem, Results
from foci.trace_functions import bind

pytestmark = needs_gpu_or_interpreter
OWNERS = (torch.arange(1000, device=DEVICE) % 7 == 0).cumsum(0) // 40
REACH = torch.tensor([40, 150, 600, 0], device=DEVICE)
CASES = {
    "window": {"mask": lambda b, h, q, k: (q >= k) & (q - k < 300)},
    "window of later keys": {"mask": lambda b, h, q, k: (k >= q + 70) & (k - q < 500), "rows": 300},
    "document": {"mask": lambda b, h, q, k: OWNERS[q] == OWNERS[k]},
    "document, causal": {"mask": lambda b, h, q, k: (OWNERS[q] == OWNERS[k]) & (q >= k), "dim": 64},
    "by head": {"mask": lambda b, h, q, k: abs(q - k) <= REACH[h], "rows": 700, "kv_heads": 4},
    "by batch entry": {"mask": lambda b, h, q, k: abs(q - k) < 100 + 200 * b},
    "stripes": {"mask": lambda b, h, q, k: (q // 64 + k // 128) % 3 != 0, "rows": 960},
    "steep": {"mask": lambda b, h, q, k: (q >= 5 * k) & (q < 5 * k + 40)},
}
KEYS = 950


def launched(mask, rows=1000, dim=128, kv_heads=2):
    """Arguments of the kernel that computes all gradients."""
    query = torch.zeros(2, 4, rows, dim, dtype=torch.float16, device=DEVICE)
    key = torch.zeros(2, kv_heads, KEYS, dim, dtype=torch.float16, device=DEVICE)
    bound = bind(None, foci.Mask(mask), DEVICE)
    operands = Operands(query, key, key, bound.captures, bound.ints, bound.floats, 0.1)
    wanted = (True, True, True, tuple(False for _ in bound.captures))
    asked = Problem(Formula(bound.variant, Layout.DENSE), torch.float16, dim, dim, 4, kv_heads, 2, rows, KEYS, *wanted)
    return launched_with(asked, operands, Results(query, query[..., 0].float()), Cotangents(query))


def walk(args, row, first, count):
    """Tiles of queries that a tile of keys visits, as `dq_semaphore.find_query_runs` says: (tile, whether it is taken as whole)."""
    table, c = args["table"], args["c"]
    counts = table.counts[row].tolist()
    if c.MODE.value == "ranges":
        low, whole_first, whole_last, last = counts
        visits = [(tile, whole_first <= tile < whole_last) for tile in range(last - 1, low - 1, -1)]
    else:
        entries, ending = table.lists[row].tolist(), int(args["order"].ranks[row, -1])
        full, part = entries[: counts[0]], entries[counts[0] : counts[0] + counts[1]]
        behind = part[len(part) - ending :]
        assert all(tile > max(full, default=-1) for tile in behind)
        visits = [(tile, False) for tile in reversed(behind)]
        visits += [(tile, True) for tile in reversed(full)]
        visits += [(tile, False) for tile in reversed(part[: len(part) - ending])]
    return visits if first + count <= KEYS else [(tile, False) for tile, _ in visits]


def bits(args, row, query_tile):
    """What a tile's words say, a row for each key."""
    table, tile_q = args["table"], args["c"].TILE_Q.value
    column = torch.arange(tile_q, device=DEVICE)
    words = table.bits[row, query_tile].int()
    return ((words[:, column % 8 // 2] >> (column // 8 * 2 + column % 2)) & 1).bool()


def whole_tile(keep, query_tile, tile, c):
    """What a mask keeps of a tile, a row for each key; nothing of what is not there."""
    tile_q, tile_kv = c.TILE_Q.value, c.TILE_KV.value
    mask = torch.zeros(tile_kv, tile_q, dtype=torch.bool, device=DEVICE)
    part = keep[query_tile * tile_q :][:tile_q, tile * tile_kv :][:, :tile_kv].T
    mask[: part.shape[0], : part.shape[1]] = part
    return mask


@pytest.mark.parametrize("name", CASES)
def test_tiles_add_in_one_order_that_ends(name):
    case = CASES[name]
    args = launched(**case)
    c, table, ranks = args["c"], args["table"], args["order"].ranks
    rows, tile_q, tile_kv = case.get("rows", 1000), c.TILE_Q.value, c.TILE_KV.value
    tasks, b_stride, h_stride = -(-KEYS // tile_kv), table.b_stride >> 2, table.h_stride >> 2
    assert c.BOUNDED.value == (name in ("window", "window of later keys", "by head", "by batch entry", "steep"))
    assert (table.bits is None) == c.BOUNDED.value
    q, k = torch.arange(rows, device=DEVICE)[:, None], torch.arange(KEYS, device=DEVICE)[None, :]
    for b in range(2):
        for h in range(4):
            keep = case["mask"](b, h, q, k).expand(rows, KEYS)
            walks, added = [], {}
            for tile in range(tasks):
                row = b * b_stride + h * h_stride + tile
                walks.append(walk(args, row, tile * tile_kv, tile_kv))
                visited = [query_tile for query_tile, _ in walks[-1]]
                if not c.BOUNDED.value:
                    for query_tile in (at for at, is_whole in walks[-1] if not is_whole):
                        assert torch.equal(bits(args, row, query_tile), whole_tile(keep, query_tile, tile, c)), name
                assert len(set(visited)) == len(visited)
                for query_tile in range(-(-rows // tile_q)):
                    part = keep[query_tile * tile_q :][:tile_q, tile * tile_kv :][:, :tile_kv]
                    assert query_tile in visited or not part.any()
                    assert (query_tile, True) not in walks[-1] or (part.all() and part.shape == (tile_q, tile_kv))
                for query_tile in visited:
                    assert int(ranks[row, query_tile]) == added.get(query_tile, 0)
                    added[query_tile] = added.get(query_tile, 0) + 1
            # two tiles of keys at a time, which wait for their turns, come to an end
            turns, waiting, running = {}, list(range(tasks)), []
            while waiting or running:
                running += [[waiting.pop(0), 0] for _ in range(min(len(waiting), 2 - len(running)))]
                moved = False
                for one in list(running):
                    tile, at = one
                    if at == len(walks[tile]):
                        running.remove(one)
                        moved = True
                    else:
                        query_tile = walks[tile][at][0]
                        row = b * b_stride + h * h_stride + tile
                        if turns.get(query_tile, 0) == int(ranks[row, query_tile]):
                            turns[query_tile] = turns.get(query_tile, 0) + 1
                            one[1] += 1
                            moved = True
                assert moved
            assert turns == added


@pytest.mark.parametrize("mask", ["window", "by head"])
def test_packed_tiles_add_in_the_order_of_their_sequence(mask):
    lengths, kv_lengths = [300, 0, 700, 1, 128], [300, 5, 520, 130, 128]
    query = torch.zeros(1, 4, sum(lengths), 128, dtype=torch.float16, device=DEVICE)
    key = torch.zeros(1, 4, sum(kv_lengths), 128, dtype=torch.float16, device=DEVICE)
    cu_q, cu_kv = (torch.tensor([0, *n], device=DEVICE).cumsum(0) for n in (lengths, kv_lengths))
    bound = bind(None, foci.Mask(CASES[mask]["mask"]), DEVICE)
    operands = Operands(
        query, key, key, bound.captures, bound.ints, bound.floats, 0.1, cu_q=cu_q, cu_kv=cu_kv, max_q=max(lengths), max_kv=max(kv_lengths)
    )
    wanted = (True, True, True, tuple(False for _ in bound.captures))
    asked = Problem(Formula(bound.variant, Layout.JAGGED), torch.float16, 128, 128, 4, 4, 8, 1024, 1024, *wanted)
    args = launched_with(asked, operands, Results(query, query[..., 0].float()), Cotangents(query))
    c, table, ranks, tasks = args["c"], args["table"], args["order"].ranks, args["spans"].tasks
    assert c.MODE.value == "ranges"
    assert c.BOUNDED.value
    for h in range(4 if mask == "by head" else 1):
        seen = {}
        for task in range(tasks.shape[0]):
            b, tile = tasks[task, :2].tolist()
            if b >= 0:
                row = h * (table.h_stride >> 2) + task
                low, behind = table.counts[row, 0].item(), table.counts[row, 3].item()
                for query_tile in range(low, behind):
                    seen.setdefault((b, query_tile), {})[tile] = ranks[row, query_tile].item()
        assert len(seen) > 5
        for rank_by_tile in seen.values():
            assert [rank_by_tile[tile] for tile in sorted(rank_by_tile)] == list(range(len(rank_by_tile)))
