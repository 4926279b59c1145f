"""Captured modules over many calls: the order of passes, modes, changes, dropout, limits, refusals."""

import copy
import gc
import pickle

import pytest
import torch
from capturing import FF, E, H, assert_same, encoder, graded, padding, rand, twins

import foci
import foci.nn
from compiled import several
from foci.backends.contract import Backend

pytestmark = pytest.mark.usefixtures("engine")


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
    results = []
    for m in (model, captured):
        inputs = [rand(3, 40, E, seed=n).requires_grad_() for n in range(3)]
        outs = [m(x, src_key_padding_mask=hidden) for x in inputs]
        grads = [torch.autograd.grad(out.square().sum(), [x, *m.parameters()]) for out, x in zip(outs, inputs)]
        results.append([t for n in range(3) for t in (outs[n], *grads[n])])
    assert_same(*results)
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
    with pytest.raises(RuntimeError, match="one backward per forward"):
        out.backward()
    (gradient,) = torch.autograd.grad(captured(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_modes_have_captures_of_their_own(engine):
    model, captured = twins(encoder())
    x, hidden = rand(3, 40, E), padding([40, 3, 20], 40)
    for m in (model, captured):
        m.layers[0].requires_grad_(False)
    kwargs = {"src_key_padding_mask": hidden}
    assert_same(graded_of_all(captured, x, **kwargs), graded_of_all(model, x, **kwargs))
    assert all(p.grad is None for p in captured.layers[0].parameters())
    for m in (model, captured):
        m.layers[0].requires_grad_(True)
    assert_same(graded_of_all(captured, x, **kwargs), graded_of_all(model, x, **kwargs))
    assert captured.forward.count == 2
    captured.eval(), model.eval()
    assert_same(graded_of_all(captured, x, **kwargs), graded_of_all(model, x, **kwargs))
    assert captured.forward.count == 3
    with foci.use("reference"):
        assert_same(graded_of_all(captured, x, **kwargs), graded_of_all(model, x, **kwargs))
    assert captured.forward.count == 4
    foci.register_backend(Last())
    try:
        assert_same(graded_of_all(captured, x, **kwargs), graded_of_all(model, x, **kwargs))
        assert captured.forward.count == 5
    finally:
        foci.unregister_backend("last")


class Last(Backend):
    """The reference, only taken where nobody else is."""

    name = "last"

    def reject(self, problem, target):
        return None

    def cost(self, problem, target):
        return 1e9

    def build(self, plan):
        return foci.backends.load("reference").build(plan)


def graded_of_all(model, x, **kwargs):
    model.zero_grad()
    out = model(x, **kwargs)
    out.square().sum().backward()
    return [out, *(p.grad for p in model.parameters())]


def test_changes_are_captured_anew(engine):
    model, captured = twins(encoder())
    x, kwargs = rand(3, 40, E), {"src_key_padding_mask": padding([40, 3, 20], 40)}

    def same(*, anew=True):
        before = engine.recordings
        assert_same(graded_of_all(captured, x, **kwargs), graded_of_all(model, x, **kwargs))
        assert captured.forward.count == 1
        assert (engine.recordings > before) == anew

    same()
    state = {name: t + 0.1 for name, t in model.state_dict().items()}
    for m in (model, captured):
        m.load_state_dict(state)
    same(anew=False)
    for m in (model, captured):
        m.load_state_dict({name: t.clone() for name, t in state.items()}, assign=True)
    same()
    for m in (model, captured):
        m.layers[1].self_attn.mask = foci.masks.causal()
    same()
    for m in (model, captured):
        m.layers[0].self_attn.rotary = foci.nn.RotaryEmbedding(H)
    same()
    for m in (model, captured):
        m.layers[0].self_attn.rotary.base = 100.0
    same()
    for m in (model, captured):
        m.layers[0].self_attn.add_zero_attn = True
    same()
    for m in (model, captured):
        m.layers[0].self_attn.add_zero_attn = False
        m.layers[0].self_attn.rotary = None
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
        results = []
        for m in (model, captured):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                out = m(x, src_key_padding_mask=hidden)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), list(m.parameters()))])
            with torch.no_grad():
                for p in m.parameters():
                    p.mul_(1.5)
        for one, other in zip(*results):
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
        kwargs = {"src_key_padding_mask": padding(lengths, 40)}
        assert_same(graded(captured, [rand(2, 40, E)], **kwargs), graded(model, [rand(2, 40, E)], **kwargs))
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
    compiled = torch.compile(captured, backend="eager", fullgraph=True)
    for length in several(45, 33, 40):
        x, hidden = rand(3, length, E), padding([length, 3, 20], length)
        wanted = model(x, src_key_padding_mask=hidden)
        torch.testing.assert_close(compiled(x, src_key_padding_mask=hidden), wanted, rtol=1e-5, atol=1e-5)
    actual = torch.func.functional_call(captured, dict(captured.named_parameters()), (x, None, hidden))
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    actual = torch.func.vmap(lambda x: captured(x, src_key_padding_mask=hidden))(x[None])
    torch.testing.assert_close(actual[0], wanted, rtol=1e-5, atol=1e-5)


def test_refusals():
    with pytest.raises(ValueError, match="model has no encoder or decoder"):
        foci.nn.capture(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="limit must be a positive integer; got 0"):
        foci.nn.capture(encoder(), limit=0)
    for sizes in ([], [0], [1.5]):
        with pytest.raises(ValueError, match="sizes must be positive integers"):
            foci.nn.capture(encoder(), sizes=sizes)
    with pytest.raises(TypeError, match="sizes must be a sequence of positive integers, numbers of tokens; got int"):
        foci.nn.capture(encoder(), sizes=512)
    for function in (foci.nn.capture, foci.nn.release):
        with pytest.raises(TypeError, match="model must be a torch.nn.Module; got NoneType"):
            function(None)
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
