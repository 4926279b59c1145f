"""What reads a fused attention's result finds it as it lay before, wherever a view counts on that."""

import pytest
import torch
from spelling_harness import compare, compiled, qkv

import foci
from compiled import several


@pytest.mark.parametrize(
    "after",
    [
        lambda out, q: (out + 1).view(q.shape[0], -1),
        lambda out, q: torch.nn.functional.gelu(out).view(q.shape[0] * q.shape[1], -1),
        lambda out, q: (out * q.sigmoid()).chunk(2, -1)[0].relu(),
        lambda out, q: out.clone().mul_(2).view(q.shape[0], -1),
        lambda out, q: (out + q).transpose(1, 2).contiguous().view(*q.shape[:1], -1),
    ],
    ids=["add", "gelu", "a gate and a part of it", "in place", "contiguous"],
)
def test_a_view_behind_what_is_computed_element_by_element_fits(after):
    def attend(q, k, v):
        return after(torch.softmax(q @ k.transpose(-2, -1) * 0.3, -1) @ v, q)

    run, _ = compiled(attend, dynamic=True)
    with foci.observe() as log:
        for length in several(20, 27, 33):
            compare(attend, qkv(length), torch.float32, run, backward=True)
    assert [site.fused for site in log.fusions] == [True]
