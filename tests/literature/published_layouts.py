"""Mask functions of the literature for images, video, mixed media and memories."""

import torch
from published import Draw, Published, Shape, hide, published

B, H, S = 2, 4, 48


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@published("Hassani et al., Neighborhood Attention Transformer, 2022")
def neighborhood(draw: Draw) -> Published:
    height, width, kernel = 6, 8, 5

    def get_row_col(idx):
        return idx // width, idx % width

    def natten_mask(b, h, q_idx, kv_idx):
        q_row, q_col = get_row_col(q_idx)
        kv_row, kv_col = get_row_col(kv_idx)
        center_row = q_row.clamp(kernel // 2, (height - 1) - kernel // 2)
        center_col = q_col.clamp(kernel // 2, (width - 1) - kernel // 2)
        return ((center_row - kv_row).abs() <= kernel // 2) & ((center_col - kv_col).abs() <= kernel // 2)

    def formula(x):
        def line(n):
            rows = torch.zeros(n, n)
            for i in range(n):
                start = min(max(i - 2, 0), n - 5)
                rows[i, start : start + 5] = 1
            return rows

        return hide(x, torch.kron(line(6), line(8)).bool())

    return Published(formula, mask_mod=natten_mask)


@published("Liu et al., Swin Transformer, 2021: shifted windows of an image")
def swin_shifted_windows(draw: Draw) -> Published:
    height, width, window, shift = 6, 8, 2, 1
    region = torch.zeros(height, width, dtype=torch.int32)
    for n, rows in enumerate((slice(0, -window), slice(-window, -shift), slice(-shift, None))):
        for m, columns in enumerate((slice(0, -window), slice(-window, -shift), slice(-shift, None))):
            region[rows, columns] = 3 * n + m
    region = region.flatten()

    def mask_mod(b, h, q_idx, kv_idx):
        same_window = (q_idx // width // window == kv_idx // width // window) & (q_idx % width // window == kv_idx % width // window)
        return same_window & (region[q_idx] == region[kv_idx])

    def formula(x):
        inside = torch.kron(torch.block_diag(*[torch.ones(2, 2)] * 3), torch.block_diag(*[torch.ones(2, 2)] * 4)).bool()
        return hide(x, inside & (region[:, None] == region))

    return Published(formula, mask_mod=mask_mod)


@published("Esser et al., Scaling Rectified Flow Transformers (MMDiT), 2024: text with padding, then image")
def multimodal_diffusion(draw: Draw) -> Published:
    text_tokens, text_lengths = 16, torch.tensor([5, 16])

    def joint_mask(b, h, q_idx, kv_idx):
        kv_is_image = kv_idx >= text_tokens
        return kv_is_image | (kv_idx < text_lengths[b])

    def formula(x):
        attend = torch.ones(B, 1, 1, S, dtype=torch.bool)
        attend[0, ..., 5:16] = False
        return hide(x, attend)

    return Published(formula, mask_mod=joint_mask)


@published("Peebles and Xie, DiT, 2023: images of several sizes packed (Dehghani et al., Patch n' Pack, 2023)")
def packed_images(draw: Draw) -> Published:
    image_id = torch.tensor([0] * 12 + [1] * 20 + [2] * 9 + [-1] * 7)

    def mask_mod(b, h, q_idx, kv_idx):
        valid = (image_id[q_idx] >= 0) & (image_id[kv_idx] >= 0)
        return valid & (image_id[q_idx] == image_id[kv_idx])

    formula = lambda x: hide(x, torch.block_diag(torch.ones(12, 12), torch.ones(20, 20), torch.ones(9, 9), torch.zeros(7, 7)).bool())
    return Published(formula, mask_mod=mask_mod)


@published("Agarwal et al., Cosmos, 2025, and Yan et al., VideoGPT, 2021: frames causal in time, near in space")
def video(draw: Draw) -> Published:
    height, width = 3, 4
    frame = height * width

    def mask_mod(b, h, q_idx, kv_idx):
        q_t, kv_t = q_idx // frame, kv_idx // frame
        q_y, kv_y = (q_idx % frame) // width, (kv_idx % frame) // width
        q_x, kv_x = q_idx % width, kv_idx % width
        near = ((q_y - kv_y).abs() <= 1) & ((q_x - kv_x).abs() <= 1)
        return (q_t >= kv_t) & near

    def formula(x):
        line = lambda n: torch.ones(n, n).tril(1).triu(-1)
        return hide(x, torch.kron(torch.ones(4, 4).tril(), torch.kron(line(3), line(4))).bool())

    return Published(formula, mask_mod=mask_mod)


@published("He et al., Masked Autoencoders, 2022: hidden patches are no keys")
def masked_image_modelling(draw: Draw) -> Published:
    hidden = draw.integers(4, B, S) > 0

    def mask_mod(b, h, q_idx, kv_idx):
        return ~hidden[b, kv_idx] | (q_idx == kv_idx)

    formula = lambda x: hide(x, ~hidden[:, None, None] | torch.eye(S).bool())
    return Published(formula, mask_mod=mask_mod)


@published("Zhou et al., Transfusion, 2024: causal text, bidirectional images")
def transfusion(draw: Draw) -> Published:
    image_of = torch.tensor([0] * 6 + [1] * 10 + [0] * 5 + [2] * 12 + [0] * 15)

    def mask_mod(b, h, q_idx, kv_idx):
        same_image = (image_of[q_idx] == image_of[kv_idx]) & (image_of[q_idx] > 0)
        return (q_idx >= kv_idx) | same_image

    def formula(x):
        attend = torch.ones(S, S).tril().bool()
        attend[6:16, 6:16], attend[21:33, 21:33] = True, True
        return hide(x, attend)

    return Published(formula, mask_mod=mask_mod)


@published("Jaegle et al., Perceiver IO, 2022: latents over a padded input")
def perceiver(draw: Draw) -> Published:
    lengths = torch.tensor([9, 40], dtype=torch.int32)
    formula = lambda x: hide(x, torch.arange(40) < torch.tensor([9, 40]).view(2, 1, 1, 1))
    return Published(formula, mask_mod=lambda b, h, latent, kv: kv < lengths[b], shape=Shape(Sq=12, Skv=40))


@published("Ho et al., Axial Attention in Multidimensional Transformers, 2019")
def axial(draw: Draw) -> Published:
    width = 8

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx // width == kv_idx // width) ^ (q_idx % width == kv_idx % width) | (q_idx == kv_idx)

    def formula(x):
        row, column = torch.kron(torch.eye(6), torch.ones(8, 8)), torch.kron(torch.ones(6, 6), torch.eye(8))
        return hide(x, (row + column).bool())

    return Published(formula, mask_mod=mask_mod)


@published("Borgeaud et al., RETRO, 2022: chunks attend the neighbors retrieved for the chunk before")
def retrieved_chunks(draw: Draw) -> Published:
    chunk, neighbor = 8, 10

    def mask_mod(b, h, q_idx, kv_idx):
        return torch.logical_and((q_idx + 1) // chunk - 1 == kv_idx // neighbor, q_idx + 1 >= chunk)

    def formula(x):
        attend = torch.zeros(48, 60, dtype=torch.bool)
        for q in range(7, 48):
            start = ((q + 1) // 8 - 1) * 10
            attend[q, start : start + 10] = True
        return hide(x, attend)

    return Published(formula, mask_mod=mask_mod, shape=Shape(Sq=48, Skv=60))


@published("Rae et al., Compressive Transformers, 2020: memory, compressed memory, then causal")
def compressive_memory(draw: Draw) -> Published:
    memory, valid = 20, torch.tensor([4, 20])

    def mask_mod(b, h, q_idx, kv_idx):
        in_memory = kv_idx < memory
        return torch.where(in_memory, kv_idx >= memory - valid[b], kv_idx - memory <= q_idx)

    def formula(x):
        attend = torch.cat([torch.ones(B, 24, 20), torch.ones(B, 24, 24).tril()], 2).bool()
        attend[0, :, :16] = False
        return hide(x, attend[:, None])

    return Published(formula, mask_mod=mask_mod, shape=Shape(Sq=24, Skv=44))


@published("Lewis et al., BART, 2020, with relative biases: padded cross attention with a bias table by batch entry")
def padded_cross_attention(draw: Draw) -> Published:
    lengths, bias = torch.tensor([3, 30]), draw.normal(B, 1, 1, 30)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[b, 0, 0, kv_idx]

    formula = lambda x, v: hide(x + v, torch.arange(30) < torch.tensor([3, 30]).view(2, 1, 1, 1))
    return Published(formula, score_mod, lambda b, h, q, kv: kv < lengths[b], (bias,), Shape(Sq=20, Skv=30))
