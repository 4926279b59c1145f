"""Fits the numbers by which Hopper's schedules are chosen, from benchmarks/results: the paces of forward.toml, the rates of rates.toml.

    python benchmarks/fit_schedules.py            # each number of the files beside the one that the results give; needs no GPU
    python benchmarks/fit_schedules.py --write    # the files take the fitted numbers

A pace is fitted to the rows of dense_sizes.jsonl without a mask that took its schedule: their relative errors have the least squares. A
rate is that of 8192 positions in hopper_forward.jsonl and hopper_backward.jsonl, for the kinds that they have. Only ratios decide, and a
card's clock moves all rates of a run alike, so take the numbers of one run. To fit anew, run `dense_sizes.py` and `hopper_attention.py` on
the card first.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from pages import results

from foci.backends.gpu.architectures import HOPPER
from foci.backends.hopper import kernel_rates, schedules
from foci.backends.hopper.schedules import PACES, SCHEDULES, Pace, Schedule, family_of_width, forward_schedule, pace_weights, padded_width
from foci.problem import Formula, Outputs, Problem, bucket
from foci.variant import PLAIN

FOLDER: Final = Path(schedules.__file__).parent
KINDS: Final = {
    "dense": "full",
    "causal": "causal",
    "window 1024": "window",
    "document": "document",
    "ALiBi causal": "added",
    "softcap causal": "score",
}
"""Rows of hopper_attention.py, and the kinds of `problem_class.score_kind` that they time."""
POSITIONS: Final = 8192
LEAST: Final = 4
"""Samples of different sizes that a pace is fitted to."""


class Sample(NamedTuple):
    """A timed forward.

    Attributes:
        family: of its head dim.
        schedule: the name of the schedule that it took.
        sizes: heads, batch entries included, rows and keys.
        microseconds: its time.
    """

    family: str
    schedule: str
    sizes: tuple[int, int, int]
    microseconds: float


class Fit(NamedTuple):
    """A pace beside the one that its samples give.

    Attributes:
        family, schedule: where it stands in forward.toml.
        pace, fitted: both paces.
        samples: how many there were.
        errors: the median relative error of each.
    """

    family: str
    schedule: str
    pace: Pace
    fitted: Pace
    samples: int
    errors: tuple[float, float]


def read_samples(lines: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """The forwards of dense_sizes.jsonl that a pace decided."""
    names = {schedule: name for name, schedule in SCHEDULES.items()}
    samples = []
    for line in lines:
        if line["causal"] or line["forward_choice"] != "hopper":
            continue
        # "B,Hq/Hkv,SqxSkv,D/Dv", each second number only where it differs
        (batch, *_), (heads, *grouped), (rows, *columns), (dim, *value_dims) = (
            [*map(int, re.split("[/x]", part))] for part in line["shape"].split(",")
        )
        keys = columns[0] if columns else rows
        sizes = bucket(batch), bucket(rows), bucket(keys)
        problem = Problem(
            Formula(PLAIN, outputs=Outputs(lse=True)), torch.bfloat16, dim, *(value_dims or [dim]), heads, *(grouped or [heads]), *sizes,
            False, False, False, (),
        )  # fmt: skip
        if not schedules.alternative_schedules(problem):
            continue
        chosen = forward_schedule(problem, (batch, rows, keys))
        family = family_of_width(padded_width(dim))
        name = next(names[schedule] for schedule in PACES[family] if _is_placed(chosen, schedule))
        samples.append(Sample(family, name, (batch * heads, rows, keys), line["forward_foci_us"]))
    return samples


def _is_placed(chosen: Schedule, schedule: Schedule) -> bool:
    """Whether a chosen schedule is this one, apart from how its tasks are assigned."""
    return replace(chosen, static=schedule.static) == schedule


def fit_paces(samples: Iterable[Sample]) -> list[Fit]:
    """Fit the paces that took `LEAST` samples or more."""
    by_pace: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        by_pace.setdefault((sample.family, sample.schedule), []).append(sample)
    fits = []
    for (family, name), group in by_pace.items():
        pace = PACES[family][SCHEDULES[name]]
        if len({sample.sizes for sample in group}) < LEAST:
            continue
        weights = torch.tensor([pace_weights(SCHEDULES[name], pace.alone, *s.sizes)[:2] for s in group], dtype=torch.float64)
        times = torch.tensor([s.microseconds for s in group], dtype=torch.float64)
        start, key = torch.linalg.lstsq(weights / times[:, None], torch.ones(len(group), 1, dtype=torch.float64)).solution[:, 0].tolist()
        fitted = Pace(round(start, 2), float(f"{key:.3g}"), pace.alone, pace.max_waves, pace.static_waves)
        errors = [statistics.median(((weights @ weights.new_tensor([p.start, p.key]) / times) - 1).abs().tolist()) for p in (pace, fitted)]
        fits.append(Fit(family, name, pace, fitted, len(group), (errors[0], errors[1])))
    return fits


class Rate(NamedTuple):
    """Rates of a kind and width: those of rates.toml, and the measured ones, None where nothing was measured."""

    width: int
    kind: str
    stored: tuple[float, ...]
    measured: tuple[float | None, ...]


def read_rates(forward: Iterable[Mapping[str, Any]], backward: Iterable[Mapping[str, Any]]) -> list[Rate]:
    """Rates of rates.toml's rows: forward of hopper and triton, backward of the fused kernel, of separate kernels, and of triton."""
    measured: dict[tuple[int, str, str, str], float] = {}
    for name, lines in (("forward", forward), ("backward", backward)):
        for line in lines:
            batch_heads_length_dim = line["shape"]
            if line["row"] in KINDS and batch_heads_length_dim[2] == POSITIONS and line["who"] in ("hopper", "triton"):
                measured[batch_heads_length_dim[3], KINDS[line["row"]], name, line["who"]] = round(line[f"{name}_tflops"])
    rates = []
    for (width, kind), row in kernel_rates.MEASURED.items():
        ours, portable = (measured.get((width, kind, "backward", who)) for who in ("hopper", "triton"))
        is_fused = row.backward.fused > 0
        rates.append(
            Rate(
                width,
                kind,
                (row.forward.hopper, row.forward.triton, row.backward.fused, row.backward.apart, row.backward.triton),
                (
                    *(measured.get((width, kind, "forward", who)) for who in ("hopper", "triton")),
                    ours if is_fused else None,
                    None if is_fused else ours,
                    portable,
                ),
            )
        )
    return rates


