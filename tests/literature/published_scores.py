"""Score functions of the literature."""

import math
from functools import partial
from types import SimpleNamespace

import torch
from published import Draw, Published, Shape, hide, published

B, H, S = 2, 4, 48


@published("Gemma team, Gemma 2, 2024")
def gemma_softcap(draw: Draw) -> Published:
    def tanh_softcap(score, b, h, q_idx, kv_idx, *, soft_cap):
        score = score / soft_cap
        score = torch.tanh(score)
        return score * soft_cap

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    formula = lambda x: hide(20 * (x / 20).tanh(), torch.ones(S, S).tril().bool())
    return Published(formula, partial(tanh_softcap, soft_cap=20), causal)


@published("Gemma 2, 2024, with a rational tanh")
def softcap_with_approximate_tanh(draw: Draw) -> Published:
    def approximate_tanh(x):
        x = x.clamp(-3.0, 3.0)
        square = x * x
        return x * (27.0 + square) / (27.0 + 9.0 * square)

    def score_mod(score, b, h, q_idx, kv_idx):
        return 2.0 * approximate_tanh(score / 2.0)

    def formula(x):
        y = (x / 2).clamp(-3, 3)
        return 2 * (y * (27 + y.pow(2)) / (27 + 9 * y.pow(2)))

    return Published(formula, score_mod)


