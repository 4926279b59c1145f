"""Captured modules against themselves, by an engine that runs a recording's function again where CUDA would replay a graph."""

import copy
import gc
import pickle

import pytest
import torch

import foci
import foci.nn
from foci.nn.buckets import Room, Seat, room_for, rounded
from foci.nn.capture import Captured
from foci.nn.graphs import Recorded

E, H, FF = 32, 4, 48


class Again:
    """Runs again what it recorded. A pool's memory is its graphs' in turn: what one left is gone when another one's forward runs."""

    def __init__(self):
        self.recordings = 0

    def takes(self, tensor):
        return True

    def pool(self):
        return []

    def warm_up(self, run):
        run()

    def record(self, pool, samples, function):
        self.recordings += 1
        inputs = [t.clone() for t in samples]
        outputs = function(inputs)
        kept = [None if t is None else t.detach().clone() for t in outputs]
        is_forward = len(samples) > 1
        if is_forward:
            pool.append([])
        mine = pool[-1]
        mine += [t for t in (*inputs, *kept) if t is not None and t.is_floating_point()]

        def replay():
            if is_forward:
                for other in pool:
                    for t in other if other is not mine else ():
                        t.fill_(torch.nan)
            for into, t in zip(kept, function(inputs)):
                if into is not None:
                    into.copy_(t.detach())

        return Recorded(replay, inputs, kept)


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    found = Again()
    monkeypatch.setattr(Captured, "engine", found)
    return found


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def padding(lengths, length):
    return torch.arange(length) >= torch.tensor(lengths)[:, None]


def encoder(dropout=0.0, layers=2, **options):
    torch.manual_seed(0)
    options = {"batch_first": True, **options}
    return foci.nn.TransformerEncoder(foci.nn.TransformerEncoderLayer(E, H, FF, dropout, **options), layers, torch.nn.LayerNorm(E))


def decoder(**options):
    torch.manual_seed(0)
    return foci.nn.TransformerDecoder(foci.nn.TransformerDecoderLayer(E, H, FF, 0.0, batch_first=True, **options), 2)


