"""The Hopper forward on a GPU: every schedule on the same problems, sequences side by side, repeats, replays."""

import math
from dataclasses import replace

import pytest
import torch
from posed import exact, kernel_of, posed

import foci
from foci import masks, scores
from foci.backends.hopper import schedules
from foci.problem import Outputs

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
]


def check(actual, wanted):
    there = wanted.lse.isfinite()
    assert ((actual.out.double() - wanted.out).norm() / wanted.out.norm()).item() < 6e-3
    assert torch.equal(actual.lse.isfinite(), there)
    assert (actual.lse.double() - wanted.lse)[there].abs().max().item() < 2e-3
    assert (actual.row_max.double() - wanted.row_max)[there].abs().max().item() < 1e-2


DOCUMENTS = torch.arange(1000) // 70
CASES = {
    "plain": {},
    "other lengths, grouped, float16": {"rows": 300, "keys": 777, "kv_heads": 2, "dtype": torch.float16},
    "causal": {"mask": masks.causal()},
    "causal, more keys": {"mask": masks.causal(), "rows": 300, "keys": 900},
    "causal, more queries": {"mask": masks.causal(), "rows": 900, "keys": 300},
    "causal alibi": {"mask": masks.causal(), "score": scores.alibi(4)},
    "farther is more": {"score": foci.Score(lambda s, b, h, q, k: s + 0.3 * (q - k)), "keys": 777},
    "jagged alibi": {"lengths": [100, 1, 700, 0, 128, 333], "score": scores.alibi(4), "mask": masks.window(150)},
    "softcap": {"score": scores.softcap(2.0)},
    "window": {"mask": masks.window(100)},
    "window, more queries": {"mask": masks.window(100), "rows": 900, "keys": 300},
    "wide window": {"mask": masks.window(400)},
    "window to both sides": {"mask": masks.window(30, 60)},
    "jagged window": {"lengths": [100, 1, 700, 0, 128, 333], "mask": masks.window(150)},
    "document": {"mask": foci.Mask(lambda b, h, q, k: DOCUMENTS.cuda()[q] == DOCUMENTS.cuda()[k])},
    "document, alone": {"mask": foci.Mask(lambda b, h, q, k: (DOCUMENTS.cuda()[q] == DOCUMENTS.cuda()[k]) & (q % 300 > 70))},
    "document alibi": {"mask": foci.Mask(lambda b, h, q, k: DOCUMENTS.cuda()[q] == DOCUMENTS.cuda()[k]), "score": scores.alibi(4)},
    "dropout": {"dropout": 0.2},
    "negative scale": {"scale": -0.1},
    "jagged": {"lengths": [100, 1, 700, 0, 128, 333]},
    "jagged causal": {"lengths": [100, 1, 700, 0, 128, 333], "mask": masks.causal()},
    "narrow": {"dim": 16, "value_dim": 64},
}


def schedule_named(name):
    """One of the backend's own; "placed" are its tasks where they are not asked for."""
    name, _, how = name.partition(" ")
    schedule = schedules.SCHEDULES[name]
    return replace(schedule, static=True) if how else schedule


def check_repeats(kernel, operands, first, times):
    """The same bits each time: noted the first time, a pass is launched again as it was."""
    for _ in range(times):
        again = kernel.forward(operands)
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)


