"""`foci bench`: every case runs at a small size, lines are whole, wrong names are named."""

import fcntl
import json
import threading
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from foci.backends.cpu import build
from foci.bench import CASES, Line, Sizes, compile_ahead, draw, measure, measure_beside, summary, table
from foci.bench.ahead import shares
from foci.bench.measure import Request
from foci.bench.report import ratios
from foci.cli.app import app

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


def made(who, forward, backward=None):
    return Line("dense", "1,2,3,4", "float32", who, forward_ms=forward, backward_ms=backward, forward_rate=1.0, backward_rate=1.0)


def test_ratios_and_table():
    lines = [made("foci", 2.0, 4.0), made("SDPA", 3.0, 2.0), made("flex", 8.0)]
    assert ratios(lines[1], lines[0]) == (1.5, 0.5)
    assert ratios(lines[2], lines[0]) == (4.0, None)
    shown = table(lines, "title")
    assert [column.header for column in shown.columns] == ["case", "B,H,S,D", "foci", "backend", "SDPA", "flex"]
    assert [list(column.cells) for column in shown.columns][4] == ["1.50 / 0.50"]


def test_summary_is_a_case_in_a_line():
    failed = Line("dense", "1,2,3,4", "float32", "math", error="no memory")
    assert summary([made("foci", 2.0, 4.0), made("SDPA", 3.0, 2.0), failed]) == "dense 1,2,3,4: 1 / 1, SDPA 1.50 / 0.50, math cannot"


def test_every_case_is_compiled_ahead_once_for_each_who_compiles():
    parts = shares(CASES, REQUEST, 5)
    assert len(parts) == 5
    assert sorted(unit for part in parts for unit in part) == sorted((case.name, who) for case in CASES for who in ("foci", "flex"))
    alone = shares(CASES[:2], Request(REQUEST.device, REQUEST.dtype, 0.0, ("cuDNN",)), 3)
    assert alone == [[("dense", "foci")], [("causal", "foci")], []]


def test_compiling_ahead_fills_the_cache(tmp_path, monkeypatch):
    if build.obstacle() is not None:
        pytest.skip(build.obstacle())
    monkeypatch.setenv("FOCI_CACHE_DIR", str(tmp_path))
    compile_ahead([case for case in CASES if case.name == "dense"], SMALL, REQUEST, 1)
    assert list(tmp_path.rglob("*.so"))


def test_processes_measure_every_case_and_time_one_at_a_time(tmp_path):
    cases = [case for case in CASES if case.name in ("dense", "window", "decode")]
    found = {lines[0].case: lines for lines in measure_beside(cases, SMALL, REQUEST, 2)}
    assert found.keys() == {"dense", "window", "decode"}
    assert all(line.who == "foci" and line.forward_ms > 0 for line, *_ in found.values())
    lock = tmp_path / "lock"
    lock.touch()
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: list(measure(cases[0], SMALL, replace(REQUEST, lock=str(lock)))))
        waiting.start()
        waiting.join(1.0)
        assert waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_picture(suffix, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    path = tmp_path / f"ratios.{suffix}"
    draw([made("foci", 2.0, 4.0), made("SDPA", 3.0, 2.0)], path, "title")
    assert path.stat().st_size > 1000
    with pytest.raises(ValueError, match="no peer"):
        draw([made("foci", 2.0)], path, "title")


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
