"""What the Hopper backend takes, what it declines and in which words. Pure: no device, no Triton."""

import pytest
import torch
from plan_problems import H200, KINDS, NARROW, TRAINED, passes, problem

import foci
from foci import execution, masks, scores
from foci.backends.hopper import BACKEND
from foci.backends.hopper.backward_schedules import FUSED_SCHEDULES
from foci.backends.hopper.kernel_rates import MEASURED, estimate_rates
from foci.backends.problem_class import score_kind
from foci.planner import choose
from foci.problem import Layout, Outputs, Target


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": masks.causal()},
        {"score": scores.alibi(16)},
        {"dtype": torch.float16, "head_dim": 64, "value_dim": 64},
        {"head_dim": 256, "value_dim": 256},
        {"head_dim": 80, "value_dim": 16},
        {"q_heads": 32, "kv_heads": 8},
        {"layout": Layout.JAGGED},
        {"query_grad": True, "key_grad": True, "value_grad": True},
    ],
    ids=lambda value: value if isinstance(value, str) else None,  # a set's text differs between processes
)
def test_it_is_chosen_for_large_problems(changes):
    decision = choose(problem(**changes), H200)
    assert decision.plan is not None
    assert decision.plan.backend == "hopper", decision.table()


@pytest.mark.parametrize(
    ("changes", "target", "said"),
    [
        ({}, Target("cpu"), "compute capability 9.0"),
        ({}, Target("cuda", 80, H200.features), "compute capability 9.0"),
        ({}, Target("cuda", 100, H200.features), "compute capability 9.0"),
        ({}, Target("cuda", 90), "not installed"),
        ({}, Target("cuda", 90, frozenset({"triton"})), "needs to know the release of Triton"),
        ({"dtype": torch.float32}, H200, "not float32"),
        ({"head_dim": 264}, H200, "go to 256"),
        ({"head_dim": 20}, H200, "multiples of 16 bytes"),
        ({"aligned": False}, H200, "16-byte aligned"),
        ({"layout": Layout.PAGED}, H200, "paged"),
        ({"outputs": Outputs(weights=True)}, H200, "weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,  # a set's text differs between processes
)
def test_what_it_cannot_take_is_declined_in_words(changes, target, said):
    reason = BACKEND.reject(problem(**changes), target)
    assert reason is not None
    assert said in reason


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "N3"),
        ({"mask": masks.causal(), "score": scores.alibi(16)}, "N3"),
        ({"mask": masks.window(1023)}, "C2"),
        ({"mask": masks.window(1023), "head_dim": 64, "value_dim": 64}, "N2"),
        ({"head_dim": 256, "value_dim": 256}, "C2"),
        ({"batch": 64, "q_len": 512, "kv_len": 512, "head_dim": 64, "value_dim": 64}, "N2"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,  # a set's text differs between processes
)
def test_explain_says_which_kernel_and_why(changes, name):
    line = next(line for line in choose(problem(**changes), H200).table().splitlines() if "hopper" in line)
    assert f": {name}, " in line
    assert "warpgroups" in line


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ((128, 128), ()),
        ((192, 128), ("D = 192 as 128 + 64",)),
        ((72, 96), ("D = 72 padded to 80 = 64 + 16", "Dv = 96 as 64 + 32", "D = 72 padded to 96 = 64 + 32")),
        ((200, 64), ("D = 200 padded to 256",)),
    ],
)
def test_explain_says_what_head_dims_are_padded_to(dims, said):
    asked = problem(head_dim=dims[0], value_dim=dims[1], query_grad=True, key_grad=True, value_grad=True)
    note = BACKEND.note(asked, H200)
    assert all(words in note for words in said)
    assert ("padded" in note or " as " in note) == bool(said)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"mask": masks.causal()}, True),
        ({"mask": masks.causal(), "score": scores.softcap(20.0)}, True),
        ({}, True),
        ({"head_dim": 256, "value_dim": 64, "kv_heads": 4}, True),
        ({"head_dim": 128}, False),
        ({"mask": masks.window(64)}, False),
        ({"mask": masks.causal(), "layout": Layout.JAGGED}, False),
        ({"mask": masks.causal(), "query_grad": False}, False),
    ],
)
def test_explain_says_where_gradients_of_scores_are_kept(changes, kept):
    asked = problem(**{"head_dim": 192, "value_dim": 128, "query_grad": True, "key_grad": True, "value_grad": True, **changes})
    assert ("kept in up to 528 MB" in BACKEND.note(asked, H200)) == kept


@pytest.mark.parametrize(("kind", "changes"), KINDS.items(), ids=KINDS)
@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize("is_trained", [False, True])
def test_the_faster_backend_is_chosen_as_measured(kind, changes, width, is_trained):
    asked = problem(**changes, head_dim=width, value_dim=width, **(TRAINED if is_trained else {}))
    assert score_kind(asked) == kind
    rates, measured = estimate_rates(asked), MEASURED.get((width, kind), MEASURED[128, kind])
    rate = measured.backward.fused if (width, kind) in FUSED_SCHEDULES else measured.backward.apart
    assert (rates.forward, rates.backward.triton) == (measured.forward, measured.backward.triton)
    # a single kernel's sums of dq take a little over many keys
    assert (
        rates.backward.hopper == rate if (width, kind) not in FUSED_SCHEDULES else 0.94 * rate < rates.backward.hopper <= rate * (1 + 1e-9)
    )
    times = {
        "hopper": 1 / rates.forward.hopper + (2.5 / rates.backward.best if is_trained else 0),
        "triton": 1 / rates.forward.triton + (2.5 / rates.backward.triton if is_trained else 0),
    }
    decision = choose(asked, H200)
    assert decision.plan is not None
    assert decision.plan.backend == min(times, key=times.__getitem__), decision.table()


