"""What can be written and is refused: each stated rule raises its own clear error."""

from __future__ import annotations

import itertools
import random

import pytest
from covering import Table
from grid import DIMENSIONS, REFUSED, UNWRITTEN, point_of
from grid_calls import make_call, make_turn
from test_grid import ours, surroundings


def refused_points(refusal):
    """A few points that this rule alone forbids, called eagerly."""
    alone = Table(DIMENSIONS, [rule for rule in (*UNWRITTEN, *REFUSED) if rule is not refusal])
    choices = [dict(zip(refusal.dimensions, values)) for values in itertools.product(*(DIMENSIONS[name] for name in refusal.dimensions))]
    random.Random(0).shuffle(choices)
    points = []
    for chosen in choices:
        row = {**chosen, "way": "eager"}
        if refusal.applies(chosen) and alone.is_allowed(row):
            completed = alone.complete(row, lambda name, row, values: random.Random(name).sample(values, len(values)))
            if completed is not None:
                points.append(point_of(completed))
        if len(points) == 3:
            break
    return points


# SDPA-15, JAG-09
@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.reason)
def test_refused(refusal):
    points = refused_points(refusal)
    assert points
    for point in points:
        turn = make_turn(point, 0)
        with surroundings(point), pytest.raises(refusal.error, match=f"(?s){refusal.message}"):
            ours(point, make_call(point), turn)
