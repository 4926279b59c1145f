"""Products of bad shapes at the speed of good ones: dims that grow inside a graph, rows read by groups, padded strides."""

from foci.padding.gemm_times import Table, find_table
from foci.padding.legality import is_legal_to_pad
from foci.padding.model import Machine, describe_machine, is_profitable_to_pad
from foci.padding.passes import Padded, pad
from foci.padding.report import Padding
from foci.padding.strides import pad_strides

__all__ = [
    "Machine",
    "Padded",
    "Padding",
    "Table",
    "describe_machine",
    "find_table",
    "is_legal_to_pad",
    "is_profitable_to_pad",
    "pad",
    "pad_strides",
]
