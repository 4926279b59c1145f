"""Every allocation of the conformance suite starts as NaN, so that nothing can rest on memory that happens to be zero."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    was, warns, fills = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(was, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory = fills
