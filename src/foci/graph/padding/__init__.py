"""Products of bad shapes at the speed of good ones: dims that grow inside a graph, rows read by groups, padded strides."""

from foci.graph.padding.legal import is_legal_to_pad
from foci.graph.padding.model import Machine, is_profitable_to_pad, machine_of
from foci.graph.padding.passes import Padded, pad
from foci.graph.padding.report import Padding
from foci.graph.padding.strides import pad_strides
from foci.graph.padding.tables import Table, find_table

__all__ = [
    "Machine",
    "Padded",
    "Padding",
    "Table",
    "find_table",
    "is_legal_to_pad",
    "is_profitable_to_pad",
    "machine_of",
    "pad",
    "pad_strides",
]
