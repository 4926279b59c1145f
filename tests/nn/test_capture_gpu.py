"""Captured modules on a CUDA device against the same modules without graphs."""

import copy
import gc
import threading

import pytest
import torch
from waiting import waits

import foci
import foci.nn

pytestmark = pytest.mark.gpu

B, S, E, H, FF = 4, 70, 64, 4, 96


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).cuda()


def padding(*lengths, length=S):
    return (torch.arange(length) >= torch.tensor(lengths)[:, None]).cuda()


def twins(dropout=0.0, dtype=torch.float32, **options):
    torch.manual_seed(0)
    layer = foci.nn.TransformerEncoderLayer(E, H, FF, dropout, batch_first=True, **options)
    model = foci.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(E)).cuda().to(dtype)
    return model, foci.nn.capture(copy.deepcopy(model))


def graded(model, inputs, **kwargs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = model(*inputs, **kwargs)
    values = out.values() if out.is_nested else out
    weights = rand(*values.shape, seed=5).to(values.dtype)
    return [values, *torch.autograd.grad((values * weights).sum(), [*inputs, *model.parameters()])]


def assert_same(actual, wanted, tolerance=1e-3):
    for one, other in zip(actual, wanted, strict=True):
        if one.is_nested:
            one, other = one.values(), other.values()
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * max(1.0, other.abs().max().item()))


LENGTHS = ([70, 3, 35, 69], [1, 1, 1, 1], [70, 70, 70, 70], [5, 60, 0, 9], [70, 3, 35, 69])
OPTIONS = {
    "plain": {},
    "variant": {"num_kv_heads": 2, "norm_first": True, "mask": foci.masks.window(9), "rotary": foci.nn.RotaryEmbedding(16)},
    "lists": {"mask": foci.Mask(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 == 0), "score": foci.scores.softcap(20.0)},
}


def assert_as_good(actual, wanted, exact):
    """The largest error of each result is at most three times that of the same module without a graph, whose products have other shapes."""
    for one, other, true in zip(actual, wanted, exact, strict=True):
        true = true.detach().float()
        error, allowed = (one.float() - true).abs().max(), (other.float() - true).abs().max()
        assert error <= 3 * allowed + 1e-3 * max(1.0, true.abs().max()), (tuple(one.shape), error, allowed)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_encoder(name, dtype):
    model, captured = twins(dtype=dtype, **OPTIONS[name])
    exact = copy.deepcopy(model).double()

    def check(inputs, times=1, **kwargs):
        true, wanted = (graded(m, [x.to(kind) for x in inputs], **kwargs) for m, kind in ((exact, torch.float64), (model, dtype)))
        for _ in range(times):
            assert_as_good(graded(captured, inputs, **kwargs), wanted, true)
        if not inputs[0].is_nested:
            with torch.inference_mode():
                assert_as_good([captured(*inputs, **kwargs)], wanted[:1], true[:1])

    for n, lengths in enumerate(LENGTHS):
        check([rand(B, S, E, seed=n).to(dtype)], times=2, src_key_padding_mask=padding(*lengths))
    check([torch.nested.nested_tensor([rand(n, E) for n in (5, 60, 1)], layout=torch.jagged, dtype=dtype)])
    packing = foci.nn.Packing(torch.tensor([0, 5, 65, 65, 66]).cuda(), 60, (4, 60))
    check([rand(66, E).to(dtype)], src_key_padding_mask=packing)


def test_decoder():
    torch.manual_seed(0)
    model = foci.nn.TransformerDecoder(foci.nn.TransformerDecoderLayer(E, H, FF, 0.0, batch_first=True), 2).cuda()
    captured = foci.nn.capture(copy.deepcopy(model))
    causal = torch.nn.Transformer.generate_square_subsequent_mask(40, device="cuda")
    tgt, memory = rand(B, 40, E), rand(B, S, E)
    for lengths in LENGTHS:
        kwargs = {
            "tgt_mask": causal, "tgt_key_padding_mask": padding(40, 1, 7, 39, length=40), "memory_key_padding_mask": padding(*lengths),
        }  # fmt: skip
        assert_same(graded(captured, [tgt, memory], **kwargs), graded(model, [tgt, memory], **kwargs))


def test_learned_scores():
    class Distances(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(H, 2 * S + 1))

        def forward(self):
            return foci.scores.relative_position(self.table)

    model, captured = twins(score=Distances())
    for lengths in LENGTHS[:2]:
        kwargs = {"src_key_padding_mask": padding(*lengths)}
        assert_same(graded(captured, [rand(B, S, E)], **kwargs), graded(model, [rand(B, S, E)], **kwargs))


def test_steps_of_an_optimizer():
    model, captured = twins()
    optimizers = [torch.optim.SGD(m.parameters(), 1e-3, momentum=0.9) for m in (model, captured)]
    for step, lengths in enumerate(LENGTHS):
        for m, optimizer in zip((model, captured), optimizers):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for part in range(2):  # gradients of two batches
                m(rand(B, S, E, seed=part), src_key_padding_mask=padding(*lengths)).square().sum().backward()
            optimizer.step()
    assert_same(captured.parameters(), model.parameters())


