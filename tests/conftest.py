"""What holds for every test: those of a device that is absent are skipped, with the reason."""

import pytest
import torch


def pytest_report_header():
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, CUDA device: {cuda}"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