@pytest.mark.parametrize(
    ("schedule", "dim"),
    [
        *(("OVERLAP_2", 128), ("OVERLAP_2_LISTS", 128), ("TURNS_3", 128), ("TURNS_3_BRIEF", 128), ("TURNS_3_NAMED", 128)),
        *(
            ("TURNS_3_QREG", 64),
            ("TURNS_3_QREG", 32),
            ("TURNS_3_QREG_SORTED", 64),
            ("TURNS_3_BRIEF", 96),
            ("TURNS_3_STATIC", 64),
            ("TURNS_3_LOOP", 96),
            ("OVERLAP_2_D192", 192),
        ),
        *(("TURNS_3_NAMED placed", 128), ("TURNS_3_QREG placed", 64)),
        *(
            ("PAIRED_2", 64),
            ("PAIRED_2_PACKED", 64),
            ("PAIRED_2_SERPENTINE", 64),
            ("PAIRED_2_QUEUE", 64),
            ("PAIRED_2_SORTED", 64),
            ("OVERLAP_2_KV64", 128),
            ("TURNS_2", 128),
            ("TURNS_2_SERPENTINE", 96),
        ),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_every_schedule_solves_every_problem(name, schedule, dim, monkeypatch):
    from foci.backends.hopper import forward_pass as host

    monkeypatch.setattr(host, "forward_schedule", lambda problem, sizes: schedule_named(schedule))
    monkeypatch.setattr(host, "count_sms", lambda device: 5)  # programs of several tasks
    case = CASES[name]
    asked, operands = posed(**{"dim": dim, **case})
    kernel = kernel_of("hopper", asked)
    first = kernel.forward(operands)
    check(first, exact(asked, operands))
    check_repeats(kernel, operands, first, 40)


DENSE = ("plain", "other lengths, grouped, float16", "causal, more keys", "negative scale", "narrow")


@pytest.mark.parametrize(
    ("schedule", "dim"),
    [("OVERLAP_2_LOOP", 128), ("OVERLAP_2_LOOP placed", 128), ("OVERLAP_2_LOOP placed", 64), ("OVERLAP_2_LOOP placed", 16)],
)
@pytest.mark.parametrize("name", DENSE)
def test_overlapped_programs_of_several_tasks_solve_dense_problems(name, schedule, dim, monkeypatch):
    test_every_schedule_solves_every_problem(name, schedule, dim, monkeypatch)


@pytest.mark.parametrize(
    ("schedule", "dim"),
    [
        ("TURNS_3_QREG_SORTED", 64),
        ("PAIRED_2_SORTED", 64),
        ("OVERLAP_2_LISTS", 128),
        ("OVERLAP_2_KV64", 128),
        ("OVERLAP_2", 128),
        ("OVERLAP_2_D192", 192),
    ],
)
@pytest.mark.parametrize("name", ["document", "document, alone", "document alibi", "by head", "few keys", "jagged"])
def test_tiles_begin_where_keys_are_attended_to(name, schedule, dim, monkeypatch):
    """As in long forwards, and tasks by their length."""
    from foci.backends.hopper import forward_pass as host

    owners = (torch.arange(1000) % 17 == 0).cumsum(0).cuda() // 3
    masks_of = {
        "by head": {"mask": foci.Mask(lambda b, h, q, k: (owners[q] == owners[k]) & ((k - q) % (h + b + 2) == 0))},
        "few keys": {"mask": foci.Mask(lambda b, h, q, k: (owners[k] % 5 == 3) & (q % 3 > 0))},
        "jagged": {"mask": foci.Mask(lambda b, h, q, k: owners[q] <= owners[k]), "lengths": [100, 1, 700, 0, 128, 333]},
    }
    monkeypatch.setattr(host, "SHORT_FORWARD_TILES", 0)
    monkeypatch.setattr(host, "forward_schedule", lambda problem, sizes: schedule_named(schedule))
    monkeypatch.setattr(host, "count_sms", lambda device: 5)
    asked, operands = posed(**{"dim": dim, **(masks_of.get(name) or CASES[name])})
    kernel = kernel_of("hopper", asked)
    first = kernel.forward(operands)
    check(first, exact(asked, operands))
    check_repeats(kernel, operands, first, 20)


@pytest.mark.parametrize(
    ("schedule", "dim"),
    [
        ("OVERLAP_2_LISTS", 128),
        ("TURNS_2", 128),
        ("OVERLAP_2_LOOP placed", 128),
        ("TURNS_3_QREG", 64),
        ("TURNS_3_QREG placed", 64),
        ("PAIRED_2", 64),
        ("TURNS_3_STATIC", 64),
    ],
)
@pytest.mark.parametrize("rows", [700, 100])
def test_the_same_comes_of_one_round_of_programs_and_of_halves_of_tasks(schedule, dim, rows, monkeypatch):
    """15 programs, or 14 by twos, leave 2, 3 or 6 tasks of 700 rows for a last round, each then for two programs."""
    from foci.backends.hopper import forward_pass as host

    monkeypatch.setattr(host, "forward_schedule", lambda problem, sizes: schedule_named(schedule))
    asked, operands = posed(rows=rows, dim=dim)
    runs = []
    for programs in (15, 1000):
        processors = programs // schedule_named(schedule).programs_per_sm
        monkeypatch.setattr(host, "count_sms", lambda device, n=processors: n)
        runs.append(kernel_of("hopper", asked).forward(operands))
    halved, alone = runs
    check(halved, exact(asked, operands))
    assert torch.equal(halved.out, alone.out)
    assert torch.equal(halved.lse, alone.lse)


@pytest.mark.parametrize("rows", [512, 450, 130])
def test_tasks_of_many_rounds_are_each_done_once(rows, monkeypatch):
    """By 2 programs, 14, and as many as there are tasks: every second round begins with the last program."""
    from foci.backends.hopper import forward_pass as host

    asked, operands = posed(batch=3, heads=5, rows=rows, dim=64, mask=masks.causal())
    assert host.forward_schedule(asked) == schedules.SCHEDULES["PAIRED_2_SERPENTINE"]
    runs = []
    for processors in (1, 7, 1000):
        monkeypatch.setattr(host, "count_sms", lambda device, n=processors: n)
        runs.append(kernel_of("hopper", asked).forward(operands))
    check(runs[0], exact(asked, operands))
    for other in runs[1:]:
        assert torch.equal(runs[0].out, other.out)
        assert torch.equal(runs[0].lse, other.lse)


# SDPA-14
@pytest.mark.parametrize("schedule", ["OVERLAP_2", "TURNS_3", "OVERLAP_2_LISTS"])
def test_huge_equal_scores_give_the_mean(schedule, monkeypatch):
    """Near 2e11: a rounded exponent must not exceed that of the maximum."""
    from foci.backends.hopper import forward_pass as host

    monkeypatch.setattr(host, "forward_schedule", lambda problem, sizes: schedule_named(schedule))
    asked, operands = posed(rows=300)
    operands.query.fill_(133120.0)
    operands.key.fill_(133120.0)
    results = kernel_of("hopper", asked).forward(operands)
    mean = operands.value.double().mean(2, keepdim=True).expand(results.out.shape)
    assert ((results.out.double() - mean).norm() / mean.norm()).item() < 6e-3
    assert results.lse.isfinite().all()


FOLLOWED = [
    *(
        ("PAIRED_2", 64, None),
        ("PAIRED_2_SERPENTINE", 64, masks.causal()),
        ("PAIRED_2_QUEUE", 64, masks.window(200)),
        ("TURNS_3_QREG", 64, None),
        ("TURNS_3", 64, masks.causal()),
        ("TURNS_3_STATIC", 64, masks.window(200)),
        ("TURNS_3_QREG", 32, None),
        ("TURNS_3_LOOP", 96, None),
    ),
    *(
        ("TURNS_3_NAMED", 128, None),
        ("OVERLAP_2_LISTS", 128, masks.window(200)),
        ("OVERLAP_2_KV64", 128, masks.causal()),
        ("OVERLAP_2_D256", 256, None),
        ("OVERLAP_2_D256", 256, masks.causal()),
    ),
]


@pytest.mark.parametrize("steepness", [-30.0, -3.0, 0.0, 3.0, 30.0])
@pytest.mark.parametrize("sign", ["both", "below 0"])
@pytest.mark.parametrize(("schedule", "dim", "mask"), FOLLOWED)
def test_sums_refer_to_numbers_that_follow_maxima(schedule, dim, mask, sign, steepness, monkeypatch):
    """Maxima that grow by less than 2^8, by more, or never, from tile to tile; where they are asked for, the numbers are the maxima."""
    from foci.backends.hopper import forward_pass as host

    monkeypatch.setattr(host, "forward_schedule", lambda problem, sizes: schedule_named(schedule))
    asked, operands = posed(dim=dim, mask=mask)
    operands.key.mul_((torch.linspace(0, 1, 1000, device="cuda") * abs(steepness) + 1)[:, None])
    if sign == "below 0":
        operands.query.abs_()
        operands.key.abs_().neg_()
    if steepness < 0:
        operands.key.copy_(operands.key.flip(2))
    wanted = exact(asked, operands)
    always = kernel_of("hopper", asked).forward(operands)
    check(always, wanted)
    seldom = replace(asked, formula=replace(asked.formula, outputs=Outputs(lse=True)))
    results = kernel_of("hopper", seldom).forward(operands)
    assert results.row_max is None
    assert ((results.out.double() - wanted.out).norm() / wanted.out.norm()).item() < 6e-3
    there = wanted.lse.isfinite()
    assert (results.lse.double() - wanted.lse)[there].abs().max().item() < 2e-3 * max(1.0, abs(steepness))


@pytest.mark.parametrize("steepness", [0.0, 30.0])
@pytest.mark.parametrize(
    ("schedule", "dim"),
    [("TURNS_3_QREG", 64), ("PAIRED_2", 64), ("TURNS_3_LOOP", 96), ("TURNS_3_NAMED", 128), ("OVERLAP_2", 128), ("OVERLAP_2_D256", 256)],
)
def test_a_row_has_the_same_result_whichever_rows_share_its_warp(schedule, dim, steepness, monkeypatch):
    from foci.backends.hopper import forward_pass as host

    monkeypatch.setattr(host, "forward_schedule", lambda problem, sizes: schedule_named(schedule))
    asked, operands = posed(dim=dim)
    asked = replace(asked, formula=replace(asked.formula, outputs=Outputs(lse=True)))
    operands.key.mul_((torch.linspace(0, 1, 1000, device="cuda") * steepness + 1)[:, None])
    first = kernel_of("hopper", asked).forward(operands)
    order = torch.randperm(operands.query.shape[2], device="cuda")
    moved = kernel_of("hopper", asked).forward(replace(operands, query=operands.query[:, :, order].contiguous()))
    assert torch.equal(moved.out, first.out[:, :, order])
    assert torch.equal(moved.lse, first.lse[:, :, order])


@pytest.mark.parametrize(
    ("schedule", "dim"),
    [("TURNS_3_QREG", 64), ("PAIRED_2", 64), ("TURNS_3_LOOP", 96), ("TURNS_3_NAMED", 128), ("OVERLAP_2", 128), ("OVERLAP_2_D256", 256)],
)
def test_a_key_that_is_not_a_number_makes_all_results_none(schedule, dim, monkeypatch):
    from foci.backends.hopper import forward_pass as host

    monkeypatch.setattr(host, "forward_schedule", lambda problem, sizes: schedule_named(schedule))
    asked, operands = posed(dim=dim)
    operands.key[:, :, 700] = math.nan
    assert kernel_of("hopper", asked).forward(operands).out.isnan().all()


# SDPA-10
@pytest.mark.parametrize(("dim", "value_dim"), [(256, 256), (192, 128), (80, 80), (8, 24), (64, 256)])
def test_every_width(dim, value_dim):
    asked, operands = posed(dim=dim, value_dim=value_dim, mask=masks.causal())
    check(kernel_of("hopper", asked).forward(operands), exact(asked, operands))


# head dims that are sums of powers of two, and problems to solve with them
PIECES = {
    (192, 128): (
        "plain",
        "other lengths, grouped, float16",
        "causal, more keys",
        "jagged",
        "jagged causal",
        "window",
        "window, more queries",
        "causal alibi",
        "softcap",
        "document",
    ),
    (192, 192): ("other lengths, grouped, float16", "causal", "jagged window", "causal alibi", "dropout"),
    (96, 96): ("other lengths, grouped, float16", "causal", "jagged causal", "window", "softcap", "document", "jagged alibi"),
    (80, 80): ("other lengths, grouped, float16", "jagged", "causal, more queries"),
    (192, 80): ("document",),
    (160, 96): ("other lengths, grouped, float16", "causal"),
    (72, 168): ("causal",),
    (192, 64): ("jagged causal",),
}


# SDPA-10
@pytest.mark.parametrize(("dims", "name"), [(dims, name) for dims, names in PIECES.items() for name in names])
def test_heads_in_pieces(dims, name):
    asked, operands = posed(**{**CASES[name], "dim": dims[0], "value_dim": dims[1]})
    kernel = kernel_of("hopper", asked)
    first = kernel.forward(operands)
    check(first, exact(asked, operands))
    check_repeats(kernel, operands, first, 10)


# JAG-03
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_leaks_from_one_sequence_into_another(causal):
    """What lies beyond a sequence, another or the memory between two, may be anything."""
    lengths = [100, 130, 257]
    asked, operands = posed(lengths=lengths, mask=masks.causal() if causal else None)
    alone = kernel_of("hopper", asked).forward(operands)
    for t in (operands.query, operands.key, operands.value):
        t[:, :, 100:230] = float("nan")
    results = kernel_of("hopper", asked).forward(operands)
    kept = torch.tensor([*range(100), *range(230, 487)], device="cuda")
    assert torch.equal(results.out[:, :, kept], alone.out[:, :, kept])
    assert torch.equal(results.lse[:, :, kept], alone.lse[:, :, kept])


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"lengths": [100, 1, 700, 0, 128, 333]}, {"rows": 500}, {"lengths": [100, 1, 300, 0, 128] * 5}),
        {"rows": 500, "mask": masks.causal()},
    ],
)
@pytest.mark.parametrize("dim", [64, 128])
def test_what_the_kernel_before_wrote_is_read(dim, options):
    """Though the forward begins while that one ends."""
    asked, operands = posed(dim=dim, **options)
    kernel = kernel_of("hopper", asked)
    values = [operands.value.clone(), torch.randn_like(operands.value)]
    wanted = [exact(asked, replace(operands, value=value)) for value in values]
    for turn in range(40):
        operands.value.copy_(values[turn % 2])
        results = kernel.forward(operands)
        assert ((results.out.double() - wanted[turn % 2].out).norm() / wanted[turn % 2].out.norm()).item() < 6e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel.forward(operands).out
    for turn in range(10):
        operands.value.copy_(values[turn % 2])
        graph.replay()
        assert ((captured.double() - wanted[turn % 2].out).norm() / wanted[turn % 2].out.norm()).item() < 6e-3


