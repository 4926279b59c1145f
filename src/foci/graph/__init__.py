"""Attention recognised in graphs by its meaning."""

from foci.graph.recognise import fuse
from foci.graph.sites import Fused, Site

__all__ = ["Fused", "Site", "fuse"]
