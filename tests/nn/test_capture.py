"""Captured modules against themselves, by an engine that runs a recording's function again where CUDA would replay a graph."""

import threading

import pytest
import torch
from capturing import FF, E, H, assert_same, decoder, encoder, graded, padding, rand, twins

import foci
import foci.nn
from foci.nn.cuda_graphs import graphs
from foci.nn.cuda_graphs.buckets import Bucket, BucketShape, choose_shape, round_up
from foci.nn.cuda_graphs.capture import Captured

pytestmark = pytest.mark.usefixtures("engine")


def test_rounded():
    for count in (*range(1, 300), 5151, 8192, 8193, 100_000):
        size = round_up(count, least=64, parts=32)
        assert count <= size < count + max(64, count // 8) and size % 64 == 0
        assert round_up(size, least=64, parts=32) == size
    assert len({round_up(n, least=64, parts=32) for n in range(4097, 8193)}) == 16


def test_rooms():
    packing = foci.nn.Packing(torch.tensor([0, 70, 71, 71]), 70, (3, 90))
    assert choose_shape(packing, 71, None, exact=False) == BucketShape(128, 8, 128, 128)
    assert choose_shape(packing, 71, None, exact=True) == BucketShape(128, 3, 90, 90)
    assert choose_shape(packing, 71, (10, 71, 500), exact=False).tokens == 71
    with pytest.raises(ValueError, match="sizes go to 70 tokens; this batch has 71"):
        choose_shape(packing, 71, (70,), exact=False)


def test_seats():
    hidden = torch.tensor([[True, False, True, False], [False, False, True, True]])
    packing = foci.nn.Packing.from_mask(hidden)
    seat = Bucket.of(packing, BucketShape(6, 4, 8, 8))
    tensors = seat.make(tokens := packing.pack(rand(2, 4, 3)), packing)
    for t in tensors:
        t.fill_(-7)
    seat.fill(tensors, tokens, packing)
    padded_packing = seat.packing(tensors)
    torch.testing.assert_close(tensors[0], torch.cat((tokens, torch.zeros(2, 3))))
    assert padded_packing.offsets.tolist() == [0, 2, 4, 4, 4] and padded_packing.columns.tolist() == [1, 3, 0, 1, 0, 0]
    assert padded_packing.shape == (4, 8) and padded_packing.longest == 8 and len(tensors) == seat.width


def test_positions_of_spare_rows():
    packing = foci.nn.Packing(torch.tensor([0, 3, 3, 5]), 3, (3, 3))
    assert packing.positions(7).tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert packing.sequence_ids(7).tolist() == [0, 0, 0, 2, 2, 3, 3]


OPTIONS = {
    "plain": {},
    "norm first, gelu": {"norm_first": True, "activation": "gelu"},
    "grouped, rotary": {"num_kv_heads": 2, "rotary": foci.nn.RotaryEmbedding(8)},
    "window, softcap": {"mask": foci.masks.window(5), "score": foci.scores.softcap(20.0)},
    "length first": {"batch_first": False},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["right", "left", "holes", "float", "none", "empty row", "all"])
def test_encoder(name, kind):
    model, captured = twins(encoder(**OPTIONS[name]))
    x, hidden = rand(3, 40, E), padding([40, 3, 20], 40)
    if kind == "left":
        hidden = hidden.flip(1)
    elif kind == "holes":
        hidden = rand(3, 40) > 0.5
    elif kind == "float":
        hidden = torch.zeros(3, 40).masked_fill(hidden, -torch.inf) + rand(1, 40)
    elif kind == "none":
        hidden = None
    elif kind == "empty row":
        hidden[1] = True
    elif kind == "all":
        hidden[:] = True
    if not captured.layers[0].self_attn.batch_first:
        x = x.transpose(0, 1)
    wanted = graded(model, [x], src_key_padding_mask=hidden)
    for _ in range(2):
        assert_same(graded(captured, [x], src_key_padding_mask=hidden), wanted)
    with torch.no_grad():
        assert_same([captured(x, src_key_padding_mask=hidden)], wanted[:1])
    with torch.inference_mode():
        assert_same([captured(x, src_key_padding_mask=hidden)], wanted[:1])


def test_different_lengths_share_a_size(engine):
    model, captured = twins(encoder())
    for n, lengths in enumerate(([40, 3, 20], [9, 9, 33], [40, 40, 40], [1, 2, 3], [40, 3, 20])):
        inputs, hidden = [rand(3, 40, E, seed=n)], padding(lengths, 40)
        assert_same(graded(captured, inputs, src_key_padding_mask=hidden), graded(model, inputs, src_key_padding_mask=hidden))
    assert captured.forward.count == 2 and engine.recordings == 4  # 64 and 128 tokens, each with its backward


def test_what_padding_holds_reaches_nothing():
    model, captured = twins(encoder())
    hidden = padding([5, 40, 2], 40)
    graded(captured, [torch.full((3, 40, E), torch.nan)], src_key_padding_mask=padding([40, 1, 1], 40))  # and leaves NaN behind
    x = rand(3, 40, E)
    wanted = graded(model, [x], src_key_padding_mask=hidden)
    assert_same(graded(captured, [x.masked_fill(hidden[..., None], torch.nan)], src_key_padding_mask=hidden), wanted)


def test_nested_and_packed():
    model, captured = twins(encoder())
    nested = torch.nested.nested_tensor([rand(n, E) for n in (5, 30, 1)], layout=torch.jagged)
    assert_same(graded(captured, [nested]), graded(model, [nested]))
    for batch in ([0, 5, 35, 36], [0, 5, 35, 35, 36], [0, 36]):
        packing = foci.nn.Packing(torch.tensor(batch), 30 if len(batch) > 2 else 36, (len(batch) - 1, 36))
        tokens = rand(36, E)
        assert_same(graded(captured, [tokens], src_key_padding_mask=packing), graded(model, [tokens], src_key_padding_mask=packing))
    assert captured.forward.count == 1
    strided = torch.nested.nested_tensor([rand(n, E) for n in (5, 30, 1)], layout=torch.strided)
    with torch.no_grad():
        for one, other in zip(captured(strided).unbind(), model(strided).unbind()):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hint", [None, True, False])
def test_attention_masks(hint):
    model, captured = twins(encoder())
    hidden, causal = padding([40, 3, 20], 40), torch.nn.Transformer.generate_square_subsequent_mask(40)
    other = rand(3 * H, 40, 40) > 1
    for mask, is_causal in ((causal, hint), (other, False), (causal + rand(40, 40), False), (~other, False)):
        kwargs = {"mask": mask, "src_key_padding_mask": hidden, "is_causal": is_causal}
        assert_same(graded(captured, [rand(3, 40, E)], **kwargs), graded(model, [rand(3, 40, E)], **kwargs))
    with pytest.raises(RuntimeError, match="The shape of the 2D attn_mask"):
        captured(rand(3, 40, E), other[0, :30, :30], hidden)


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "num_kv_heads": 2}], ids=["plain", "grouped"])
def test_decoder(options):
    model, captured = twins(decoder(**options))
    tgt, memory = rand(3, 20, E), rand(3, 40, E, seed=1)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(20)
    cross = rand(20, 40) > 1
    for kwargs in (
        {"tgt_key_padding_mask": padding([20, 1, 7], 20), "memory_key_padding_mask": padding([3, 40, 9], 40), "tgt_mask": causal},
        {"memory_key_padding_mask": padding([3, 40, 9], 40), "memory_mask": cross},
        {"tgt_mask": causal, "tgt_is_causal": True},
        {},
    ):
        assert_same(graded(captured, [tgt, memory], **kwargs), graded(model, [tgt, memory], **kwargs))
    with pytest.raises(ValueError, match="memory must have the batch size of tgt, 3; got 2"):
        captured(tgt, memory[:2])


