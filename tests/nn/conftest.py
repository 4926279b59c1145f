import pytest


@pytest.fixture
def engine(monkeypatch):
    """Captured modules without a GPU."""
    from capturing import Again

    from foci.nn.cuda_graphs.capture import Captured

    eager_engine = Again()
    monkeypatch.setattr(Captured, "engine", eager_engine)
    return eager_engine


@pytest.fixture
def taken(monkeypatch):
    """Whether each stack, and each layer called by itself, was computed straight."""
    from foci.nn import encoder
    from foci.nn.fused_encoder import Stack

    straight_flags, look, run = [], encoder.noted, Stack.run

    def note(*args):
        stack = look(*args)
        if stack is None:
            straight_flags.append(False)
        return stack

    def note_run(*args, **options):
        out = run(*args, **options)
        straight_flags.append(out is not None)
        return out

    monkeypatch.setattr(encoder, "noted", note)
    monkeypatch.setattr(Stack, "run", note_run)
    return straight_flags
