"""Decoding with a KV cache against the whole sequence at once."""

import pytest
import torch
from twins import rand

import foci
import foci.nn

B, N, E, H, FF = 3, 12, 16, 4, 24
KINDS = [None, 1, 4, 64]  # static, and pages of one token, some, more than there are


def encoder(depth=2, **options):
    torch.manual_seed(0)
    options = {"num_kv_heads": 2, "rotary": foci.nn.RotaryEmbedding(4), **options}
    layer = foci.nn.TransformerEncoderLayer(E, H, FF, 0.0, batch_first=True, dtype=torch.float64, **options)
    return foci.nn.TransformerEncoder(layer, depth, torch.nn.LayerNorm(E, dtype=torch.float64)).eval()


def run_full_sequence(model, x, **kwargs):
    causal = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=torch.float64)
    return model(x, mask=causal, **kwargs)


VARIANTS = {
    "plain": {},
    "multi-head, no rotary": {"num_kv_heads": None, "rotary": None},
    "window": {"mask": foci.masks.window(3)},
    "score": {"score": lambda s, b, h, q, kv: s - 0.1 * (q - kv)},
}


@pytest.mark.parametrize("page_size", KINDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_is_the_whole_sequence(page_size, name):
    model, x = encoder(**VARIANTS[name]), rand(B, N, E)
    cache = foci.nn.KVCache(2, N, page_size=page_size)
    parts = [model(part, cache=cache) for part in x.split([5, 1, 1, 3, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), run_full_sequence(model, x))
    assert cache.length == N and cache.lengths is None and len(cache) == 2


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("side", ["right", "left", "holes"])
def test_prompts_of_different_lengths(page_size, side):
    model = encoder()
    hidden = {
        "right": [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 1]],
        "left": [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]],
        "holes": [[0, 0, 0, 0], [0, 1, 0, 1], [1, 0, 1, 1]],
    }[side]
    hidden = torch.tensor(hidden, dtype=torch.bool)
    prompt, tokens = rand(B, 4, E), rand(B, 3, E, seed=1)
    cache = foci.nn.KVCache(2, 16, page_size=page_size)
    first = model(prompt, src_key_padding_mask=hidden, cache=cache)
    later = torch.cat([model(tokens[:, n : n + 1], cache=cache) for n in range(3)], 1)
    assert (first[hidden] == 0).all() and cache.lengths.tolist() == (7 - hidden.sum(1)).tolist()
    for n in range(B):
        row = torch.cat((prompt[n, ~hidden[n]], tokens[n]))[None]
        want = run_full_sequence(model, row)[0]
        torch.testing.assert_close(torch.cat((first[n, ~hidden[n]], later[n])), want)


@pytest.mark.parametrize("page_size", [None, 2])
def test_rows_are_selected(page_size):
    model, x = encoder(), rand(B, N, E)
    cache = foci.nn.KVCache(2, N, page_size=page_size)
    model(x[:, :5], cache=cache)
    rows = torch.tensor([2, 0, 0])
    cache.select(rows)
    tokens = rand(3, 2, E, seed=2)
    out = torch.cat([model(tokens[:, n : n + 1], cache=cache) for n in range(2)], 1)
    want = run_full_sequence(model, torch.cat((x[rows, :5], tokens), 1))
    torch.testing.assert_close(out, want[:, 5:])
    cache.reset()
    assert cache.length == 0
    torch.testing.assert_close(model(x, cache=cache), run_full_sequence(model, x))


