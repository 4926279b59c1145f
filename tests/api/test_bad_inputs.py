"""Bad inputs: each is an error that names the argument, what it was and what would be right."""

import inspect
import warnings

import numpy as np
import pytest
import torch

import foci

Q = torch.randn(1, 2, 16, 8)
PACKED = torch.randn(16, 2, 8)
COUNTS, INDICES = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 3, dtype=torch.int32)
SPARSE = torch.ones(16, 16).to_sparse()
ALLOWED = np.ones((16, 16), dtype=bool)
FLOAT8 = torch.ones(16, 16).to(torch.float8_e4m3fn)


def lists(counts=COUNTS, indices=INDICES, *full):
    return lambda: foci.BlockMask.from_kv_blocks(counts, indices, *full, BLOCK_SIZE=16)


def attend(**options):
    return lambda: foci.attention(Q, Q, Q, **options)


def near(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() < 4


def early(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def varlen(*offsets, longest=16):
    at = torch.tensor(offsets)
    return lambda: foci.varlen_attn(PACKED, PACKED, PACKED, at, at, longest, longest)


CASES = {
    "counts beyond": (lists(COUNTS * 4), ValueError, r"^kv_num_blocks must be from 0 to the 3 columns of kv_indices; got 4 to 4$"),
    "negative counts": (lists(-COUNTS), ValueError, r"^kv_num_blocks must be from 0 to the 3 columns of kv_indices; got -1 to -1$"),
    "full counts beyond": (lists(COUNTS, INDICES, COUNTS * 9, INDICES), ValueError, "^full_kv_num_blocks must be from 0 to the 3"),
    "counts of floats": (lists(COUNTS.float()), TypeError, "^kv_num_blocks must be int32 or int64; got torch.float32"),
    "indices of floats": (lists(COUNTS, INDICES.float()), TypeError, "^kv_indices must be int32 or int64; got torch.float32"),
    "block diffusion": (
        attend(mask=foci.masks.block_diffusion(5, block=2)),
        ValueError,
        r"^block_diffusion\(5, block=2\) is for 10 queries and keys; query and key have 16 and 16",
    ),
    "document offsets": (
        lambda: foci.masks.document_offsets(torch.tensor([0, 5, 3, 16])),
        ValueError,
        r"^offsets must begin at 0 and not decrease, got \[0, 5, 3, 16\]",
    ),
    "offsets that begin late": (lambda: foci.masks.document_offsets(torch.tensor([2, 5])), ValueError, "^offsets must begin at 0"),
    "moved to cuda": (attend(score=lambda s, b, h, i, j: s.to("cuda")), TypeError, r"test_bad_inputs.py:\d+: a move to cuda .*; leave it out"),
    "cuda()": (attend(score=lambda s, b, h, i, j: s.cuda()), TypeError, r"test_bad_inputs.py:\d+: a move to cuda"),
    "sparse mask": (attend(mask=SPARSE.bool()), TypeError, r"^mask must be a dense tensor; got layout torch.sparse_coo: give mask.to_dense\(\)"),
    "sparse bias": (attend(bias=SPARSE), TypeError, "^bias must be a dense tensor; got layout torch.sparse_coo"),
    "sparse attn_mask": (
        lambda: foci.scaled_dot_product_attention(Q, Q, Q, SPARSE), TypeError, "^attn_mask must be a dense tensor; got layout torch.sparse_coo"
    ),
    "sparse capture": (
        attend(score=lambda s, b, h, i, j: s + SPARSE[i, j]), TypeError, r"a captured tensor of layout torch.sparse_coo .*tensor.to_dense\(\)"
    ),
    "index beyond a table": (
        attend(score=lambda s, b, h, i, j: s + Q[0, 0, 0][9]),
        TypeError,
        r"test_bad_inputs.py:\d+: index 9 is out of bounds for dimension 0 with size 8 .*; use an index within the dimension",
    ),
    "bias of 8 bits": (attend(bias=FLOAT8), TypeError, r"^bias must be float16, .* got float8_e4m3fn\[16, 16\]"),
    "attn_mask of 8 bits": (
        lambda: foci.scaled_dot_product_attention(Q, Q, Q, FLOAT8), TypeError, r"^attn_mask must be bool or floating; got float8_e4m3fn"
    ),
    "max_q beyond 64 bits": (varlen(0, 16, longest=2**70), ValueError, r"^max_q must be a length below 2\*\*31; got 1.18059e\+21"),
    "offsets that decrease": (varlen(0, 9, 5, 16), ValueError, "cu_seq_q must not decrease"),
    "offsets beyond": (varlen(0, 9, 20), ValueError, "within its 16 tokens: cu_seq_q must not decrease and not go beyond"),
    "numpy array in a mask": (
        attend(mask=lambda b, h, i, j: ALLOWED[i, j]), TypeError, r"test_bad_inputs.py:\d+: a NumPy array .*; capture a tensor, as of torch.from_numpy"
    ),
    "numpy function in a mask": (
        attend(mask=lambda b, h, i, j: np.abs(i - j) < 4), TypeError, r"test_bad_inputs.py:\d+: a function of NumPy .*; use the function of torch"
    ),
    "numpy function in a score": (attend(score=lambda s, b, h, i, j: np.clip(s, -1, 1)), TypeError, r"test_bad_inputs.py:\d+: a NumPy array"),
    "positional mask": (
        lambda: foci.attention(Q, Q, Q, foci.masks.causal()),
        TypeError,
        r"^attention takes query, key and value by position and everything else by name; got Mask in fourth place: write mask=",
    ),
    "positional score": (lambda: foci.attention(Q, Q, Q, foci.scores.softcap(3.0)), TypeError, "got Score in fourth place: write score="),
    "positional bias": (lambda: foci.attention(Q, Q, Q, Q[0, 0]), TypeError, "got Tensor in fourth place: write bias="),
    "is_causal": (attend(is_causal=True), TypeError, r"^attention has no argument is_causal= \(got True\): write mask=foci\.masks\.causal\(\)"),
    "positional mask of explain": (
        lambda: foci.explain(Q, Q, Q, foci.masks.causal()), TypeError, "^explain takes query, key and value by position .*: write mask="
    ),
    "is_causal of explain": (
        lambda: foci.explain(Q, Q, Q, is_causal=True), TypeError, r"^explain has no argument is_causal= \(got True\): write mask="
    ),
    "score_mod": (attend(score_mod=near), TypeError, r"^attention has no argument score_mod= \(got function\): write score="),
    "misspelt": (attend(masc=near), TypeError, r"^attention has no argument masc= \(got function\): did you mean mask=\?"),
    "of no likeness": (attend(flag=1), TypeError, r"^attention has no argument flag= \(got 1\): there are mask, score, bias, sink, scale"),
    "& of functions": (
        attend(mask=lambda b, h, i, j: (near & early)(b, h, i, j)),
        TypeError,
        r"test_bad_inputs.py:\d+: & of two functions .*; write foci\.and_masks\(f, g\), or foci\.Mask\(f\) & g",
    ),
    "slopes": (attend(score=foci.scores.alibi_slopes(2)), TypeError, r"^score must be a foci\.Score; got the slopes of ALiBi, .*foci\.scores\.alibi\(heads\)"),
    "function of slopes": (attend(score=foci.scores.alibi_slopes), TypeError, r"^score must be a foci\.Score; got the slopes of ALiBi"),
    "even neighborhood": (lambda: foci.masks.natten((16,), 4), ValueError, "^kernel must be odd, such as 3 or 5, .*; got 4$"),
    "empty neighborhood": (lambda: foci.masks.natten((16,), 0), ValueError, "^kernel must be odd, such as 1 or 3, .*; got 0$"),
}  # fmt: skip


# FLEX-03, FLEX-06, JAG-02
@pytest.mark.parametrize("name", CASES)
def test_names_the_argument(name):
    call, kind, said = CASES[name]
    with pytest.raises(kind, match=said):
        call()


def test_what_is_right_still_runs():
    assert attend(score=lambda s, b, h, i, j: s.to("cpu").cpu())().shape == Q.shape
    assert attend(mask=foci.masks.block_diffusion(8, block=2))().shape == Q.shape
    assert foci.attention(Q, Q, Q, mask=foci.masks.document_offsets(torch.tensor([0, 5, 5, 16]))).isfinite().all()


@pytest.mark.parametrize("function", [foci.attention, foci.explain])
def test_refused_arguments_are_not_in_the_signature(function):
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


# JAG-02
@pytest.mark.parametrize("backend", ["cpu", "blocked", "reference"])
def test_offsets_that_end_before_the_last_token_warn(backend):
    with foci.use(backend):
        with pytest.warns(
            UserWarning, match=r"^cu_seq_q ends at 9, before the last of the 16 tokens of query: .*should cu_seq_q\[-1\] be 16\?"
        ):
            out = varlen(0, 4, 9)()
        assert out[:9].any(dim=-1).all() and not out[9:].any()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            varlen(0, 4, 16)()
