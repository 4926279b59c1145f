"""Devices that need not be there."""

import contextlib
import itertools

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor

from compiled import check_variety, resize
from foci.padding import Machine, Padding, pad
from foci.padding.gemm_times import KINDS, ROLES, Row, Shape, Table
from foci.padding.operators import OPERATORS
from foci.padding.padding_autograd import grow_dims
from foci.padding.passes import note_outputs

SHAPES = (Shape(1, 8192, 32768, 1024), Shape(1, 1024, 1024, 1024), Shape(1, 128, 128, 128), Shape(64, 1024, 1024, 64))


def machine(slowdown: float = 3.0, *, odd: float = 1.0, bandwidth: float = 4e12, tf32: bool = True) -> Machine:
    """One on which every misaligned matrix makes a product slower by `slowdown`, and one of odd, padded rows by `odd`."""
    peak = 1e14
    rows = tuple(
        Row(kind, role, alignment, shape, shape.flops / peak, odd * shape.flops / peak, slowdown * shape.flops / peak)
        for kind, role, alignment, shape in itertools.product(KINDS, ROLES, (1, 2, 4, 8), SHAPES)
    )
    table = Table("simulated", "simulated", "none", dict.fromkeys(KINDS, peak), bandwidth, 1e-9, rows)
    return Machine("simulated", 16, tf32, table)


def check_values(nodes):
    """That nodes describe their values as their mode of fake tensors does when it runs them."""
    for node in nodes:
        arguments, keywords = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        fake = node.meta["val"]
        assert isinstance(fake, FakeTensor)
        with fake.fake_mode:
            value = node.target(*arguments, **keywords)
        described = [(x.shape, x.stride(), x.dtype, x.device) for x in (fake, value)]
        assert described[0] == described[1], node.format_node()


class Recorder:
    """A backend of torch.compile that pads the graphs of AOTAutograd and runs them node by node; keeps what it did.

    With `grow`, dims grow first, in the graph that holds forward and backward pass together.
    """

    def __init__(self, on: Machine | None = None, *, grow: bool = False) -> None:
        self.machine = on or machine()
        self.grow = grow
        self.graphs: list[torch.fx.GraphModule] = []
        self.paddings: list[Padding] = []

    def __call__(self, graph_module, example_inputs):
        return aot_autograd(**self.compilers())(graph_module, example_inputs)

    def compilers(self):
        return {
            "fw_compiler": self.compiler,
            "inference_compiler": self.inference,
            "partition_fn": self.partition,
            "decompositions": select_decomp_table(),
        }

    def partition(self, joint, inputs, **options):
        self._grow(joint)
        note_outputs(joint.graph)
        return min_cut_rematerialization_partition(joint, inputs, **options)

    def inference(self, graph, inputs):
        self._grow(graph)
        return self.compiler(graph, inputs)

    def _grow(self, graph):
        if self.grow:
            before = set(graph.graph.nodes)
            self.paddings.extend(grow_dims(graph.graph, self.machine))
            check_values([node for node in graph.graph.nodes if node not in before])
            graph.graph.lint()
            graph.recompile()

    def compiler(self, graph, inputs):
        done = pad(graph, inputs, self.machine)
        self.graphs.append(done.graph_module)
        self.paddings.extend(done.paddings)
        context = torch._guards.TracingContext.try_get()
        if context is not None and context.output_strides is not None and not context.output_strides:
            # as Inductor does, so that the backward graph knows how the forward graph saved its tensors
            outputs = done.graph_module.graph.output_node().args[0]
            values = [out.meta.get("val") if isinstance(out, torch.fx.Node) else None for out in outputs]
            context.output_strides.extend(x.stride() if isinstance(x, torch.Tensor) else None for x in values)
        return make_boxed_func(done.graph_module)

    def products(self) -> list[tuple[tuple[int, ...], ...]]:
        """Sizes and strides of the operands of every product, in the order of the graphs."""
        layouts = []
        for graph in self.graphs:
            for node in graph.graph.nodes:
                if node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default):
                    operands = [arg.meta["val"] for arg in node.args[-2:]]
                    layouts.append(tuple((tuple(x.shape), x.stride()) for x in operands))
        return layouts

    def strides(self, operator: str) -> list[tuple[int, ...]]:
        """Of all results of `foci::operator`, in the order of the graphs."""
        nodes = (node for graph in self.graphs for node in graph.graph.nodes if node.target is OPERATORS[operator])
        return [tuple(node.meta["val"].stride()) for node in nodes]

    def how(self) -> dict[str, str | None]:
        return {padding.tensor: padding.how for padding in self.paddings}


def compiled(function, recorder, **options):
    torch._dynamo.reset()
    # one length: those who call this are asked for sizes
    return torch.compile(function, backend=recorder, **options)


def other_sizes(inputs, fixed=()):
    """Arguments of two further calls: every size from 60 on is another one, but those of `fixed`, which the function has as numbers.

    There are none where all are fixed.
    """
    sizes = {n for x in inputs for n in x.shape if n >= 60} - set(fixed)
    if not sizes and fixed:
        return []
    calls = [resize(inputs, {n: n + more for n in sizes}) for more in (2, 6)]
    check_variety([inputs, *calls])
    return calls


@contextlib.contextmanager
def first_call_only(recorder):
    """Forgets what the recorder does inside: tests look at the graphs of the first call, whose sizes are numbers."""
    graphs, paddings = len(recorder.graphs), len(recorder.paddings)
    yield
    del recorder.graphs[graphs:], recorder.paddings[paddings:]
