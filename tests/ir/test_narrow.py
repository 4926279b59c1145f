"""Captured integers of 8 and 16 bits: their arithmetic wraps as torch's does. The reference is torch."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import foci

DTYPES = [torch.uint8, torch.int8, torch.int16]
S = 24


def numbers(dtype, *shape, seed=0):
    bounds = torch.iinfo(dtype)
    values = torch.randint(bounds.min, bounds.max + 1, shape, dtype=torch.int64, generator=torch.Generator().manual_seed(seed))
    edges = torch.tensor([bounds.min, bounds.max, 0, 1])
    values.view(-1)[: len(edges)] = edges
    return values.to(dtype)


# of two numbers of the captured vector, and positions
WORDS = {
    "sub": lambda x, y, i, j: x - y < 2,
    "add": lambda x, y, i, j: x + y > 90,
    "mul": lambda x, y, i, j: x * y < 60,
    "neg": lambda x, y, i, j: -x < y,
    "not": lambda x, y, i, j: ~x < y,
    "abs": lambda x, y, i, j: (x - y).abs() <= 40,
    "square": lambda x, y, i, j: x.square() > y,
    "cube": lambda x, y, i, j: x**3 > y,
    "shifted": lambda x, y, i, j: (x << 3) > (y >> 1),
    "floor": lambda x, y, i, j: (x // -1) < y // 300,
    "remainder": lambda x, y, i, j: x % 300 < y,
    "fmod": lambda x, y, i, j: torch.fmod(x, 7) < y,
    "compared": lambda x, y, i, j: (x < 300) | (y == -1) | (x >= 256),
    "number first": lambda x, y, i, j: 300 - x < y,
    "alpha": lambda x, y, i, j: torch.add(x, y, alpha=3) > 10,
    "addcmul": lambda x, y, i, j: torch.addcmul(x, x, y) > 10,
    "bits": lambda x, y, i, j: ((x & 511) ^ (y | -7)) > 20,
    "where": lambda x, y, i, j: torch.where(i > j, x, -1) + y > 5,
    "clamp": lambda x, y, i, j: x.clamp(0, 99) * y > 5,
    "maximum": lambda x, y, i, j: torch.maximum(x, y) + 100 > 5,
    "sign": lambda x, y, i, j: (x - y).sign() * 100 - 100 > y,
    "wider operand": lambda x, y, i, j: x + i < y + j,
    "tensor operand": lambda x, y, i, j: x + torch.tensor(300) > y + torch.tensor(7, dtype=torch.int32),
    "narrow operand": lambda x, y, i, j: x + torch.tensor(100, dtype=torch.int8) > y,
    "float": lambda x, y, i, j: x * 1.5 - y / 2 > 3.0,
    "float number": lambda x, y, i, j: (x < 1.5) | (y == 300.5),
    "bool operand": lambda x, y, i, j: x + (i > j) > y,
    "cast": lambda x, y, i, j: x.int() - y.long() < 2,
    "cast between": lambda x, y, i, j: x.to(torch.int16) * y.to(torch.int16) < 60,
    "cast to 8 bits": lambda x, y, i, j: (i * 30).to(torch.uint8) < (j * 20).to(torch.uint8) + 7,
    "like": lambda x, y, i, j: torch.full_like(x, 100) + x > y,
    "float of a sum": lambda x, y, i, j: (x + y).float() / 3 > 7.0,
}


def attend(allowed, q, k, v):
    scores = torch.where(allowed, q.double() @ k.double().mT * 8**-0.5, -torch.inf)
    some = allowed.any(-1, keepdim=True)
    return torch.where(some, torch.softmax(torch.where(some, scores, 0.0), -1), 0.0) @ v.double()


def drawn():
    return tuple(torch.randn(1, 1, S, 8) for _ in range(3))


# FLEX-02, FLEX-03
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WORDS)
def test_masks_wrap_as_torch_does(name, dtype):
    x, word = numbers(dtype, S), WORDS[name]
    i, j = torch.arange(S)[:, None], torch.arange(S)[None]
    # vectors and positions of rank 2: torch computes in the dtype it takes in flex_attention
    allowed = torch.tensor([[bool(word(x[a], x[b], i[a, 0], j[0, b])) for b in range(S)] for a in range(S)])
    q, k, v = drawn()
    for backend in ("reference", "blocked"):
        with foci.use(backend):
            actual = foci.attention(q, k, v, mask=lambda b, h, qi, ki: word(x[qi], x[ki], qi, ki))
        torch.testing.assert_close(actual.double(), attend(allowed, q, k, v), atol=1e-5, rtol=1e-5)


# FLEX-03
@pytest.mark.parametrize("backend", ["reference", "blocked", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_are_those_of_torchs_flex_attention(dtype, backend):
    x, table = numbers(dtype, S), numbers(dtype, 2, S, seed=1)

    def score(s, b, h, qi, ki):
        distance = (x[qi] - x[ki] + table[h, ki] * 3) * 1
        return torch.where(x[qi] - x[ki] < 2, s + distance * 0.01, s - (table[h, qi] // 2) * 0.01)

    q, k, v = (torch.randn(1, 2, S, 8) for _ in range(3))
    with foci.use(backend):
        actual = foci.flex_attention(q, k, v, score_mod=score)
    torch.testing.assert_close(actual, flex_attention(q, k, v, score_mod=score), atol=1e-5, rtol=1e-5)


# of a matrix of captured numbers: its rows are reduced
ROWS = {
    "sum": lambda m, i, j: m[i].sum() + m[j].sum() > 900,
    "dot": lambda m, i, j: torch.dot(m[i], m[j]) > 20,
    "largest": lambda m, i, j: m[i].max() + m[j].amin() > 9,
    "any": lambda m, i, j: (m[i] + m[j] == 0).any(),
    "row and position": lambda m, i, j: (m[i] + j < 30).all(),
    "row and number": lambda m, i, j: (m[i] * 300).sum() > (m[j] - 1).sum(),
    "isin": lambda m, i, j: torch.isin(i - 3, m[j]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_rows_wrap_as_torchs_do(name, dtype):
    m, word = numbers(dtype, S, 5), ROWS[name]
    positions = torch.arange(S, dtype=torch.int32)
    allowed = torch.tensor([[bool(word(m, a, b)) for b in positions] for a in positions])
    q, k, v = drawn()
    with foci.use("blocked"):
        actual = foci.attention(q, k, v, mask=lambda b, h, qi, ki: word(m, qi, ki))
    torch.testing.assert_close(actual.double(), attend(allowed, q, k, v), atol=1e-5, rtol=1e-5)


REFUSED = {
    "torch.pow of torch.uint8": lambda x, i, j: x[i] ** x[j] > 3,
    "300 in the place of a number of torch.uint8": lambda x, i, j: x[i].clamp(0, 300) > x[j],
    "torch.div(rounding_mode='trunc') of torch.uint8": lambda x, i, j: torch.div(x[i], 3, rounding_mode="trunc") > 3,
    "a cast to torch.uint8": lambda x, i, j: (i * 0.3).to(torch.uint8) > 3,
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused_names_the_dtype_and_the_cure(said):
    x, function = numbers(torch.uint8, S), REFUSED[said]
    with pytest.raises(TypeError) as caught:
        foci.attention(*drawn(), mask=lambda b, h, i, j: function(x, i, j))
    assert said in str(caught.value)
    assert "tensor.int()" in str(caught.value) or "torch.int32" in str(caught.value)


# FLEX-05
def test_bounds_survive_where_nothing_wraps():
    place = torch.arange(512, dtype=torch.int16)
    mask = foci.create_block_mask(lambda b, h, i, j: (place[i] - place[j] < 9) & (place[i] - place[j] >= 0), 1, 1, 512, 512, device="cpu")
    assert mask.to_dense().tolist() == [[[[int(0 <= i - j <= 1) for j in range(4)] for i in range(4)]]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_comparisons_alone_take_no_wrapping(dtype):
    from foci.ir.function_fingerprint import fingerprint
    from foci.trace_functions import bind, is_kept

    x = numbers(dtype, S)
    mask = lambda b, h, i, j: (x[i] == x[j]) & (x[i] <= 5)
    bound = bind(None, mask, torch.device("cpu"))
    assert is_kept(fingerprint(None), fingerprint(mask), torch.device("cpu"), has_blocks=False)
    assert not any(e.op == "mod" for e in bound.variant.mask.walk())
