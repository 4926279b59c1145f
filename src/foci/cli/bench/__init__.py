"""Measurements of foci beside what a user would take instead, in one run on the machine at hand: `foci bench`."""

from foci.cli.bench.ahead import compile_ahead, measure_beside
from foci.cli.bench.cases import CASES, Case, Sizes
from foci.cli.bench.measure import Line, facts, measure
from foci.cli.bench.report import draw, summary, table

__all__ = ["CASES", "Case", "Line", "Sizes", "compile_ahead", "draw", "facts", "measure", "measure_beside", "summary", "table"]
