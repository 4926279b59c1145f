import pytest

from foci.padding import legality, operators


@pytest.fixture(autouse=True)
def padding_is_nan(monkeypatch):
    """What lies between rows is NaN, so that it cannot reach a result unseen; 1 in a dtype of which products on this CPU read it, where
    foci pads nothing. What the pass does to graphs is tested in that dtype all the same."""
    empty, reads_between_rows = operators._empty, legality.reads_between_rows
    monkeypatch.setattr(legality, "reads_between_rows", lambda dtype: False)

    def filled(sizes, strides, like, alignment, smallest):
        tensor = empty(sizes, strides, like, alignment, smallest)
        if tensor.device.type != "meta" and tensor.dtype.is_floating_point and not hasattr(tensor, "fake_mode"):
            extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
            value = 1.0 if tensor.device.type == "cpu" and reads_between_rows(tensor.dtype) else float("nan")
            tensor.as_strided((max(extent, 0),), (1,)).fill_(value)
        return tensor

    monkeypatch.setattr(operators, "_empty", filled)