def test_transformer_and_layers():
    torch.manual_seed(0)
    model = foci.nn.Transformer(E, H, 1, 1, FF, 0.0, batch_first=True)
    model, captured = twins(torch.nn.ModuleDict({"layer": encoder().layers[0], "both": model}))
    src, tgt = rand(3, 40, E), rand(3, 20, E)
    hidden = padding([3, 40, 9], 40)

    def run(m):
        return m["both"](m["layer"](src, src_key_padding_mask=hidden), tgt, src_key_padding_mask=hidden, memory_key_padding_mask=hidden)

    actual, wanted = (torch.autograd.grad(run(m).square().sum(), list(m.parameters())) for m in (captured, model))
    assert_same(actual, wanted)
    assert [type(m).__name__ for m in captured.modules() if isinstance(vars(m).get("forward"), Captured)] == [
        "TransformerEncoderLayer", "TransformerEncoder", "TransformerDecoder",
    ]  # fmt: skip


def test_learned_scores():
    class Distances(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(rand(H, 81))

        def forward(self):
            return foci.scores.relative_position(self.table)

    model, captured = twins(encoder(score=Distances()))
    for lengths in ([40, 3, 20], [40, 40, 1]):
        kwargs = {"src_key_padding_mask": padding(lengths, 40)}
        actual = graded(captured, [rand(3, 40, E)], **kwargs)
        assert_same(actual, graded(model, [rand(3, 40, E)], **kwargs))


def test_indexed_tensors_keep_lengths_as_they_are():
    table = rand(3, 40)
    score = foci.Score(lambda score, b, h, q_idx, kv_idx: score + table[b, kv_idx])
    model, captured = twins(encoder(score=score))
    kwargs = {"src_key_padding_mask": padding([40, 3, 20], 40)}
    assert_same(graded(captured, [rand(3, 40, E)], **kwargs), graded(model, [rand(3, 40, E)], **kwargs))
    table.mul_(2)  # read where it lies
    assert_same(graded(captured, [rand(3, 40, E)], **kwargs), graded(model, [rand(3, 40, E)], **kwargs))
    assert captured.forward.count == 1


def test_extra_keys():
    model = encoder()
    for layer in model.layers:
        attention = foci.nn.MultiheadAttention(E, H, batch_first=True, add_bias_kv=True, add_zero_attn=True)
        layer.self_attn = attention
    model, captured = twins(model)
    kwargs = {"src_key_padding_mask": padding([40, 3, 20], 40)}
    assert_same(graded(captured, [rand(3, 40, E)], **kwargs), graded(model, [rand(3, 40, E)], **kwargs))


@pytest.fixture
def freed(monkeypatch):
    """Fake CUDA graphs, and a list that each of them joins when it is freed."""

    class Graph:
        def __del__(self):
            freed.append(self)

    freed = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(graphs, "_unfreed", [])
    return freed


def test_no_graph_is_freed_while_another_is_captured(freed, monkeypatch):
    one, other = graphs._Graph(), graphs._Graph()
    monkeypatch.setattr(graphs, "is_capturing", lambda: False)
    del one
    assert len(freed) == 1
    monkeypatch.setattr(graphs, "is_capturing", lambda: True)
    del other
    assert len(freed) == 1
    graphs._Graph()
    assert len(freed) == 2  # the one that was kept; the last one is kept now


def test_no_graph_is_freed_in_another_thread_which_cannot_know_who_captures(freed, monkeypatch):
    monkeypatch.setattr(graphs, "is_capturing", lambda: False)
    owner = [graphs._Graph()]
    thread = threading.Thread(target=owner.clear)
    thread.start()
    thread.join()
    assert not freed
    last = graphs._Graph()
    assert len(freed) == 1
    del last
    assert len(freed) == 2
