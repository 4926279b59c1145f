"""What the kernel of all gradients would be launched with, natively or in the interpreter."""

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch

from foci.backends.contract import Plan
from foci.problem import Target

backward = pytest.importorskip("foci.backends.hopper.backward_pass", reason="needs a Triton with Gluon")
from foci.backends.hopper.kernel import build_kernel  # noqa: E402

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu")
needs_gpu_or_interpreter = pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter")


class _Caught(Exception):
    pass


class _Instead:
    """Stands in for a kernel: `does` takes its arguments by name, and the fields of `call_params` likewise."""

    def __init__(self, kernel, does):
        self.signature, self.does = kernel.signature, does

    def warmup(self, *args, grid, **options):
        """Nothing is compiled, so that the launch goes through `__getitem__`."""

    def __getitem__(self, grid):
        def launch(*args, **options):
            named = dict(zip(self.signature.parameters, args, strict=True))
            fields = named["call_params"]._asdict() if "call_params" in named else {}
            return self.does(named | fields)

        return launch


def gradients_with(does, asked, operands, results, cotangents, sums=None, *, few=False):
    """Gradients of a problem that the kernel takes, where `does`, given its arguments by name, stands in for it. `sums`: other than the
    schedule has. `few`: the kernel of few queries."""
    kernel = build_kernel(Plan("hopper", asked, Target("cuda", 90, frozenset({"triton", "triton-3.6"}))), own_backward=True)
    backward_pass = kernel.backward_pass
    assert (backward_pass.short_q is not None) == few
    assert backward_pass.fused is not None
    backward_pass.fused = replace(
        backward_pass.fused, sums=sums or backward_pass.fused.sums, goes_round=backward_pass.fused.goes_round and sums is None
    )
    name = "attention_few_gradients" if few else "attention_gradients"
    with mock.patch.object(backward, name, _Instead(getattr(backward, name), does)):
        return kernel.backward(operands, results, cotangents)


def launched_with(asked, operands, results, cotangents):
    """Its arguments by name, for a problem that it takes."""

    def catch(args):
        raise _Caught(args)

    with pytest.raises(_Caught) as caught:
        gradients_with(catch, asked, operands, results, cotangents)
    return caught.value.args[0]
