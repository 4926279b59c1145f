"""No positional tuple of five or more fields crosses a function: what travels together is a NamedTuple or a frozen dataclass.

A tuple crosses a function where it is returned, passed, stored as an attribute, written into an annotation, or unpacked from a call's
result. Elements with a star do not count: what may have any length is a sequence, not a record.

These are no records:

    lists       all elements are text, all are numbers and other constants, all are tuples, or all are calls of one function; what is unpacked
                from `range` or from `split`
    iterated    every element is treated alike: `frozenset((...))`, `map(f, (...))`, `isinstance(x, (...))`
    built       `make_tuple(Class, (...))` is how hot paths write `Class(...)`
    dimensions  `x.permute((...))`
    keys        a local tuple that its function looks up, compares or hashes, or one of the type `Hashable`, or returned as
                `tuple[object, ...]`: a type checker lets nobody use the elements
    launches    arguments of a kernel, which its signature names
    protocols   tuples that torch prescribes: autograd's `forward` and `backward`, functions that are registered with `torch.library`,
                results of `torch.ops`, and `PROTOCOLS`
"""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "foci"
LONGEST = 4
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

ITERATING = {
    "frozenset",
    "set",
    "sum",
    "min",
    "max",
    "any",
    "all",
    "sorted",
    "map",
    "hash",
    "isinstance",
    "issubclass",
    "fromkeys",
    "join",
    "zip",
}
DIMENSIONS = {"permute", "reshape", "view", "expand", "as_strided", "Size"}
BUILDING = {"make_tuple"}
LAUNCHING = {"launch", "launch_first", "launch_known", "launch_ahead", "specialize"}
LOOKING_UP = {"get", "pop", "setdefault", "hash"}

PROTOCOLS = {
    "dynamo_hop.py:run_captured": "a higher-order operator returns a plain tuple of tensors",
    "integrations/flash.py:dense_forward": "aten::_scaled_dot_product_flash_attention returns nine values",
    "integrations/flash.py:flash_forward": "aten::_flash_attention_forward returns five tensors",
    "operator/op_schema.py:module": "the type of the outputs of foci::attention",
    "operator/op_schema.py:pack_results": "the outputs of foci::attention",
    "operator/op_schema.py:flatten": "the arguments of foci::attention",
}
"""Functions whose tuples torch prescribes."""


def name_of(node):
    """Last name of a function as a call writes it."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_long(elements):
    return sum(not isinstance(element, ast.Starred) for element in elements) > LONGEST


def is_list(elements):
    """Whether all elements are written alike."""
    kinds = {
        "text" if isinstance(e, ast.JoinedStr) or (isinstance(e, ast.Constant) and isinstance(e.value, str))
        else "constant" if isinstance(e, ast.Constant)
        else "tuple" if isinstance(e, ast.Tuple)
        else f"call of {name_of(e.func)}" if isinstance(e, ast.Call)
        else e
        for e in elements if not isinstance(e, ast.Starred)
    }  # fmt: skip
    return len(kinds) == 1


def target_of(node):
    """What a node assigns to, or None."""
    return node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None


def is_opaque(node):
    """Whether a node assigns to a variable that is annotated as `Hashable`."""
    return isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Hashable"


def is_record(node):
    """Whether an expression is the literal of a positional record."""
    return isinstance(node, ast.Tuple) and is_long(node.elts) and not is_list(node.elts)


class Module:
    """A parsed file: which function a node is in, and which tuples the functions hold by name."""

    def __init__(self, source):
        self.tree = ast.parse(source)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        registered = (n for n in ast.walk(self.tree) if isinstance(n, ast.Call) and name_of(n.func).lstrip("_").startswith("register"))
        self.registered = {n.id for call in registered for n in ast.walk(call) if isinstance(n, ast.Name)}
        self.tuples = {
            (self.function(n), target_of(n).id)
            for n in ast.walk(self.tree)
            if isinstance(target_of(n), ast.Name) and is_record(n.value) and not is_opaque(n) and self.function(n) is not None
        }
        self.keys = {(self.function(n), n.id) for n in ast.walk(self.tree) if isinstance(n, ast.Name) and self.is_looked_up(n)}

    def function(self, node):
        """The function around a node, or None."""
        node = self.parents.get(node)
        while node is not None and not isinstance(node, FUNCTIONS):
            node = self.parents.get(node)
        return node

    def is_looked_up(self, name):
        """Whether a name is used as a key at this place."""
        parent = self.parents[name]
        if isinstance(parent, ast.Call):
            return name_of(parent.func) in LOOKING_UP and name in parent.args
        return isinstance(parent, ast.Compare) or (isinstance(parent, ast.Subscript) and parent.slice is name)

    def qualified_name(self, node):
        """`Class.method` of the function around a node."""
        names = []
        while node is not None:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.append(node.name)
            node = self.parents.get(node)
        return ".".join(reversed(names)) or "module"

    def is_protocol(self, function):
        """Whether torch's autograd or registry calls a function."""
        parent = self.parents.get(function)
        bases = [name_of(base) for base in parent.bases] if isinstance(parent, ast.ClassDef) else []
        return "Function" in bases or getattr(function, "name", None) in self.registered

    def holds_record(self, node):
        """Whether an expression is a record, or a local name of one that is no key."""
        if isinstance(node, ast.Name):
            at = (self.function(node), node.id)
            return at in self.tuples and at not in self.keys
        if isinstance(node, ast.IfExp):
            return self.holds_record(node.body) or self.holds_record(node.orelse)
        return is_record(node)

    def crossings(self):
        """(function, line, kind) of each positional record that crosses a function."""
        for node in ast.walk(self.tree):
            kind = self.kind(node)
            if kind is not None:
                yield self.qualified_name(node), node.lineno, kind

    def kind(self, node):
        """How a node lets a record cross a function, or None."""
        if isinstance(node, (ast.Lambda, ast.Yield)):
            return "returned" if self.holds_record(node.body if isinstance(node, ast.Lambda) else node.value) else None
        if isinstance(node, ast.Return):
            return "returned" if self.holds_record(node.value) and not self.is_free_return(node) else None
        if isinstance(node, ast.Call):
            free = name_of(node.func) in ITERATING | DIMENSIONS | BUILDING | LAUNCHING | LOOKING_UP
            return "passed" if not free and any(map(self.holds_record, (*node.args, *(k.value for k in node.keywords)))) else None
        if isinstance(node, ast.Subscript) and name_of(node.value) in ("tuple", "Tuple"):
            return "annotated" if is_record(node.slice) else None
        target = target_of(node)
        if isinstance(target, (ast.Attribute, ast.Subscript)):
            return "stored" if self.holds_record(node.value) else None
        unpacks = isinstance(target, ast.Tuple) and is_long(target.elts) and isinstance(node.value, ast.Call)
        return "unpacked" if unpacks and not self.is_free_unpacking(node.value) else None

    def is_free_return(self, node):
        function = self.function(node)
        returns = ast.unparse(function.returns) if getattr(function, "returns", None) is not None else ""
        is_sequence = returns.startswith("tuple[") and returns.endswith(", ...]") and "Any" not in returns
        return is_sequence or returns == "Hashable" or self.is_protocol(function)

    def is_free_unpacking(self, call):
        return name_of(call.func) in ("range", "split") or ast.unparse(call.func).startswith("torch.ops.")


