"""The worked example, in its small form: it learns, torch.nn's model has the same losses, and the cache changes nothing."""

import importlib
import itertools
import sys
from pathlib import Path

import pytest
import torch

import foci
import foci.nn

EXAMPLE = Path(__file__).parents[2] / "examples" / "language_model"
NAMES = ("data", "model", "train")


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        for name in NAMES:
            sys.modules.pop(name, None)
        yield importlib.import_module("train")
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def docs(example):
    return example.documents(example.SMALL.max_length, files=40)


@pytest.fixture(scope="module")
def trained(example, docs):
    torch.manual_seed(0)
    model, other = (example.LanguageModel(nn, example.SMALL) for nn in (foci.nn, torch.nn))
    other.load_state_dict(model.state_dict())
    run = example.train(model, example.packed_loss, docs, tokens=example.SMALL.tokens, steps=40)
    theirs = example.train(other, example.padded_loss, docs, tokens=example.SMALL.tokens, steps=40, stop=10)
    return model, run, theirs


def test_validation_loss_falls(trained):
    losses = [loss for _, loss in trained[1].validation]
    assert losses[-1] < losses[0] - 1.0
    assert losses[-1] < 4.2  # all bytes alike would cost 5.5


def test_losses_are_those_of_torch_nn(trained):
    _, ours, theirs = trained
    assert len(theirs.training) == 10
    torch.testing.assert_close(torch.tensor(ours.training[:10]), torch.tensor(theirs.training), rtol=5e-6, atol=0)


def test_documents_have_mixed_lengths_and_no_padding(example, docs, trained):
    batch = next(example.batches(docs[0], example.SMALL.tokens, seed=0))
    lengths = {len(document) for document in docs[0]}
    assert len(lengths) > 100 and min(lengths) < 40
    with foci.observe() as log:
        packed = example.packed_loss(trained[0], batch)
    assert all(call.problem.formula.layout.value == "jagged" for call in log.calls)
    torch.testing.assert_close(packed, example.padded_loss(trained[0], batch))


def test_generation_with_the_cache(example, trained):
    model = trained[0].eval()
    written = example.generate(model, b"def f", 30, temperature=0)
    ids = [example.BEGIN, *b"def f"]
    with torch.no_grad():
        for _ in range(30):
            logits = model(torch.tensor([ids]), torch.arange(len(ids)))[0, -1, : example.BEGIN]
            ids.append(int(logits.argmax()))
    assert written == bytes(ids[1:])
    assert len(example.generate(model, b"def ", 5, seed=1)) == 9


def test_batches_are_the_same_for_both(example, docs):
    first, second = (list(itertools.islice(example.batches(docs[0], 200, seed=3), 3)) for _ in range(2))
    assert all(torch.equal(a, b) for one, other in zip(first, second) for a, b in zip(one, other))
