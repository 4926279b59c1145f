"""A small stack, a padded batch of it, and what comes of both, also where every module is called."""

import torch

import foci.nn

B, S, E, H = 3, 9, 32, 4
PADDING = torch.arange(S) >= torch.tensor([9, 4, 6])[:, None]


def model(*, dropout=0.0, activation="relu", norm_first=False, bias=True, dtype=torch.float32, layers=2, **options):
    torch.manual_seed(0)
    layer = foci.nn.TransformerEncoderLayer(
        E, H, 48, dropout, activation, batch_first=True, norm_first=norm_first, bias=bias, dtype=dtype, **options
    )
    return foci.nn.TransformerEncoder(layer, layers)


def outcome(encoder, x, **options):
    """Output, and gradients of the input and all parameters."""
    torch.manual_seed(1)
    y = encoder(x, src_key_padding_mask=PADDING, **options)
    wanted = [t for t in (x, *encoder.parameters()) if t.requires_grad]
    weights = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    return [y, *torch.autograd.grad(y, wanted, weights)]


def by_modules(monkeypatch, encoder, x, **options):
    with monkeypatch.context() as patch:
        patch.setattr("foci.nn.encoder.noted", lambda *_: None)
        return outcome(encoder, x, **options)


def source(dtype=torch.float32, *, grad=True):
    return torch.randn(B, S, E, dtype=dtype, generator=torch.Generator().manual_seed(3)).requires_grad_(grad)