@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize("norm_first", [False, True])
def test_decoder(page_size, norm_first):
    torch.manual_seed(0)
    layer = foci.nn.TransformerDecoderLayer(E, H, FF, 0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64, num_kv_heads=2)
    model = foci.nn.TransformerDecoder(layer, 2).eval()
    x, memory = rand(B, 6, E), rand(B, 7, E)
    hidden = torch.zeros(B, 7, dtype=torch.bool)
    hidden[1, 4:] = True
    causal = torch.nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    want = model(x, memory, tgt_mask=causal, memory_key_padding_mask=hidden)
    cache = foci.nn.KVCache(2, 6, page_size=page_size)
    parts = [model(part, memory, memory_key_padding_mask=hidden, cache=cache) for part in x.split([2, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), want)
    assert cache[0].memory.key.shape == (B, 2, 7, 4)


def test_the_memory_is_projected_once():
    torch.manual_seed(0)
    model = foci.nn.TransformerDecoder(foci.nn.TransformerDecoderLayer(E, H, FF, 0.0, batch_first=True, dtype=torch.float64), 1).eval()
    x, memory = rand(B, 2, E), rand(B, 7, E)
    cache = foci.nn.KVCache(1, 2)
    model(x[:, :1], memory, cache=cache)
    kept = cache[0].memory.key
    model(x[:, 1:], memory, cache=cache)
    assert cache[0].memory.key is kept


def test_what_a_cache_refuses():
    model, x = encoder(), rand(B, N, E)
    cache = foci.nn.KVCache(2, 4)
    model(x[:, :3], cache=cache)
    with pytest.raises(ValueError, match="the cache holds 4 tokens; 3 are there and 2 are to be added"):
        model(x[:, 3:5], cache=cache)
    for arguments in (
        {"num_layers": 0, "max_length": 1},
        {"num_layers": 1, "max_length": 0},
        {"num_layers": 1, "max_length": 1, "page_size": 0},
    ):
        with pytest.raises(ValueError, match="must be at least 1; got 0"):
            foci.nn.KVCache(**arguments)


@pytest.mark.parametrize("page_size", [None, 2])
def test_a_cache_of_other_layers_rows_or_dtype_is_refused(page_size):
    model, x = encoder(), rand(B, N, E)
    with pytest.raises(ValueError, match=r"cache must be made for the 2 layers of the model, .*; it has 1"):
        model(x, cache=foci.nn.KVCache(1, 8, page_size=page_size))
    with pytest.raises(TypeError, match="cache must be a foci.nn.KVCache; got list"):
        model(x, cache=[None, None])
    cache = foci.nn.KVCache(2, 8, page_size=page_size)
    with pytest.raises(TypeError, match=r"cache\[n\]; got KVCache"):
        model.layers[0](x, cache=cache)
    model(x[:, :1], cache=cache)
    with pytest.raises(ValueError, match=f"the cache holds {B} rows of torch.float64; 1 of torch.float64 are to be added"):
        model(x[:1, 1:2], cache=cache)
    with pytest.raises(ValueError, match=f"the cache holds {B} rows of torch.float64; {B} of torch.float32 are to be added"):
        model.float()(x[:, 1:2].float(), cache=cache)
    assert cache.length == 1


def test_a_padding_mask_beside_a_cache_only_leaves_tokens_out():
    model, x = encoder(), rand(B, N, E)
    padding = torch.arange(N).expand(B, N) >= torch.tensor([[N], [1], [4]])
    adds = torch.zeros(B, N, dtype=torch.float64).masked_fill(padding, -torch.inf)
    outs = [model(x, src_key_padding_mask=mask, cache=foci.nn.KVCache(2, N)) for mask in (padding, adds)]
    torch.testing.assert_close(outs[0], outs[1])
    cache = foci.nn.KVCache(2, 2 * N)
    with pytest.raises(ValueError, match="key_padding_mask beside a cache must be bool, or floating of 0 and -inf alone"):
        model(x, src_key_padding_mask=adds.clamp_min(-1e9), cache=cache)
    model(x, src_key_padding_mask=padding, cache=cache)
    with pytest.raises(AssertionError, match="key_padded_mask"):
        model(x[:, :1], src_key_padding_mask=torch.cat((padding, padding[:, :1]), 1), cache=cache)
    assert cache.length == N


def test_pages_grow_with_the_tokens():
    model, x = encoder(), rand(B, N, E)
    cache = foci.nn.KVCache(2, 10_000, page_size=4)
    model(x, cache=cache)
    pool = cache[0]._buffers[0].pool
    assert pool.shape[0] * pool.shape[2] < 4 * B * N


def test_generation_does_not_compile_anew():
    model = encoder()
    cache = foci.nn.KVCache(2, 64)
    from foci.trace_functions import cache_sizes

    with torch.no_grad():
        model(rand(1, 4, E), cache=cache)
        model(rand(1, 1, E), cache=cache)
        before = cache_sizes()["variants"]
        for _ in range(20):
            model(rand(1, 1, E), cache=cache)
    assert cache_sizes()["variants"] == before


def test_pages_are_read_where_they_lie():
    model, x = encoder(), rand(B, N, E)
    cache = foci.nn.KVCache(2, N, page_size=4)
    with foci.observe() as log:
        model(x[:, :9], cache=cache)
        model(x[:, 9:10], cache=cache)
    assert {call.problem.formula.layout.value for call in log.calls} == {"paged"}


@pytest.mark.parametrize("page_size", KINDS)
def test_weights_and_own_keys_beside_a_cache(page_size):
    torch.manual_seed(0)
    module = foci.nn.MultiheadAttention(E, H, batch_first=True, add_bias_kv=True, add_zero_attn=True, dtype=torch.float64)
    x = rand(B, N, E)
    cache = foci.nn.KVCache(1, N, page_size=page_size)[0]
    causal = torch.nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    whole_out, whole_weights = module(x, x, x, attn_mask=causal)
    module(x[:, :7], x[:, :7], x[:, :7], cache=cache)
    out, weights = module(x[:, 7:], x[:, 7:], x[:, 7:], cache=cache)
    torch.testing.assert_close(out, whole_out[:, 7:])
    torch.testing.assert_close(weights, whole_weights[:, 7:])


@pytest.mark.parametrize("page_size", [None, 2])
def test_a_batch_without_rows(page_size):
    model, x = encoder(), rand(B, N, E)
    cache = foci.nn.KVCache(2, N, page_size=page_size)
    assert model(x[:0, :3], cache=cache).shape == (0, 3, E) and cache.length == 3
    cache.reset()
    model(x[:, :3], cache=cache)
    cache.select(torch.tensor([], dtype=torch.int64))
    assert model(x[:0, 3:6], cache=cache).shape == (0, 3, E)


def test_a_call_that_ended_halfway_is_noticed():
    model, x = encoder(), rand(B, N, E)
    cache = foci.nn.KVCache(2, N)
    stop = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x[:, :3], cache=cache)
    stop.remove()
    with pytest.raises(ValueError, match=r"the layers of cache must hold the same tokens; they hold \[3, 0\], .* reset it"):
        model(x[:, :3], cache=cache)
    cache.reset()
    model(x[:, :3], cache=cache)