def write_paces(text: str, fits: Iterable[Fit]) -> str:
    """Return forward.toml with fitted paces; nothing else of it changes."""
    for fit in fits:
        head, title, rest = text.partition(f"[paces.{fit.family}]\n")
        assert title, fit.family
        line = f"{fit.schedule} = {{ start = {fit.fitted.start}, key = {fit.fitted.key}"
        text = head + title + re.sub(rf"^{fit.schedule} = {{ start = [^,]+, key = [^,\s]+", line, rest, count=1, flags=re.MULTILINE)
    return text


def write_rates(text: str, rates: Iterable[Rate]) -> str:
    """Return rates.toml with measured rates; what was not measured stays."""
    for rate in rates:
        new = [stored if measured is None else measured for stored, measured in zip(rate.stored, rate.measured, strict=True)]
        head, title, rest = text.partition(f"[measured.{rate.width}]\n")
        assert title, rate.width
        numbers = ", ".join(map(_number, new[:2])), ", ".join(map(_number, new[2:]))
        line = f"{rate.kind} = {{ forward = [{numbers[0]}], backward = [{numbers[1]}] }}"
        text = head + title + re.sub(rf"^{rate.kind} = .*$", line, rest, count=1, flags=re.MULTILINE)
    return text


def _number(value: float) -> str:
    return f"{value:g}"


def main() -> None:
    """Print both tables, and write the files if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the fitted numbers into the files")
    write = parser.parse_args().write
    fits = fit_paces(read_samples(results("dense_sizes")))
    print(f"paces, microseconds on {HOPPER.sms} SMs: start and key of the file, fitted, median error of each")
    for fit in fits:
        pace, fitted = fit.pace, fit.fitted
        print(
            f"{fit.family:7s} {fit.schedule:20s} {fit.samples:3d} samples  {pace.start:5.2f} {pace.key:.5f}  {fitted.start:5.2f} "
            f"{fitted.key:.5f}  {fit.errors[0]:6.1%} {fit.errors[1]:6.1%}"
        )
    rates = read_rates(results("hopper_forward"), results("hopper_backward"))
    print("rates, TFLOP/s: forward hopper, triton; backward fused, separate, triton; of the file, then measured")
    for rate in rates:
        measured = " ".join("   -" if value is None else f"{value:4.0f}" for value in rate.measured)
        print(f"{rate.width:4d} {rate.kind:9s} {' '.join(f'{value:4.0f}' for value in rate.stored)}   {measured}")
    if write:
        for name, change in (("forward.toml", lambda text: write_paces(text, fits)), ("rates.toml", lambda text: write_rates(text, rates))):
            path = FOLDER / name
            path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
