"""torch.nn's modules in a model, made foci's."""

from __future__ import annotations

from typing import Final, TypeVar

import torch

from foci.nn.attention import adopt
from foci.nn.decoder import TransformerDecoder, TransformerDecoderLayer
from foci.nn.encoder import TransformerEncoder, TransformerEncoderLayer
from foci.nn.linear import PaddedLinear, pad_storage
from foci.nn.transformer import Transformer

__all__ = ["convert"]

Model = TypeVar("Model", bound=torch.nn.Module)

_CLASSES: Final[dict[type, type]] = {
    torch.nn.TransformerEncoderLayer: TransformerEncoderLayer,
    torch.nn.TransformerEncoder: TransformerEncoder,
    torch.nn.TransformerDecoderLayer: TransformerDecoderLayer,
    torch.nn.TransformerDecoder: TransformerDecoder,
    torch.nn.Transformer: Transformer,
}


def convert(model: Model, *, padding: bool = False) -> Model:
    """Makes every attention and transformer module of torch.nn in a model foci's, in place.

    The modules stay the same objects, with their parameters, hooks, modes and whoever refers to them; only their classes
    change. A subclass of torch's modules keeps its class, and what it consists of is converted.

    Args:
        model: any module, itself one of torch's perhaps.
        padding: whether linear layers become `PaddedLinear`.

    Returns:
        The model.

    Raises:
        TypeError: for anything but a module.

    Example:
        >>> import torch, foci.nn
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.TransformerEncoderLayer(32, 4, batch_first=True))
        >>> type(foci.nn.convert(model)[1]) is foci.nn.TransformerEncoderLayer
        True
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    for module in model.modules():
        if type(module) is torch.nn.MultiheadAttention:
            adopt(module)
        elif padding and type(module) is torch.nn.Linear:
            module.__class__ = PaddedLinear
            pad_storage(module)
        elif type(module) in _CLASSES:
            module.__class__ = _CLASSES[type(module)]
            if isinstance(module, TransformerEncoder):
                module.use_nested_tensor = module.enable_nested_tensor
    return model
