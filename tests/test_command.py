"""The command as a shell starts it; its lists, its cache, its errors."""

# ECO-03

import inspect
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import foci
from foci.backends import disk
from foci.backends.cpu import build
from foci.cli import progress
from foci.cli.catalogue import list_entries
from foci_cli.app import app

SOURCE = Path(foci.__file__).parents[1]
START = (
    "import sys; from foci_cli import main; sys.argv = ['foci', *sys.argv[1:]]\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
)


def run(*words, **environment):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "160", "TERM": "dumb", "NO_COLOR": "1", **environment})


def flat(text):
    return " ".join(text.split())


def start(*words, program=START, **environment):
    """(standard output, loaded modules, seconds of processor time) of a command in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program, *words], env=os.environ | {"PYTHONPATH": str(SOURCE)} | environment, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.split(), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


QUICK = {
    "help": (["--help"], {}, "explain"),
    "help of a command": (["mask", "--help"], {}, "--block"),
    "version": (["--version"], {}, f"foci {foci.__version__}"),
    "completion": ([], {"_FOCI_COMPLETE": "complete_bash", "COMP_WORDS": "foci ex", "COMP_CWORD": "1"}, "explain"),
}


@pytest.mark.parametrize(("words", "environment", "said"), QUICK.values(), ids=QUICK)
def test_it_starts_without_torch_and_takes_little_longer_than_typer_alone(words, environment, said):
    runs, typer = [], []
    for _ in range(3):  # in turns: other processes slow both
        runs.append(start(*words, **environment))
        typer.append(start(program="import typer"))
    for output, modules, _ in runs:
        assert said in output
        assert not {"torch", "rich", "numpy", "foci"} & set(modules)
    assert min(seconds for *_, seconds in runs) < 4 * min(seconds for *_, seconds in typer)


# -- foci masks, foci scores


@pytest.mark.parametrize("kind", ["masks", "scores"])
def test_every_named_one_is_listed_with_its_arguments_and_a_line(kind):
    module = getattr(foci, kind)
    entries = list_entries(module)
    assert [entry.call.partition("(")[0] for entry in entries] == sorted(module.__all__)
    for entry in entries:
        name = entry.call.partition("(")[0]
        assert all(parameter in entry.call for parameter in inspect.signature(getattr(module, name)).parameters)
        assert entry.line == getattr(module, name).__doc__.strip().splitlines()[0]
    done = run(kind, COLUMNS="300")
    assert done.exit_code == 0
    for entry in entries:
        assert flat(f"{entry.call} {entry.line}") in flat(done.output)


# -- foci cache


def test_cache_shows_what_is_kept_and_clears_it_alone(tmp_path):
    for name, size in (("cpu/a.so", 3 << 20), ("triton/b.json", 100), ("other/mine.txt", 5)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(bytes(size))
    shown = run("cache", FOCI_CACHE_DIR=str(tmp_path), FOCI_CACHE_LIMIT="7")
    assert shown.exit_code == 0, shown.output
    assert f"{tmp_path}: 3.0 MiB" in shown.output and "bound: 7.0 MiB" in shown.output
    cleared = run("cache", "--clear", FOCI_CACHE_DIR=str(tmp_path))
    assert cleared.output == f"removed 3.0 MiB from {tmp_path}\n"
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["other", "other/mine.txt"]


def test_cache_says_what_a_limit_must_be():
    done = run("cache", FOCI_CACHE_LIMIT="1GB")
    assert done.exit_code == 2
    assert "FOCI_CACHE_LIMIT must be a number of MiB, such as 1024; got '1GB'" in flat(done.output)


def test_the_oldest_files_go_first_and_those_in_use_stay(tmp_path):
    now = time.time()
    for age, name in ((5, "a.so"), (4, "b.so"), (3, "c.so"), (0.1, "d.so"), (9, "keep.txt")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, times=(now, now - age * 3600))
    disk.remove_oldest(tmp_path, ".so", 250)
    assert {path.name for path in tmp_path.iterdir()} == {"c.so", "d.so", "keep.txt"}
    disk.remove_oldest(tmp_path, ".so", 0)
    assert {path.name for path in tmp_path.iterdir()} == {"d.so", "keep.txt"}


@pytest.mark.skipif(build.obstacle() is not None, reason="no C++ compiler")
def test_a_compiled_kernel_makes_room_for_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCI_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FOCI_CACHE_LIMIT", "1")
    build.load('extern "C" int first_of_cache_limit() { return 1; }')
    (first,) = (tmp_path / "cpu").glob("*.so")
    old = tmp_path / "cpu" / "old.so"
    old.write_bytes(bytes(2 << 20))
    for path in (first, old):
        os.utime(path, times=(1e9, 1e9))
    monkeypatch.setattr(build, "_loaded", {})
    build.load('extern "C" int first_of_cache_limit() { return 1; }')  # a use makes it young
    assert first.stat().st_mtime > 1e9
    build.load('extern "C" int second_of_cache_limit() { return 2; }')
    assert first.exists() and not old.exists() and len(list((tmp_path / "cpu").glob("*.so"))) == 2


# -- errors name the option


ERRORS = {
    "mask": (["explain", "--mask", "casual"], "--mask: there is no 'casual'"),
    "score": (["explain", "--score", "alibu"], "--score: there is no 'alibu'"),
    "heads": (["explain", "--kv-heads", "3"], "--kv-heads: the number of query heads"),
    "argument": (["mask", "casual"], "NAME: there is no 'casual'"),
    "case": (["bench", "nothing"], "CASES: no case begins with 'nothing'"),
    "peer": (["bench", "--peers", "xformer"], "--peers: no peer 'xformer'"),
    "kind": (["tune", "--kinds", "float8"], "--kinds: no kind of arithmetic 'float8'"),
    "device": (["explain", "--device", "gpu0"], "'--device': 'gpu0' is no device"),
    "folder": (["mask", "causal", "--out", str(Path(__file__).parent)], "is a folder; name a file"),
    "output": (["bench", "--out", "/proc/none/lines.jsonl"], "'--out': the folder of '/proc/none/lines.jsonl' cannot be made"),
}


@pytest.mark.parametrize(("words", "said"), ERRORS.values(), ids=ERRORS)
def test_an_error_names_the_option(words, said, monkeypatch):
    monkeypatch.setattr("foci.cli.bench_cmd._measured", lambda *args: pytest.fail("it measured"))
    done = run(*words)
    assert done.exit_code == 2
    assert said in flat(done.output), done.output


# -- progress and calls


def test_bench_shows_progress_where_it_is_piped_and_says_where_the_picture_is(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(progress, "_BETWEEN_LINES", 0.0)
    picture = tmp_path / "new" / "ratios.png"
    done = run(
        "bench", "causal D 64", "--device", "cpu", "--dtype", "float32", "--batch", "1", "--heads", "1", "--length", "64", "--dim", "16",
        "--seconds", "0", "--peers", "SDPA", "--plot", str(picture),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "1 of 1 cases" in flat(done.output)
    assert picture.is_file() and f"picture: {picture}" in done.output


def test_a_call_prints_as_one_line():
    query, key = torch.randn(2, 4, 100, 16, requires_grad=True), torch.randn(2, 2, 80, 16)
    with foci.observe() as log:
        foci.attention(query, key, key, mask=foci.masks.window(8), score=foci.scores.softcap(3.0))
    line = str(log.calls[0])
    assert "\n" not in line and repr(log.calls[0]) == f"<Call {line}>"
    backend, _, rest = line.partition(": ")
    assert backend == log.calls[0].backend
    assert rest.startswith("dense, batch <= 2, 4 query heads, 2 key heads, queries <= 128, keys <= 128, head dim 16, float32, training: ")
    assert "tanh" in rest and "kv_idx" in rest.partition(" where ")[2]
