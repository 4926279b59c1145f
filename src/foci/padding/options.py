"""The passes as Inductor's own hooks take them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import fx

from foci.code_fingerprint import code_fingerprint, hash_files
from foci.compat.inductor import known_settings
from foci.compat.lowering import HAS_LOWERINGS, CustomGraphPass
from foci.padding import lowering
from foci.padding.gemm_times import folder
from foci.padding.joined_qkv_grad import join_gradients
from foci.padding.model import Machine
from foci.padding.padding_autograd import grow_dims
from foci.padding.passes import default_machine, note_outputs, pad, visible_outputs
from foci.padding.report import tell

__all__ = ["SizesPass", "StridesPass", "options"]


@dataclass(frozen=True)
class SizesPass(CustomGraphPass):
    """Before autograd's graph is cut in two: dims of bad size grow.

    Attributes:
        machine: to decide for; by default the graph's own device.
    """

    machine: Machine | None = None

    def __call__(self, graph: fx.Graph) -> None:
        machine = self.machine or default_machine(graph)
        if machine is not None:
            tell(grow_dims(graph, machine))
            note_outputs(graph)

    def uuid(self) -> Any:
        """Key of this version of the pass, and of these tables, in Inductor's cache of compiled graphs."""
        return "sizes", repr(self.machine), _fingerprint()


@dataclass(frozen=True)
class StridesPass(CustomGraphPass):
    """On the forward and on the backward graph: padded strides, and gradients made side by side where they are read so.

    Attributes:
        machine: to decide for; by default the graph's own device.
    """

    machine: Machine | None = None

    def __call__(self, graph: fx.Graph) -> None:
        module = graph.owning_module
        if module is not None:
            lowering.register()
            join_gradients(graph)
            tell(pad(module, (), self.machine, visible=visible_outputs(graph)).paddings)

    def uuid(self) -> Any:
        """Key of this version of the pass, and of these tables, in Inductor's cache of compiled graphs."""
        return "strides", repr(self.machine), _fingerprint()


def options(machine: Machine | None = None) -> dict[str, Any]:
    """Inductor's options that bring the passes, for `torch.compile(model, options=...)`.

    Inductor's own padding of products, which is timed while compiling, is off; its padding of what loops write stays.
    When Inductor takes a compiled graph from its cache, no pass runs and nothing is reported. Where a release of torch lacks what
    foci needs to pad inside of Inductor, there are no options; `foci env` says so.

    Args:
        machine: to decide for; by default each graph's own device.

    Example:
        >>> import torch
        >>> from foci.padding.options import options
        >>> model = torch.compile(torch.nn.Linear(64, 30523), options=options())
    """
    if not HAS_LOWERINGS:
        return {}
    passes = {"joint_custom_pre_pass": SizesPass(machine), "post_grad_custom_pre_pass": StridesPass(machine)}
    return known_settings({**passes, "shape_padding": False}, without="pads fewer products inside of graphs")


@cache
def _fingerprint() -> str:
    """Hash the code, and the tables that the user measured; these are read once, as in `find_table`."""
    return hash_files(code_fingerprint(), folder().glob("*.json"))
