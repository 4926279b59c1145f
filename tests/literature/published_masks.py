"""Mask functions of the literature, some beside a score function."""

from functools import lru_cache, partial

import torch
from published import Draw, Published, Shape, grid, hide, published

from foci import and_masks, or_masks

B, H, S = 2, 4, 48


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@published("Vaswani et al., Attention Is All You Need, 2017")
def causal_mask(draw: Draw) -> Published:
    return Published(lambda x: hide(x, torch.ones(S, S).tril().bool()), mask_mod=causal)


@published("Jiang et al., Mistral 7B, 2023: a causal sliding window")
def sliding_window(draw: Draw) -> Published:
    def sliding_window(b, h, q_idx, kv_idx, window_size):
        return q_idx - kv_idx < window_size

    mask = and_masks(causal, partial(sliding_window, window_size=11))
    return Published(lambda x: hide(x, torch.ones(S, S).tril().triu(-10).bool()), mask_mod=mask)


@published("Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2024")
def streaming_sinks(draw: Draw) -> Published:
    def generate(window_size: int, sinks: int):
        def sink_mask(b, h, q, kv):
            return kv < sinks

        def window_mask(b, h, q, kv):
            return q - kv <= window_size

        return and_masks(causal, or_masks(sink_mask, window_mask))

    def formula(x):
        attend = torch.ones(S, S).triu(-9).bool()
        attend[:, :4] = True
        return hide(x, attend.tril())

    return Published(formula, mask_mod=generate(9, 4))


@published("Raffel et al., T5, 2020: a prefix for each batch entry")
def prefix_per_batch(draw: Draw) -> Published:
    prefix_length = torch.tensor([5, 31])

    def prefix_mask(b, h, q_idx, kv_idx):
        return kv_idx < prefix_length[b]

    formula = lambda x: torch.cat(
        [
            hide(x[:1], torch.ones(S, S).tril().bool() | (torch.arange(S) < 5)),
            hide(x[1:], torch.ones(S, S).tril().bool() | (torch.arange(S) < 31)),
        ]
    )
    return Published(formula, mask_mod=or_masks(prefix_mask, causal))


@published("Krell et al., Efficient Sequence Packing without Cross-contamination, 2021")
def packed_documents(draw: Draw) -> Published:
    lengths = [7, 20, 1, 12, 8]
    document_id = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))

    def document_causal_mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (document_id[q_idx] == document_id[kv_idx])

    return Published(lambda x: hide(x, torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()), mask_mod=document_causal_mask)


@published("Krell et al., 2021: positions within each document for a mask made for one")
def packed_documents_with_inner_mask(draw: Draw) -> Published:
    lengths = torch.tensor([13, 19, 16])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    document_id = torch.repeat_interleave(torch.arange(3), lengths)

    def generate_doc_mask_mod(inner):
        def doc_mask_mod(b, h, q_idx, kv_idx):
            same_doc = document_id[q_idx] == document_id[kv_idx]
            q_logical = q_idx - offsets[document_id[q_idx]]
            kv_logical = kv_idx - offsets[document_id[kv_idx]]
            return torch.where(same_doc, inner(b, h, q_logical, kv_logical), False)

        return doc_mask_mod

    def formula(x):
        inner = [torch.ones(n, n).tril().bool() | (torch.arange(n) < 4) for n in (13, 19, 16)]
        return hide(x, torch.block_diag(*(m.float() for m in inner)).bool())

    return Published(formula, mask_mod=generate_doc_mask_mod(or_masks(causal, lambda b, h, q, kv: kv < 4)))


@published("Dao et al., FlashAttention variable length, 2022: ids found through offsets of each batch entry")
def jagged_offsets(draw: Draw) -> Published:
    offsets = torch.tensor([0, 48, 79])
    ids = draw.integers(3, 48 + 48)

    def mask_mod(b, h, q_idx, kv_idx):
        length = offsets[b + 1] - offsets[b]
        return (ids[offsets[b] + q_idx] == ids[offsets[b] + kv_idx]) & (q_idx < length) & (kv_idx < length)

    def formula(x):
        rows = torch.stack([ids[:48], ids[48:96]])
        inside = torch.arange(S) < torch.tensor([[48], [31]])
        attend = (rows[:, :, None] == rows[:, None]) & inside[:, :, None] & inside[:, None]
        return hide(x, attend[:, None])

    return Published(formula, mask_mod=mask_mod)


@published("Beltagy et al., Longformer, 2020")
def longformer(draw: Draw) -> Published:
    is_global = torch.zeros(B, S, dtype=torch.bool)
    is_global[0, [0, 17]], is_global[1, 5] = True, True

    def longformer_mask(b, h, q_idx, kv_idx):
        return (torch.abs(q_idx - kv_idx) <= 4) | is_global[b, q_idx] | is_global[b, kv_idx]

    def formula(x):
        attend = torch.ones(S, S).tril(4).triu(-4).bool() | is_global[:, :, None] | is_global[:, None]
        return hide(x, attend[:, None])

    return Published(formula, mask_mod=longformer_mask)


