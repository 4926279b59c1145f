"""What a user reads after a wrong call: the argument, its shape or dtype, what would be right."""

import numpy as np
import pytest
import torch
from torch.nn.attention import bias as torch_bias

import foci


def t(*shape, dtype=torch.float32, **kwargs):
    return torch.zeros(*shape, dtype=dtype, **kwargs)


Q, K = t(2, 4, 6, 8), t(2, 4, 10, 8)
PACKED, CU = t(10, 4, 8), torch.tensor([0, 4, 10])
BLOCKS = foci.create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu")
TABLE = t(4)
NESTED = torch.nested.nested_tensor([t(3, 4, 8), t(5, 4, 8)], layout=torch.jagged).transpose(1, 2)


def attention(**kwargs):
    return lambda: foci.attention(Q, K, K, **kwargs)


def scored(function):
    return lambda: foci.flex_attention(Q, K, K, score_mod=function)


def masked(function):
    return lambda: foci.attention(Q, K, K, mask=function)


def varlen(*args, **kwargs):
    return lambda: foci.varlen_attn(*args, **kwargs)


def used():
    with foci.use("nonsense"):
        pass


def restricted():
    with foci.use("aten"):
        foci.attention(Q, K, K, score=lambda s, b, h, i, j: s * 2)


CASES = {
    # query, key, value
    "query is no tensor": (lambda: foci.attention([1.0], K, K), TypeError, r"^query must be a tensor; got list$"),
    "value is None": (lambda: foci.scaled_dot_product_attention(Q, K, None), TypeError, r"^value must be a tensor; got NoneType$"),
    "one dim": (lambda: foci.scaled_dot_product_attention(t(8), K, K), ValueError, r"query must have at least 2 dim.*got float32\[8\] on cpu"),
    "three dims": (lambda: foci.attention(Q[0], K, K), ValueError, r"query must have 4 dimensions \[batch, heads, length, head dim\]; got float32\[4, 6, 8\]"),
    "flex of three dims": (lambda: foci.flex_attention(Q, K[0], K), ValueError, r"key must have 4 dimensions .*; got float32\[4, 10, 8\]"),
    "dtypes": (lambda: foci.attention(Q, K.half(), K), ValueError, r"one dtype; got query float32\[.*key float16\[.*value float32\["),
    "devices": (lambda: foci.attention(Q, K, K.to("meta")), ValueError, r"one device; got query .* on cpu, .* value .* on meta"),
    "integers": (lambda: foci.attention(Q.int(), K.int(), K.int()), TypeError, r"must be float16, bfloat16, float32 or float64; got int32"),
    "complex": (lambda: foci.attention(*[Q.to(torch.complex64)] * 3), TypeError, r"must be float16, .*; got complex64"),
    "head dims": (lambda: foci.attention(Q, K[..., :4], K), ValueError, r"query and key must have one head dim; got 8 and 4"),
    "lengths": (lambda: foci.attention(Q, K, K[:, :, :5]), ValueError, r"key and value must have one length; got 10 and 5"),
    "heads of value": (lambda: foci.attention(Q, K, K[:, :2]), ValueError, r"key and value must have one number of heads; got 4 and 2"),
    "grouped heads": (lambda: foci.attention(Q, K[:, :3], K[:, :3]), ValueError, r"query heads must be a multiple of the number of key heads; got 4 and 3"),
    "batches": (lambda: foci.attention(Q, t(3, 4, 10, 8), t(3, 4, 10, 8)), ValueError, r"batch sizes of query, key and value must be equal or 1; got 2, 3, 3"),
    "leading dims": (lambda: foci.scaled_dot_product_attention(Q, t(2, 3, 10, 8), t(2, 3, 10, 8)), ValueError, r"leading dim.*\[2, 4\], \[2, 3\].*enable_gqa=True"),
    "gqa without heads": (lambda: foci.scaled_dot_product_attention(t(6, 8), t(6, 8), t(6, 8), enable_gqa=True), ValueError, r"enable_gqa needs a head dim"),
    "gqa heads": (
        lambda: foci.scaled_dot_product_attention(Q[0], K[0, :3], K[0, :3], enable_gqa=True), ValueError, r"query heads must be a multiple of key heads; got 4 and 3"
    ),
    "flex gqa": (lambda: foci.flex_attention(Q, K[:, :2], K[:, :2]), ValueError, r"query has 4 heads and key 2: grouped heads need enable_gqa=True"),
    "a sparse query": (lambda: foci.attention(Q.to_sparse(), K, K), TypeError, r"^query must be a dense tensor; got layout torch.sparse_coo"),
    "a sparse value": (lambda: foci.scaled_dot_product_attention(Q, K, K.to_sparse()), TypeError, r"^value must be a dense tensor; got layout torch.sparse_coo"),
    "flex gqa flag": (lambda: foci.flex_attention(Q, K, K, enable_gqa="yes"), TypeError, r"^enable_gqa must be True or False; got str"),
    "flex lse flag": (lambda: foci.flex_attention(Q, K, K, return_lse="yes"), TypeError, r"^return_lse must be True or False; got str"),
    # masks
    "Mask of a number": (lambda: foci.Mask(3), TypeError, r"^function must be a function \(b, h, q_idx, kv_idx\) -> bool; got int"),
    "Mask of a score": (lambda: foci.Mask(foci.scores.softcap(2.0)), TypeError, r"^function must be a function \(b, h, q_idx, kv_idx\) -> bool; got Score"),
    "Mask's length": (lambda: foci.Mask(lambda b, h, i, j: i > j, length="long"), TypeError, r"^length must be an integer or None; got str"),
    "alibi of other heads": (attention(score=foci.scores.alibi(2)), ValueError, r"^alibi is for 2 query heads; query has 4$"),
    "alibi of more heads": (attention(score=foci.scores.alibi(8)), ValueError, r"^alibi is for 8 query heads; query has 4$"),
    "learned slopes": (attention(score=foci.scores.alibi(t(5))), ValueError, r"^alibi is for 5 query heads; query has 4$"),
    "temperatures": (attention(score=foci.scores.temperature(t(5))), ValueError, r"^temperature is for 5 query heads; query has 4$"),
    "distances by head": (attention(score=foci.scores.relative_position(t(5, 3))), ValueError, r"^relative_position is for 5 query heads; query has 4$"),
    "buckets by head": (attention(score=foci.scores.t5_bias(t(8, 5))), ValueError, r"^t5_bias is for 5 query heads; query has 4$"),
    "heads of a composition": (
        attention(score=foci.scores.softcap(2.0) >> foci.scores.alibi(2)), ValueError, r"^\(softcap\(2.0\) >> alibi\) is for 2 query heads; query has 4$"
    ),
    "heads that differ": (
        lambda: foci.scores.alibi(2) >> foci.scores.temperature(t(4)), ValueError,
        r"^alibi is for 2 query heads, temperature for 4: they do not compose$"
    ),
    "Score's heads": (lambda: foci.Score(lambda s, b, h, i, j: s, heads="two"), TypeError, r"^heads must be an integer or None; got str"),
    "flex alibi": (lambda: foci.flex_attention(Q, K, K, score_mod=foci.scores.alibi(2)), ValueError, r"^alibi is for 2 query heads; query has 4$"),
    "varlen alibi": (varlen(PACKED, PACKED, PACKED, CU, CU, 6, 6, score=foci.scores.alibi(2)), ValueError, r"^alibi is for 2 query heads; query has 4$"),
    "paged alibi": (
        lambda: foci.paged_attention(Q, K, K, torch.zeros(2, 1, dtype=torch.int32), torch.tensor([3, 4]), score=foci.scores.alibi(2)),
        ValueError, r"^alibi is for 2 query heads; query has 4$"
    ),
    "nested alibi": (lambda: foci.attention(*[NESTED] * 3, score=foci.scores.alibi(2)), ValueError, r"^alibi is for 2 query heads; query has 4$"),
    "module's alibi": (
        lambda: foci.nn.MultiheadAttention(8, 4, score=foci.scores.alibi(2))(*[t(3, 2, 8)] * 3), ValueError, r"^alibi is for 2 query heads; query has 4$"
    ),
    "Score of a tensor": (lambda: foci.Score(t(3)), TypeError, r"^function must be a function \(score, b, h, q_idx, kv_idx\) -> score; got Tensor"),
    "dilated window of None": (lambda: foci.masks.dilated_window(None, dilation=2), TypeError, r"^left must be an integer, got None"),
    "no dilation": (lambda: foci.masks.dilated_window(2, dilation=None), TypeError, r"^dilation must be an integer, got None"),
    "global tokens of None": (lambda: foci.masks.global_window(2, 2, None), TypeError, r"^global_tokens must be an integer, got None"),
    "global tokens twice": (lambda: foci.masks.global_window(2, 2, t(2, 3, 4, dtype=torch.bool)), ValueError, r"^global_tokens must be \[S\] or \[B, S\]"),
    "diffusion block": (lambda: foci.masks.block_diffusion(8, block=None), TypeError, r"^block must be an integer, got None"),
    "natten kernel flag": (lambda: foci.masks.natten((4, 4), True), TypeError, r"^kernel must be integers, one for each dimension; got \(True,\)"),
    "alibi of nothing": (lambda: foci.scores.alibi(None), TypeError, r"^slopes must be a number of heads or \[Hq\], got NoneType"),
    "alibi of no heads": (lambda: foci.scores.alibi(0), ValueError, r"^slopes must be at least 1, got 0"),
    "alibi's side": (lambda: foci.scores.alibi(4, symmetric="yes"), TypeError, r"^symmetric must be True or False; got str"),
    "t5's sides": (lambda: foci.scores.t5_bias(t(32, 4), bidirectional="yes"), TypeError, r"^bidirectional must be True or False; got str"),
    "t5's reach": (lambda: foci.scores.t5_bias(t(32, 4), max_distance=2.5), TypeError, r"^max_distance must be an integer, got 2.5"),
    "both masks": (lambda: foci.scaled_dot_product_attention(Q, K, K, t(6, 10), is_causal=True), ValueError, r"is_causal=True excludes attn_mask"),
    "both causal": (lambda: foci.scaled_dot_product_attention(Q, K, K, foci.causal_upper_left(6, 10), is_causal=True), ValueError, r"is_causal=True excludes attn_mask"),
    "float mask shape": (
        lambda: foci.scaled_dot_product_attention(Q, K, K, t(6, 9)), ValueError, r"attn_mask must broadcast to .*\[2, 4, 6, 10\]; got float32\[6, 9\]"
    ),
    "bool mask shape": (
        lambda: foci.scaled_dot_product_attention(Q, K, K, t(3, 1, 10, dtype=torch.bool)), ValueError, r"mask must broadcast to .*\[2, 4, 6, 10\]; got bool\[3, 1, 10\]"
    ),
    "mask of five dims": (lambda: foci.scaled_dot_product_attention(Q, K, K, t(1, 1, 1, 6, 10)), ValueError, r"attn_mask must broadcast to .*got float32\[1, 1, 1, 6, 10\]"),
    "folded mask shape": (
        lambda: foci.scaled_dot_product_attention(Q[0], K[0], K[0], t(2, 6, 10)), ValueError, r"attn_mask must broadcast to \[4, 6, 10\]; got float32\[2, 6, 10\]"
    ),
    "integer mask": (lambda: foci.scaled_dot_product_attention(Q, K, K, t(6, 10, dtype=torch.int64)), TypeError, r"attn_mask must be bool or floating; got int64\[6, 10\]"),
    "bool attn_mask shape": (lambda: foci.scaled_dot_product_attention(Q, K, K, t(5, 10, dtype=torch.bool)), ValueError, r"^attn_mask must broadcast to .*\[2, 4, 6, 10\]; got bool\[5, 10\]"),
    "wider mask": (lambda: foci.scaled_dot_product_attention(Q, K, K, t(6, 10, dtype=torch.float64)), TypeError, r"attn_mask must be bool, or floating and not float64 .*float32; got float64"),
    "mask elsewhere": (lambda: foci.scaled_dot_product_attention(Q, K, K, t(6, 10, device="meta")), ValueError, r"attn_mask must be on the query's device, cpu; got float32\[6, 10\] on meta"),
    "is_causal is a string": (lambda: foci.scaled_dot_product_attention(Q, K, K, is_causal="no"), TypeError, r"is_causal must be True or False; got str"),
    "enable_gqa is a number": (lambda: foci.scaled_dot_product_attention(Q, K, K, enable_gqa=1), TypeError, r"enable_gqa must be True or False; got int"),
    "block_mask is a number": (lambda: foci.flex_attention(Q, K, K, block_mask=3), TypeError, r"^block_mask must be a foci.Mask, a function"),
    "mask of another type": (lambda: foci.scaled_dot_product_attention(Q, K, K, "causal"), TypeError, r"attn_mask must be a tensor, a foci.Mask or None; got str"),
    "causal value of other lengths": (
        lambda: foci.scaled_dot_product_attention(Q, K, K, foci.causal_lower_right(6, 9)), ValueError, r"is for lengths 6 x 9; query and key have 6 x 10"
    ),
    "torch's value of other lengths": (
        lambda: foci.scaled_dot_product_attention(Q, K, K, torch_bias.causal_lower_right(5, 10)), ValueError, r"is for lengths 5 x 10; query and key have 6 x 10"
    ),
    "a length of a value": (lambda: foci.causal_upper_left(-1, 4), ValueError, r"seq_len_q must be a length, an integer of at least 0; got -1"),
    "additive mask": (attention(mask=t(6, 10)), TypeError, r"^mask must be bool.*got float32\[6, 10\].*goes into bias="),
    "mask is a number": (attention(mask=3), TypeError, r"mask must be a foci.Mask, a function .* a bool tensor, .*; got int"),
    "mask is a Score": (attention(mask=foci.scores.softcap(2.0)), TypeError, r"mask is a Score: pass it as score="),
    "score is a Mask": (attention(score=foci.masks.causal()), TypeError, r"score is a Mask: pass it as mask="),
    "score is no function": (attention(score=2.0), TypeError, r"score must be a foci.Score or a function .*; got float"),
    "bias is bool": (attention(bias=t(6, 10, dtype=torch.bool)), TypeError, r"bias must be a floating tensor; got bool\[6, 10\] on cpu; a bool tensor goes into mask="),
    "bias elsewhere": (attention(bias=t(6, 10, device="meta")), ValueError, r"^bias must be on the query's device, cpu; got float32\[6, 10\] on meta"),
    "bias is no tensor": (attention(bias=1.0), TypeError, r"bias must be a floating tensor; got float"),
    "mask before dims": (lambda: foci.attention(Q[0], K[0], K[0], mask=t(6, 10, dtype=torch.bool)), ValueError, r"query must have 4 dimensions"),
    "bias shape": (attention(bias=t(6, 9)), ValueError, r"bias must broadcast to .*\[2, 4, 6, 10\]; got float32\[6, 9\]"),
    "mask and": (lambda: foci.masks.causal() and foci.masks.window(3), TypeError, r"a Mask has no truth value: compose masks with &, \| and ~"),
    "score or": (lambda: foci.scores.softcap(2.0) or None, TypeError, r"a Score has no truth value: compose scores with >>"),
    "mask & score": (lambda: foci.masks.causal() & foci.scores.softcap(2.0), TypeError, r"a Score cannot be composed with a Mask: pass it as score="),
    "mask & number": (lambda: foci.masks.causal() & 3, TypeError, r"a Mask composes with another Mask or a function .*; got int"),
    "score >> mask": (lambda: foci.scores.softcap(2.0) >> foci.masks.causal(), TypeError, r"a Mask cannot be composed with a Score: pass it as mask="),
    # numbers
    "dropout above 1": (attention(dropout_p=1.5), ValueError, r"dropout_p must be from 0 to 1; got 1.5"),
    "dropout below 0": (lambda: foci.scaled_dot_product_attention(Q, K, K, dropout_p=-0.1), ValueError, r"dropout_p must be from 0 to 1; got -0.1"),
    "dropout is True": (attention(dropout_p=True), TypeError, r"dropout_p must be a number from 0 to 1; got bool"),
    "scale is a string": (attention(scale="big"), TypeError, r"scale must be a number or None .*; got str"),
    "scale is nan": (attention(scale=float("nan")), ValueError, r"scale must be finite; got nan"),
    "return_aux": (attention(return_aux=True), TypeError, r"return_aux must be a foci.AuxRequest; got bool"),
    "flex return_aux": (lambda: foci.flex_attention(Q, K, K, return_aux=1), TypeError, r"return_aux must have the flags lse and max_scores.*; got int"),
    "flex both": (lambda: foci.flex_attention(Q, K, K, return_lse=True, return_aux=foci.AuxRequest()), (TypeError, ValueError), r"return_aux"),
    "sink shape": (attention(sink=t(3)), ValueError, r"sink must be a floating tensor with one logit per query head, \[4\]; got float32\[3\]"),
    "sink type": (attention(sink=1.0), TypeError, r"sink must be a tensor; got float"),
    # functions
    "function of few arguments": (scored(lambda s, b, h, i: s), TypeError, r"score.*\(score, b, h, q_idx, kv_idx\)"),
    "mask of few arguments": (masked(lambda i, j: i >= j), TypeError, r"mask.*\(b, h, q_idx, kv_idx\)"),
    "python if": (scored(lambda s, b, h, i, j: s if i > j else 0), foci.TraceError, r"test_errors.py:\d+: a Python `if`.*use torch.where"),
    "unknown function": (scored(lambda s, b, h, i, j: torch.lgamma(s)), foci.TraceError, r"test_errors.py:\d+: torch.lgamma is outside"),
    "unknown method": (scored(lambda s, b, h, i, j: s.erfinv()), foci.TraceError, r"test_errors.py:\d+: Tensor.erfinv is outside"),
    "array": (scored(lambda s, b, h, i, j: s + np.ones(4)[h]), foci.TraceError, r"test_errors.py:\d+: a NumPy array is outside .*torch.from_numpy"),
    "item": (scored(lambda s, b, h, i, j: s * i.item()), foci.TraceError, r"test_errors.py:\d+: Tensor.item is outside"),
    "math module": (scored(lambda s, b, h, i, j: s * __import__("math").exp(i)), foci.TraceError, r"test_errors.py:\d+: .*use the function of torch"),
    "in place": (scored(lambda s, b, h, i, j: s.add_(1)), foci.TraceError, r"test_errors.py:\d+: Tensor.add_ is outside"),
    "float index": (scored(lambda s, b, h, i, j: s + TABLE[s]), foci.TraceError, r"test_errors.py:\d+: an index of type float .*index with integers"),
    "too many indices": (scored(lambda s, b, h, i, j: s + TABLE[h, i]), foci.TraceError, r"index with 2 entries for a tensor with 1 dimensions"),
    "constant index": (scored(lambda s, b, h, i, j: s + t(4, 4)[h][7]), foci.TraceError, r"test_errors.py:\d+: index 7 of a dimension of size 4"),
    "returns a row": (
        scored(lambda s, b, h, i, j: s + TABLE),
        foci.TraceError,
        r"^\S+test_errors\.py:\d+: <lambda> returned a row of shape \[4\]; it must return one number .* such as TABLE\[h\], or sum it",
    ),
    "returns None": (scored(lambda s, b, h, i, j: None), foci.TraceError, r"^\S+test_errors\.py:\d+: <lambda> returned NoneType; it must return one number"),
    "score returns bool": (scored(lambda s, b, h, i, j: i > j), foci.TraceError, r"must return a score, got a boolean: pass a mask function as mask="),
    "mask returns number": (masked(lambda b, h, i, j: i - j), foci.TraceError, r"must return a boolean.*got i32"),
    "bits of a float": (scored(lambda s, b, h, i, j: s & 1), foci.TraceError, r"test_errors.py:\d+: and takes booleans or integers, got float"),
    "captured device": (scored(lambda s, b, h, i, j: s + TABLE.to("meta")[h]), ValueError, r"captured tensor 0, float32\[4\] on meta, must be on the query's device, cpu"),
    "captured size": (scored(lambda s, b, h, i, j: s + TABLE[j]), ValueError, r"float32\[4\] on cpu, is indexed by kv_idx in dimension 0.*at least 10 entries"),
    "captured complex": (scored(lambda s, b, h, i, j: s + torch.zeros(4, dtype=torch.complex64)[h]), TypeError, r"captured tensor has dtype torch.complex64"),
    "length outside": (lambda: foci.q_len(), RuntimeError, r"q_len\(\) has a value only inside a score or mask function"),
    # block masks
    "block mask of other lengths": (lambda: foci.flex_attention(Q, K, K, block_mask=foci.create_block_mask(lambda b, h, i, j: i >= j, None, None, 512, 256, device="cpu")),
                                    ValueError, r"block mask covers 4 x 2 blocks of 128 x 128; query length 6 and key length 10 need 1 x 1"),
    "block mask of other heads": (lambda: foci.flex_attention(Q, K, K, block_mask=foci.create_block_mask(lambda b, h, i, j: i >= j + h, None, 3, 6, 10, device="cpu")),
                                  ValueError, r"block mask has 3 heads; it must have 1 or 4"),
    "block size": (lambda: foci.create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu", BLOCK_SIZE=0), ValueError, r"BLOCK_SIZE must be at least 1, got 0"),
    "negative length": (lambda: foci.create_block_mask(lambda b, h, i, j: i >= j, None, None, -1, 64, device="cpu"), ValueError, r"Q_LEN must not be negative, got -1"),
    "block size of text": (lambda: foci.create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu", BLOCK_SIZE="16"),
                           TypeError, r"^BLOCK_SIZE must be an integer or two, of queries and of keys; got '16'"),
    "three block sizes": (lambda: foci.create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu", BLOCK_SIZE=(16, 16, 16)),
                          TypeError, r"^BLOCK_SIZE must be an integer or two, of queries and of keys; got \(16, 16, 16\)"),
    "a fraction of a block": (lambda: foci.create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu", BLOCK_SIZE=2.5),
                              TypeError, r"^BLOCK_SIZE must be an integer or two, of queries and of keys; got 2.5"),
    "mask_mod of three": (lambda: foci.create_block_mask(lambda b, h, i: i, None, None, 64, 64, device="cpu"), TypeError, r"mask_mod must be a function \(b, h, q_idx, kv_idx\)"),
    "and_masks": (lambda: foci.and_masks(foci.masks.causal(), 3), RuntimeError, r"mask_mods must be functions .*number 1 is of type int"),
    "sliced block mask": (lambda: foci.flex_attention(t(1, 1, 256, 8), t(1, 1, 256, 8), t(1, 1, 256, 8), block_mask=BLOCKS[:, :, :2]), RuntimeError, r"made by slicing another"),
    "five indices": (lambda: BLOCKS[0, 0, 0, 0], IndexError, r"at most 3 indices.*got 4"),
    # packed tensors
    "packed dims": (varlen(Q, K, K, CU, CU, 6, 6), ValueError, r"query must have 3 dimensions \[tokens, heads, head dim\]; got float32\[2, 4, 6, 8\]"),
    "offsets type": (varlen(PACKED, PACKED, PACKED, [0, 4, 10], CU, 6, 6), TypeError, r"cu_seq_q must be a tensor; got list"),
    "offsets dtype": (varlen(PACKED, PACKED, PACKED, CU.float(), CU, 6, 6), TypeError, r"cu_seq_q must be int32 or int64; got torch.float32"),
    "offsets shape": (varlen(PACKED, PACKED, PACKED, CU, CU[None], 6, 6), ValueError, r"cu_seq_k must be a vector of cumulative lengths \[sequences \+ 1\]; got shape \[1, 3\]"),
    "offsets count": (varlen(PACKED, PACKED, PACKED, CU, CU[1:], 6, 6), ValueError, r"must count the same sequences; got shapes \[3\] and \[2\]"),
    "offsets elsewhere": (varlen(PACKED, PACKED, PACKED, CU, CU.to("meta"), 6, 6), ValueError, r"cu_seq_k must be on the query's device, cpu; got int64\[3\] on meta"),
    "used lengths": (varlen(PACKED, PACKED, PACKED, CU, CU, 6, 6, seqused_k=CU), ValueError, r"seqused_k must have one length per sequence, \[2\]; got int64\[3\]"),
    "used lengths type": (varlen(PACKED, PACKED, PACKED, CU, CU, 6, 6, seqused_k=[4, 6]), TypeError, r"seqused_k must be a tensor; got list"),
    "used lengths dtype": (varlen(PACKED, PACKED, PACKED, CU, CU, 6, 6, seqused_k=t(2)), TypeError, r"seqused_k must be int32 or int64; got torch.float32"),
    "window of one": (varlen(PACKED, PACKED, PACKED, CU, CU, 6, 6, window_size=3), ValueError, r"window_size must be \(left, right\), .*; got 3"),
    "packed return_aux": (varlen(PACKED, PACKED, PACKED, CU, CU, 6, 6, return_aux=True), TypeError, r"return_aux must have the flag lse.*; got bool"),
    "window": (varlen(PACKED, PACKED, PACKED, CU, CU, 6, 6, window_size=(-2, 0)), ValueError, r"window_size must be \(left, right\), each at least -1 .*; got \(-2, 0\)"),
    "max_q": (varlen(PACKED, PACKED, PACKED, CU, CU, 6.5, 6), ValueError, r"max_q must be a length, an integer of at least 0; got 6.5"),
    "packed gqa flag": (varlen(PACKED, PACKED, PACKED, CU, CU, 6, 6, enable_gqa="yes"), TypeError, r"^enable_gqa must be True or False; got str"),
    "window of flags": (varlen(PACKED, PACKED, PACKED, CU, CU, 6, 6, window_size=(True, 0)), ValueError, r"^window_size must be \(left, right\), .*; got \(True, 0\)"),
    "packed keys elsewhere": (varlen(PACKED, PACKED.to("meta"), PACKED, CU, CU, 6, 6), ValueError, r"^query, key and value must have one device; got .*key float32\[10, 4, 8\] on meta"),
    "paged query": (lambda: foci.paged_attention(Q[0], K, K, torch.zeros(2, 2, dtype=torch.int64), torch.tensor([1, 1])),
                    ValueError, r"^query must have 4 dimensions \[batch, heads, length, head dim\]; got float32\[4, 6, 8\]"),
    "packed heads": (varlen(PACKED, PACKED[:, :2], PACKED[:, :2], CU, CU, 6, 6), ValueError, r"query has 4 heads and key 2: grouped heads need enable_gqa=True"),
    "packed mask": (varlen(PACKED, PACKED, PACKED, CU, CU, 6, 6, mask=t(6, 6, dtype=torch.bool)), TypeError, r"mask of packed tensors must be a foci.Mask or a function"),
    # auxiliary outputs
    "sink of a flat query": (lambda: foci.attention(t(8), K, K, sink=t(4)), ValueError, r"^query must have 4 dimensions"),
    "a request of numbers": (lambda: foci.AuxRequest(lse=3), TypeError, r"^lse must be True or False; got int"),
    # backends
    "tune": (lambda: foci.use(tune="yes").__enter__(), TypeError, r"^tune must be True or False; got str"),
    # one length: it raises before anything compiles
    "compile a number": (lambda: foci.compile(3), TypeError, r"^model must be a module or a function; got int"),
    "unknown backend": (used, ValueError, r"no backend 'nonsense'; there are .*reference"),
    "no backend": (restricted, foci.NoViableBackend, r"no viable backend for this attention:\n(.*\n)*.*aten +no: .*score function"),
    "half a backend": (lambda: foci.register_backend(type("Half", (), {"name": "half"})()), TypeError, r"^backend must be an object of a class that derives from foci.backends.contract.Backend; got an object of Half, which lacks reject, cost, build"),
    "taken name": (lambda: foci.register_backend(foci.backends.load("reference")), ValueError, r"a backend 'reference' exists already"),
    "nothing to unregister": (lambda: foci.unregister_backend("reference"), ValueError, r"no backend 'reference' was registered"),
}  # fmt: skip


# SDPA-02, SDPA-03, SDPA-05, SDPA-09, SDPA-15, FLEX-02
@pytest.mark.parametrize("name", CASES)
def test_message(name):
    call, kind, message = CASES[name]
    with pytest.raises(kind, match=message):
        call()


def test_there_are_enough():
    assert len(CASES) >= 45


def test_state_survives_errors():
    for name in ("python if", "no backend", "unknown backend"):
        call, kind, _ = CASES[name]
        with pytest.raises(kind):
            call()
    assert foci.attention(Q, K, K).shape == Q.shape
