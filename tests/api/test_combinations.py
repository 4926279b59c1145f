"""Features drawn together, by way of the public functions, against the formula in float64: forward and every gradient."""

import math
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import foci
from foci.dropout import keep

GENERATOR = torch.Generator()


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def tables(heads, batch):
    return {
        "slope": rand(heads) * 0.2,
        "relative": rand(heads, 13),
        "batch": rand(batch) * 0.5 + 1,
        "number": rand(1),
        "rows": rand(batch, 6),
    }


SCORES = {
    "none": ((), None),
    "slopes": (("slope",), lambda t: lambda s, b, h, i, j: s - t["slope"][h] * (i - j).abs()),
    "cap": ((), lambda t: lambda s, b, h, i, j: 5 * torch.tanh(s / 5)),
    "distances": (("relative",), lambda t: lambda s, b, h, i, j: s + t["relative"][h, (i - j).clamp(-6, 6) + 6]),
    "of the entry": (("batch",), lambda t: lambda s, b, h, i, j: s * t["batch"][b] + 0.125 * h),
    "curved": (("number",), lambda t: lambda s, b, h, i, j: torch.sin(s) * s.abs() + torch.where(i > j, t["number"][0], -t["number"][0])),
    "row sums": (("rows",), lambda t: lambda s, b, h, i, j: s + t["rows"][b].sum(-1) * 0.1),
    "hiding": (("slope",), lambda t: lambda s, b, h, i, j: torch.where((i * 3 + j * 5) % 4 != 0, s * t["slope"][h], -torch.inf)),
}
MASKS = {
    "none": (None, lambda b, h, i, j, q, kv: torch.ones_like(i + j, dtype=torch.bool)),
    "causal": (foci.masks.causal(), lambda b, h, i, j, q, kv: i >= j),
    "lower right": (foci.masks.causal_lower_right(), lambda b, h, i, j, q, kv: j <= i + kv - q),
    "window": (foci.masks.window(3, 2), lambda b, h, i, j, q, kv: (i - j <= 3) & (j - i <= 2)),
    "outside": (~foci.masks.window(1, 1), lambda b, h, i, j, q, kv: (i - j > 1) | (j - i > 1)),
    "lengths": (
        foci.Mask(lambda b, h, i, j: (j < foci.kv_len() - 1) & (i >= foci.q_len() - 7)),
        lambda b, h, i, j, q, kv: (j < kv - 1) & (i >= q - 7),
    ),
    "odd": (lambda b, h, i, j: ((i + j + h) % 3 != 0) | (b == 1), lambda b, h, i, j, q, kv: ((i + j + h) % 3 != 0) | (b == 1)),
}
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 8e-3}


@dataclass(frozen=True)
class Drawn:
    seed: int
    score: str
    mask: str
    dtype: torch.dtype
    kv_heads: int
    groups: int
    lengths: tuple[tuple[int, int], ...]
    layout: str
    widths: tuple[int, int]
    dropout: float
    sink: bool
    aux: frozenset[str]
    scale: float | None
    apart: bool
    backend: str
    needs_grad: frozenset[str]
    used: tuple[frozenset[str], ...]  # for each turn, outputs that the loss is made of


def uses(names):
    """Sets of outputs, most of them with the first."""
    some = st.frozensets(st.sampled_from(names), min_size=1)
    return st.one_of(st.just(frozenset(names[:1])), some.map(lambda used: used | {names[0]}), some)


@st.composite
def drawn(draw):
    layout = draw(st.sampled_from(["dense", "nested", "packed", "paged"]))
    pair = st.tuples(st.sampled_from([0, 1, 5, 17, 33]), st.sampled_from([1, 4, 16, 30]))
    lengths = draw(st.lists(pair, min_size=1, max_size=3))
    if layout in ("dense", "paged"):
        lengths = [(max(1, lengths[0][0]), lengths[0][1])] * len(lengths)
    other = {"dense": ["lse", "row_max", "column_sums", "weights"], "packed": ["lse"]}.get(layout, ["lse", "row_max", "column_sums"])
    has_sink = layout != "packed" and draw(st.booleans())
    aux = draw(st.sets(st.sampled_from(other)))
    return Drawn(
        seed=draw(st.integers(0, 1000)),
        score=draw(st.sampled_from(list(SCORES))),
        mask=draw(st.sampled_from(list(MASKS))),
        dtype=draw(st.sampled_from(list(TOLERANCES))),
        kv_heads=draw(st.integers(1, 2)),
        groups=draw(st.integers(1, 3)),
        lengths=tuple(lengths),
        layout=layout,
        widths=(draw(st.sampled_from([1, 8, 13])), draw(st.sampled_from([5, 8]))),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.3])),
        sink=has_sink,
        aux=frozenset(aux - {"column_sums"} if has_sink and layout == "paged" else aux),
        scale=draw(st.sampled_from([None, 0.3, -0.5])),
        apart=draw(st.booleans()),
        backend=draw(st.sampled_from(["blocked", "reference", "cpu"])),
        needs_grad=frozenset(draw(st.sets(st.sampled_from(["query", "key", "value", "captured", "sink"]), min_size=1))),
        used=tuple(draw(st.lists(uses(["out", *sorted(aux)]), min_size=1, max_size=4))),
    )


