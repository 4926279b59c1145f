"""Score functions of the literature that depend on the distance between positions."""

import math

import torch
from published import Draw, Published, grid, hide, published

B, H, S = 2, 4, 48


@published("Press et al., Train Short, Test Long, 2022")
def alibi(draw: Draw) -> Published:
    def generate_alibi_bias(heads: int):
        def alibi_mod(score, b, h, q_idx, kv_idx):
            scale = torch.exp2(-((h + 1) * 8.0 / heads))
            bias = (kv_idx - q_idx) * scale
            return score + bias

        return alibi_mod

    def formula(scores):
        _, _, q, kv = grid()
        slopes = torch.tensor([2.0 ** (-8 * (i + 1) / H) for i in range(H)], dtype=scores.dtype)
        return scores + slopes.view(-1, 1, 1) * (kv - q)

    return Published(formula, generate_alibi_bias(H))


@published("Press et al., 2022, with slopes as parameters")
def alibi_with_learned_slopes(draw: Draw) -> Published:
    slopes = draw.uniform(H)

    def score_mod(score, batch, head, token_q, token_kv):
        return score - slopes[head] * torch.abs(token_q - token_kv)

    return Published(lambda x, m: x - m.view(-1, 1, 1) * (grid()[2] - grid()[3]).abs(), score_mod, learned=(slopes,))


@published("Raffel et al., Exploring the Limits of Transfer Learning (T5), 2020")
def t5_buckets_computed_inside(draw: Draw) -> Published:
    num_buckets, max_distance = 16, 40
    relative_attention_bias = draw.normal(num_buckets, H)

    def t5_bias(score, b, h, q_idx, kv_idx):
        relative_position = kv_idx - q_idx
        half = num_buckets // 2
        bucket = (relative_position > 0).to(torch.int32) * half
        distance = torch.abs(relative_position)
        max_exact = half // 2
        log_ratio = torch.log(distance.float() / max_exact) / math.log(max_distance / max_exact)
        large = max_exact + (log_ratio * (half - max_exact)).to(torch.int32)
        large = torch.minimum(large, torch.full_like(large, half - 1))
        bucket = bucket + torch.where(distance < max_exact, distance, large)
        return score + relative_attention_bias[bucket, h]

    def formula(x, table):
        def bucket(d):
            side = 8 if d > 0 else 0
            d = abs(d)
            return side + (d if d < 4 else min(7, 4 + int(math.log(d / 4) / math.log(10) * 4 + 1e-9)))

        index = torch.tensor([[bucket(kv - q) for kv in range(S)] for q in range(S)])
        return x + table[index].permute(2, 0, 1)

    return Published(formula, t5_bias, learned=(relative_attention_bias,))


@published("Shaw et al., Self-Attention with Relative Position Representations, 2018")
def shaw_clamped_distance(draw: Draw) -> Published:
    max_relative = 7
    table = draw.normal(2 * max_relative + 1)

    def relative_bias(score, b, h, q_idx, kv_idx):
        return score + table[torch.clamp(kv_idx - q_idx, -max_relative, max_relative) + max_relative]

    def formula(x, t):
        bands = sum(t[d + 7] * torch.diag(torch.ones(S - abs(d), dtype=x.dtype), d) for d in range(-6, 7))
        far = t[14] * torch.ones(S, S, dtype=x.dtype).triu(7) + t[0] * torch.ones(S, S, dtype=x.dtype).tril(-7)
        return x + bands + far

    return Published(formula, relative_bias, learned=(table,))


@published("Chi et al., KERPLE, 2022, the logarithmic kernel")
def kerple_log(draw: Draw) -> Published:
    r1, r2 = draw.uniform(H, low=0.1, high=2.0), draw.uniform(H, low=0.1, high=1.0)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - r1[h] * torch.log(1 + r2[h] * (q_idx - kv_idx).abs())

    formula = lambda x, a, c: x - a.view(-1, 1, 1) * torch.log1p(c.view(-1, 1, 1) * (grid()[2] - grid()[3]).abs())
    return Published(formula, score_mod, learned=(r1, r2))


@published("Chi et al., KERPLE, 2022, the power kernel")
def kerple_power(draw: Draw) -> Published:
    r1, r2 = draw.uniform(H, low=0.1, high=1.0), draw.uniform(H, low=0.3, high=1.9)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - r1[h] * torch.pow(torch.abs(q_idx - kv_idx).float(), r2[h])

    def formula(x, a, p):
        distance = (grid()[2] - grid()[3]).abs().to(x.dtype)
        powers = torch.where(distance == 0, 0.0, torch.exp(p.view(-1, 1, 1) * distance.clamp(min=1).log()))
        return x - a.view(-1, 1, 1) * powers

    return Published(formula, score_mod, learned=(r1, r2))


class Fire:
    """A small network of the normalised log distance, as a module would hold it."""

    def __init__(self, draw: Draw) -> None:
        self.c = draw.uniform(low=0.5, high=2.0)
        self.threshold = draw.uniform(low=8.0, high=16.0)
        self.first, self.first_bias, self.second = draw.normal(8), draw.normal(8), draw.normal(H, 8)

    def __call__(self, score, b, h, q_idx, kv_idx):
        distance = torch.log(self.c * (q_idx - kv_idx).abs() + 1)
        normaliser = torch.log(self.c * torch.maximum(q_idx, self.threshold) + 1)
        hidden = torch.relu(self.first * (distance / normaliser) + self.first_bias)
        return score + (self.second[h] * hidden).sum(-1)


