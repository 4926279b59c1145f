"""The rows of docs/features.md and the tests that name them: `python tests/features.py` writes the column of tests anew."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "features.md"
ROW = re.compile(r"\| ([A-Z]+-\d\d) \| (.+?) \|(.*)\|")


def rows(page: str) -> dict[str, str]:
    """Each row of the page with its column of tests."""
    return {match[1]: match[3].strip() for match in map(ROW.fullmatch, page.splitlines()) if match is not None}


def rows_named_by(source: str, prefixes: frozenset[str]) -> set[str]:
    """Rows that the comments of a file of tests name; a line that names rows and stands above no test is an error."""
    named = re.compile(rf"\s*# (?:{'|'.join(sorted(prefixes))})-\d.*")
    lines, tree = source.splitlines(), ast.parse(source)
    tests = (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name.lower().startswith("test"))
    above = {min(part.lineno for part in (n, *n.decorator_list)) - 1 for n in tests}
    head = tree.body[0].end_lineno + 2 if ast.get_docstring(tree) is not None else 1
    named_lines = {number: line for number, line in enumerate(lines, 1) if named.fullmatch(line)}
    strays = [line for number, line in named_lines.items() if number not in above | {head} and number + 1 not in named_lines]
    if strays:
        raise AssertionError(f"these lines name rows and stand above no test: {strays}")
    return {row for line in named_lines.values() for row in line.strip().removeprefix("# ").split(", ")}


def find_tests_by_row(prefixes: frozenset[str]) -> dict[str, list[str]]:
    """Files of tests, below tests/, by the rows that they name."""
    named: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for row in rows_named_by(path.read_text(encoding="utf-8"), prefixes):
            named.setdefault(row, []).append(path.relative_to(TESTS).as_posix())
    return named


def with_tests(page: str) -> str:
    """The page with its column of tests written anew."""
    named = find_tests_by_row(frozenset(row.partition("-")[0] for row in rows(page)))

    def row(line: str) -> str:
        match = ROW.fullmatch(line)
        if match is None:
            return line
        links = ", ".join(f"[{path.removesuffix('.py')}](../tests/{path})" for path in named.get(match[1], ()))
        return f"| {match[1]} | {match[2]} | {links} |"

    return "\n".join(map(row, page.splitlines())) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_tests(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