def graded(model, inputs, *args, **kwargs):
    """Output, and gradients of inputs and parameters."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = model(*inputs, *args, **kwargs)
    values = out.values() if out.is_nested else out
    return [values, *torch.autograd.grad((values * rand(*values.shape, seed=5)).sum(), [*inputs, *model.parameters()], allow_unused=True)]


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            if one.is_nested:
                one, other = one.values(), other.values()
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def twins(model, **options):
    return model, foci.nn.capture(copy.deepcopy(model), **options)


def test_rounded():
    for count in (*range(1, 300), 5151, 8192, 8193, 100_000):
        size = rounded(count, least=64, parts=32)
        assert count <= size < count + max(64, count // 8) and size % 64 == 0
        assert rounded(size, least=64, parts=32) == size
    assert len({rounded(n, least=64, parts=32) for n in range(4097, 8193)}) == 16


def test_rooms():
    packing = foci.nn.Packing(torch.tensor([0, 70, 71, 71]), 70, (3, 90))
    assert room_for(packing, 71, None, exact=False) == Room(128, 8, 128, 128)
    assert room_for(packing, 71, None, exact=True) == Room(128, 3, 90, 90)
    assert room_for(packing, 71, (10, 71, 500), exact=False).tokens == 71
    with pytest.raises(ValueError, match="sizes go to 70 tokens; this batch has 71"):
        room_for(packing, 71, (70,), exact=False)


def test_seats():
    hidden = torch.tensor([[True, False, True, False], [False, False, True, True]])
    packing = foci.nn.Packing.from_mask(hidden)
    seat = Seat.of(packing, Room(6, 4, 8, 8))
    tensors = seat.make(tokens := packing.pack(rand(2, 4, 3)), packing)
    for t in tensors:
        t.fill_(-7)
    seat.fill(tensors, tokens, packing)
    made = seat.packing(tensors)
    torch.testing.assert_close(tensors[0], torch.cat((tokens, torch.zeros(2, 3))))
    assert made.offsets.tolist() == [0, 2, 4, 4, 4] and made.columns.tolist() == [1, 3, 0, 1, 0, 0]
    assert made.shape == (4, 8) and made.longest == 8 and len(tensors) == seat.width


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
        given, hidden = [rand(3, 40, E, seed=n)], padding(lengths, 40)
        assert_same(graded(captured, given, src_key_padding_mask=hidden), graded(model, given, src_key_padding_mask=hidden))
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
        given = {"mask": mask, "src_key_padding_mask": hidden, "is_causal": is_causal}
        assert_same(graded(captured, [rand(3, 40, E)], **given), graded(model, [rand(3, 40, E)], **given))
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

    found, wanted = (torch.autograd.grad(run(m).square().sum(), list(m.parameters())) for m in (captured, model))
    assert_same(found, wanted)
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
        given = {"src_key_padding_mask": padding(lengths, 40)}
        found = graded(captured, [rand(3, 40, E)], **given)
        assert_same(found, graded(model, [rand(3, 40, E)], **given))


def test_indexed_tensors_keep_lengths_as_they_are():
    table = rand(3, 40)
    score = foci.Score(lambda score, b, h, q_idx, kv_idx: score + table[b, kv_idx])
    model, captured = twins(encoder(score=score))
    given = {"src_key_padding_mask": padding([40, 3, 20], 40)}
    assert_same(graded(captured, [rand(3, 40, E)], **given), graded(model, [rand(3, 40, E)], **given))
    table.mul_(2)  # read where it lies
    assert_same(graded(captured, [rand(3, 40, E)], **given), graded(model, [rand(3, 40, E)], **given))
    assert captured.forward.count == 1


def test_extra_keys():
    model = encoder()
    for layer in model.layers:
        attention = foci.nn.MultiheadAttention(E, H, batch_first=True, add_bias_kv=True, add_zero_attn=True)
        layer.self_attn = attention
    model, captured = twins(model)
    given = {"src_key_padding_mask": padding([40, 3, 20], 40)}
    assert_same(graded(captured, [rand(3, 40, E)], **given), graded(model, [rand(3, 40, E)], **given))


def test_steps_of_an_optimizer():
    model, captured = twins(encoder())
    one, other = (torch.optim.SGD(m.parameters(), 1e-3) for m in (model, captured))
    for step, lengths in enumerate(([40, 3, 20], [40, 40, 1], [7, 8, 9])):
        for m, optimizer in ((model, one), (captured, other)):
            optimizer.zero_grad(set_to_none=step == 1)
            for part in range(2):  # gradients of two batches
                m(rand(3, 40, E, seed=part), src_key_padding_mask=padding(lengths, 40)).square().sum().backward()
            optimizer.step()
    assert_same(captured.parameters(), model.parameters())


def test_gradients_are_the_callers():
    """A gradient that the graph's memory held would be overwritten by the next step."""
    _, captured = twins(encoder())
    hidden = padding([40, 3, 20], 40)
    captured(rand(3, 40, E), src_key_padding_mask=hidden).sum().backward()
    first = [p.grad for p in captured.parameters()]
    kept = [g.clone() for g in first]
    for p in captured.parameters():
        p.grad = None
    out = captured(rand(3, 40, E, seed=1), src_key_padding_mask=hidden)
    before = out.detach().clone()
    out.square().sum().backward()
    captured(rand(3, 40, E, seed=2), src_key_padding_mask=hidden)
    assert all(map(torch.equal, first, kept)) and torch.equal(out, before)


def test_forwards_before_backwards(engine):
    """Each forward that waits has memory of its own."""
    model, captured = twins(encoder())
    hidden = padding([40, 3, 20], 40)
    found = []
    for m in (model, captured):
        inputs = [rand(3, 40, E, seed=n).requires_grad_() for n in range(3)]
        outs = [m(x, src_key_padding_mask=hidden) for x in inputs]
        grads = [torch.autograd.grad(out.square().sum(), [x, *m.parameters()]) for out, x in zip(outs, inputs)]
        found.append([t for n in range(3) for t in (outs[n], *grads[n])])
    assert_same(*found)
    assert captured.forward.count == 3
    recordings = engine.recordings
    for n in range(4):  # an output that nobody differentiates gives its memory back
        captured(rand(3, 40, E, seed=n).requires_grad_(), src_key_padding_mask=hidden)
    gc.collect()
    captured(rand(3, 40, E).requires_grad_(), src_key_padding_mask=hidden).sum().backward()
    assert engine.recordings == recordings


