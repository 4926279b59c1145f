"""Tiles of keys that begin at tiles of queries of their own and go round: which they visit, and in which order they add to dq."""

from types import SimpleNamespace

import pytest

turns = pytest.importorskip("foci.backends.hopper.dq_semaphore", reason="needs a Triton with Gluon")

from foci.backends.hopper.kernel_args import Task  # noqa: E402

C = SimpleNamespace(MODE="all", ROUND=True, TILE_Q=64, TILE_KV=128)
COUNTS = [*range(1, 10), 16, 31, 64, 65]


class Tile(int):
    """A number as a kernel has it."""

    def to(self, dtype):
        return self


@pytest.fixture
def plain(monkeypatch):
    """The kernel's functions as Python runs them, on numbers."""
    plain = SimpleNamespace(where=lambda on, a, b: a if on else b, minimum=min, maximum=max, int64=int, static_range=range)
    namespace = SimpleNamespace(
        **{name: getattr(turns, name).fn for name in ("find_query_runs", "nth_tile", "dq_rank", "count_query_tiles", "tile_at")}
    )
    for name, value in (("gl", plain), ("count_query_tiles", namespace.count_query_tiles), ("tile_at", namespace.tile_at)):
        monkeypatch.setattr(turns, name, value)
    return namespace


def walk(runs):
    """(tile of queries, whether it is taken as masked) in the order in which `fused_consumer` goes through runs."""
    spans = zip(runs[1::2], runs[2::2], (True, False, True, False), strict=True)
    return [(tile, masked) for last, count, masked in spans for tile in range(last, last - count, -1)]


@pytest.mark.parametrize("overhang", [(0, 0), (5, 0), (0, 9), (63, 127)], ids=str)
@pytest.mark.parametrize("tiles", COUNTS)
def test_all_are_visited_once_and_nothing_waits_in_a_circle(tiles, overhang, plain):
    for count in COUNTS:
        q_len, kv_len = count * C.TILE_Q - overhang[0], tiles * C.TILE_KV - overhang[1]
        walks = []
        for tile in range(tiles):
            runs = plain.find_query_runs(None, None, Task(0, 0, 0, Tile(tile), tile), 0, q_len, kv_len, C)
            assert plain.count_query_tiles(runs) == count
            assert all(n >= 0 for n in runs[2::2])
            visits = walk(runs)
            walks.append([visited for visited, _ in visits])
            assert walks[-1] == [(tile * count // tiles - step) % count for step in range(count)]
            assert walks[-1] == [plain.nth_tile(None, runs, i, C) for i in range(count)]
            over = kv_len < (tile + 1) * C.TILE_KV
            assert all(masked == (over or q_len < (visited + 1) * C.TILE_Q) for visited, masked in visits)
        order = {}
        for visited in range(count):
            ranks = [plain.dq_rank(None, None, 0, tile, visited, q_len, kv_len, C) for tile in range(tiles)]
            order[visited] = sorted(range(tiles), key=lambda tile, ranks=ranks: ranks[tile])
            assert sorted(ranks) == list(range(tiles))
            assert order[visited] == sorted(range(tiles), key=lambda tile, visited=visited: (walks[tile].index(visited), tile))
        # all at once, a tile of queries a round: no slower than sums take one after the other
        at, added, rounds = [0] * tiles, [0] * count, 0
        while min(at) < count:
            ready = [
                tile for tile in range(tiles) if at[tile] < count and order[walks[tile][at[tile]]][added[walks[tile][at[tile]]]] == tile
            ]
            for tile in ready:
                added[walks[tile][at[tile]]] += 1
                at[tile] += 1
            rounds += 1
            assert ready
        assert rounds == max(count, tiles)
