"""foci.nn on a CUDA device against itself on the CPU; what it waits for; CUDA graphs."""

import copy

import pytest
import torch
from waiting import waits

import foci
import foci.nn

pytestmark = pytest.mark.gpu

B, S, E, H, FF = 4, 70, 64, 4, 96


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def padding(length=S):
    return torch.arange(length) >= torch.tensor([length, 3, length // 2, length - 1])[:, None]


def both(model, *args, **kwargs):
    """Outputs and parameter gradients on the CPU and on the GPU."""
    results = []
    for device in ("cpu", "cuda"):
        placed = copy.deepcopy(model).to(device)
        out = placed(*(a.to(device) for a in args), **{name: value.to(device) for name, value in kwargs.items()})
        grads = torch.autograd.grad((out * rand(*out.shape, seed=3).to(device)).sum(), list(placed.parameters()))
        results.append([t.cpu() for t in (out, *grads)])
    return results


def encoder(**options):
    torch.manual_seed(0)
    layer = foci.nn.TransformerEncoderLayer(E, H, FF, 0.0, batch_first=True, **options)
    return foci.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(E))


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "norm_first": True, "mask": foci.masks.window(9)}], ids=["plain", "variant"])
def test_encoder(options):
    cpu, cuda = both(encoder(**options), rand(B, S, E), src_key_padding_mask=padding())
    for one, other in zip(cpu, cuda):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "options", [{}, {"norm_first": True, "activation": "gelu"}, {"mask": foci.masks.causal()}], ids=["last", "first", "causal"]
)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_layers_are_one_node(monkeypatch, options, dropout):
    """And give what their modules give, dropout's draws included."""
    torch.manual_seed(0)
    layer = foci.nn.TransformerEncoderLayer(E, H, FF, dropout, batch_first=True, **options)
    layer.self_attn.dropout = 0.0  # its seeds are drawn in an order of their own
    model, x = foci.nn.TransformerEncoder(layer, 2).cuda(), rand(B, S, E).cuda().requires_grad_()

    def outcome():
        torch.manual_seed(1)
        out = model(x, src_key_padding_mask=padding().cuda())
        return out, [out, *torch.autograd.grad((out * rand(*out.shape, seed=3).cuda()).sum(), [x, *model.parameters()])]

    out, actual = outcome()
    names, nodes = [], [out.grad_fn]
    while nodes:
        one = nodes.pop()
        names.append(type(one).__name__)
        nodes += [n for n, _ in one.next_functions if n is not None]
    assert names.count("_NodeBackward") == 2
    assert "AddmmBackward0" not in names
    monkeypatch.setattr("foci.nn.encoder.noted", lambda *_: None)
    torch.testing.assert_close(actual, outcome()[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_end_with_relu(dtype):
    model, x = encoder().cuda().to(dtype).eval(), rand(B, S, E).cuda().to(dtype)
    with torch.no_grad():
        actual = model(x, src_key_padding_mask=padding().cuda())
    torch.testing.assert_close(actual, model(x, src_key_padding_mask=padding().cuda()), rtol=2e-2, atol=2e-2)


def test_decoder():
    torch.manual_seed(0)
    decoder = foci.nn.TransformerDecoder(foci.nn.TransformerDecoderLayer(E, H, FF, 0.0, batch_first=True), 2)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(40)
    masks = {"tgt_mask": causal, "tgt_key_padding_mask": padding(40), "memory_key_padding_mask": padding()}
    cpu, cuda = both(decoder, rand(B, 40, E), rand(B, S, E), **masks)
    for one, other in zip(cpu, cuda):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("length", [S, 1 << 14])  # the host looks through the one itself
@pytest.mark.parametrize("kind", ["right", "left", "holes", "bias", "nothing"])
def test_packings(kind, length, batch_first):
    hidden = padding(length)
    mask = {
        "right": hidden, "left": hidden.flip(1), "holes": rand(B, length) > 0.5, "nothing": hidden & False,
        "bias": torch.where(hidden, -torch.inf, rand(B, length)),
    }[kind]  # fmt: skip
    actual, wanted = (foci.nn.Packing.from_mask(m, batch_first=batch_first) for m in (mask.cuda(), mask))
    assert (actual.longest, actual.shape, actual.batch_first) == (wanted.longest, wanted.shape, wanted.batch_first)
    for name in ("offsets", "indices", "columns", "starts", "bias"):
        one, other = getattr(actual, name), getattr(wanted, name)
        assert one is None if other is None else one.is_cuda and torch.equal(one.cpu(), other), name


@pytest.mark.parametrize("page_size", [None, 16])
def test_cache(page_size):
    model, x = encoder(rotary=foci.nn.RotaryEmbedding(16)).cuda().eval(), rand(B, 30, E).cuda()
    causal = torch.nn.Transformer.generate_square_subsequent_mask(30, device="cuda")
    cache = foci.nn.KVCache(2, 30, page_size=page_size)
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in x.split([20, 1, 1, 8], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(x, mask=causal), rtol=1e-3, atol=1e-3)


# JAG-08
def test_waits():
    model, x = encoder().cuda(), rand(B, S, E).cuda()
    nested = torch.nested.nested_tensor([rand(n, E) for n in (5, 70, 1)], layout=torch.jagged).cuda()
    hidden = padding().cuda()
    with foci.observe() as log:
        model(nested)
    if log.calls[0].backend != "triton":
        pytest.skip(f"{log.calls[0].backend} reads offsets on the host; the Triton backend does not")
    assert waits(lambda: model(x, src_key_padding_mask=hidden)) == 1
    assert waits(lambda: model(nested)) == 0
    packing = foci.nn.Packing(nested.offsets(), 70, (3, 70))
    assert waits(lambda: model(nested.values(), src_key_padding_mask=packing)) == 0
    torch.testing.assert_close(model(nested.values(), src_key_padding_mask=packing), model(nested).values())


def test_cuda_graph():
    model, x, hidden = encoder().cuda().eval(), rand(B, S, E).cuda(), padding().cuda()
    with torch.no_grad():
        want = model(x, src_key_padding_mask=hidden)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                model(x)
        torch.cuda.current_stream().wait_stream(stream)
        with foci.observe() as log:
            model(x)
        if log.calls[0].backend == "blocked":
            pytest.skip("the blocked backend reads the mask's blocks on the host")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x, src_key_padding_mask=hidden)
        graph.replay()
    torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-3)
