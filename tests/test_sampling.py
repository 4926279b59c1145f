"""Which parts of the tests of many cases CI runs."""

import itertools

import pytest

from sampling import drawn_part


@pytest.mark.parametrize("step", range(1, 17))
def test_every_part_is_drawn_within_a_day(step):
    """A day has hundreds of commits. Wherever CI begins, and if it runs every 16th alone, 69 runs draw each of the ten parts."""
    for first in range(1000):
        assert {drawn_part(first + step * run, 10) for run in range(69)} == set(range(10))


def test_thirteen_commits_in_a_row_draw_every_part():
    for first in range(1000):
        assert {drawn_part(commit, 10) for commit in range(first, first + 13)} == set(range(10))


def test_parts_are_alike_in_size():
    parts = [drawn_part(commit, 10) for commit in range(2000)]
    assert all(190 <= len(list(group)) <= 210 for _, group in itertools.groupby(sorted(parts)))
