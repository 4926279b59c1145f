"""Measurements: written, read, extended, and what decisions make of them."""

# PAD-02

import pytest
import torch
from machines import machine
from rich.console import Console

from foci.padding import Machine, find_table, is_profitable_to_pad, options
from foci.padding.gemm_times import ROLES, Fault, Row, Shape, Table, extend, read, write
from foci.padding.model import describe_machine, seconds
from foci.padding.tuning import tune

TINY = (Shape(1, 32, 32, 32), Shape(2, 16, 16, 16))


def table(device="somewhere", misaligned=3e-6):
    rows = tuple(Row("bfloat16", role, 2, TINY[0], 1e-6, 2e-6, misaligned) for role in ROLES)
    return Table(device, "kin", "2.11", {"bfloat16": 1e12}, 1e12, 1e-9, rows)


def same(first, second):
    return (first.device, first.rows, first.peaks) == (second.device, second.rows, second.peaks)


def test_written_tables_read_back(tmp_path):
    write(table(), tmp_path / "t.json")
    assert same(read(tmp_path / "t.json"), table())


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match=r"t\.json holds no table"):
        read(tmp_path / "t.json")


def test_new_measurements_replace_old_ones(tmp_path):
    path = extend(table(), tmp_path / "t.json")
    extend(table(misaligned=9e-6), path)
    assert {row.misaligned for row in read(path).rows} == {9e-6}
    assert len(read(path).rows) == len(ROLES)


def test_what_was_tuned_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCI_CACHE_DIR", str(tmp_path))
    extend(table("a device"))
    find_table.cache_clear()
    try:
        timings = find_table("a device", "elsewhere")
        assert timings is not None
        assert same(timings, table("a device"))
        assert find_table("a device", "elsewhere") is timings
    finally:
        find_table.cache_clear()


def test_an_unknown_device_goes_by_its_family():
    timings = find_table("NVIDIA H100 80GB HBM3", "sm_90")
    assert timings is not None
    assert timings.device == "NVIDIA H200"
    assert find_table("a device", "unheard of") is None


def test_tuning_measures_every_role():
    timings = tune(torch.device("cpu"), ("float32",), shapes=TINY, repeats=2)
    assert {(row.role, row.alignment, row.shape) for row in timings.rows} == {
        (role, a, shape) for role in ROLES for a in (4, 8) for shape in TINY
    }
    assert all(min(row.aligned, row.padded, row.misaligned) > 0 for row in timings.rows)
    assert timings.bandwidth > 0
    assert timings.device.startswith("cpu")


def test_the_command(tmp_path, monkeypatch):
    from foci.cli import tuning

    monkeypatch.setattr(tuning, "SMALL_SHAPES", TINY)
    console = Console(record=True, width=300)
    tuning.run_tune("cpu", "float64", 2, tmp_path / "t.json", console)
    assert len(read(tmp_path / "t.json").rows) == len(ROLES) * len(TINY)
    assert "10 measurements of cpu" in console.export_text()
    with pytest.raises(tuning.Unknown, match="float8"):
        tuning.run_tune("cpu", "float8", 2, None, console)


def test_the_worst_fault_decides():
    of = machine().table
    shape = Shape(1, 1024, 1024, 1024)
    good = seconds(of, "bfloat16", shape, {})
    assert seconds(of, "bfloat16", shape, {"a": Fault(2, padded=True)}) == pytest.approx(good)
    assert seconds(of, "bfloat16", shape, {"a": Fault(2, padded=True), "out": Fault(4, padded=False)}) == pytest.approx(3 * good)
    assert seconds(of, "bfloat16", shape, {"a": Fault(3, padded=True)}) is None


def test_a_gain_within_the_error_of_measurements_is_none():
    assert is_profitable_to_pad(1.0, 0.5, 0.4)
    assert not is_profitable_to_pad(1.0, 0.98, 0.0)
    assert not is_profitable_to_pad(1.0, 0.5, 0.6)


def test_h200():
    h200 = Machine("NVIDIA H200", 16, True, find_table("NVIDIA H200", "sm_90"))
    for dtype, alignment in ((torch.bfloat16, 2), (torch.float32, 4)):
        kind, shape = h200.kind(dtype), Shape(1, 8192, 30523, 768)
        good, padded = (seconds(h200.table, kind, shape, faults) for faults in ({}, {"out": Fault(alignment, padded=True)}))
        assert padded > 2 * good  # aligned rows alone do not help there


def test_the_machine_at_hand():
    description = describe_machine(torch.device("cpu"))
    assert description.name.startswith("cpu")
    assert description.kind(torch.float32) == "float32"
    assert description.kind(torch.int8) is None


@pytest.mark.parametrize("kind", [options.SizesPass, options.StridesPass])
def test_what_was_tuned_makes_compiled_graphs_in_caches_old(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("FOCI_CACHE_DIR", str(tmp_path))
    seen = []
    for measured in (None, table(misaligned=3e-6), table(misaligned=4e-6), table(misaligned=4e-6)):
        if measured is not None:
            extend(measured)
        options._fingerprint.cache_clear()
        seen.append(kind().uuid())
    options._fingerprint.cache_clear()
    assert seen[0] != seen[1] != seen[2] == seen[3]
