import pytest


@pytest.fixture
def engine(monkeypatch):
    """Captured modules without a GPU."""
    from capturing import Again

    from foci.nn.capture import Captured

    found = Again()
    monkeypatch.setattr(Captured, "engine", found)
    return found