def formula(case, query, key, value, score, sink, number, seed):
    """Of one entry or sequence, query [Sq, Hq, D]: out [Sq, Hq, Dv], and what may be asked for besides."""
    q_len, heads, dim = query.shape
    key, value = (t.repeat_interleave(case.groups, 1).transpose(0, 1) for t in (key, value))
    at = [torch.full((1, 1, 1), number), *(torch.arange(n) for n in (heads, q_len, key.shape[1]))]
    b, h, i, j = at[0], at[1][:, None, None], at[2][:, None], at[3]
    scores = query.transpose(0, 1) @ key.mT * (1 / math.sqrt(dim) if case.scale is None else case.scale)
    scores = scores if score is None else score(scores, b, h, i, j).expand(scores.shape)
    attends = MASKS[case.mask][1](b, h, i, j, q_len, key.shape[1]).expand(scores.shape) & (scores > -torch.inf)
    logits = torch.where(attends, scores, 0.0).masked_fill(~attends, -torch.inf)
    joined = logits if sink is None else torch.cat([logits, sink[:, None, None].expand(heads, q_len, 1)], -1)
    some = (joined > -torch.inf).any(-1, keepdim=True)
    lse = torch.logsumexp(torch.where(some, joined, 0.0), -1, keepdim=True)
    weights = torch.where(attends, torch.exp(torch.where(attends, scores, 0.0) - lse), 0.0)
    dropped = weights
    if case.dropout:
        dropped = torch.where(keep(seed, case.dropout, b, h, i, j), weights / (1 - case.dropout), 0.0)
    results = {
        "lse": torch.where(some, lse, -torch.inf)[..., 0].mT,
        "row_max": logits.amax(-1).mT,
        "column_sums": weights.sum(1).mT,
        "weights": weights.transpose(0, 1),
    }
    return (dropped @ value).transpose(0, 1), results


def expected(case, tensors, score, sink, seed):
    spans = [(sum(n[0] for n in case.lengths[:m]), sum(n[1] for n in case.lengths[:m])) for m in range(len(case.lengths))]
    query, key, value = tensors
    parts = []
    for number, ((q0, kv0), (q_len, kv_len)) in enumerate(zip(spans, case.lengths, strict=True)):
        keys = slice(kv0, kv0 + kv_len)
        parts.append(formula(case, query[q0 : q0 + q_len], key[keys], value[keys], score, sink, number, seed))
    return {"out": torch.cat([p[0] for p in parts]), **{name: torch.cat([p[1][name] for p in parts]) for name in case.aux}}


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)])


def attended(case, tensors, score, sink):
    """What foci finds, by the layout's entry point, as rows [tokens, Hq, ...]."""
    q_lengths, kv_lengths = ([pair[n] for pair in case.lengths] for n in (0, 1))
    mask, batch = MASKS[case.mask][0], len(case.lengths)
    options = {"mask": mask, "score": score, "scale": case.scale, "dropout_p": case.dropout}
    asked = foci.AuxRequest(**dict.fromkeys(case.aux, True))
    query, key, value = tensors
    if case.layout == "packed":
        cu_q, cu_kv = offsets(q_lengths), offsets(kv_lengths)
        out, lse = foci.varlen_attn(
            *tensors, cu_q, cu_kv, max(q_lengths), max(kv_lengths), enable_gqa=True, return_aux=asked_lse, **options
        )
        return {"out": out, "lse": lse.mT}
    if case.layout == "nested":
        query, key, value = (
            torch.nested.nested_tensor_from_jagged(t, offsets(n), min_seqlen=min(n), max_seqlen=max(n)).transpose(1, 2)
            for t, n in ((query, q_lengths), (key, kv_lengths), (value, kv_lengths))
        )
        out, aux = foci.attention(query, key, value, sink=sink, return_aux=asked, **options)
        return {"out": out.transpose(1, 2).values(), **{name: getattr(aux, name).transpose(1, 2).values() for name in case.aux}}
    query, key, value = (t.unflatten(0, (batch, -1)).transpose(1, 2) for t in tensors)
    if case.layout == "dense":
        out, aux = foci.attention(query, key, value, sink=sink, return_aux=asked, **options)
    else:
        pool, table = zip(*(paged(t.detach(), kv_lengths[0]) for t in (key, value)), strict=True)
        lengths = torch.tensor(kv_lengths)
        out, aux = foci.paged_attention(query, *pool, table[0], lengths, max_kv=kv_lengths[0], sink=sink, return_aux=asked, **options)
    rows = {"out": out, **{name: getattr(aux, name) for name in case.aux}}
    return {name: t.transpose(1, 2).flatten(0, 1) for name, t in rows.items()}


class asked_lse:
    lse = True


