"""Threads at once: what one keeps, another may have dropped or made anew."""

import random
import sys
import threading

import pytest
import torch

import foci
from foci import trace_functions
from foci.ir import expr as ir

THREADS, TURNS = 4, 300


@pytest.fixture(autouse=True)
def often():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(function):
    """What the function returns in each thread, given the thread's random numbers."""
    outcomes, start = {}, threading.Barrier(THREADS)

    def run(n):
        start.wait()
        try:
            outcomes[n] = [function(draw) for draw in [random.Random(n)] for _ in range(TURNS)]
        except Exception as error:
            outcomes[n] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            raise outcome
    return [outcomes[n] for n in range(THREADS)]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_nodes_that_come_and_go():
    """One for equal parts, whoever makes it."""

    def make(draw):
        nodes = [ir.const(10**6 + draw.randrange(4)) for _ in range(4)]
        return [(n.value, n) for n in nodes][0]

    keep = [dict(nodes) for nodes in at_once(make)]
    for value in set().union(*keep):
        assert len({id(nodes[value]) for nodes in keep if value in nodes} | {id(ir.const(value))}) == 1


def test_functions_of_more_numbers_than_are_kept():
    device = torch.device("cpu")

    def window(draw):
        width = draw.randint(10, 30)
        return width, trace_functions.bind(None, lambda b, h, i, j: i - j < width, device).ints

    for outcomes in at_once(window):
        assert [ints for _, ints in outcomes] == [(width,) for width, _ in outcomes]


def test_attention_of_changing_numbers():
    query = torch.randn(1, 2, 6, 8)
    distance = torch.arange(6)[:, None] - torch.arange(6)

    def attend(draw):
        width, factor = draw.randint(1, 12), draw.choice((0.5, 1.0, 2.0))
        with foci.use(draw.choice(("blocked", "reference"))):
            return width, factor, foci.attention(query, query, query, mask=lambda b, h, i, j: i - j < width, score=lambda s, *_: s * factor)

    for outcomes in at_once(attend):
        for width, factor, out in outcomes[:: TURNS // 20]:
            want = (query @ query.mT * (factor / 8**0.5)).masked_fill(distance >= width, -torch.inf).softmax(-1) @ query
            torch.testing.assert_close(out, want)