def test_explain_says_that_lengths_decide():
    assert "N2 or C2 instead when the actual lengths need fewer waves" in BACKEND.note(problem(), H200)
    assert "instead" not in BACKEND.note(problem(mask=masks.causal()), H200)


def test_explain_says_what_was_measured_and_where_the_backward_is_from():
    def said(**changes):
        return BACKEND.note(problem(**changes), H200)

    assert "forward measured at 1.43x triton's speed" in said()
    assert "backward" not in said()
    assert said(**TRAINED).endswith("backward estimated at 1.45x triton's speed")
    shared = {"q_heads": 32, "kv_heads": 8}
    assert said(**KINDS["score"], **NARROW, **shared, **TRAINED).endswith(
        "backward estimated at 0.75x triton's speed, so taken from triton"
    )


@pytest.mark.parametrize(
    ("batch", "heads", "lengths", "dim", "backend"),
    [
        (2, (16, 16), (128, 4096), 64, "triton"),
        (1, (16, 16), (128, 8192), 128, "triton"),
        (1, (32, 8), (64, 8192), 128, "triton"),
        (1, (16, 16), (256, 4096), 128, "triton"),
        (4, (16, 16), (128, 8192), 128, "hopper"),  # in two, which is slower than 64 programs that take all keys
        (8, (16, 16), (128, 1024), 64, "hopper"),
        (4, (16, 16), (128, 1024), 128, "hopper"),
        (8, (16, 16), (128, 8192), 128, "hopper"),
    ],
)
def test_few_queries_over_many_keys_go_where_keys_are_split(batch, heads, lengths, dim, backend):
    changes = {
        "batch": batch,
        **dict(zip(("q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim"), (*heads, *lengths, dim, dim))),
    }
    decision = choose(problem(**changes), H200)
    assert decision.plan.backend == backend
    if backend == "triton":
        assert "split-KV" in decision.table()
    # with gradients the forward alone
    trained = choose(problem(**changes, **TRAINED), H200)
    assert trained.plan.backend == "hopper"
    assert ("the forward runs the triton split-KV kernel" in BACKEND.note(trained.problem, H200)) == (backend == "triton")


# SDPA-13
@pytest.mark.parametrize("changes", [{}, TRAINED], ids=["forward", "trained"])
@pytest.mark.parametrize("kv_heads", [0, 2])
def test_no_heads_are_planned_for_as_well(changes, kv_heads):
    decision = choose(problem(q_heads=0, kv_heads=kv_heads, **changes), H200)
    assert decision.plan is not None
    assert "zero heads" in decision.table()


@pytest.mark.parametrize(
    ("batch", "rows", "length", "way"),
    [(2, 128, 4096, "triton"), (2, 64, 4096, "triton"), (2, 128, 512, "hopper"), (4, 128, 8192, "hopper"), (4, 64, 4096, "hopper")],
)
def test_a_forward_with_gradients_is_tritons_where_that_is_sooner_done_as_explain_says(batch, rows, length, way):
    asked = problem(**TRAINED, batch=batch, q_len=rows, kv_len=length)
    assert passes(asked)[0] == {"triton": "PortableForward", "hopper": "HopperForward"}[way]
    assert ("the forward runs the triton split-KV kernel" in BACKEND.note(asked, H200)) == (way == "triton")


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"kv_len": 8192}, {"kv_len": 512}),
        ({"q_heads": 8}, {"kv_heads": 4}),
        ({"kv_heads": 4}, {"q_heads": 8, "kv_heads": 8}),
    ],
)
def test_kernels_are_of_the_lengths_and_heads_they_are_given(first, then):
    pytest.importorskip("triton", reason="Triton is not installed")
    narrow = {"head_dim": 64, "value_dim": 64, "query_grad": True, "key_grad": True, "value_grad": True}
    for changes in (first, then):
        decision = choose(problem(**KINDS["causal"], **narrow, **changes), H200, ("hopper",))
        assert execution._compiled(decision).builder.problem == decision.plan.problem
        assert execution._compiled(decision) is execution._compiled(decision)


# FLEX-14
def test_one_query_is_left_to_the_kernel_that_splits_keys():
    decision = choose(problem(q_len=1, q_heads=32, kv_heads=8, kv_len=65536), H200)
    assert decision.plan is not None
    assert decision.plan.backend != "hopper"


def test_unaligned_operands_make_an_unaligned_problem():
    from foci.problem import is_aligned

    aligned = torch.zeros(2, 4, 64, 128, dtype=torch.bfloat16)
    assert is_aligned(aligned)
    assert is_aligned(aligned.transpose(1, 2))
    assert is_aligned(torch.zeros(1, 1, 64, 128, dtype=torch.bfloat16)[:, :1])
    assert not is_aligned(aligned.transpose(2, 3))
    assert not is_aligned(aligned[..., 4:])
    assert not is_aligned(torch.zeros(2, 4, 64, 20, dtype=torch.bfloat16))
    assert not is_aligned(aligned[:, :1].expand(2, 4, 64, 128))


def test_it_is_a_backend_among_the_others():
    assert "hopper" in foci.backends.names()
