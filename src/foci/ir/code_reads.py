"""The names that code reads, found in its bytecode: globals, closure variables, its first argument, and attributes of any of these.

A path names what the code reads of a variable: `()` the value as a whole, `("config", "window")` its attribute `.config.window` alone.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Container
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
_WRITES_OF_CLOSURES: Final = frozenset(("DELETE_DEREF", "STORE_DEREF"))


class Reads(NamedTuple):
    """The names that code, and the code within it, reads.

    Attributes:
        globals: the paths of each global and builtin.
        cells: the paths of each closure variable.
        first: the paths of the first argument.
        attributes: attributes of any other value.
    """

    globals: dict[str, set[Path]]
    cells: dict[str, set[Path]]
    first: set[Path]
    attributes: set[str]

    @property
    def names(self) -> set[str]:
        """Every name: of globals, and of attributes of any value."""
        paths = [path for every in (*self.globals.values(), *self.cells.values(), self.first) for path in every]
        return self.attributes.union(self.globals, *paths)


def read_code(code: types.CodeType) -> Reads | None:
    """Return the names that code reads; None if it imports, assigns to a global, an attribute or a closure variable, or compares
    identities other than those of constants: equal numbers and strings may be one object in one call and two in the next."""
    reads = Reads({}, {name: set() for name in code.co_freevars}, set(), set())
    first = code.co_varnames[0] if code.co_argcount else None
    instructions = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    at = 0
    while at < len(instructions):
        instruction = instructions[at]
        at += 1
        path = _WHOLE
        if instruction.opname in _VARIABLES:
            path = _find_path(instructions, at)
            at += len(path)
        elif instruction.opname in _ATTRIBUTES:
            reads.attributes.add(instruction.argval)
        elif _is_refused(instruction, instructions[at - 2], reads.cells):
            return None
        *before, last = _find_variables(instruction) or (None,)
        for name, name_path in (*((name, _WHOLE) for name in before), (last, path)):
            if instruction.opname == "LOAD_GLOBAL":
                reads.globals.setdefault(str(name), set()).add(name_path)
            elif name in reads.cells:
                reads.cells[name].add(name_path)
            elif name is not None and name == first:
                reads.first.add(name_path)
            else:
                reads.attributes.update(name_path)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType) and not _add_inner(reads, inner, first):
            return None
    return reads


def _is_refused(instruction: dis.Instruction, previous: dis.Instruction, cells: Container[str]) -> bool:
    """Whether an instruction makes code unreadable, as `read_code` has it."""
    if instruction.opname == "IS_OP":
        return previous.opname != "LOAD_CONST" or not (previous.argval is None or isinstance(previous.argval, bool))
    is_write = instruction.opname in _WRITES_OF_CLOSURES and instruction.argval in cells
    return is_write or (instruction.opcode in dis.hasname and instruction.opname != "LOAD_GLOBAL")


def _find_path(instructions: list[dis.Instruction], at: int) -> Path:
    """The chain of attributes from an instruction on. It ends before a jump target, where the value may be another variable's."""
    names = []
    for instruction in instructions[at:]:
        if instruction.opname not in _ATTRIBUTES or instruction.is_jump_target:
            break
        names.append(instruction.argval)
    return tuple(names)


def _find_variables(instruction: dis.Instruction) -> tuple[str, ...]:
    """Variables that an instruction reads or assigns."""
    if instruction.opname == "LOAD_GLOBAL" or instruction.opcode in dis.haslocal or instruction.opcode in dis.hasfree:
        return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return ()


def _add_inner(reads: Reads, code: types.CodeType, first: str | None) -> bool:
    """Add the names that inner code reads; False if these are not known. Its closure variables may belong to any enclosing code, so they
    count as whole values."""
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