def paged(dense, length, page=8):
    """A pool whose pages lie in another order, with NaN where no token is, and its table."""
    batch, heads, _, dim = dense.shape
    count = -(-length // page)
    table = torch.arange(batch * count).flip(0).view(batch, count)
    padded = torch.nn.functional.pad(dense, (0, 0, 0, count * page - length), value=torch.nan)
    pool = torch.empty(batch * count, heads, page, dim, dtype=dense.dtype)
    pool[table.flatten()] = padded.unflatten(2, (count, page)).transpose(1, 2).flatten(0, 1)
    return pool, table


def gradients(results, leaves, wanted, used):
    """Of a weighted sum of what is used and differentiable; -inf counts as nothing. Weights that every dtype holds arrive as gradients
    unrounded."""
    generator, total = torch.Generator().manual_seed(7), torch.zeros(())
    for name in sorted(results):
        weights = torch.randn(wanted[name].shape, generator=generator).bfloat16().double()
        if name != "row_max" and name in used:
            total = total + (torch.where(wanted[name].isfinite(), results[name].double(), 0.0) * weights).sum()
    if not total.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


TERMS = 16
"""Of a sum, that the tolerance is for. Rounding errors of more terms add up as their square root does, also where the sum is exactly zero."""


def close(name, actual, wanted, dtype, terms=TERMS):
    actual, wanted = actual.detach().double(), wanted.detach().double()
    assert actual.shape == wanted.shape, name
    hidden = wanted.isinf()
    assert torch.equal(actual.isinf(), hidden), name
    actual, wanted = actual.masked_fill(hidden, 0), wanted.masked_fill(hidden, 0)
    scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    scale *= max(1.0, math.sqrt(terms / TERMS))
    torch.testing.assert_close(actual, wanted, atol=TOLERANCES[dtype] * scale, rtol=0, msg=lambda text: f"{name}: {text}")


# FLEX-07, FLEX-11, JAG-04
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(drawn())
def test_combined_features_are_the_formula(case):
    GENERATOR.manual_seed(case.seed)
    heads, (dim, width) = case.kv_heads * case.groups, case.widths
    q_tokens, kv_tokens = (sum(pair[n] for pair in case.lengths) for n in (0, 1))
    tensors = [rand(q_tokens, heads, dim), rand(kv_tokens, case.kv_heads, dim), rand(kv_tokens, case.kv_heads, width)]
    tensors = [t.to(case.dtype) for t in tensors]
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    names, make = SCORES[case.score]
    captured = {name: t.to(wide) for name, t in tables(heads, len(case.lengths)).items()}
    sink = rand(heads).to(wide) if case.sink else None
    if case.backend == "cpu" and (case.dtype == torch.float64 or "weights" in case.aux):
        return

    labels = ["query", "key", "value", *names, *([] if sink is None else ["sink"])]
    drawn_tensors = [*tensors, *(captured[name] for name in names), *([] if sink is None else [sink])]
    needs_grad = ["captured" if name in names else name for name in labels]

    def functions(cast):
        """Leaves, and what reads them: query, key and value, the score function, the sink."""
        leaves = [cast(t).clone().requires_grad_(name in case.needs_grad) for t, name in zip(drawn_tensors, needs_grad, strict=True)]
        score = None if make is None else make(dict(zip(names, leaves[3:], strict=False)))
        return leaves, score, None if sink is None else leaves[-1]

    ours, exact = functions(lambda t: t), functions(torch.Tensor.double)
    for turn, used in enumerate(case.used):
        if turn:  # the same tensors and functions, of other values
            with torch.no_grad():
                for mine, wide_one in zip(ours[0], exact[0], strict=True):
                    wide_one.copy_(mine.copy_(mine.flip(0) * 0.75))
        agrees(case, labels, ours, exact, used)


def agrees(case, labels, ours, exact, used):
    """Whether a call finds what the formula does, gradients of the outputs `used` included."""

    def found_by(function, leaves, score, sink):
        given_tensors = [t[..., None].expand(*t.shape, 2)[..., 0] for t in leaves[:3]] if case.apart else leaves[:3]
        torch.manual_seed(case.seed)
        return function(given_tensors, score, sink)

    with foci.use(case.backend):
        results = found_by(lambda *call: attended(case, *call), *ours)
        torch.manual_seed(case.seed)
        seed = torch.randint(0, 2**63 - 1, (1,))
        wanted = found_by(lambda *call: expected(case, *call, seed), *exact)
        results = {name: results[name] for name in wanted}
        for name, value in wanted.items():
            close(name, results[name], value, case.dtype)
        named = [(name, mine, wide) for name, mine, wide in zip(labels, ours[0], exact[0], strict=True) if mine.requires_grad]
        if case.layout == "paged":  # pages take no gradient
            named = [row for row in named if row[0] not in ("key", "value")]
        if not named or used == {"row_max"}:
            return
        grads = gradients(results, [mine for _, mine, _ in named], wanted, used)
        queries = case.groups * max(q_len for q_len, _ in case.lengths)  # that attend to a key
        distances = max(max(pair) for pair in case.lengths) ** 2 / 3  # a slope's gradient is of scores times distances, of these squares
        terms = {"key": queries, "slope": queries * distances}
        for (name, _, _), grad, other in zip(named, grads, gradients(wanted, [wide for *_, wide in named], wanted, used), strict=True):
            close(f"gradient of {name}", grad, other, case.dtype, terms.get(name, TERMS))