def crossings(path):
    """Crossings of a file that torch does not prescribe, with the file's name before the function's."""
    file = path.relative_to(SOURCE).as_posix()
    found = ((f"{file}:{name}", line, kind) for name, line, kind in Module(path.read_text("utf-8")).crossings())
    return [crossing for crossing in found if crossing[0] not in PROTOCOLS]


FOUND = [crossing for path in sorted(SOURCE.rglob("*.py")) for crossing in crossings(path)]


def test_no_long_tuple_crosses_a_function():
    assert FOUND == []


RECORD = "a, b + 1, f(c), d, 5"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (f"def f(): return {RECORD}", "returned"),
        (f"def f():\n    x = {RECORD}\n    return x", "returned"),
        (f"def f(): return ({RECORD}) if x else None", "returned"),
        (f"def f(): yield {RECORD}", "returned"),
        (f"f = lambda: ({RECORD})", "returned"),
        (f"def f(): g(({RECORD}))", "passed"),
        (f"def f(): g(h=({RECORD}))", "passed"),
        (f"def f():\n    x = {RECORD}\n    g(x)", "passed"),
        (f"def f(self): self.x = {RECORD}", "stored"),
        (f"def f(self): self.x[y] = {RECORD}", "stored"),
        (f"def f():\n    x: tuple[Any, ...] = {RECORD}\n    return x", "returned"),
        ("def f() -> tuple[int, int, str, int, int]: ...", "annotated"),
        ("def f(x: dict[str, tuple[int, int, str, int, int]]): ...", "annotated"),
        ("a, b, c, d, e = f()", "unpacked"),
        ("a, b, *c, d, e, g = f()", "unpacked"),
        (f"class F:\n    def backward(ctx): return {RECORD}", "returned"),
        (f"def f() -> tuple[Any, ...]: return {RECORD}", "returned"),
    ],
)
def test_records_are_found(source, kind):
    assert [found for *_, found in Module(source).crossings()] == [kind]


@pytest.mark.parametrize(
    "source",
    [
        "def f(): return a, b, c, d",
        "def f(): return *a, b, c, d, e",
        "def f(): return 'a', 'b', f'{c}', 'd', 'e'",
        "def f(): return g(1), g(2), g(3), g(4), g(5)",
        "TABLE = [(a, 1, 2, 3, 'b')]",
        f"frozenset(({RECORD}))",
        f"isinstance(x, ({RECORD}))",
        f"P(*map(encode, ({RECORD})))",
        f"make_tuple(P, ({RECORD}))",
        f"x.permute(({RECORD}))",
        f"def f():\n    key = {RECORD}\n    known = cache.get(key)\n    g(key)",
        f"def f():\n    key = {RECORD}\n    cache[key] = x\n    g(key)",
        f"def f():\n    key: Hashable = {RECORD}\n    g(key)",
        f"def f() -> tuple[object, ...]: return {RECORD}",
        f"kernel.launch({RECORD}, ({RECORD}))",
        f"class F(torch.autograd.Function):\n    def backward(ctx): return {RECORD}",
        f"def f(): return {RECORD}\ntorch.library.register_fake('x', f)",
        "a, b, c, d, e = torch.ops.foci.attention(x)",
        "a, b, c, d, e = range(5)",
    ],
)
def test_what_is_no_record_is_left_alone(source):
    assert list(Module(source).crossings()) == []
