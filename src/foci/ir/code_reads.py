"""What code reads by name, found in its bytecode: globals, variables it closes over, its first argument, and attributes of any of these.

A path is what is read of a variable: `()` its value as a whole, `("config", "window")` its attribute `.config.window` alone.
"""

from __future__ import annotations

import dis
import types
from typing import Final, NamedTuple, TypeAlias

__all__ = ["Path", "Reads", "read_code"]

Path: TypeAlias = tuple[str, ...]

_WHOLE: Final[Path] = ()
_ATTRIBUTES: Final = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_VARIABLES: Final = frozenset((
    "LOAD_DEREF", "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_FAST_LOAD_FAST",
    "LOAD_GLOBAL", "STORE_FAST_LOAD_FAST",
))  # fmt: skip
"""Operations that end with the value of their last variable on top of the stack."""


class Reads(NamedTuple):
    """What code and the code within it read by name.

    Attributes:
        globals: paths that are read of globals and builtins, by name.
        cells: likewise of the variables that it closes over.
        first: likewise of its first argument.
        attributes: names that are read of other values.
    """

    globals: dict[str, set[Path]]
    cells: dict[str, set[Path]]
    first: set[Path]
    attributes: set[str]


def read_code(code: types.CodeType) -> Reads | None:
    """Return what code reads by name; None where it imports, or changes a global or an attribute."""
    reads = Reads({}, {name: set() for name in code.co_freevars}, set(), set())
    first = code.co_varnames[0] if code.co_argcount else None
    instructions = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    at = 0
    while at < len(instructions):
        instruction = instructions[at]
        at += 1
        path = _WHOLE
        if instruction.opname in _VARIABLES:
            path = _path(instructions, at)
            at += len(path)
        elif instruction.opname in _ATTRIBUTES:
            reads.attributes.add(instruction.argval)
        elif instruction.opcode in dis.hasname:
            return None
        *others, last = _names(instruction) or (None,)
        for name, of_name in (*((name, _WHOLE) for name in others), (last, path)):
            if instruction.opname == "LOAD_GLOBAL":
                reads.globals.setdefault(str(name), set()).add(of_name)
            elif name in reads.cells:
                reads.cells[name].add(of_name)
            elif name is not None and name == first:
                reads.first.add(of_name)
            else:
                reads.attributes.update(of_name)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType) and not _add_inner(reads, inner, first):
            return None
    return reads


def _path(instructions: list[dis.Instruction], at: int) -> Path:
    """Attributes that are read, one of the other, from an instruction on. A jump may bring another value there."""
    names = []
    for instruction in instructions[at:]:
        if instruction.opname not in _ATTRIBUTES or instruction.is_jump_target:
            break
        names.append(instruction.argval)
    return tuple(names)


def _names(instruction: dis.Instruction) -> tuple[str, ...]:
    """Variables that an instruction reads or changes."""
    if instruction.opname == "LOAD_GLOBAL" or instruction.opcode in dis.haslocal or instruction.opcode in dis.hasfree:
        return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return ()


def _add_inner(reads: Reads, code: types.CodeType, first: str | None) -> bool:
    """Add what code within reads. Its variables may be any of the code around it, so they count as read as a whole."""
    inner = read_code(code)
    if inner is None:
        return False
    for name, paths in inner.globals.items():
        reads.globals.setdefault(name, set()).update(paths)
    for name, paths in inner.cells.items():
        reads.attributes.update(*paths)
        if name in reads.cells:
            reads.cells[name].add(_WHOLE)
        elif name == first:
            reads.first.add(_WHOLE)
    reads.attributes.update(inner.attributes, *inner.first)
    return True
