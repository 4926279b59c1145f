"""Which parts of the tests of many cases CI and `make test` run."""

import itertools

import pytest

from sampling import drawn_part

# Parts, and how many commits in a row, and runs of every n-th commit for any n up to 16, draw all of them: of `make test`, and of CI.
ENOUGH = [(16, 21, 152), (24, 34, 215)]


@pytest.mark.parametrize("step", range(1, 17))
@pytest.mark.parametrize(("parts", "in_a_row", "runs"), ENOUGH)
def test_every_part_is_drawn_within_days(parts, in_a_row, runs, step):
    """A day has hundreds of commits. Each part comes soon, wherever CI begins, and if it runs every 16th commit alone."""
    enough = in_a_row if step == 1 else runs
    for first in range(1000):
        assert {drawn_part(first + step * run, parts) for run in range(enough)} == set(range(parts))


@pytest.mark.parametrize(("parts", "in_a_row", "runs"), ENOUGH)
def test_parts_are_alike_in_size(parts, in_a_row, runs):
    drawn = sorted(drawn_part(commit, parts) for commit in range(200 * parts))
    assert all(190 <= len(list(group)) <= 210 for _, group in itertools.groupby(drawn))
