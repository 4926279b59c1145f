"""benchmarks/fit_schedules.py: it finds the paces that made the times, and writes numbers into the files and nothing else."""

import random
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from foci.backends.hopper.schedules import PACES, SCHEDULES, pace_weights

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "src" / "foci" / "backends" / "hopper"


@pytest.fixture
def fitting(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import fit_schedules

    yield fit_schedules
    for name in ("fit_schedules", "pages", "measure"):
        sys.modules.pop(name, None)


def samples_of(fitting, family, name, start, key):
    alone, draw = PACES[family][SCHEDULES[name]].alone, random.Random(0)
    for _ in range(12):
        sizes = draw.randrange(8, 400), draw.randrange(64, 4000), draw.randrange(64, 4000)
        starts, keys, _ = pace_weights(SCHEDULES[name], alone, *sizes)
        yield fitting.Sample(family, name, sizes, starts * start + keys * key)


def test_a_pace_is_found_from_the_times_it_makes(fitting):
    for family, paces in PACES.items():
        for schedule in paces:
            name = next(n for n, s in SCHEDULES.items() if s == schedule)
            (fit,) = fitting.fit_paces(samples_of(fitting, family, name, 3.21, 0.0123))
            assert (fit.fitted.start, fit.fitted.key) == (3.21, 0.0123)
            assert fit.errors[1] < 1e-6


def test_few_samples_fit_nothing(fitting):
    few = [*samples_of(fitting, "whole", "TURNS_2", 3.0, 0.01)][: fitting.LEAST - 1]
    assert fitting.fit_paces(few) == []


def test_fitted_paces_are_written_where_they_belong(fitting):
    before = (FOLDER / "forward.toml").read_text(encoding="utf-8")
    fits = [*fitting.fit_paces(samples_of(fitting, "narrow", "PAIRED_2", 3.21, 0.0123))]
    after = tomllib.loads(fitting.write_paces(before, fits))
    expected = tomllib.loads(before)
    expected["paces"]["narrow"]["PAIRED_2"] |= {"start": 3.21, "key": 0.0123}
    assert after == expected
    assert expected["paces"]["slim"]["PAIRED_2"]["start"] != 3.21  # another family's schedule of that name


def test_measured_rates_are_written_and_the_others_stay(fitting):
    def lines(name):
        times = {"hopper": 700.4, "triton": 400.0}
        return [{"row": "causal", "shape": [2, 16, 8192, 128], "who": who, f"{name}_tflops": rate} for who, rate in times.items()]

    before = (FOLDER / "rates.toml").read_text(encoding="utf-8")
    after = tomllib.loads(fitting.write_rates(before, fitting.read_rates(lines("forward"), lines("backward"))))
    expected = tomllib.loads(before)
    separate = expected["measured"]["128"]["causal"]["backward"][1]
    expected["measured"]["128"]["causal"] = {"forward": [700, 400], "backward": [700, separate, 400]}
    assert after == expected


def test_the_results_on_file_can_be_fitted(fitting):
    fits = fitting.fit_paces(fitting.read_samples(fitting.results("dense_sizes")))
    assert len(fits) >= 5
    assert all(fit.errors[1] < 0.15 for fit in fits)
    assert any(None not in rate.measured[:2] for rate in fitting.read_rates(fitting.results("hopper_forward"), []))
