"""Lines of scores against the scores themselves, pair by pair."""

import pytest
import torch

import foci
from foci import scores
from foci.backends.gpu.affine_scores import affine_in_keys
from foci.ir.eager import Env, evaluate
from foci.trace_functions import bind

triton = pytest.importorskip("foci.backends.gpu.functions", reason="needs Triton")

SLOPES = torch.tensor([0.5, 0.25])
TABLE = torch.linspace(0, 1, 40)
LINES = {
    "alibi": scores.alibi(2),
    "slopes of its own": foci.Score(lambda s, b, h, q, k: s + SLOPES[h] * (k - q)),
    "farther is more": foci.Score(lambda s, b, h, q, k: s + 0.3 * (q - k)),
    "two terms": foci.Score(lambda s, b, h, q, k: s + (0.3 * (q - k) + SLOPES[h] * k)),
    "a number for each head": foci.Score(lambda s, b, h, q, k: s + (SLOPES[h] + k * 2.0)),
}
OTHERS = {
    "nothing": None,
    "flat": foci.Score(lambda s, b, h, q, k: s + SLOPES[h]),
    "distance": foci.Score(lambda s, b, h, q, k: s - 0.3 * abs(q - k)),
    "bent": foci.Score(lambda s, b, h, q, k: s + 0.3 * k * k),
    "steeper by row": foci.Score(lambda s, b, h, q, k: s + 0.3 * q * k),
    "in steps": foci.Score(lambda s, b, h, q, k: s + 0.3 * (k // 2)),
    "read by key": foci.Score(lambda s, b, h, q, k: s + TABLE[k]),
    "read by row": foci.Score(lambda s, b, h, q, k: s + (TABLE[q] + 0.3 * k)),
    "bounded": scores.softcap(2.0),
}


@pytest.mark.parametrize("streaming", ["kv_idx", "q_idx"])
@pytest.mark.parametrize("name", LINES)
def test_a_line_is_what_is_added_and_rises_evenly(name, streaming):
    bound = bind(LINES[name], None, torch.device("cpu"))
    score = triton.cast_coordinates_early(bound.variant.score)
    line = affine_in_keys(score, streaming)
    if streaming == "q_idx" and name == "a number for each head":
        assert line is None  # flat from query to query
        return
    assert line is not None
    variables = {"b": torch.tensor(0), "h": torch.tensor(1), "q_idx": torch.arange(31)[:, None], "kv_idx": torch.arange(37)}
    env = Env({n: v.to(torch.int32) for n, v in variables.items()} | {"score": torch.tensor(0.0)}, bound.captures, bound.ints, bound.floats)
    score_value, added, rise = evaluate((score, *line), env)
    torch.testing.assert_close(added.expand(31, 37), score_value.expand(31, 37))
    steps = added.expand(31, 37).diff(dim=1 if streaming == "kv_idx" else 0)
    torch.testing.assert_close(steps, torch.as_tensor(rise).expand(steps.shape))


@pytest.mark.parametrize("streaming", ["kv_idx", "q_idx"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_scores_are_no_lines(name, streaming):
    bound = bind(OTHERS[name], None, torch.device("cpu"))
    assert affine_in_keys(triton.cast_coordinates_early(bound.variant.score), streaming) is None
