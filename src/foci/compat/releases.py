"""Releases of what foci builds on that its tests were run with. `make matrix`, `foci env`, README.md and pyproject.toml agree with this."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

__all__ = [
    "OLDEST_GXX", "PYTHONS", "RELEASES", "SUPPORTED", "TESTED", "Release", "describe_capability", "describe_gxx", "describe_release",
    "describe_system", "parse_minor",
]  # fmt: skip

# `tests/matrix.py` runs this file by itself, without torch: nothing of foci is imported here.

TESTED: Final = "tested"
TESTED_IN_PART: Final = "tested in part"
SUPPORTED: Final = "supported"


class Release(NamedTuple):
    """A release of torch, and the Triton that its wheel on PyPI requires."""

    torch: str
    triton: str


RELEASES: Final = (
    Release("2.11.0", "3.6.0"),
    Release("2.12.1", "3.7.1"),
    Release("2.13.0", "3.7.1"),
    Release("2.14.1", "3.8.0"),
    Release("2.15.0", "3.9.0"),
)
"""Oldest first."""

PYTHONS: Final[Mapping[str, str]] = MappingProxyType(
    {"3.11": TESTED, "3.12": TESTED_IN_PART, "3.13": TESTED_IN_PART, "3.14": TESTED_IN_PART}
)
"""Oldest first, each with how much of the suite ran."""
SYSTEM: Final = ("Linux", "x86_64")
CAPABILITIES: Final = ((9, 0),)
"""Compute capabilities of GPUs that the tests ran on; kernels for 8.0 are compiled by the tests and not run."""
OLDEST_GXX: Final = 12
"""The oldest g++ that builds the kernels of the backend cpu."""


def parse_minor(version: str) -> tuple[int, int]:
    """The first two numbers of a version: (2, 13) of "2.13.0+cpu". Raises ValueError for what is no version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def describe_release(package: str, version: str, torch_version: str) -> str:
    """Whether a release was tested, in words. Patch releases count as the minor release they are of.

    Args:
        package: "python", "torch" or "triton".
        version: of the package.
        torch_version: each torch was tested with one Triton.
    """
    known = {"python": list(PYTHONS), "torch": [each.torch for each in RELEASES], "triton": [each.triton for each in RELEASES]}[package]
    same_minor = next((each for each in known if parse_minor(each) == parse_minor(version)), None)
    if same_minor is None:
        return f"not tested: {known[0]} to {known[-1]} were"
    if package == "python":
        return PYTHONS[same_minor]
    if package == "triton":
        required = [each.triton for each in RELEASES if parse_minor(each.torch) == parse_minor(torch_version)]
        if required and parse_minor(required[0]) != parse_minor(version):
            return f"not tested with torch {torch_version}: {required[0]} was"
    return TESTED


def describe_system(system: str, machine: str) -> str:
    """Whether an operating system on a kind of processor was tested, in words."""
    return TESTED if (system, machine) == SYSTEM else f"not tested: {' on '.join(SYSTEM)} was"


def describe_capability(capability: tuple[int, int]) -> str:
    """Whether a GPU's compute capability was tested, in words."""
    return TESTED if capability in CAPABILITIES else f"not tested: {', '.join(f'sm_{major}{minor}' for major, minor in CAPABILITIES)} was"


def describe_gxx(version: str) -> str:
    """Whether a g++ builds the kernels of the backend cpu, in words; an empty version stands for no compiler."""
    major = version.split(".")[0]
    return SUPPORTED if major.isdecimal() and int(major) >= OLDEST_GXX else f"g++ {OLDEST_GXX} or later is needed"
