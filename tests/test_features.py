"""docs/features.md: each row is named by a test, each row that a test names is there, and the column of tests is up to date."""

import pytest

from features import PAGE, find_tests_by_row, rows, rows_named_by, with_tests

PREFIXES = frozenset({"DIST", "ECO", "FLEX", "FUSE", "JAG", "MOD", "NOW", "PAD", "SDPA", "START"})


def test_each_row_is_named_by_a_test():
    page = PAGE.read_text(encoding="utf-8")
    assert set(rows(page)) == set(find_tests_by_row(PREFIXES))
    assert {row.partition("-")[0] for row in rows(page)} == PREFIXES


def test_the_column_of_tests_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tests(page) == page, "python tests/features.py writes it anew"


def test_rows_are_read_above_tests_and_at_the_head_of_a_file():
    head = '"""Of what it is."""\n\n# JAG-02\n\nimport torch\n\n'
    assert rows_named_by(head + "# SDPA-01, SDPA-02\n# JAG-01\n@decorated(\n    1,\n)\ndef test_a():\n    pass\n", PREFIXES) == {
        "JAG-02",
        "SDPA-01",
        "SDPA-02",
        "JAG-01",
    }
    assert rows_named_by("class TestA:\n    # MOD-03\n    def test_a(self):\n        pass\n", PREFIXES) == {"MOD-03"}
    for stray in ("# MOD-03\n\n\ndef test_a():\n    pass\n", "# MOD-03\ndef helper():\n    pass\n"):
        with pytest.raises(AssertionError, match="MOD-03"):
            rows_named_by("import torch\n\n" + stray, PREFIXES)
