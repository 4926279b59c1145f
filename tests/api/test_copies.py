"""Masks and scores in files, other processes and copies of models."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import foci
import foci.nn
from compiled import several
from foci import masks, scores
from foci.integrations.model_mask import ModelMask
from foci.mask_examples import Sizes
from foci.mask_mods import create_mask
from foci.trace_functions import bind

CPU = torch.device("cpu")
SIZES = Sizes()


def by_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_process(value):
    return pickle.loads(ForkingPickler.dumps(value))


ROADS = [copy.copy, copy.deepcopy, by_file, by_process]
EXAMPLES = [e for e in (*masks.EXAMPLES, *scores.EXAMPLES) if e.name != "function"]


def even_keys(b, h, q_idx, kv_idx):
    return kv_idx % 2 == 0


def doubled(score, b, h, q_idx, kv_idx):
    return score * 2


def same(one, other):
    bound, again = (bind(*((x, None) if isinstance(x, foci.Score) else (None, x)), CPU) for x in (one, other))
    assert bound.variant == again.variant
    assert (bound.ints, bound.floats) == (again.ints, again.floats)
    assert len(bound.captures) == len(again.captures)
    for tensor, copied in zip(bound.captures, again.captures):
        torch.testing.assert_close(copied, tensor, rtol=0, atol=0)
        assert copied.requires_grad == tensor.requires_grad
    assert repr(one) == repr(other)
    assert type(one) is type(other)


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_every_named_one(example, road):
    sizes = SIZES if example.fits(SIZES) else Sizes(Hq=12, Sq=80, Skv=80)
    assert example.fits(sizes)
    value = example.build(sizes)
    same(value, road(value))


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)
@pytest.mark.parametrize(
    "value",
    [
        ~(masks.causal() & masks.window(5)) | masks.document(torch.arange(40) // 9),
        masks.document_offsets(torch.tensor([0, 7, 40])),
        even_keys & masks.causal(),
        masks.causal() | even_keys,
        scores.alibi(4) >> doubled >> scores.softcap(3.0),
        doubled >> scores.softcap(3.0),
        foci.Mask(even_keys, name="even"),
        foci.Score(doubled),
        ModelMask(even_keys, (2, 1, 40, 40), CPU),
        foci.causal_upper_left(40, 30),
    ],
    ids=repr,
)
def test_composed_ones_and_functions_of_modules(value, road):
    same(value, road(value))


def test_lengths_come_along():
    for mask in (foci.causal_upper_left(3, 5), foci.causal_lower_right(3, 5)):
        assert torch.equal(pickle.loads(pickle.dumps(mask)).to_tensor(), mask.to_tensor())
    model_mask = pickle.loads(pickle.dumps(ModelMask(even_keys, (2, 1, 4, 6), CPU)))
    assert model_mask.shape == (2, 1, 4, 6)
    assert model_mask[:, :, :, :5].shape == (2, 1, 4, 5)


@pytest.mark.parametrize("join", [lambda f: foci.Mask(f), lambda f: masks.causal() & f, lambda f: ~(f | masks.causal())])
def test_functions_within_functions_are_copied_but_not_pickled(join):
    ids = torch.arange(40) // 7
    mask = join(lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx])
    with pytest.raises((AttributeError, pickle.PicklingError), match="Can't (get|pickle) local object .*lambda"):
        pickle.dumps(mask)
    for copied in (copy.copy(mask), copy.deepcopy(mask)):
        assert torch.equal(*(create_mask(m, None, None, 40, 40, device="cpu") for m in (mask, copied)))


class Biased(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.full((4,), 0.1))
        self.score = scores.alibi(self.slopes) >> scores.softcap(20.0)
        self.mask = masks.causal() & masks.document(torch.arange(16) // 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return foci.attention(x, x, x, mask=self.mask, score=self.score)


@pytest.mark.parametrize("road", [copy.deepcopy, by_file], ids=lambda road: road.__name__)
def test_a_copied_model_learns_its_own_parameters(road):
    model = Biased()
    other = road(model)
    x = torch.randn(2, 4, 16, 8)
    assert torch.equal(model(x), other(x))
    other(x).square().sum().backward()
    assert model.slopes.grad is None and other.slopes.grad.abs().min() > 0
    with torch.no_grad():
        other.slopes.mul_(3)
    assert not torch.allclose(model(x), other(x))


def test_a_mask_made_in_a_compiled_graph_and_handed_out():
    @torch.compile(backend="eager", fullgraph=True)
    def attend(x, ids):
        mask = masks.causal() & masks.document(ids)
        return foci.attention(x, x, x, mask=mask), mask

    for length in several(16, 19, 24):
        x, ids = torch.randn(2, 4, length, 8), torch.arange(length) // 5
        out, mask = attend(x, ids)
        same(mask, masks.causal() & masks.document(ids))
        torch.testing.assert_close(foci.attention(x, x, x, mask=pickle.loads(pickle.dumps(mask))), out)


def test_modules_of_every_layer_variant():
    layer = foci.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, mask=masks.window(3), score=scores.alibi(4))
    x = torch.randn(2, 9, 16)
    for road in (copy.deepcopy, by_file):
        assert torch.equal(road(layer)(x), layer(x))


def test_an_error_reaches_another_process():
    q = torch.randn(1, 2, 8, 4)
    with foci.use("aten"), pytest.raises(foci.NoViableBackend) as caught:
        foci.attention(q, q, q, score=foci.scores.softcap(3.0))
    copied = pickle.loads(pickle.dumps(caught.value))
    assert str(copied) == str(caught.value) and copied.decision.table() == caught.value.decision.table()


def test_a_factory_keeps_its_name_and_arguments():
    assert masks.window.__module__ == "foci.masks.positional"
    assert scores.t5_bias.__qualname__ == "t5_bias"
    with pytest.raises(TypeError, match=r"window\(\) missing 1 required positional argument: 'left'"):
        masks.window()
