"""The Python examples of README.md and docs/ run as they stand there, each by itself, and print what stands below them; the commands named there exist."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


PRINTED = re.compile(r"\s*^```text title=\"prints\"\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


def blocks(*languages):
    """(place, code) of each fenced block; the place is a file and the line of the block's first line of code."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[1] in languages:
                yield f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start(2)) + 1}", match[2]


def printed():
    """{place: text} of each Python example that a block of what it prints follows; places as in `blocks`."""
    outputs = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[1] == "python" and (after := PRINTED.match(text, match.end())):
                outputs[f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start(2)) + 1}"] = after[1]
    return outputs


PYTHON = dict(blocks("python"))
PRINTS = printed()
LINES = [line.split() for _, text in blocks("sh", "console", "bash") for line in text.splitlines()]
COMMANDS = sorted({words[1] for words in LINES if words[:1] == ["foci"]})
TARGETS = sorted({words[1] for words in LINES if words[:1] == ["make"]})


@pytest.mark.parametrize("place", PYTHON)
def test_python_example(place, monkeypatch, tmp_path, capsys):
    page, line = place.rsplit(":", 1)
    # Blank lines in front, so that a traceback names the page's own line.
    code = compile("\n" * (int(line) - 1) + PYTHON[place], str(ROOT / page), "exec")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(code, {"__name__": "__example__"})
    printed = capsys.readouterr().out
    if place in PRINTS:
        assert printed == PRINTS[place]
    if page == "README.md":  # it has the output beside the call, to be short
        assert printed.splitlines() == re.findall(r"^print\(.*\)  # (.+)$", PYTHON[place], re.MULTILINE) != []


def test_the_readme_is_read_in_two_minutes():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert sum(place.startswith("README.md:") for place in PYTHON) == 5
    for link in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text):
        assert (ROOT / link).exists(), link


def test_the_pages_have_examples():
    assert any(place.startswith("README.md:") for place in PYTHON)
    assert COMMANDS
    assert PRINTS
    titles = sum(page.read_text(encoding="utf-8").count('title="prints"') for page in PAGES)
    assert titles == len(PRINTS), "what is printed must follow the example that prints it"
    assert TARGETS


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists(command):
    from typer.testing import CliRunner

    from foci_cli.app import app

    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


@pytest.mark.parametrize("target", TARGETS)
def test_make_target_exists(target):
    assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
