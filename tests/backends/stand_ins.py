"""Compiles kernels without a GPU: a stand-in for each kernel compiles it where the call would launch it."""

import functools
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel, by the name of its function. `stack`: bytes a thread spills, and `registers` it has, None where no tool tells
    them. `ir`: what Triton has read, of a kernel that is compiled no further."""

    name: str
    kernel: Any
    stack: int | None = None
    registers: int | None = None
    file: Path | None = None
    ir: str = ""

    @property
    def shared(self):
        return self.kernel.metadata.shared

    @property
    def ptx(self):
        return self.kernel.asm["ptx"]

    @functools.cached_property
    def sass(self):
        """Read when it is asked for: that takes longer than some kernels take to compile. Empty where no tool reads it."""
        return "" if self.file is None else told(self.kernel, "-sass", self.file)


def told(kernel, flag, file):
    """The output of cuobjdump for a kernel; empty where it is not installed."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return ""
    file.write_bytes(kernel.asm["cubin"])
    return subprocess.run([tool, flag, file], capture_output=True, text=True, check=True).stdout


class StandIn:
    """Stands in for a kernel."""

    def __init__(self, function, arch, kernels, file, is_read_only):
        self.function, self.arch, self.kernels, self.file, self.signature = function, arch, kernels, file, function.signature
        self.is_read_only = is_read_only

    def warmup(self, *args, grid, **options):
        """Nothing is compiled, so that the launch goes through `__getitem__`."""

    def __getitem__(self, grid):
        def compile_it(*args, **options):
            self.kernels.append(self.compiled(args, options))

        return compile_it

    def specialize(self, args, options):
        """Triton's inputs for these arguments: source, target, backend and parsed options."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, make_backend
        from triton.experimental.gluon._runtime import GluonASTSource
        from triton.runtime.jit import create_function_from_signature

        target = GPUTarget("cuda", self.arch, 32)
        backend = make_backend(target)
        binder = create_function_from_signature(self.function.signature, self.function.params, backend)
        bound, specialization, _ = binder(*args, **options)
        parsed, signature, constants, attributes = self.function._pack_args(backend, dict(options), bound, specialization, options)
        kind = GluonASTSource if self.function.is_gluon() else ASTSource
        return kind(self.function, signature, constants, attributes), target, backend, parsed

    def compiled(self, args, options):
        import triton
        from triton._C.libtriton import ir

        source, target, backend, parsed = self.specialize(args, options)
        if self.is_read_only:
            context = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            read = source.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
            return Compiled(self.function.__name__, None, ir=str(read))
        kernel = triton.compile(source, target=target, options=parsed.__dict__)
        usage = told(kernel, "-res-usage", self.file)
        if not usage:
            return Compiled(self.function.__name__, kernel)
        stack, registers = (int(re.search(rf"{name}:(\d+)", usage).group(1)) for name in ("STACK", "REG"))
        return Compiled(self.function.__name__, kernel, stack, registers, self.file)
