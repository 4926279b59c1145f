"""Tuning on request: candidates, choice and store, with a timer that is made up. No GPU, no Triton."""

# FLEX-12

import dataclasses
import json
import stat

import pytest
import torch

import foci
from foci import masks, scores
from foci.backends.contract import Kernel, Plan
from foci.backends.gpu.architectures import find
from foci.backends.gpu.schedules import Schedule, schedule_for, shared_bytes
from foci.backends.problem_class import tile_bytes
from foci.backends.triton.tuning import Store, TunedKernel, list_candidates, tuning_key
from foci.problem import Cotangents, Formula, Operands, Problem, Results, Target
from foci.trace_functions import bind

KINDS = (
    "forward",
    "forward_sparse",
    "query_gradient",
    "query_gradient_sparse",
    "key_gradient",
    "key_gradient_scored",
    "captures",
    "decode",
)
TABLE = torch.zeros(512, 512, dtype=torch.bfloat16)


def plan(score=None, mask=None, *, arch=90, dim=128, dtype=torch.bfloat16, block_size=None):
    variant = bind(score, mask, torch.device("cpu")).variant
    formula = Formula(variant, block_size=block_size)
    grads = tuple(True for _ in variant.captures)
    asked = Problem(formula, dtype, dim, dim, 4, 4, 2, 512, 512, True, True, True, grads, tuned=True)
    return Plan("triton", asked, Target("cuda", arch, frozenset({"triton"})))


class Pretended(Kernel):
    """A kernel that launches what `kinds` say, and takes as long as `cost` says."""

    def __init__(self, asked, cost, kinds=(("forward",), ("query_gradient", "key_gradient"))):
        self.plan, self.cost, self.kinds, self.schedules = asked, cost, kinds, {}

    def run(self, kinds):
        p, seconds = self.plan.problem, 0.0
        for kind in kinds:
            self.schedules.setdefault(kind, schedule_for(kind, self.plan.target.arch, (128, 128), p.dtype.itemsize))
            seconds += self.cost(kind, self.schedules[kind])
        return seconds

    def forward(self, operands):
        self.seconds = self.run(self.kinds[0])
        return self

    def backward(self, operands, results, cotangents):
        self.seconds = self.run(self.kinds[1])
        return self


def tuned(asked, cost, store, log=None):
    def time(run):
        if log is not None:
            log.append(run)
        return run().seconds

    return TunedKernel(asked, lambda p: Pretended(p, cost), store=store, time=time, device="pretended GPU")


def operands():
    query = torch.zeros(1, 1, 1, 1)
    return Operands(query, query, query)


def passes(kernel):
    kernel.forward(operands())
    kernel.backward(operands(), Results(torch.zeros(1), torch.zeros(1)), Cotangents(torch.zeros(1)))
    return dict(kernel.kernel.schedules)


