"""Masks and scores as words on the command line: an example's name, or an expression such as `causal & window(128)`."""

from __future__ import annotations

import ast
import contextlib
import difflib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import foci
from foci.mask_examples import MaskExample, ScoreExample, Sizes

__all__ = ["Unknown", "given_for", "read_mask", "read_score"]

T = TypeVar("T")

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.RShift: operator.rshift,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.Invert: operator.invert, ast.USub: operator.neg}


class Unknown(ValueError):
    """Words that name no mask, score or other choice. The message says what would.

    Attributes:
        option: that the words were given for, such as --mask; None where several options together are wrong.
    """

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


@contextlib.contextmanager
def given_for(option: str) -> Iterator[None]:
    """Inside, each `Unknown` names an option."""
    try:
        yield
    except Unknown as error:
        error.option = option
        raise


def read_mask(text: str, sizes: Sizes) -> foci.Mask:
    """The mask that `text` names, built for `sizes`.

    Example:
        >>> from foci.mask_examples import Sizes
        >>> read_mask("causal & ~window(8)", Sizes())
        Mask((causal & ~window(8, 0)))
    """
    return _read(text, sizes, foci.masks.EXAMPLES, foci.masks, foci.Mask)


def read_score(text: str, sizes: Sizes) -> foci.Score:
    """The score that `text` names, built for `sizes`."""
    return _read(text, sizes, foci.scores.EXAMPLES, foci.scores, foci.Score)


def _read(text: str, sizes: Sizes, examples: Sequence[MaskExample] | Sequence[ScoreExample], module: Any, kind: type[T]) -> T:
    named = {example.name: example for example in examples}
    if text in named:
        if not named[text].fits(sizes):
            raise Unknown(f"the example {text!r} does not make sense for {sizes}")
        built = named[text].build(sizes)
    else:
        built = _evaluate(_parse(text), text, {name: getattr(module, name) for name in module.__all__}, sorted(named))
    if not isinstance(built, kind):
        raise Unknown(f"{text!r} is no {kind.__name__.lower()}")
    return built


def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise Unknown(f"{text!r} does not read as an expression: {error.msg}") from error


def _evaluate(node: ast.expr, text: str, functions: Mapping[str, Any], examples: Sequence[str]) -> Any:
    """Names and calls of `functions`, literals, and the operators that compose: nothing else runs."""

    def inner(part: ast.expr) -> Any:
        return _evaluate(part, text, functions, examples)

    def function(name: str) -> Any:
        if name in functions:
            return functions[name]
        near = difflib.get_close_matches(name, sorted({*functions, *examples}), n=3)
        raise Unknown(f"there is no {name!r}{': did you mean ' + ' or '.join(near) + '?' if near else ''}; examples: {', '.join(examples)}")

    match node:
        case ast.Constant(value=value) if isinstance(value, int | float | str) or value is None:
            return value
        case ast.Tuple(elts=parts):
            return tuple(inner(part) for part in parts)
        case ast.Name(id=name):
            return _call(function(name), name, (), {})
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords) if all(word.arg for word in keywords):
            return _call(function(name), name, [inner(a) for a in arguments], {str(word.arg): inner(word.value) for word in keywords})
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _BINARY[type(sign)](inner(left), inner(right))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](inner(operand))
    raise Unknown(
        f"{ast.unparse(node)!r} in {text!r}: only names, calls with literal arguments, and & | ~ >> are read, not functions of your own"
    )


def _call(function: Callable[..., Any], name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    try:
        return function(*arguments, **keywords)
    except (TypeError, ValueError) as error:
        raise Unknown(f"{name}: {error}") from error
