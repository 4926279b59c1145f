"""The instructions by which a warp follows the largest scores of its rows, carried out in Python: 32 lanes, four to a row, two rows each."""

import re

import numpy as np
import pytest

following = pytest.importorskip("foci.backends.hopper.online_softmax", reason="needs a Triton with Gluon")

LANES = np.arange(32)
FACTOR = np.float32(0.18)


class Warp:
    """Registers of 32 lanes as their bits. Names of registers, places of operands and constants are read as instructions write them."""

    def __init__(self, operands):
        self.values = {f"${i}": bits for i, bits in enumerate(operands)}
        self.passed_over = False

    def bits(self, name):
        if name in self.values:
            return self.values[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(32, number & 0xFFFFFFFF, np.uint32)

    def read(self, name, kind):
        return self.bits(name).view({"f32": np.float32, "s32": np.int32, "b32": np.uint32}[kind])

    def step(self, name, args):
        operation, *parts = name.split(".")
        kind = next((part for part in reversed(parts) if part in ("f32", "s32", "b32")), None)
        if operation == "vote":
            result = np.full(32, self.values[args[1]].any())
        elif operation == "shfl":
            result = self.bits(args[1])[LANES ^ int(args[2])]
        elif operation == "selp":
            result = np.where(self.values[args[3]], self.bits(args[1]), self.bits(args[2]))
        else:
            with np.errstate(all="ignore"):
                result = self.compute(operation, parts, [self.read(arg, kind) for arg in args[1:3]], args, kind)
        self.values[args[0]] = result if result.dtype == bool else result.view(np.uint32)

    def compute(self, operation, parts, values, args, kind):
        if operation == "setp":
            result = {"ge": np.greater_equal, "gt": np.greater, "eq": np.equal}[parts[0]](*values)
            return result | self.values[args[3]] if "or" in parts else result
        if operation == "fma":
            return (np.float64(values[0]) * np.float64(values[1]) + np.float64(self.read(args[3], kind))).astype(np.float32)
        one = {
            "mov": lambda x: x.copy(), "neg": np.negative, "abs": np.abs, "rcp": np.reciprocal, "ex2": np.exp2,
        }  # fmt: skip
        if operation in one:
            return one[operation](values[0])
        two = {"max": np.fmax if kind == "f32" else np.maximum, "mul": np.multiply, "and": np.bitwise_and, "add": np.add}
        return two[operation](*values)

    def run(self, text):
        text = re.sub(r"^{ (\.reg[^;]*; )*|done: }$", "", text)
        for line in filter(None, map(str.strip, text.split(";"))):
            if line.startswith(".reg"):
                continue
            if line.startswith("@"):
                if not self.values[line[2 : line.index(" ")]].any():
                    self.passed_over = True
                    return
                continue
            name, rest = line.split(maxsplit=1)
            self.step(name, [arg.strip() for arg in rest.split(",")])


def bits_of(numbers):
    return np.broadcast_to(np.asarray(numbers, np.float32), 32).copy().view(np.uint32)


def floats(bits):
    return bits.view(np.float32)


def held(tile, n):
    """The n numbers of each lane of a tile [16, columns]: two of one of its rows, two of the other, then of the next eight columns."""
    return [bits_of(tile[LANES // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (LANES % 4) + i % 2]) for i in range(n)]


def folded(tiles, *, exact=False, in_place=True):
    """(number, sum of weights by totals, by sums) of each row after its tiles [16, 128], and how many tiles were passed over."""
    sums = 32 if in_place else 0
    text = following._softmax_text(32, 2, sums, None if exact else following.SLACK.value)
    kept = [[bits_of(number)] * 2 for number in (-np.inf, 0.0, 0.0, -0.0)]  # the bits of -0 are the least integer
    totals, result, passed = [bits_of(0.0)] * 4, [bits_of(0.0)] * 32, 0
    for tile in tiles:
        x = held(tile, 64)
        halves = [x[8 * j + 4 * half + i] for half in (0, 1) for j in range(8) for i in range(4)]
        rows = [numbers[i // 2 % 2] for numbers in kept for i in range(32)] + [totals[i % 4] for i in range(32)] + [bits_of(FACTOR)] * 32
        warp = Warp([*result[:sums], *[bits_of(np.nan)] * 32, *result[:sums], *halves, *rows])
        warp.run(text)
        passed += warp.passed_over
        left = [warp.values[f"${sums + i}"] for i in range(16)]
        kept, totals = [[left[i], left[i + 2]] for i in (0, 1, 4, 5)], left[8:12]
        if in_place:
            result = [warp.values[f"${i}"] for i in range(32)]
        else:
            result = [bits_of(floats(one) * floats(left[12 + i // 2 % 2 * 2])) for i, one in enumerate(result)]
        for i, one in enumerate(x):
            row = i // 2 % 2
            weight = np.exp2(floats(one) * floats(kept[1][row]) - floats(kept[2][row]))
            totals[2 * row + i % 2] = bits_of(floats(totals[2 * row + i % 2]) + weight)
            result[i % 32] = bits_of(floats(result[i % 32]) + weight)
    number = np.concatenate([floats(kept[0][row])[::4] for row in (0, 1)])
    by_totals = np.concatenate([sum(map(floats, totals[2 * row : 2 * row + 2])).reshape(8, 4).sum(1) for row in (0, 1)])
    by_sums = np.concatenate([sum(floats(one) for i, one in enumerate(result) if i // 2 % 2 == row).reshape(8, 4).sum(1) for row in (0, 1)])
    return number, by_totals, by_sums, passed


def drawn(kind):
    """Eight tiles [16, 128] of scores."""
    tiles = np.random.default_rng(0).standard_normal((8, 16, 128)).astype(np.float32) * 10
    rising = np.linspace(0, 600, 8, dtype=np.float32)[:, None, None]
    return {
        "plain": tiles,
        "below 0": -np.abs(tiles) - 300,
        "rising": tiles + rising,
        "rising from below 0": tiles + rising - 500,
        "falling": tiles - rising,
        "one row rises": tiles + rising * (np.arange(16) == 5)[:, None],
        "some masked": np.where(np.arange(128) % 3 == 0, tiles, -np.inf),
        "rows masked at first": np.where((np.arange(8) > 2)[:, None, None] | (np.arange(16) % 2 == 0)[:, None], tiles, -np.inf),
        "0 and -0": np.where(np.arange(128) % 2 == 0, 0.0, -0.0) * np.ones_like(tiles),
    }[kind].astype(np.float32)


KINDS = ["plain", "below 0", "rising", "rising from below 0", "falling", "one row rises", "some masked", "rows masked at first", "0 and -0"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_sums_refer_to_the_number_that_is_kept(kind, exact, in_place):
    tiles = drawn(kind)
    number, by_totals, by_sums, passed = folded(tiles, exact=exact, in_place=in_place)
    scores = tiles.transpose(1, 0, 2).reshape(16, -1).astype(np.float64)
    wanted = np.log2(np.exp2((scores - scores.max(1, keepdims=True)) * FACTOR).sum(1)) + scores.max(1) * FACTOR
    for total in (by_totals, by_sums):
        np.testing.assert_allclose(np.log2(total) + number * np.float64(FACTOR), wanted, rtol=1e-6, atol=2e-5)
    if exact:
        np.testing.assert_array_equal(number, scores.max(1).astype(np.float32))
    else:
        assert ((scores.max(1) - number) * FACTOR <= 8.001).all()
        assert passed == {"plain": 7, "falling": passed, "some masked": 7, "0 and -0": 7}.get(kind, passed)


def test_a_row_without_keys_has_no_number_and_no_weights():
    number, by_totals, by_sums, passed = folded(np.full((3, 16, 128), -np.inf, np.float32))
    assert (number == -np.inf).all()
    assert (by_totals == 0).all()
    assert (by_sums == 0).all()
    assert passed == 0


def test_a_row_is_raised_or_not_whatever_the_other_rows_are():
    tiles = drawn("plain") + np.linspace(0, 60, 8, dtype=np.float32)[:, None, None]
    alone = folded(tiles)
    among = tiles.copy()
    among[:, 5] += np.linspace(0, 3000, 8, dtype=np.float32)[:, None]
    other_rows = np.arange(16) != 5
    for one, other in zip(alone[:3], folded(among)[:3], strict=True):
        np.testing.assert_array_equal(one[other_rows], other[other_rows])