@pytest.mark.parametrize("arch", [80, 86, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("score", [None, scores.bias(TABLE)])
def test_candidates_fit_shared_memory(arch, dtype, dim, score):
    asked = plan(score, masks.causal(), arch=arch, dim=dim, dtype=dtype)
    scratch = tile_bytes(asked.problem.variant)
    for kind in KINDS:
        default = schedule_for(kind, arch, (dim, dim), dtype.itemsize, scratch=scratch)
        candidates = list_candidates(kind, asked)
        assert (candidates[0] if candidates else None) == default
        assert len(set(candidates)) == len(candidates) <= 24
        for schedule in candidates:
            assert shared_bytes(kind, schedule, (dim, dim), dtype.itemsize, scratch=scratch) <= find(arch).shared_bytes
            assert arch >= 90 or not schedule.descriptors
        if dtype == torch.bfloat16 and dim <= 128:
            assert len(candidates) > 4


def test_candidates_divide_the_blocks_of_a_block_mask():
    for schedule in list_candidates("forward_sparse", plan(block_size=(48, 96))):
        assert 48 % schedule.tile_q == 0
        assert 96 % schedule.tile_kv == 0


def by_tiles(kind, schedule):
    wanted = {"forward": 64, "query_gradient": 128}.get(kind, 64)
    return abs(schedule.tile_q - wanted) + 3 * abs(schedule.stages - 2) + schedule.warps / 100


def test_the_fastest_of_each_kernel_is_chosen_kept_and_found_again(tmp_path):
    asked, first_log, second_log = plan(), [], []
    first = passes(tuned(asked, by_tiles, Store(tmp_path), first_log))
    for kind in ("forward", "query_gradient", "key_gradient"):
        assert first[kind] == min(list_candidates(kind, asked), key=lambda s: by_tiles(kind, s))
    assert len(first_log) == sum(len(list_candidates(kind, asked)) for kind in first)
    # another process: nothing is timed, whatever the times would be now
    second = passes(tuned(asked, lambda kind, schedule: -by_tiles(kind, schedule), Store(tmp_path), second_log))
    assert second == first
    assert second_log == []


def test_a_plan_of_captures_and_one_of_another_device_have_choices_of_their_own(tmp_path):
    keys = {
        tuning_key(plan(), "A"),
        tuning_key(plan(), "B"),
        tuning_key(plan(scores.alibi(4)), "A"),
        tuning_key(plan(None, masks.causal()), "A"),
    }
    assert len(keys) == 4
    assert "tuned" in plan().text
    assert "tuned" not in dataclasses.replace(plan(), problem=dataclasses.replace(plan().problem, tuned=False)).text
    assert tuning_key(plan(scores.alibi(4)), "A") == tuning_key(plan(scores.alibi(4)), "A")


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "no object": lambda path: path.write_text("[1, 2]"),
    "another key": lambda path: path.write_text(path.read_text().replace("pretended", "another")),
    "unknown field": lambda path: path.write_text(path.read_text().replace('"warps"', '"worms"')),
    "a string": lambda path: path.write_text(path.read_text().replace('"warps": 4', '"warps": "4"').replace('"warps": 8', '"warps": "8"')),
    "anyone's": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_not_believed(name, tmp_path):
    asked, log = plan(), []
    first = passes(tuned(asked, by_tiles, Store(tmp_path)))
    (path,) = tmp_path.glob("*.json")
    DAMAGE[name](path)
    assert passes(tuned(asked, by_tiles, Store(tmp_path), log)) == first
    assert log
    log.clear()
    assert passes(tuned(asked, by_tiles, Store(tmp_path), log)) == first  # written anew
    assert not log
    assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0


def test_a_stored_schedule_that_is_no_candidate_is_not_run(tmp_path):
    asked = plan()
    Store(tmp_path).write(tuning_key(asked, "pretended GPU"), {"forward": Schedule(1024, 1024, 4, 9)})
    schedules = passes(tuned(asked, by_tiles, Store(tmp_path)))
    assert schedules["forward"] in list_candidates("forward", asked)
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["schedules"]["forward"]["tile_q"] != 1024


@pytest.mark.parametrize("directory", [None, "missing"])
def test_a_folder_that_cannot_be_written_warns_and_tunes_each_time(directory, tmp_path):
    store = Store(None if directory is None else tmp_path / directory)
    for _ in range(2):
        log = []
        with pytest.warns(UserWarning, match="FOCI_CACHE_DIR"):
            passes(tuned(plan(), by_tiles, store, log))
        assert log


def test_nothing_is_tuned_unless_asked():
    query = torch.zeros(1, 2, 8, 16)
    with foci.observe() as log, foci.use(tune=True):
        foci.attention(query, query, query)
        with foci.use("reference", tune=True):
            foci.attention(query, query, query)
        foci.attention(query, query, query)
    with foci.observe() as after:
        foci.attention(query, query, query)
    assert [call.problem.tuned for call in log.calls] == [True, True, True]
    assert log.calls[1].backend == "reference"
    assert log.calls[2].backend != "reference"
    assert [call.problem.tuned for call in after.calls] == [False]


def test_the_backward_pass_on_another_thread_is_tuned_too():
    query = torch.zeros(1, 2, 8, 16, requires_grad=True)
    with foci.observe() as log, foci.use(tune=True):
        foci.attention(query, query, query).sum().backward()
    assert [call.problem.tuned for call in log.backward_calls] == [True]


def test_what_is_settled_runs_once(tmp_path):
    runs = []

    class Counted(Pretended):
        def run(self, kinds):
            runs.append(kinds)
            return super().run(kinds)

    kernel = TunedKernel(
        plan(), lambda p: Counted(p, by_tiles), store=Store(tmp_path), time=lambda run: run().seconds, device="pretended GPU"
    )
    passes(kernel)
    runs.clear()
    passes(kernel)
    assert len(runs) == 2
