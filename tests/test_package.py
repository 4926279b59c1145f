"""What is built for PyPI: contents, metadata, links, versions."""

import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import foci
from foci.compat import releases

pytest.importorskip("hatchling")
pytest.importorskip("hatch_vcs")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the sources as an archive without git holds them."""
    folder = tmp_path_factory.mktemp("archive")
    for name in ("src", "README.md", "LICENSE", "pyproject.toml", "hatch_build.py", ".git_archival.txt"):
        path = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(path, folder / name, ignore=ignore) if path.is_dir() else shutil.copy(path, folder / name)
    words = [sys.executable, "-W", "ignore", "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(built) as file:
        yield file


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_the_wheel_holds_every_file_of_the_packages(wheel):
    expected = {
        path.relative_to(ROOT / "src").as_posix()
        for package in ("foci", "foci_cli")
        for path in (ROOT / "src" / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected == {name for name in wheel.namelist() if ".dist-info/" not in name}


def test_an_archive_without_git_has_the_fallback_version(metadata):
    assert metadata["Version"] == PROJECT["tool"]["hatch"]["version"]["fallback-version"]


def test_torch_alone_is_required(metadata):
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert required == ["torch>=" + ".".join(map(str, releases.parse_minor(releases.RELEASES[0].torch)))]
    command = {re.split(r"[>=<]", line)[0] for line in metadata.get_all("Requires-Dist") if re.search(r"extra == 'cli'", line)}
    assert command == {"rich", "typer"}


def test_links_of_the_description_hold_outside_the_repository(metadata):
    text = metadata.get_payload(decode=True).decode()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links and [link for link in links if not link.startswith(("https://", "#"))] == []
    assert f"({REPOSITORY}/blob/main/docs/" in text
    for path in re.findall(rf"\({re.escape(REPOSITORY)}/(?:blob|raw)/main/([^)#]+)", text):
        assert (ROOT / path).exists(), path


def test_the_address_of_the_repository_stands_in_one_place(metadata):
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert urls["Repository"] == REPOSITORY
    assert all(url.startswith(REPOSITORY) for url in urls.values())
    owner = REPOSITORY.split("/")[-2]
    texts = [path for path in ROOT.glob("*") if path.suffix in (".md", ".toml", ".cff", ".py")]
    texts += [*ROOT.glob("conda/*"), *ROOT.glob(".github/**/*.yml"), *ROOT.glob("docs/**/*.md")]
    assert [path.name for path in texts if f"{owner}/foci" in path.read_text(encoding="utf-8")] == ["pyproject.toml"]


def test_the_version_is_the_installed_one():
    from importlib.metadata import version

    assert foci.__version__ == version("foci")


def test_support_md_agrees_with_the_releases():
    text = (ROOT / "SUPPORT.md").read_text(encoding="utf-8")
    assert len(releases.RELEASES) == 5 and "last five minor releases" in text
    for name, versions in (
        ("PyTorch", [each.torch for each in releases.RELEASES]),
        ("Triton", [each.triton for each in releases.RELEASES]),
        ("Python", list(releases.PYTHONS)),
    ):
        oldest, newest = (".".join(map(str, releases.parse_minor(each))) for each in (versions[0], versions[-1]))
        assert f"| {name} | {oldest} to {newest} |" in text


def test_the_command_says_which_extra_it_lacks():
    code = "import sys; sys.modules['typer'] = None; from foci_cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "foci: typer is not installed, which the command needs: pip install 'foci[cli]'\n"


def test_workflows_run_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml"))
    targets = set(re.findall(r"run: make ([a-z-]+)", commands))
    assert {"lint", "test", "docs", "wheel", "matrix-quick"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
    tested = re.search(r"torch: (\[.*\])", commands)[1]
    assert set(re.findall(r'"([\d.]+)"', tested)) <= {each.torch for each in releases.RELEASES}