def test_inference_between_forward_and_backward():
    model, captured = twins(encoder())
    hidden, x = padding([40, 3, 20], 40), rand(3, 40, E)
    out = captured(x, src_key_padding_mask=hidden)
    with torch.no_grad():
        captured(rand(3, 40, E, seed=1), src_key_padding_mask=hidden)
        captured(rand(3, 40, E, seed=1), src_key_padding_mask=padding([40, 40, 40], 40))
    out.square().sum().backward()
    model(x, src_key_padding_mask=hidden).square().sum().backward()
    assert_same([p.grad for p in captured.parameters()], [p.grad for p in model.parameters()])


def test_second_backwards_are_refused():
    _, captured = twins(encoder())
    x = rand(3, 40, E).requires_grad_()
    out = captured(x, src_key_padding_mask=padding([40, 3, 20], 40)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once for each forward"):
        out.backward()
    (gradient,) = torch.autograd.grad(captured(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_modes_have_captures_of_their_own(engine):
    model, captured = twins(encoder())
    x, hidden = rand(3, 40, E), padding([40, 3, 20], 40)
    for m in (model, captured):
        m.layers[0].requires_grad_(False)
    given = {"src_key_padding_mask": hidden}
    assert_same(graded_of_all(captured, x, **given), graded_of_all(model, x, **given))
    assert all(p.grad is None for p in captured.layers[0].parameters())
    for m in (model, captured):
        m.layers[0].requires_grad_(True)
    assert_same(graded_of_all(captured, x, **given), graded_of_all(model, x, **given))
    assert captured.forward.count == 2
    captured.eval(), model.eval()
    assert_same(graded_of_all(captured, x, **given), graded_of_all(model, x, **given))
    assert captured.forward.count == 3
    with foci.use("reference"):
        assert_same(graded_of_all(captured, x, **given), graded_of_all(model, x, **given))
    assert captured.forward.count == 4


def graded_of_all(model, x, **kwargs):
    model.zero_grad()
    out = model(x, **kwargs)
    out.square().sum().backward()
    return [out, *(p.grad for p in model.parameters())]


def test_changes_are_captured_anew():
    model, captured = twins(encoder())
    x, given = rand(3, 40, E), {"src_key_padding_mask": padding([40, 3, 20], 40)}

    def same():
        assert_same(graded_of_all(captured, x, **given), graded_of_all(model, x, **given))
        assert captured.forward.count == 1

    same()
    state = {name: t + 0.1 for name, t in model.state_dict().items()}
    for m in (model, captured):
        m.load_state_dict(state)
    same()
    for m in (model, captured):
        m.load_state_dict({name: t.clone() for name, t in state.items()}, assign=True)
    same()
    for m in (model, captured):
        m.layers[1].self_attn.mask = foci.masks.causal()
    same()
    for m in (model, captured):
        m.norm = torch.nn.Identity()
    same()
    x = x.double()
    for m in (model, captured):
        m.double()
    same()


def test_dropout_draws_anew():
    _, captured = twins(encoder(dropout=0.5))
    x, hidden = rand(3, 40, E), padding([40, 3, 20], 40)
    outs = [captured(x, src_key_padding_mask=hidden) for _ in range(3)]
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
    captured.eval()
    assert torch.equal(captured(x, src_key_padding_mask=hidden), captured(x, src_key_padding_mask=hidden))


def test_capturing_draws_no_numbers():
    model, captured = twins(encoder(dropout=0.5))
    x, hidden = rand(2, 32, E), padding([32, 32], 32)  # 64 tokens, no spare row: the same draws
    torch.manual_seed(3)
    captured(x, src_key_padding_mask=hidden)
    torch.manual_seed(3)
    again = captured(x, src_key_padding_mask=hidden)
    torch.manual_seed(3)
    packing = foci.nn.Packing(torch.tensor([0, 32, 64]), 32, (2, 32))
    torch.testing.assert_close(again.flatten(0, 1), model(x.flatten(0, 1), src_key_padding_mask=packing), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache", [True, False])
def test_autocast(cache):
    model, captured = twins(encoder())
    x, hidden = rand(3, 40, E), padding([40, 3, 20], 40)
    for _ in range(2):
        found = []
        for m in (model, captured):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                out = m(x, src_key_padding_mask=hidden)
            found.append([out, *torch.autograd.grad(out.float().square().sum(), list(m.parameters()))])
            with torch.no_grad():
                for p in m.parameters():
                    p.mul_(1.5)
        for one, other in zip(*found):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2 * other.abs().max().item())
            assert one.dtype == other.dtype
    assert captured.forward.count == 1


def test_limit():
    _, captured = twins(encoder(), limit=2)
    for size in (10, 100, 200, 10):
        captured(rand(1, size, E)).sum().backward()
        assert captured.forward.count <= 2


def test_sizes():
    model, captured = twins(encoder(), sizes=[100, 50])
    for lengths in ([40, 3], [40, 40]):
        given = {"src_key_padding_mask": padding(lengths, 40)}
        assert_same(graded(captured, [rand(2, 40, E)], **given), graded(model, [rand(2, 40, E)], **given))
    with pytest.raises(ValueError, match="sizes go to 100 tokens; this batch has 120"):
        captured(rand(3, 40, E))


def test_copies_and_pickles_capture_for_themselves():
    _, captured = twins(encoder())
    x = rand(2, 10, E)
    wanted = captured(x)
    for other in (copy.deepcopy(captured), pickle.loads(pickle.dumps(captured))):
        assert other.forward.module is other and other.forward.count == 0
        assert_same([other(x)], [wanted])
        assert other.state_dict().keys() == captured.state_dict().keys()


def test_release():
    model, captured = twins(torch.nn.Sequential(encoder()))
    assert foci.nn.release(captured) is captured and "forward" not in vars(captured[0])
    assert_same([captured(rand(2, 5, E))], [model(rand(2, 5, E))])
    foci.nn.release(foci.nn.capture(foci.nn.capture(captured)))
    assert "forward" not in vars(captured[0])


def test_compiled_and_transformed_as_before(engine):
    model, captured = twins(encoder())
    x, hidden = rand(3, 40, E), padding([40, 3, 20], 40)
    wanted = model(x, src_key_padding_mask=hidden)
    compiled = torch.compile(captured, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, src_key_padding_mask=hidden), wanted, rtol=1e-5, atol=1e-5)
    found = torch.func.functional_call(captured, dict(captured.named_parameters()), (x, None, hidden))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    found = torch.func.vmap(lambda x: captured(x, src_key_padding_mask=hidden))(x[None])
    torch.testing.assert_close(found[0], wanted, rtol=1e-5, atol=1e-5)


def test_refusals():
    with pytest.raises(ValueError, match="model has no encoder or decoder"):
        foci.nn.capture(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="limit must be a positive integer; got 0"):
        foci.nn.capture(encoder(), limit=0)
    for sizes in ([], [0], [1.5]):
        with pytest.raises(ValueError, match="sizes must be positive integers"):
            foci.nn.capture(encoder(), sizes=sizes)
    with pytest.raises(ValueError, match="enable_nested_tensor=False"):
        foci.nn.capture(foci.nn.TransformerEncoder(encoder().layers[0], 1, enable_nested_tensor=False))
    with pytest.raises(ValueError, match="not foci.nn.TransformerEncoderLayer"):
        foci.nn.capture(foci.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(E, H), 1))


def test_refused_calls():
    _, captured = twins(encoder())
    x, hidden = rand(3, 40, E), padding([40, 3, 20], 40)
    with pytest.raises(ValueError, match="cache must be None"):
        captured(x, cache=foci.nn.KVCache(2, 50))
    with pytest.raises(ValueError, match="src must be batched"):
        captured(x[0])
    with pytest.raises(ValueError, match="mask must not require grad"):
        captured(x, rand(40, 40).requires_grad_())
    with pytest.raises(ValueError, match="src_key_padding_mask must not require grad"):
        captured(x, src_key_padding_mask=rand(3, 40).requires_grad_())
    with pytest.raises(TypeError, match="unexpected keyword argument 'tgt'"):
        captured(x, tgt=x)
    with pytest.raises(AssertionError, match="src_key_padding_mask"):
        captured(x, src_key_padding_mask=hidden.long())
    handle = captured.layers[1].linear1.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="Linear within a captured module must have no hooks"):
        captured(x)
    handle.remove()
    captured(x)


def test_hooks_of_the_module_itself_and_of_parameters():
    _, captured = twins(encoder())
    seen = []
    captured.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    captured.layers[0].linear1.weight.register_hook(lambda g: seen.append(g.shape))
    captured(rand(3, 40, E), src_key_padding_mask=padding([40, 3, 20], 40)).sum().backward()
    assert seen == [(3, 40, E), (FF, E)]


def test_cpu_tensors_are_refused(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ValueError, match="src must be on the CUDA device of src in a captured module; got cpu"):
        foci.nn.capture(encoder())(rand(2, 5, E))
