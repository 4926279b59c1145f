"""Numbers and lengths that Dynamo makes symbols: each call computes with its own, forward and backward, by every door into foci."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache

import foci
from compiled import check_variety, compare, several
from foci import code_fingerprint
from foci.fusion import inductor_pass
from foci.fusion.inductor import InductorPass
from foci.padding import options as padding
from padding.machines import machine

S, D = 24, 16
at = torch.arange(S)
far = (at[:, None] - at).abs()
INTS, FLOATS = (3, 4, 5, 7), (0.25, 0.5, 0.75, 1.5)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    with fresh_cache():
        yield


def tokens(length=S):
    return torch.randn(1, 2, length, D, requires_grad=True)


def of(values):
    x = tokens()
    return [(x, value) for value in values]


def sdpa(x, mask):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def by_hand(scores, x):
    return torch.softmax(scores, -1) @ x


# The graph of each has a number that is an argument.
GRAPHS = {
    "window": (lambda x, n: sdpa(x, far < n), INTS),
    "decode position": (lambda x, n: F.scaled_dot_product_attention(x[:, :, n : n + 1], x, x, attn_mask=at[None] <= n), INTS),
    "padding": (lambda x, n: sdpa(x, (at < n).expand(S, S)), INTS),
    "filled": (lambda x, n: sdpa(x, at[None] <= torch.full((S, 1), n)), INTS),
    "diagonal": (lambda x, n: sdpa(x, torch.ones(S, S, dtype=torch.bool).tril(n)), INTS),
    "start": (lambda x, n: sdpa(x, torch.arange(n, n + S)[:, None] >= 2 * at), INTS),
    "step": (lambda x, n: sdpa(x, torch.arange(0, n * S, n)[:, None] >= 4 * at), INTS),
    "blocks": (lambda x, n: sdpa(x, at[:, None] // n == at // n), INTS),
    "true or false": (lambda x, n: sdpa(x, (at[:, None] >= at) | torch.full((S, S), n > 4)), INTS),
    "masked scores": (lambda x, n: by_hand((x @ x.mT * 0.25).masked_fill(far >= n, -1e9), x), INTS),
    "int in a bias": (lambda x, n: by_hand(x @ x.mT * 0.25 - far * n, x), INTS),
    "int divides": (lambda x, n: by_hand(x @ x.mT / n, x), INTS),
    "float scale": (lambda x, c: by_hand(x @ x.mT * c, x), FLOATS),
    "float slope": (lambda x, c: by_hand(x @ x.mT * 0.25 - far * c, x), FLOATS),
    "softcap": (lambda x, c: by_hand(torch.tanh(x @ x.mT / c) * c, x), FLOATS),
    "float limit": (lambda x, c: sdpa(x, far * 0.1 < c), FLOATS),
}
EAGER = {"backend": "foci", "options": {"rest": "eager"}}


# SDPA-21
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_of_a_graph(name, dynamic):
    function, values = GRAPHS[name]
    with foci.observe() as log:
        compare(function, of(values), dynamic=dynamic, **EAGER)
    assert log.fusions and all(site.fused for site in log.fusions)


def softmax_of(x, score, mask=None):
    """Attention by hand, in torch."""
    score = score if mask is None else score.masked_fill(~mask, -torch.inf)
    return torch.softmax(score, -1) @ x


def dots(x):
    return x @ x.mT * D**-0.5


# A call of foci and the same in torch.
CALLS = {
    "mask function": (
        lambda x, n: foci.attention(x, x, x, mask=lambda b, h, i, j: j <= n),
        lambda x, n: softmax_of(x, dots(x), (at <= n).expand(S, S)), INTS,
    ),
    "window": (
        lambda x, n: foci.attention(x, x, x, mask=foci.masks.window(n)),
        lambda x, n: softmax_of(x, dots(x), (at[:, None] - at <= n) & (at[:, None] >= at)), INTS,
    ),
    "int in a score": (
        lambda x, n: foci.attention(x, x, x, score=lambda s, b, h, i, j: s - n * (i - j).abs()),
        lambda x, n: softmax_of(x, dots(x) - n * far), INTS,
    ),
    "float in a score": (
        lambda x, c: foci.attention(x, x, x, score=lambda s, b, h, i, j: s - c * (i - j).abs()),
        lambda x, c: softmax_of(x, dots(x) - c * far), FLOATS,
    ),
    "softcap": (
        lambda x, c: foci.attention(x, x, x, score=foci.scores.softcap(c)),
        lambda x, c: softmax_of(x, torch.tanh(dots(x) / c) * c), FLOATS,
    ),
    "scale": (
        lambda x, c: foci.attention(x, x, x, scale=c),
        lambda x, c: softmax_of(x, x @ x.mT * c), FLOATS,
    ),
    "excluding score": (
        lambda x, n: foci.flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: torch.where((i - j).abs() < n, s, -torch.inf)),
        lambda x, n: softmax_of(x, dots(x), far < n), INTS,
    ),
    "key lengths": (
        lambda x, n: foci.attention(x, x, x, mask=lambda b, h, i, j: j < foci.kv_len() - n),
        lambda x, n: softmax_of(x, dots(x), (at < S - n).expand(S, S)), INTS,
    ),
}  # fmt: skip


# FLEX-09
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", CALLS)
def test_of_a_call(name, dynamic):
    function, reference, values = CALLS[name]
    compare(function, of(values), reference=reference, dynamic=dynamic, **EAGER)


def graph_of_several(x, n, c):
    """In one graph, as each takes Inductor seconds."""
    return sdpa(x, far < n), sdpa(x, at[None] <= torch.full((S, 1), n)), by_hand(x @ x.mT * 0.25 - far * c, x)


def calls_of_several(x, n, c):
    return (
        foci.attention(x, x, x, mask=lambda b, h, i, j: j <= n),
        foci.attention(x, x, x, mask=foci.masks.window(n), score=lambda s, b, h, i, j: s * c),
        foci.attention(x, x, x, scale=c, score=lambda s, b, h, i, j: s + n * (i > j)),
    )


def reference_of_several(x, n, c):
    return (
        softmax_of(x, dots(x), (at <= n).expand(S, S)),
        softmax_of(x, dots(x) * c, (at[:, None] - at <= n) & (at[:, None] >= at)),
        softmax_of(x, x @ x.mT * c + n * (at[:, None] > at)),
    )


def of_both():
    x = tokens()
    return [(x, n, c) for n, c in zip(INTS, FLOATS, strict=True)]


# SDPA-08
@pytest.mark.parametrize("call", [foci.attention, foci.scaled_dot_product_attention])
def test_of_dropout(call):
    """Zero and more than zero are two graphs."""
    q, k, v = (tokens() for _ in range(3))

    def function(p):
        return call(q, k, v, dropout_p=p)

    compiled = torch.compile(function, backend="aot_eager")  # draws what eager calls draw
    for p in several(0.3, 0.5, 0.0, 0.1, 0.9, 1.0):
        found = []
        for each in (compiled, function):
            torch.manual_seed(0)
            out = each(p)
            found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        torch.testing.assert_close(*found)


# FLEX-09
@pytest.mark.parametrize("backend", ["aot_eager", "foci"])
def test_a_captured_tensor_that_is_too_short_is_refused_where_lengths_are_symbols(backend):
    ids = torch.arange(40) // 5

    def function(q):
        return foci.attention(q, q, q, mask=lambda b, h, i, j: ids[i] == ids[j])

    compiled = torch.compile(function, backend=backend)
    for length in several(24, 32, 40):
        q = tokens(length)
        torch.testing.assert_close(compiled(q), function(q))
    ids = torch.arange(30) // 5
    with pytest.raises(ValueError, match="captured tensor 0.*must have at least 40 entries"):
        compiled(tokens(40))
    compiled(tokens(30))


# SDPA-21, FLEX-09
@needs_compiler
@pytest.mark.parametrize("dynamic", [None, True])
def test_under_inductor(dynamic):
    def all_of_them(x, n, c):
        return graph_of_several(x, n, c) + calls_of_several(x, n, c)

    def reference(x, n, c):
        return graph_of_several(x, n, c) + reference_of_several(x, n, c)

    compare(all_of_them, of_both(), reference=reference, dynamic=dynamic, backend="foci", options={"rest": "inductor"})


# SDPA-21
@pytest.mark.slow
@needs_compiler
def test_under_code_in_cpp():
    function, values = GRAPHS["window"]
    compare(function, of(values), dynamic=True, backend="foci", options={"rest": "inductor", "cpp_wrapper": True})


# SDPA-21
@pytest.mark.slow
@needs_compiler
def test_under_the_pass_in_inductor():
    with torch._inductor.config.patch(pre_grad_custom_pass=inductor_pass):
        compare(graph_of_several, of_both())


# SDPA-21
@needs_compiler
def test_numbers_and_lengths_at_once():
    def attend(x, n):
        positions = torch.arange(x.shape[2])
        return sdpa(x, (positions[:, None] - positions).abs() < n)

    xs = [tokens(length) for length in (24, 30, 37, 64)]
    compare(attend, list(zip(xs, INTS, strict=True)), backend="foci")
    torch._dynamo.reset()
    for x in xs:
        torch._dynamo.mark_dynamic(x, 2)
    compare(attend, list(zip(xs, INTS, strict=True)), backend="foci")


# SDPA-21
@pytest.mark.slow
@needs_compiler
def test_a_number_beside_padded_products():
    weight = torch.randn(D, 31, requires_grad=True)

    def attend(x, w, n):
        return (sdpa(x, at[None] <= torch.full((S, 1), n)) @ w).logsumexp(-1), F.pad(x @ w, (0, n))

    x = tokens()
    settings = {"rest": "inductor", **padding.options(machine(odd=3.0, bandwidth=1e12))}
    compare(attend, [(x, weight, n) for n in INTS], backend="foci", options=settings)


@needs_compiler
@pytest.mark.parametrize("function, values", [(GRAPHS["window"][0], INTS), (CALLS["int in a score"][0], INTS)])
def test_only_a_place_without_symbols_is_fixed(function, values, monkeypatch):
    codes: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))
    model, x = torch.compile(function, backend="foci"), tokens()
    counts = []
    for value in several(*values[:3]):
        codes.clear()
        model(x, value).sum().backward()
        text = "".join(codes)
        counts.append((text.count("ward(fixed=True)"), text.count("ward(fixed=False)")))
    assert counts == [(2, 0), (0, 2), (0, 0)]  # forward and backward; the third value compiles nothing


def test_a_call_is_compared_at_three_values_or_not_at_all():
    x = tokens()
    check_variety([(x, 1), (x, 2), (x, 3)])
    check_variety([(tokens(n),) for n in (3, 4, 5)])
    for few in (
        [(x,)] * 3,
        [(x, 1), (x, 2), (x, 1)],
        [(tokens(3), 1), (tokens(4), 2), (tokens(4), 3)],
        [(tokens(n), 1) for n in (3, 4, 5)],
    ):
        with pytest.raises(AssertionError):
            check_variety(few)


@pytest.mark.parametrize("name", ["ir/emit.py", "variant.py", "fusion/direct.py", "operator/direct.py", "padding/tables/any.json"])
def test_any_change_of_foci_makes_compiled_graphs_in_caches_old(name, tmp_path, monkeypatch):
    keys = []
    for text in ("one", "two", "two"):
        for file in ("code_fingerprint.py", name):
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(code_fingerprint, "__file__", str(tmp_path / "code_fingerprint.py"))
        for remembered in (code_fingerprint.code_fingerprint, padding._fingerprint):
            remembered.cache_clear()
        keys.append((InductorPass().uuid(), padding.SizesPass().uuid(), padding.StridesPass().uuid()))
    for remembered in (code_fingerprint.code_fingerprint, padding._fingerprint):
        remembered.cache_clear()
    assert all(first != second == third for first, second, third in zip(*keys, strict=True))