@published("Li et al., Functional Interpolation for Relative Position Encoding (FIRE), 2024")
def fire(draw: Draw) -> Published:
    module = Fire(draw)

    def formula(x, c, threshold, first, bias, second):
        _, _, q, kv = grid()
        ratio = torch.log1p(c * (q - kv).abs()) / torch.log1p(c * torch.maximum(q.to(x.dtype), threshold))
        return x + torch.einsum("qkr,hr->hqk", torch.relu(ratio[..., None] * first + bias), second)

    learned = (module.c, module.threshold, module.first, module.first_bias, module.second)
    return Published(formula, module, learned=learned)


@published("Chi et al., Dissecting Transformer Length Extrapolation (Sandwich), 2023")
def sandwich(draw: Draw) -> Published:
    frequencies = 1.0 / 10000 ** (torch.arange(8, dtype=draw.dtype) / 8)

    def score_mod(score, b, h, q_idx, kv_idx):
        bias = torch.cos((q_idx - kv_idx) * frequencies).sum() - 8
        return score + bias * (8.0 / H) * (h + 1)

    def formula(x):
        _, _, q, kv = grid()
        waves = sum(torch.cos((q - kv).to(x.dtype) * float(f)) for f in frequencies) - 8
        return x + waves * torch.tensor([2.0, 4.0, 6.0, 8.0], dtype=x.dtype).view(-1, 1, 1)

    return Published(formula, score_mod)


@published("Sun et al., Retentive Network, 2023: decay by head, on softmax scores")
def retention_decay(draw: Draw) -> Published:
    gamma = 1 - 2.0 ** (-5 - torch.arange(0, H, dtype=draw.dtype))

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score * gamma[h] ** (q_idx - kv_idx), -float("inf"))

    def formula(x):
        distance = torch.arange(S)[:, None] - torch.arange(S)
        powers = torch.tensor([[31 / 32], [63 / 64], [127 / 128], [255 / 256]], dtype=x.dtype).view(-1, 1, 1) ** distance
        return hide(x * powers, distance >= 0)

    return Published(formula, score_mod)


@published("Qin et al., TransNormer, 2022, and TransNormerLLM, 2023: exponential decay")
def transnormer_decay(draw: Draw) -> Published:
    log_decay = draw.uniform(H, low=-0.2, high=-0.01)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * torch.exp(log_decay[h] * (q_idx - kv_idx).abs().float())

    formula = lambda x, d: x * torch.exp(d).view(-1, 1, 1) ** (grid()[2] - grid()[3]).abs()
    return Published(formula, score_mod, learned=(log_decay,))


@published("Sukhbaatar et al., Adaptive Attention Span in Transformers, 2019")
def adaptive_span(draw: Draw) -> Published:
    span, ramp = draw.uniform(H, low=4.0, high=30.0), 8

    def score_mod(score, b, h, q_idx, kv_idx):
        reach = (ramp + span[h] - (q_idx - kv_idx).abs()) / ramp
        return score + torch.log(torch.clamp(reach, 1e-4, 1.0))

    formula = lambda x, z: x + ((8 + z.view(-1, 1, 1) - (grid()[2] - grid()[3]).abs()) / 8).clamp(1e-4, 1).log()
    return Published(formula, score_mod, learned=(span,))


@published("Wu et al., DA-Transformer, 2021: distances through a learned sigmoid, scores through a ReLU")
def distance_aware(draw: Draw) -> Published:
    weight, value = draw.normal(H), draw.normal(H)

    def score_mod(score, b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        coefficient = (1 + torch.exp(value[h])) / (1 + torch.exp(value[h] - weight[h] * distance * 0.1))
        return torch.nn.functional.relu(score) * coefficient

    def formula(x, w, v):
        w, v = w.view(-1, 1, 1), v.view(-1, 1, 1)
        return x.clamp(min=0) * (1 + v.exp()) * torch.sigmoid(w * 0.1 * (grid()[2] - grid()[3]).abs() - v)

    return Published(formula, score_mod, learned=(weight, value))


@published("Fan et al., RMT: Retentive Networks Meet Vision Transformers, 2024: Manhattan decay, as a bias")
def manhattan_decay(draw: Draw) -> Published:
    decay, width = draw.uniform(H, low=-1.0, high=-0.1), 8

    def score_mod(score, b, h, q_idx, kv_idx):
        qy, qx = q_idx // width, q_idx % width
        ky, kx = torch.div(kv_idx, width, rounding_mode="floor"), torch.remainder(kv_idx, width)
        return score + decay[h] * ((qy - ky).abs() + (qx - kx).abs())

    def formula(x, d):
        points = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(8), indexing="ij"), -1).view(S, 2).to(x.dtype)
        return x + d.view(-1, 1, 1) * torch.cdist(points, points, p=1)

    return Published(formula, score_mod, learned=(decay,))


@published("After Wang et al., Encoding Word Order in Complex Embeddings, 2020: waves of the distance")
def phase_by_distance(draw: Draw) -> Published:
    amplitude, period = draw.normal(H), draw.uniform(H, low=3.0, high=9.0)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + amplitude[h] * torch.sin(2 * math.pi * (q_idx - kv_idx) / period[h])

    formula = lambda x, a, p: x + a.view(-1, 1, 1) * ((grid()[2] - grid()[3]).to(x.dtype) * (2 * math.pi) / p.view(-1, 1, 1)).sin()
    return Published(formula, score_mod, learned=(amplitude, period))
