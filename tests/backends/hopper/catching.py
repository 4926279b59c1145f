"""What the kernel of all gradients would be launched with, natively or in the interpreter."""

import os
from unittest import mock

import pytest
import torch

from foci.backends.contract import Plan
from foci.problem import Target

backward = pytest.importorskip("foci.backends.hopper.backward", reason="needs a Triton with Gluon")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu")
needs_gpu_or_interpreter = pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter")


class _Caught(Exception):
    pass


class _Catching:
    signature = backward.attention_gradients.signature

    def __getitem__(self, grid):
        def launch(*args, **options):
            raise _Caught(dict(zip(self.signature.parameters, args, strict=True)))

        return launch


def launched_with(asked, operands, results, cotangents):
    """Its arguments by name, for a problem that it takes."""
    kernel = backward.HopperGradients(Plan("hopper", asked, Target("cuda", 90, frozenset({"triton", "triton-3.6"}))))
    assert kernel.fused is not None
    with mock.patch.object(backward, "attention_gradients", _Catching()), pytest.raises(_Caught) as caught:
        kernel.backward(operands, results, cotangents)
    return caught.value.args[0]
