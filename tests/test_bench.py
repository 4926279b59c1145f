"""`foci bench`: every case runs at a small size, lines are whole, wrong names are named."""

import contextlib
import functools
import json
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest
import torch
from typer.testing import CliRunner

from foci.backends.cpu import build
from foci.cli.bench import CASES, Line, Sizes, ahead, calls, compile_ahead, draw, measure, measure_beside, summary, table
from foci.cli.bench.ahead import dealt, shares
from foci.cli.bench.measure import Request
from foci.cli.bench.report import ratios
from foci_cli.app import app

SMALL = Sizes(1, 4, 4, 64, 64, 16)
REQUEST = Request(torch.device("cpu"), torch.float32, seconds=0.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_measured(case):
    lines = list(measure(case, SMALL, REQUEST))
    ours = next(line for line in lines if line.who == "foci")
    assert ours.error is None
    assert ours.backend is not None
    assert ours.forward_ms > 0
    assert ours.forward_rate > 0
    assert (ours.backward_ms is not None) == case.trains
    assert len({line.who for line in lines}) == len(lines)


@pytest.mark.slow
def test_rates_count_the_attended_pairs():
    lengths = {case.name: next(iter(measure(case, SMALL, Request(REQUEST.device, REQUEST.dtype, 0.0, ())))) for case in CASES}
    work = {name: line.forward_rate * line.forward_ms for name, line in lengths.items()}
    assert work["causal"] == pytest.approx(work["dense"] / 2)
    assert work["dense"] * 1e6 == pytest.approx(4 * 4 * 64 * 64 * 16)
    assert work["documents 32"] < work["documents 8"] < work["documents 2"] < work["dense"]
    assert work["decode"] * 1e6 == pytest.approx(2 * 4 * 64 * 16 * 4)  # bytes of keys and values: 4 entries, one key head
    assert work["window"] < work["causal"] * 1.1


def test_a_peer_that_cannot_is_a_line_with_its_reason():
    causal = next(case for case in CASES if case.name == "jagged causal")
    lines = {line.who: line for line in measure(causal, SMALL, REQUEST)}
    if lines["nested"].error is None:
        pytest.skip("this torch has causal attention of NestedTensors on the CPU")
    assert "scaled_dot_product_attention" in lines["nested"].error
    assert lines["foci"].error is None
    assert lines["nested"].as_json().keys() == {"case", "sizes", "dtype", "who", "unit", "error"}


def make_line(who, forward, backward=None):
    return Line("dense", "1,2,3,4", "float32", who, forward_ms=forward, backward_ms=backward, forward_rate=1.0, backward_rate=1.0)


def test_ratios_and_table():
    lines = [make_line("foci", 2.0, 4.0), make_line("SDPA", 3.0, 2.0), make_line("flex", 8.0)]
    assert ratios(lines[1], lines[0]) == (1.5, 0.5)
    assert ratios(lines[2], lines[0]) == (4.0, None)
    shown = table(lines, "title")
    assert [column.header for column in shown.columns] == ["case", "B,H,S,D", "foci", "backend", "SDPA", "flex"]
    assert [list(column.cells) for column in shown.columns][4] == ["1.50 / 0.50"]


def test_summary_is_a_case_in_a_line():
    failed = Line("dense", "1,2,3,4", "float32", "math", error="no memory")
    assert (
        summary([make_line("foci", 2.0, 4.0), make_line("SDPA", 3.0, 2.0), failed]) == "dense 1,2,3,4: 1 / 1, SDPA 1.50 / 0.50, math cannot"
    )


def test_every_case_is_compiled_ahead_once_for_each_who_compiles():
    parts = shares(CASES, REQUEST, 5)
    assert len(parts) == 5
    assert sorted(unit for part in parts for unit in part) == sorted((case.name, who) for case in CASES for who in ("foci", "flex"))
    alone = shares(CASES[:2], Request(REQUEST.device, REQUEST.dtype, 0.0, ("cuDNN",)), 3)
    assert alone == [[("dense", "foci")], [("causal", "foci")], []]


@pytest.mark.slow
def test_compiling_ahead_fills_the_cache(tmp_path, monkeypatch):
    if build.obstacle() is not None:
        pytest.skip(build.obstacle())
    monkeypatch.setenv("FOCI_CACHE_DIR", str(tmp_path))
    compile_ahead([case for case in CASES if case.name == "dense"], SMALL, REQUEST, 1)
    assert list(tmp_path.rglob("*.so"))


def of_names(*names):
    return [case for case in CASES if case.name in names]


@pytest.mark.slow
def test_processes_measure_every_case():
    results = list(measure_beside(of_names("dense", "window", "decode"), SMALL, REQUEST, 2))
    assert [lines[0].case for lines in results] == ["dense", "window", "decode"]
    assert all(line.who == "foci" and line.forward_ms > 0 for line, *_ in results)
    assert [line.who for line in results[0]] == ["foci", "SDPA"]


def test_cases_are_dealt_in_turn_those_of_flex_attention_first():
    gpu = replace(REQUEST, device=torch.device("cuda"))
    parts = dealt(CASES, gpu, 7)
    assert sorted(name for part in parts for name in part) == sorted(case.name for case in CASES)
    assert {len(part) for part in parts} <= {len(CASES) // 7, len(CASES) // 7 + 1}
    assert {part[0] for part in parts} == {name for name in (case.name for case in CASES[1:]) if name.startswith("causal")} | {
        "window",
        "window D 64",
    }
    assert dealt(CASES, replace(gpu, peers=("cuDNN",)), 1) == [[case.name for case in CASES]]
    assert dealt(CASES[:2], gpu, 16) == [["causal"], ["dense"]]


def test_flex_attention_is_compiled_once_for_what_is_asked(monkeypatch):
    """However many other cases are compiled in between, past Dynamo's limit."""
    from torch._dynamo.utils import counters

    # one length: it counts how often foci bench compiles
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    case = of_names("documents 8")[0]
    asked = [case.build(SMALL, REQUEST.device, REQUEST.dtype) for _ in range(torch._dynamo.config.recompile_limit + 2)]
    torch._dynamo.reset()
    counters.clear()
    inputs = [torch.randn(SMALL.batch, SMALL.heads, SMALL.q_len, SMALL.dim) for _ in range(3)]
    for _ in range(2):
        for one in asked:
            calls._flex(one, SMALL, REQUEST.device)(*inputs)
        assert counters["frames"]["ok"] == len(asked)


class Threads:
    """What stands in for processes: they note what they do, and `lost` die of their first case."""

    def __init__(self, monkeypatch, lost=()):
        self.noted, self.lost = [], lost
        monkeypatch.setattr(ahead.multiprocessing, "get_context", lambda _: self)
        monkeypatch.setattr(ahead, "_once", self.once)
        monkeypatch.setattr(ahead, "measure", self.measure)
        # what is a process's own
        monkeypatch.setattr(sys, "stderr", sys.stderr)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")

    Pipe = staticmethod(multiprocessing.Pipe)

    def Process(self, target, args):
        line = Connection(os.dup(args[0].fileno()))  # the parent closes its own
        thread = threading.Thread(target=self.serve, args=(target, line, args[1:]), daemon=True)
        thread.terminate, thread.pid, thread.exitcode = lambda: None, 1, -9
        return thread

    def serve(self, target, line, args):
        with contextlib.suppress(SystemExit):
            target(line, *args)
        line.close()

    def note(self, what, name):
        self.noted.append((what, name, threading.current_thread()))

    def once(self, case, who, asked, square, request):
        if case.name in self.lost:
            sys.exit()
        time.sleep(0.2 if case.name == "window" else 0.01)
        self.note("ran", case.name)

    def measure(self, case, square, request, asked):
        self.note("begins", case.name)
        if case.name in self.lost:
            sys.exit()
        time.sleep(0.02)
        self.note("ends", case.name)
        yield Line(case.name, "", "", "foci", forward_ms=1.0)


NAMES = ("dense", "causal", "window", "decode", "decode many")


def test_nothing_is_timed_before_all_have_run_and_one_case_is_timed_at_a_time(monkeypatch):
    threads = Threads(monkeypatch)
    results = list(measure_beside(of_names(*NAMES), SMALL, replace(REQUEST, peers=()), 3))
    assert [lines[0].case for lines in results] == list(NAMES)
    ran, timed = threads.noted[: len(NAMES)], threads.noted[len(NAMES) :]
    assert {what for what, *_ in ran} == {"ran"}
    assert [(what, name) for what, name, _ in timed] == [(what, name) for name in NAMES for what in ("begins", "ends")]
    who = {name: thread for _, name, thread in ran}
    assert len(set(who.values())) == 3
    assert all(thread is who[name] for _, name, thread in timed)


def test_a_process_that_dies_before_all_have_run_holds_up_nobody(monkeypatch):
    threads = Threads(monkeypatch, lost=("causal",))
    first_lines = {lines[0].case: lines[0] for lines in measure_beside(of_names(*NAMES), SMALL, replace(REQUEST, peers=()), 3)}
    gone = {name for name in NAMES if first_lines[name].error is not None}
    assert gone == {"causal", "decode many"}  # of one process
    assert "ended, exit code -9" in first_lines["decode many"].error
    assert {name for what, name, _ in threads.noted if what == "ends"} == set(NAMES) - gone


def test_processes_that_end_at_once_are_lines_that_say_so(monkeypatch):
    monkeypatch.setattr(ahead, "_serve", os._exit)  # which takes no such arguments
    results = [line for lines in measure_beside(of_names("dense", "decode"), SMALL, REQUEST, 1) for line in lines]
    assert [(line.case, line.sizes) for line in results] == [("dense", "1,4,64,16"), ("decode", "4,4/1,1x64,16")]
    assert all("ended, exit code 1" in line.error for line in results)


def test_what_raises_while_it_is_timed_is_a_line(monkeypatch):
    threads = Threads(monkeypatch)

    def measure(case, *rest):
        if case.name == "dense":
            raise MemoryError("no more")
        return threads.measure(case, *rest)

    monkeypatch.setattr(ahead, "measure", measure)
    (dense,), (causal,) = measure_beside(of_names("dense", "causal"), SMALL, REQUEST, 1)
    assert dense.error == "MemoryError: no more"
    assert causal.error is None


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_picture(suffix, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    path = tmp_path / f"ratios.{suffix}"
    draw([make_line("foci", 2.0, 4.0), make_line("SDPA", 3.0, 2.0)], path, "title")
    assert path.stat().st_size > 1000
    with pytest.raises(ValueError, match="no peer"):
        draw([make_line("foci", 2.0)], path, "title")


# ECO-03
def test_command(tmp_path):
    out = tmp_path / "lines.jsonl"
    options = ["--device", "cpu", "--dtype", "float32", "--length", "64", "--heads", "4", "--dim", "16", "--batch", "1", "--seconds", "0"]
    done = CliRunner().invoke(app, ["bench", "dense", "decode p", *options, "--out", str(out), "--peers", "SDPA"])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    measured = [(line["case"], line["who"]) for line in lines]
    assert measured == [("dense", "foci"), ("dense", "SDPA"), ("decode paged", "foci"), ("decode paged many", "foci")]
    assert "dense 1,4,64,16: " in done.output
    assert all({"device", "torch", "foci", "threads"} <= line.keys() for line in lines)


@pytest.mark.parametrize(
    ("options", "words"), [(["dens", "nothing"], "no case begins"), (["--peers", "cudn"], "no peer 'cudn'"), (["--device", "mars"], "mars")]
)
def test_wrong_names_are_named(options, words):
    done = CliRunner().invoke(app, ["bench", *options], env={"COLUMNS": "300", "TERM": "dumb"})
    assert done.exit_code == 2
    assert words in done.output


def test_a_picture_names_every_peer():
    from foci.cli.bench.report import _MARKERS, _NAMES

    assert {name.lower() for name in calls.PEERS} <= set(_NAMES)
    assert len(set(_MARKERS)) == len(_MARKERS) == len(_NAMES) + 1