def test_forwards_before_backwards():
    model, captured = twins()
    results = []
    for m in (model, captured):
        inputs = [rand(B, S, E, seed=n).requires_grad_() for n in range(3)]
        outs = [m(x, src_key_padding_mask=padding(*LENGTHS[n])) for n, x in enumerate(inputs)]
        with torch.no_grad():
            m(inputs[0], src_key_padding_mask=padding(*LENGTHS[1]))
        results.append([t for out, x in zip(outs, inputs) for t in (out, *torch.autograd.grad(out.square().sum(), [x, *m.parameters()]))])
    assert_same(*results)


def test_results_are_the_callers():
    _, captured = twins()
    hidden = padding(*LENGTHS[0])
    out = captured(rand(B, S, E), src_key_padding_mask=hidden)
    out.sum().backward()
    first = [out.detach(), *(p.grad for p in captured.parameters())]
    kept = [t.clone() for t in first]
    captured.zero_grad()
    for n in range(1, 4):
        captured(rand(B, S, E, seed=n), src_key_padding_mask=padding(*LENGTHS[n])).square().sum().backward()
    assert all(map(torch.equal, first, kept))


def test_dropout():
    model, captured = twins(dropout=0.3)
    packing = foci.nn.Packing(torch.tensor([0, 40, 64]).cuda(), 40, (2, 40))  # no spare row: the same draws
    x, kwargs = rand(64, E), {"src_key_padding_mask": packing}
    outputs = [captured(x, **kwargs) for _ in range(3)]
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])
    for seed in (3, 4):
        runs = []
        for m in (model, captured):
            torch.manual_seed(seed)
            runs.append(graded(m, [x], **kwargs))
        assert_same(runs[1], runs[0])


def test_autocast():
    model, captured = twins()
    x, hidden = rand(B, S, E), padding(*LENGTHS[0])
    for _ in range(2):
        results = []
        for m in (model, captured):
            with torch.autocast("cuda", torch.bfloat16):
                out = m(x, src_key_padding_mask=hidden)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), list(m.parameters()))])
            with torch.no_grad():
                for p in m.parameters():
                    p.mul_(1.3)
        assert [t.dtype for t in results[0]] == [t.dtype for t in results[1]]
        assert_same(results[1], results[0], 5e-2)
    assert captured.forward.count == 1


def test_streams():
    model, captured = twins()
    streams = [torch.cuda.Stream() for _ in range(2)]
    x, hidden = rand(B, S, E), padding(*LENGTHS[0])
    wanted = graded(model, [x], src_key_padding_mask=hidden)
    torch.cuda.synchronize()
    for _ in range(3):
        results = []
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(graded(captured, [x], src_key_padding_mask=hidden))
        torch.cuda.synchronize()
        for one in results:
            assert_same(one, wanted)


def test_waits():
    _, captured = twins()
    x, hidden = rand(B, S, E), padding(*LENGTHS[0])
    assert waits(lambda: captured(x, src_key_padding_mask=hidden).sum().backward()) == 1
    packing = foci.nn.Packing.from_mask(hidden)
    tokens = packing.pack(x)
    assert waits(lambda: captured(tokens, src_key_padding_mask=packing).sum().backward()) == 0


def test_sizes_share_memory():
    _, captured = twins(num_kv_heads=1)

    def step(count):
        packing = foci.nn.Packing(torch.tensor([0, count]).cuda(), count, (1, count))
        captured(rand(count, E), src_key_padding_mask=packing).sum().backward()
        captured.zero_grad()

    def reserved():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    before = reserved()
    step(60_000)
    one = reserved() - before
    for count in (52_000, 44_000, 36_000, 33_000):
        step(count)
    assert captured.forward.count == 5
    assert reserved() - before < 1.35 * one


def test_what_cannot_be_captured_says_so():
    _, captured = twins()
    x, hidden = rand(B, S, E), padding(*LENGTHS[0])
    with foci.use("blocked"), pytest.raises(RuntimeError, match="waits for the device"):
        captured(x, src_key_padding_mask=hidden)
    with pytest.raises(ValueError, match="src must be on the CUDA device"):
        captured(x.cpu(), src_key_padding_mask=hidden.cpu())
    with pytest.raises(ValueError, match="src_key_padding_mask must be on the CUDA device"):
        captured(x, src_key_padding_mask=hidden.cpu())
    captured(x, src_key_padding_mask=hidden).sum().backward()  # and nothing is left of that


def test_within_a_graph_of_the_callers():
    model, captured = twins()
    x, hidden = rand(B, S, E), padding(*LENGTHS[0])
    with torch.no_grad():
        wanted = model(x, src_key_padding_mask=hidden)
        captured(x, src_key_padding_mask=hidden)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = captured(x, src_key_padding_mask=hidden)
        graph.replay()
    assert_same([out], [wanted])


def test_graphs_dropped_in_another_thread_leave_a_capture_alone():
    """The garbage collector may run in a thread that compiles, while the caller's thread captures a graph of its own."""
    model, captured = twins()
    x, hidden = rand(B, S, E), padding(*LENGTHS[0])
    with torch.no_grad():
        captured(x, src_key_padding_mask=hidden)
        owner = [captured]
        del captured

        def drop():
            owner.clear()
            gc.collect()

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            thread = threading.Thread(target=drop)
            thread.start()
            thread.join()
            out = x * 2
        graph.replay()
    assert not owner
    assert_same([out], [x * 2])
