"""Modules of foci.nn in graphs of torch.fx: leaves, as torch.nn's are."""

import operator

import pytest
import torch

import foci.nn

ENCODER = {"batch_first": True, "dim_feedforward": 32}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = foci.nn.MultiheadAttention(16, 2, batch_first=True)
        self.layer = foci.nn.TransformerEncoderLayer(16, 2, **ENCODER)
        self.encoder = foci.nn.TransformerEncoder(foci.nn.TransformerEncoderLayer(16, 2, **ENCODER), 2)
        self.decoder = foci.nn.TransformerDecoder(foci.nn.TransformerDecoderLayer(16, 2, **ENCODER), 2)
        self.last = foci.nn.TransformerDecoderLayer(16, 2, **ENCODER)
        self.both = foci.nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
        self.head = foci.nn.PaddedLinear(16, 5)

    def forward(self, x, padding):
        y = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        y = self.encoder(self.layer(y, src_key_padding_mask=padding), src_key_padding_mask=padding)
        y = self.last(self.decoder(y, x, memory_key_padding_mask=padding), x)
        return self.head(self.both(x, y, tgt_key_padding_mask=padding))


@pytest.mark.parametrize("training", [False, True])
def test_traced_model_calls_modules_whole(training):
    torch.manual_seed(0)
    model = Model().train(training)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout | torch.nn.MultiheadAttention):
            setattr(module, "p" if isinstance(module, torch.nn.Dropout) else "dropout", 0.0)
    traced = torch.fx.symbolic_trace(model)
    calls = [node.target for node in traced.graph.nodes if node.op not in ("placeholder", "output")]
    assert calls == ["attention", operator.getitem, "layer", "encoder", "decoder", "last", "both", "head"]
    x, padding = torch.randn(3, 7, 16), torch.arange(7) >= torch.tensor([[7], [4], [2]])
    assert torch.equal(traced(x, padding), model(x, padding))


class Queried(torch.nn.Module):
    """Its targets are no input."""

    def __init__(self):
        super().__init__()
        self.attention = foci.nn.MultiheadAttention(16, 2, batch_first=True)
        self.decoder = foci.nn.TransformerDecoderLayer(16, 2, **ENCODER)
        self.both = foci.nn.Transformer(16, 2, 1, 1, 32, batch_first=True)

    def forward(self, memory):
        asked = torch.ones(3, 4, 16)
        y = self.attention(asked, memory, memory, need_weights=False)[0]
        return y + self.decoder(asked, memory) + self.both(memory, asked)


def test_traced_where_the_first_argument_is_a_constant():
    model = Queried().eval()
    x = torch.randn(3, 7, 16)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


def test_traced_by_itself():
    with pytest.raises(TypeError, match="only a model that has it"):
        torch.fx.symbolic_trace(foci.nn.TransformerEncoderLayer(16, 2))