SHORT = {
    "rows of every kind": {"rows": 450, "keys": 512},
    "one row": {"rows": 1, "keys": 300},
    "one key": {"rows": 200, "keys": 1},
    "many tasks, grouped": {"batch": 40, "heads": 16, "kv_heads": 4, "rows": 300},
    "halves of tasks": {"batch": 1, "heads": 71, "rows": 512},
    "many queries": {"rows": 3000, "keys": 130},
    "causal": {"batch": 16, "heads": 12, "rows": 512, "mask": masks.causal()},
    "causal, more keys": {"batch": 20, "heads": 16, "kv_heads": 4, "rows": 300, "keys": 450, "mask": masks.causal()},
    "causal, more queries": {"batch": 20, "rows": 700, "keys": 300, "mask": masks.causal_lower_right()},
    "packed, causal": {"lengths": [100, 1, 300, 0, 128, 333, 64, 512] * 12, "heads": 8, "mask": masks.causal()},
    "packed": {"lengths": [100, 1, 300, 0, 128, 333, 64, 512] * 12, "heads": 8},
    "packed alike": {"lengths": [256] * 64, "heads": 16},
    "alibi": {"batch": 16, "heads": 12, "rows": 400, "mask": masks.causal(), "score": scores.alibi(12)},
    "packed softcap": {"lengths": [100, 1, 300, 0, 128, 333, 64, 512] * 12, "heads": 8, "score": scores.softcap(5.0)},
    "window": {"batch": 16, "heads": 12, "rows": 700, "mask": masks.window(90)},
    "packed window": {"lengths": [100, 1, 300, 0, 128, 333, 64, 512] * 12, "heads": 8, "mask": masks.window(90)},
    "document": {"batch": 16, "heads": 12, "rows": 700, "mask": foci.Mask(lambda b, h, q, k: (q * q // 7000) == (k * k // 7000))},
}


@pytest.mark.parametrize(("dim", "value_dim", "dtype"), [(64, 64, torch.bfloat16), (32, 64, torch.float16), (8, 24, torch.bfloat16)])
@pytest.mark.parametrize("name", SHORT)
def test_many_short_tasks_of_narrow_heads(name, dim, value_dim, dtype):
    """Two programs on each multiprocessor, as many as the device has."""
    asked, operands = posed(**SHORT[name], dim=dim, value_dim=value_dim, dtype=dtype)
    kernel = kernel_of("hopper", asked)
    first = kernel.forward(operands)
    check(first, exact(asked, operands))
    check_repeats(kernel, operands, first, 20)


def test_gaps_between_sequences_are_zero():
    asked, operands = posed(lengths=[100, 130, 257])
    short = torch.tensor([90, 130, 200], device="cuda")
    results = kernel_of("hopper", asked).forward(replace(operands, q_lengths=short, kv_lengths=short))
    gaps = torch.tensor([*range(90, 100), *range(430, 487)], device="cuda")
    assert (results.out[:, :, gaps] == 0).all()
    assert (results.lse[:, :, gaps] == -math.inf).all()
    assert results.out[:, :, :90].isfinite().all()


def test_heads_side_by_side_and_tokens_first():
    """The memory of one joint projection, [B, S, 3 H, D]."""
    joint = torch.randn(2, 500, 12, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    query, key, value = joint.split(4, dim=1)
    with foci.use("hopper"):
        out = foci.attention(query, key, value, mask=masks.causal())
    with foci.use("reference"):
        wanted = foci.attention(query.double(), key.double(), value.double(), mask=masks.causal())
    assert ((out.double() - wanted).norm() / wanted.norm()).item() < 6e-3


# SDPA-12
def test_rows_at_odd_addresses_are_declined_and_solved_elsewhere():
    query = torch.randn(1, 2, 64, 72, device="cuda", dtype=torch.bfloat16)[..., 4:68]
    with foci.use("hopper"), pytest.raises(foci.NoViableBackend, match="16-byte aligned"):
        foci.attention(query, query, query)
    with foci.observe() as log:
        assert foci.attention(query, query, query).isfinite().all()
    assert log.calls[0].backend != "hopper"


# FLEX-10
def test_new_lengths_and_values_compile_nothing():
    from foci.backends.hopper.forward import attention_forward

    def compiled():
        return sum(len(cache[0]) for cache in attention_forward.device_caches.values())

    def once(length, batch, heads, window):
        q = torch.randn(batch, heads, length, 64, device="cuda", dtype=torch.bfloat16)
        with foci.use("hopper"):
            foci.attention(q, q.clone(), q.clone(), mask=masks.window(window))

    once(1000, 2, 4, 100)
    before = compiled()
    for sizes in ((1001, 1, 1, 5), (16, 3, 5, 16), (2048, 16, 8, 2000), (77, 1, 2, 33), (1, 1, 1, 3)):
        once(*sizes)
    assert compiled() == before