@published("Liu et al., Swin Transformer, 2021")
def swin_window_bias(draw: Draw) -> Published:
    height, width = 6, 8
    y, x = torch.arange(S) // width, torch.arange(S) % width
    relative_position_index = (y[:, None] - y + height - 1) * (2 * width - 1) + (x[:, None] - x + width - 1)
    module = SimpleNamespace(relative_position_bias_table=draw.normal((2 * height - 1) * (2 * width - 1), H), index=relative_position_index)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + module.relative_position_bias_table[module.index[q_idx, kv_idx], h]

    def formula(scores, table):
        square = table.view(2 * height - 1, 2 * width - 1, H)
        bias = torch.stack(
            [
                torch.stack([square[q // width - k // width + height - 1, q % width - k % width + width - 1] for k in range(S)])
                for q in range(S)
            ]
        )
        return scores + bias.permute(2, 0, 1)

    return Published(formula, score_mod, learned=(module.relative_position_bias_table,))


@published("Liu et al., Swin Transformer V2, 2022: a learned logit scale for cosine attention")
def cosine_with_tau(draw: Draw) -> Published:
    logit_scale = draw.normal(H, 1, 1)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * torch.clamp(logit_scale[h, 0, 0], max=math.log(1.0 / 0.01)).exp()

    return Published(lambda x, t: x * t.clamp(max=math.log(100)).exp(), score_mod, learned=(logit_scale,))


@published("Golovneva et al., Contextual Position Encoding (CoPE), 2024, with gates computed beforehand")
def contextual_positions(draw: Draw) -> Published:
    most = 9
    gates = draw.uniform(B, H, S)  # stands for the cumulative sum of the gates
    logits = draw.normal(B, H, S, most + 1)

    def score_mod(score, b, h, q_idx, kv_idx):
        position = ((gates[b, h, q_idx] + gates[b, h, kv_idx]) * 5).clamp(max=most - 0.01)
        below = torch.floor(position)
        weight = position - below
        low = logits[b, h, q_idx, below.to(torch.int64)]
        high = logits[b][h][q_idx][below.long() + 1]
        return score + (1 - weight) * low + weight * high

    def formula(x, g, table):
        position = ((g[..., :, None] + g[..., None, :]) * 5).clamp(max=most - 0.01)
        below = position.detach().floor()
        weight = position - below
        low = torch.gather(table, 3, below.long())
        return x + torch.lerp(low, torch.gather(table, 3, below.long() + 1), weight)

    return Published(formula, score_mod, learned=(gates, logits))


@published("Lin et al., Forgetting Transformer, 2025")
def forgetting_transformer(draw: Draw) -> Published:
    log_gates = draw.uniform(B, H, S, low=-0.3, high=0.0)
    cumulative = log_gates.cumsum(-1)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + (cumulative[b, h, q_idx] - cumulative[b, h, kv_idx])

    def formula(x, gates):
        between = [[gates[..., kv + 1 : q + 1].sum(-1) for kv in range(S)] for q in range(S)]
        bias = torch.stack([torch.stack(row, -1) for row in between], -2)
        return hide(x + bias, torch.ones(S, S).tril().bool())

    return Published(formula, score_mod, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, learned=(log_gates,))


@published("Jumper et al., AlphaFold 2 (Evoformer), 2021: a gated pair bias")
def evoformer_gated_bias(draw: Draw) -> Published:
    gate, pair = draw.normal(B, S), draw.normal(B, S, S, H)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + torch.sigmoid(gate[b, q_idx]) * pair[b, q_idx, kv_idx, h]

    formula = lambda x, g, p: x + (g.sigmoid()[:, :, None, None] * p).permute(0, 3, 1, 2)
    return Published(formula, score_mod, learned=(gate, pair))


@published("Jumper et al., AlphaFold 2, 2021: triangle attention with a residue mask")
def alphafold_pair_bias(draw: Draw) -> Published:
    pair_bias = draw.normal(B, H, S, S)
    residue_mask = draw.integers(4, B, S) > 0

    def score_mod(score, b, h, q_idx, kv_idx):
        score = score + pair_bias[b, h, q_idx, kv_idx]
        return torch.where(residue_mask[b, kv_idx], score, -1e9)

    formula = lambda x, p: torch.where(residue_mask[:, None, None], x + p, -1e9)
    return Published(formula, score_mod, learned=(pair_bias,))


@published("Ying et al., Graphormer, 2021: spatial encoding and edges")
def graphormer_spatial(draw: Draw) -> Published:
    shortest_path = draw.integers(10, B, S, S)
    encoder = torch.nn.Embedding(10, H, dtype=draw.dtype)
    encoder.weight.data.copy_(draw.normal(10, H))
    virtual_node = draw.normal(H)

    def score_mod(score, b, h, q_idx, kv_idx):
        bias = encoder.weight[shortest_path[b, q_idx, kv_idx], h]
        return score + torch.where((q_idx == 0) | (kv_idx == 0), virtual_node[h], bias)

    def formula(x, table, virtual):
        bias = torch.nn.functional.one_hot(shortest_path, 10).to(x.dtype) @ table
        bias = bias.permute(0, 3, 1, 2)
        first = torch.zeros(S, S, dtype=torch.bool)
        first[0], first[:, 0] = True, True
        return x + torch.where(first, virtual.view(-1, 1, 1), bias)

    return Published(formula, score_mod, learned=(encoder.weight, virtual_node))


@published("DeepSeek-AI, DeepSeek-V2 (multi-head latent attention), 2024: the decoupled rotary part")
def latent_attention_rope(draw: Draw) -> Published:
    q_rope, k_rope = draw.normal(B, H, S, 6), draw.normal(B, S, 6)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + torch.dot(q_rope[b, h, q_idx], k_rope[b, kv_idx]) * 0.4

    formula = lambda x, q, k: x + 0.4 * torch.einsum("bhqd,bkd->bhqk", q, k)
    return Published(formula, score_mod, learned=(q_rope, k_rope), torch_runs_it=False)


@published("He et al., DeBERTa, 2021: content to position and position to content")
def deberta_disentangled(draw: Draw) -> Published:
    reach = 8
    c2p, p2c = draw.normal(B, H, S, 2 * reach), draw.normal(B, H, S, 2 * reach)

    def score_mod(score, b, h, q_idx, kv_idx):
        there = torch.clamp(q_idx - kv_idx + reach, 0, 2 * reach - 1)
        back = torch.clamp(kv_idx - q_idx + reach, min=0, max=2 * reach - 1)
        return score + (c2p[b, h, q_idx, there] + p2c[b, h, kv_idx, back]) / math.sqrt(3)

    def formula(x, there, back):
        distance = torch.arange(S)[:, None] - torch.arange(S)
        first = torch.gather(there, 3, (distance + reach).clamp(0, 2 * reach - 1).expand(B, H, S, S))
        second = torch.gather(back, 3, (distance + reach).clamp(0, 2 * reach - 1).expand(B, H, S, S)).transpose(-1, -2)
        return x + (first + second) / 3**0.5

    return Published(formula, score_mod, learned=(c2p, p2c))


@published("Dai et al., Transformer-XL, 2019, and Huang et al., Music Transformer, 2018: relative shift")
def transformer_xl_shift(draw: Draw) -> Published:
    relative_logits = draw.normal(B, H, S, S)

    def score_mod(score, b, h, q_idx, kv_idx):
        shifted = relative_logits[b, h, q_idx, S - 1 - q_idx + kv_idx]
        return torch.where(kv_idx <= q_idx, score + shifted, float("-inf"))

    def formula(x, r):
        padded = torch.nn.functional.pad(r, (1, 0)).view(B, H, S + 1, S)[:, :, 1:]
        return hide(x + padded, torch.ones(S, S).tril().bool())

    # above the diagonal the index leaves the row, where the score is hidden: torch's eager path refuses to read there
    return Published(formula, score_mod, learned=(relative_logits,), torch_runs_it=False)


@published("Yang et al., Modeling Localness for Self-Attention Networks, 2018: a Gaussian around a predicted center")
def gaussian_localness(draw: Draw) -> Published:
    center, width = draw.uniform(B, H, S, high=float(S)), draw.uniform(B, H, S, low=2.0, high=9.0)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - (kv_idx - center[b, h, q_idx]) ** 2 / (2 * width[b, h, q_idx] ** 2)

    formula = lambda x, c, w: x - ((torch.arange(S) - c[..., None]) / w[..., None]).square() / 2
    return Published(formula, score_mod, learned=(center, width))


@published("Chiang and Cholak, Overcoming a Theoretical Limitation of Self-Attention, 2022: log-length scaling")
def log_length_scaling(draw: Draw) -> Published:
    def score_mod(score, b, h, q_idx, kv_idx):
        return score * torch.where(q_idx + 1 > 16, torch.log((q_idx + 1).float()) / math.log(16), 1.0)

    def formula(x):
        factors = torch.tensor([max(1.0, math.log(n) / math.log(16)) for n in range(1, S + 1)], dtype=x.dtype)
        return x * factors[:, None]

    return Published(formula, score_mod)


@published("Meta AI, Llama 4, 2025: temperature tuning by position")
def temperature_by_position(draw: Draw) -> Published:
    floor_scale, attention_scale = 8.0, 0.1

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * (torch.log(torch.floor((q_idx.float() + 1.0) / floor_scale) + 1.0) * attention_scale + 1.0)

    formula = lambda x: x * torch.tensor([1 + 0.1 * math.log(1 + (n + 1) // 8) for n in range(S)], dtype=x.dtype)[:, None]
    return Published(formula, score_mod)


@published("Henry et al., Query-Key Normalization for Transformers, 2020: a learned scale, one for each head")
def learned_scale(draw: Draw) -> Published:
    head_scale = draw.normal(H)
    return Published(lambda x, s: x * s.view(1, -1, 1, 1), lambda score, b, h, q, kv: score * head_scale[h], learned=(head_scale,))


@published("Devlin et al., BERT, 2019: the additive padding mask")
def additive_padding(draw: Draw) -> Published:
    attention_mask = (torch.arange(S) < torch.tensor([[20], [48]])).to(torch.int64)
    extended = (1.0 - attention_mask.to(draw.dtype)) * -10000.0

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + extended[b, kv_idx]

    def formula(x):
        attend = torch.tensor([20, 48]).view(2, 1, 1, 1) > torch.arange(S)
        return torch.where(attend, x, x - 10000)

    return Published(formula, score_mod)


@published("Ainslie et al., ETC, 2020: a relation label for each pair")
def labelled_pairs(draw: Draw) -> Published:
    labels = draw.integers(5, B, S, S).to(torch.uint8)
    embedding = draw.normal(5, H)

    def score_mod(score, b, h, q_idx, kv_idx):
        label = labels[b, q_idx, kv_idx].to(torch.int32)
        return score + embedding[label, h]

    formula = lambda x, e: x + torch.stack([(labels == n).to(x.dtype)[:, None] * e[n].view(-1, 1, 1) for n in range(5)]).sum(0)
    return Published(formula, score_mod, learned=(embedding,))


@published("Zhai et al., Actions Speak Louder than Words (HSTU), 2024: a bias by the log of elapsed time")
def elapsed_time(draw: Draw) -> Published:
    timestamps = draw.integers(50, B, S).cumsum(-1)
    table = draw.normal(12)

    def score_mod(score, b, h, q_idx, kv_idx):
        elapsed = (timestamps[b, q_idx] - timestamps[b, kv_idx]).abs()
        return score + table[torch.log2(elapsed + 1.0).to(torch.int32)]

    def formula(x, t):
        elapsed = (timestamps[:, :, None] - timestamps[:, None, :]).abs()
        bucket = sum((elapsed + 1 >= 2**n).long() for n in range(1, 12))
        return x + t[bucket][:, None]

    return Published(formula, score_mod, learned=(table,))


@published("Hendrycks and Gimpel, GELU, 2016; Ramachandran et al., Swish, 2017: activations in a row")
def activations(draw: Draw) -> Published:
    def score_mod(score, b, h, q_idx, kv_idx):
        score = torch.nn.functional.silu(score) + torch.nn.functional.gelu(score)
        score = torch.where(h % 2 == 0, score, torch.nn.functional.softplus(score))
        return torch.clamp(score, -4, 4) - torch.square(score) * 0.01

    def formula(x):
        y = x * x.sigmoid() + x * 0.5 * (1 + torch.erf(x / 2**0.5))
        y = torch.stack([y[:, 0], y[:, 1].exp().log1p(), y[:, 2], y[:, 3].exp().log1p()], 1)
        return y.clamp(-4, 4) - 0.01 * y**2

    return Published(formula, score_mod)


@published("Kitaev et al., Reformer, 2020: a penalty for attending to oneself")
def reformer_self_penalty(draw: Draw) -> Published:
    shape = Shape(Sq=40, Skv=56)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - 1e5 * (q_idx == kv_idx)

    return Published(lambda x: x - 1e5 * torch.eye(40, 56, dtype=x.dtype), score_mod, shape=shape)