class BigBird:
    """Blocks: a window, global ones, and random ones drawn once for each head."""

    def __init__(self, draw: Draw, block: int) -> None:
        self.block = block
        self.random_blocks = torch.stack([torch.stack([draw.permutation(S // block)[:2] for _ in range(S // block)]) for _ in range(H)])

    def __call__(self, b, h, q_idx, kv_idx):
        q_block, kv_block = q_idx // self.block, kv_idx // self.block
        window = (q_block - kv_block).abs() <= 1
        first = (q_block == 0) | (kv_block == 0)
        chosen = self.random_blocks[h, q_block]
        return window | first | (chosen[0] == kv_block) | (chosen[1] == kv_block)


@published("Zaheer et al., Big Bird, 2020")
def big_bird(draw: Draw) -> Published:
    mask = BigBird(draw, 8)

    def formula(x):
        attend = torch.ones(6, 6).tril(1).triu(-1).bool().repeat(H, 1, 1)
        attend[:, 0], attend[:, :, 0] = True, True
        attend.scatter_(2, mask.random_blocks, True)
        return hide(x, attend.repeat_interleave(8, 1).repeat_interleave(8, 2))

    return Published(formula, mask_mod=mask)


@published("Child et al., Generating Long Sequences with Sparse Transformers, 2019: strided, by head parity")
def sparse_transformer(draw: Draw) -> Published:
    stride = 7

    def mask_mod(b, h, q_idx, kv_idx):
        local = q_idx - kv_idx < stride
        strided = (q_idx - kv_idx) % stride == 0
        return (q_idx >= kv_idx) & torch.where(h % 2 == 0, local, strided)

    def formula(x):
        distance = torch.arange(S)[:, None] - torch.arange(S)
        local, strided = (distance >= 0) & (distance < 7), (distance >= 0) & (distance.abs().fmod(7) == 0)
        return hide(x, torch.stack([local, strided, local, strided]))

    return Published(formula, mask_mod=mask_mod)


@published("Ding et al., LongNet, 2023: dilated segments, shifted by head")
def longnet_dilated(draw: Draw) -> Published:
    segment, rate = 16, 4

    def mask_mod(b, h, q_idx, kv_idx):
        same_segment = (q_idx // segment) == (kv_idx // segment)
        return same_segment & (q_idx % rate == h % rate) & (kv_idx % rate == h % rate) & (q_idx >= kv_idx)

    def formula(x):
        attend = torch.zeros(H, S, S, dtype=torch.bool)
        for h in range(H):
            for start in range(0, S, 16):
                chosen = torch.arange(start + h, start + 16, 4)
                attend[h, chosen[:, None], chosen] = torch.ones(4, 4).tril().bool()
        return hide(x, attend)

    return Published(formula, mask_mod=mask_mod)


@published("Arriola et al., Block Diffusion, 2025")
def block_diffusion(draw: Draw) -> Published:
    n, block_size = 24, 4

    def block_diff_mask(b, h, q_idx, kv_idx, block_size=None, n=None):
        x0_flag_q, x0_flag_kv = q_idx >= n, kv_idx >= n
        block_q = torch.where(x0_flag_q == 1, (q_idx - n) // block_size, q_idx // block_size)
        block_kv = torch.where(x0_flag_kv == 1, (kv_idx - n) // block_size, kv_idx // block_size)
        block_diagonal = (block_q == block_kv) & (x0_flag_q == x0_flag_kv)
        offset_block_causal = (block_q > block_kv) & (x0_flag_kv == 1) & (x0_flag_q == 0)
        block_causal = (block_q >= block_kv) & (x0_flag_kv == 1) & (x0_flag_q == 1)
        return block_diagonal | offset_block_causal | block_causal

    def formula(x):
        same, past = torch.eye(6), torch.ones(6, 6).tril(-1)
        tiles = torch.cat([torch.cat([same, past], 1), torch.cat([torch.zeros(6, 6), same + past], 1)])
        return hide(x, torch.kron(tiles, torch.ones(4, 4)).bool())

    return Published(formula, mask_mod=partial(block_diff_mask, block_size=block_size, n=n))


@published("Yuan et al., Native Sparse Attention (DeepSeek), 2025: the chosen blocks of each query block and head")
def top_blocks(draw: Draw) -> Published:
    topk = torch.stack([draw.permutation(6)[:2] for _ in range(B * H * 6)]).view(B, H, 6, 2)

    def selected(b, h, q, kv):
        return (topk[b, h, q // 8] == kv // 8).any(-1) & (kv <= q)

    def formula(x):
        attend = torch.zeros(B, H, 6, 6, dtype=torch.bool).scatter_(3, topk, True)
        return hide(x, attend.repeat_interleave(8, 2).repeat_interleave(8, 3).tril())

    return Published(formula, mask_mod=selected)


@published("Miao et al., SpecInfer, 2024, and Cai et al., Medusa, 2024: a tree of drafted tokens after a cached context")
def speculation_tree(draw: Draw) -> Published:
    parents = [-1, 0, 0, 1, 1, 2, 3, 6]
    ancestors = torch.eye(8, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    context = torch.tensor([30, 17])

    def tree_mask(b, h, q_idx, kv_idx):
        node = kv_idx - context[b]
        in_tree = (node >= 0) & (node < 8)
        return (node < 0) | (in_tree & ancestors[q_idx, node.clamp(0, 7)])

    def formula(x):
        attend = torch.zeros(B, 1, 8, 40, dtype=torch.bool)
        for b, n in enumerate((30, 17)):
            attend[b, ..., :n] = True
            attend[b, 0, :, n : n + 8] = ancestors
        return hide(x, attend)

    return Published(formula, mask_mod=tree_mask, shape=Shape(Sq=8, Skv=40))


@published("Zhang et al., Transformer Transducer, 2020, and Shi et al., Emformer, 2021: chunks with left context")
def audio_chunks(draw: Draw) -> Published:
    chunk, left_chunks = 5, 2

    def chunked(b, h, q_idx, kv_idx):
        behind = q_idx // chunk - kv_idx // chunk
        return (behind >= 0) & (behind <= left_chunks)

    formula = lambda x: hide(x, torch.kron(torch.ones(10, 10).tril().triu(-2), torch.ones(5, 5))[:S, :S].bool())
    return Published(formula, mask_mod=chunked)


@published("Zhang et al., Transformer Transducer, 2020: a limited look ahead, within each utterance")
def look_ahead(draw: Draw) -> Published:
    utterance = torch.tensor([37, 48])

    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx + 3) & (q_idx - kv_idx <= 10) & (kv_idx < utterance[b])

    def formula(x):
        attend = torch.ones(S, S).tril(3).triu(-10).bool() & (torch.arange(S) < torch.tensor([37, 48])[:, None, None])
        return hide(x, attend[:, None])

    return Published(formula, mask_mod=mask_mod)


@published("Meta AI, Llama 4, 2025: chunked causal attention")
def llama_chunks(draw: Draw) -> Published:
    formula = lambda x: hide(x, torch.block_diag(*[torch.ones(16, 16).tril()] * 3).bool())
    return Published(formula, mask_mod=lambda b, h, q, kv: (q // 16 == kv // 16) & (q >= kv))


@published("Juravsky et al., Hydragen, 2024: sequences that share a prefix, packed after it")
def shared_prefix(draw: Draw) -> Published:
    prefix, owner = 10, torch.tensor([0] * 10 + [1] * 15 + [2] * 13 + [3] * 10)

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((kv_idx < prefix) | (owner[q_idx] == owner[kv_idx]))

    def formula(x):
        attend = torch.block_diag(torch.ones(10, 10), torch.ones(15, 15), torch.ones(13, 13), torch.ones(10, 10))
        attend[:, :10] = 1
        return hide(x, attend.tril().bool())

    return Published(formula, mask_mod=mask_mod)


@published("Roy et al., Routing Transformer, 2021: clusters of each head")
def routing(draw: Draw) -> Published:
    cluster = draw.integers(5, B, H, S)

    def mask_mod(b, h, q_idx, kv_idx):
        of = cluster[b][h]
        return (of[q_idx] == of[kv_idx]) & (kv_idx <= q_idx)

    formula = lambda x: hide(x, (cluster[..., :, None] == cluster[..., None, :]) & torch.ones(S, S).tril().bool())
    return Published(formula, mask_mod=mask_mod)


@published("Mohtashami and Jaggi, Landmark Attention, 2023: landmarks are seen from afar")
def landmarks(draw: Draw) -> Published:
    landmark = torch.tensor([7, 15, 23, 31, 39, 47])

    def mask_mod(b, h, q_idx, kv_idx):
        return causal(b, h, q_idx, kv_idx) & (torch.isin(kv_idx, landmark) | (q_idx // 8 == kv_idx // 8))

    def formula(x):
        attend = torch.block_diag(*[torch.ones(8, 8)] * 6)
        attend[:, landmark] = 1
        return hide(x, attend.tril().bool())

    return Published(formula, mask_mod=mask_mod, torch_runs_it=False)


@published("Yang et al., XLNet, 2019: an order of factorisation for each batch entry")
def permutation_language_model(draw: Draw) -> Published:
    rank = torch.stack([draw.permutation(S), draw.permutation(S)])
    formula = lambda x: hide(x, rank[:, None, :, None] > rank[:, None, None, :])
    return Published(formula, mask_mod=lambda b, h, q, kv: rank[b, q] > rank[b, kv])


@published("Press et al., 2022, and Jiang et al., 2023, together: ALiBi in a window over packed documents")
def alibi_window_documents(draw: Draw) -> Published:
    ids = torch.tensor([0] * 22 + [1] * 26)
    slopes = draw.uniform(H)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx)

    @lru_cache
    def mask_for(window):
        return lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv) & (q - kv <= window)

    def formula(x, m):
        distance = grid()[2] - grid()[3]
        attend = torch.block_diag(torch.ones(22, 22), torch.ones(26, 26)).tril().triu(-9).bool()
        return hide(x - m.view(-1, 1, 1) * distance, attend)

    return Published(formula, score_mod, mask_for(9), learned=(slopes,))
