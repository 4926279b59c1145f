"""docs/design.md has a section of five lines for each package of foci, which names all of its files and the changes that go there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "foci"
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
LINES = ("What", "In and out", "Read", "Change", "Must not know")


def section(title: str, level: int = 2) -> str:
    """The text below a heading, up to the next one of its level."""
    return re.split(rf"^#{{1,{level}}} ", PAGE.split(f"\n{'#' * level} {title}\n")[1], flags=re.MULTILINE)[0]


ROOMS = dict(re.findall(r"^### `(\S+)/`: [^\n]+\n(.*?)(?=^#)", section("Rooms"), re.MULTILINE | re.DOTALL))
CHANGES = {row.split(" | ")[0].removeprefix("| ") for row in section("One change, one place").splitlines() if row.startswith("| ")}


def read_lines(room: str) -> dict[str, str]:
    """The room's lines by their labels."""
    return dict(re.findall(r"^- \*\*(.+?):\*\* (.*?)(?=^- |\Z)", ROOMS[room], re.MULTILINE | re.DOTALL))


def modules_in(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.py")} - {"__init__"}


def test_every_package_has_a_room():
    packages = {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("__init__.py")} - {"."}
    assert set(ROOMS) == packages


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_five_lines_and_names_its_files(room):
    lines = read_lines(room)
    assert tuple(lines) == LINES
    named = re.findall(r"`([a-z_0-9]+)`", lines["Read"])
    assert len(named) == len(set(named))
    assert set(named) - {"__init__"} == modules_in(SOURCE / room)


@pytest.mark.parametrize("room", ROOMS)
def test_changes_of_a_room_are_rows_of_the_table(room):
    changes = re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", read_lines(room)["Change"].replace("\n  ", " "))
    assert changes
    assert set(changes) <= CHANGES


def test_modules_outside_of_packages_are_named():
    rows = [row for row in section("Modules at the top", 3).splitlines() if row.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)\.py`", row.split(" | ")[0])}
    assert named == modules_in(SOURCE)
