"""Masks at the upper left where a decoding step would want the lower right: a warning once, and a note in `explain`."""

# SDPA-05, FLEX-05

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import foci
from foci import call_cache, masks, prepare
from foci_cli.app import app

KEYS = 40


def tensors(queries, heads=2):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, heads, queries, 8, generator=generator), torch.randn(1, heads, KEYS, 8, generator=generator)


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch):
    monkeypatch.setattr(prepare, "_warned_of_alignment", False)
    call_cache._calls.clear()  # a call that is known is not prepared again
    torch._dynamo.reset()


def said_by(call):
    """The warnings of a call, made twice."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
        call()
    return [(str(w.message), w.filename) for w in caught if "upper left" in str(w.message)]


def attend(mask, queries=1):
    q, k = tensors(queries)
    return lambda: foci.attention(q, k, k, mask=mask)


def varlen(q_len, mask):
    q, k = torch.zeros(q_len, 2, 8), torch.zeros(KEYS, 2, 8)
    cu_q, cu_k = torch.tensor([0, q_len]), torch.tensor([0, KEYS])
    return lambda: foci.varlen_attn(q, k, k, cu_q, cu_k, q_len, KEYS, mask=mask)


def paged(mask, queries=1):
    q, pool = torch.zeros(1, 2, queries, 8), torch.zeros(4, 2, 16, 8)
    return lambda: foci.paged_attention(q, pool, pool, torch.tensor([[2, 0, 3]]), torch.tensor([KEYS]), mask=mask)


def compiled(mask):
    q, k = tensors(1)
    # one length: how tensors of one shape are aligned changes from call to call
    step = torch.compile(lambda q, k: foci.attention(q, k, k, mask=mask), backend="eager", fullgraph=True, dynamic=False)
    return lambda: step(q, k)


def functional(name):
    q, k = tensors(1)
    if name == "flex":
        return lambda: foci.flex_attention(q, k, k, block_mask=masks.causal())
    return lambda: foci.scaled_dot_product_attention(q, k, k, masks.causal())


LOWER = "foci.masks.causal_lower_right()"
SAID = {
    "causal": (attend(masks.causal()), LOWER),
    "sixteen queries": (attend(masks.causal(), 16), LOWER),
    "window": (attend(masks.window(8)), 'foci.masks.window(8, 0, align="lower_right")'),
    "composed": (attend(masks.causal() & masks.window(8, 2)), f'{LOWER} & foci.masks.window(8, 2, align="lower_right")'),
    "with a function": (attend(masks.causal() & (lambda b, h, i, j: j > 2)), LOWER),
    "varlen": (varlen(1, masks.causal()), LOWER),
    "paged": (paged(masks.causal()), LOWER),
    "flex": (functional("flex"), LOWER),
    "sdpa": (functional("sdpa"), LOWER),
    "compiled": (compiled(masks.causal()), LOWER),
}


@pytest.mark.parametrize(("call", "form"), SAID.values(), ids=SAID)
def test_a_warning_once_offers_the_lower_right(call, form):
    said = said_by(call)
    assert len(said) == 1
    assert said[0][0].endswith(f"write {form}")
    assert Path(said[0][1]) == Path(__file__)


UNSAID = {
    "lower right": attend(masks.causal_lower_right()),
    "a window at the lower right": attend(masks.window(8, align="lower_right")),
    "as many queries": attend(masks.causal(), KEYS),
    "many queries": attend(masks.causal(), 17),
    "another mask": attend(masks.padding(torch.tensor([7]))),
    "one of two masks": attend(masks.causal() | masks.prefix_lm(3)),
    "a function": attend(lambda b, h, i, j: i >= j),
    "known lengths": attend(foci.causal_upper_left(1, KEYS)),
    "is_causal": lambda: foci.scaled_dot_product_attention(tensors(1)[0], *[tensors(1)[1]] * 2, is_causal=True),
    "varlen of many": varlen(30, masks.causal()),
    "a prompt in pages": paged(masks.causal(), 5),
    "a window of varlen_attn": lambda: foci.varlen_attn(
        torch.zeros(1, 2, 8), *[torch.zeros(KEYS, 2, 8)] * 2, torch.tensor([0, 1]), torch.tensor([0, KEYS]), 1, KEYS, window_size=(-1, 0)
    ),
    "a module": lambda: foci.nn.MultiheadAttention(8, 2, batch_first=True)(
        torch.zeros(1, 1, 8), *[torch.zeros(1, KEYS, 8)] * 2, need_weights=False, is_causal=True, attn_mask=torch.ones(1, KEYS).bool()
    ),
    "explain": lambda: foci.explain(tensors(1)[0], *[tensors(1)[1]] * 2, mask=masks.causal()),
}


@pytest.mark.parametrize("call", UNSAID.values(), ids=UNSAID)
def test_no_warning(call):
    assert said_by(call) == []


def test_a_warning_in_a_process_of_its_own():
    code = (
        "import torch, foci; q, k = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 9, 8)\n"
        "for _ in range(3): foci.attention(q, k, k, mask=foci.masks.causal()); foci.attention(q, k, k, mask=foci.masks.window(3))"
    )
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("UserWarning: the mask is aligned to the upper left") == 1


def test_a_call_of_torchs_meaning_does_not_hide_the_warning():
    q, k = tensors(1)
    assert said_by(lambda: foci.scaled_dot_product_attention(q, k, k, is_causal=True)) == []
    assert len(said_by(lambda: foci.scaled_dot_product_attention(q, k, k, masks.causal()))) == 1


@pytest.mark.parametrize("queries", [1, 30])
def test_explain_has_a_note_of_any_number_of_queries(queries):
    q, k = tensors(queries)
    explanation = foci.explain(q, k, k, mask=masks.causal())
    (note,) = explanation.notes
    assert f"so {queries} queries stand at the first {queries} of {KEYS} keys" in note
    assert str(explanation).endswith(f"\nnote: {note}")
    for other in (foci.explain(k, k, k, mask=masks.causal()), foci.explain(q, k, k, mask=masks.causal_lower_right())):
        assert other.notes == ()
        assert "note" not in str(other)


def test_the_command_has_the_note():
    done = CliRunner().invoke(app, ["explain", "--q", "1", "--kv", "64", "--mask", "causal"], env={"COLUMNS": "160", "TERM": "dumb"})
    assert "write foci.masks.causal_lower_right()" in " ".join(done.output.split())


def test_the_mask_means_what_the_note_says():
    """By hand: at the upper left one query attends to key 0 alone, at the lower right to every key."""
    q, k = tensors(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        upper = foci.attention(q, k, k, mask=masks.causal())
    torch.testing.assert_close(upper, k[:, :, :1])
    weights = (q.double() @ k.double().mT * 8**-0.5).softmax(-1)
    torch.testing.assert_close(
        foci.attention(q, k, k, mask=masks.causal_lower_right()).double(), weights @ k.double(), atol=2e-6, rtol=1e-5
    )
