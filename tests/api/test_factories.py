"""A factory in the place of what it makes, `foci.masks.causal` for `foci.masks.causal()`, is an error of one sentence."""

import pytest
import torch

import foci

Q = torch.randn(1, 2, 8, 8)
CALLS = {
    "mask": lambda factory: foci.attention(Q, Q, Q, mask=factory),
    "block_mask": lambda factory: foci.flex_attention(Q, Q, Q, block_mask=factory),
    "mask_mod": lambda factory: foci.create_block_mask(factory, 1, 1, 8, 8, device="cpu"),
    "function": foci.Mask,
    "the other mask": lambda factory: foci.masks.window(3) & factory,
    "mod_fn": lambda factory: foci.create_mask(factory, 1, 1, 8, 8, device="cpu"),
}


# FLEX-02
@pytest.mark.parametrize("name", CALLS)
def test_masks(name):
    with pytest.raises(TypeError, match=rf"^{name} is the function foci.masks.causal, .*: write foci.masks.causal\(\)$"):
        CALLS[name](foci.masks.causal)


@pytest.mark.parametrize("call", [lambda s: foci.attention(Q, Q, Q, score=s), lambda s: foci.flex_attention(Q, Q, Q, score_mod=s)])
def test_scores(call):
    with pytest.raises(TypeError, match=r"^score is the function foci.scores.alibi, .*: write foci.scores.alibi\(\.\.\.\)$"):
        call(foci.scores.alibi)
    with pytest.raises(TypeError, match="the other score is the function foci.scores.softcap"):
        foci.scores.alibi(2) >> foci.scores.softcap


@pytest.mark.parametrize("name", [n for n in foci.masks.__all__ if n.islower() and n != "document_offsets"])
def test_every_factory_of_masks(name):
    factory = getattr(foci.masks, name)
    if callable(factory) and not isinstance(factory, foci.Mask):
        with pytest.raises(TypeError, match=f"foci.masks.{name}"):
            foci.attention(Q, Q, Q, mask=factory)
