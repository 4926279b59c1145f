"""What an editor and a type checker see of foci: public names alone, and the type of each result."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import foci

SOURCE = Path(foci.__file__).parents[1]
SUBMODULES = {"distributed", "fusion", "integrations", "kernel_packs", "nn"}
MODULES = {
    "foci": set(foci.__all__) | SUBMODULES,
    **dict.fromkeys(("foci.distributed", "foci.fusion", "foci.integrations", "foci.kernel_packs", "foci.masks", "foci.nn", "foci.scores")),
}


@pytest.mark.parametrize("name", MODULES)
def test_dir_lists_public_names_alone(name):
    module = importlib.import_module(name)
    listed = dir(module)
    assert set(listed) == (MODULES[name] or set(module.__all__))
    assert len(listed) == len(set(listed))
    assert [n for n in listed if n.startswith("_") or not hasattr(module, n)] == []


def test_what_is_imported_when_asked_for_is_listed():
    code = "import sys, foci; names = dir(foci); assert {'compile', 'patch', 'nn'} <= set(names); assert 'foci.nn' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(SOURCE)})


def test_examples_are_not_offered():
    """The list that tests and the command line read is no mask and no score."""
    assert foci.masks.EXAMPLES
    assert foci.scores.EXAMPLES
    assert "EXAMPLES" not in (*dir(foci.masks), *dir(foci.scores))


REVEALED = """
import torch
import torch.nn.attention.flex_attention
import torch.nn.attention.varlen
import foci
import foci.distributed
from foci import AuxRequest

q = torch.zeros(1, 2, 8, 4)
table, lengths = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
asked: AuxRequest | None = None if q.is_cuda else AuxRequest(lse=True)

reveal_type(foci.attention(q, q, q))
reveal_type(foci.attention(q, q, q, mask=foci.masks.causal(), return_aux=None))
reveal_type(foci.attention(q, q, q, score=foci.scores.alibi(2), return_aux=AuxRequest(lse=True)))
reveal_type(foci.attention(q, q, q, return_aux=asked))
reveal_type(foci.paged_attention(q, q, q, table, lengths))
reveal_type(foci.paged_attention(q, q, q, table, lengths, return_aux=AuxRequest(lse=True)))
reveal_type(foci.distributed.attention(q, q, q, shards="heads"))
reveal_type(foci.distributed.attention(q, q, q, shards="heads", return_aux=AuxRequest(lse=True)))
reveal_type(foci.attention(q, q, q, return_aux=AuxRequest(lse=True))[1].lse)
reveal_type(foci.scaled_dot_product_attention(q, q, q))

flag = bool(q.is_cuda)
flex = torch.nn.attention.flex_attention.AuxRequest(max_scores=True)
reveal_type(foci.flex_attention(q, q, q))
reveal_type(foci.flex_attention(q, q, q, None, None, None, False, False))
reveal_type(foci.flex_attention(q, q, q, return_lse=True))
reveal_type(foci.flex_attention(q, q, q, return_aux=flex))
reveal_type(foci.flex_attention(q, q, q, return_aux=flex)[1].max_scores)
reveal_type(foci.flex_attention(q, q, q, return_lse=flag))

varlen = torch.nn.attention.varlen.AuxRequest(lse=True)
reveal_type(foci.varlen_attn(q, q, q, table, None, 8, 8))
reveal_type(foci.varlen_attn(q, q, q, table, None, 8, 8, return_aux=varlen))
reveal_type(foci.varlen_attn(q, q, q, table, None, 8, 8, return_aux=AuxRequest(lse=True)))
foci.attention(q, q, q, return_aux=True)
foci.attention(q, q, q).lse
foci.flex_attention(q, q, q, return_aux=varlen)
foci.varlen_attn(q, q, q, table, None, 8, 8).lse
"""
TENSOR, PAIR = "Tensor", "tuple[Tensor, AuxOutput]"
LSE, FLEX = "tuple[Tensor, Tensor]", "tuple[Tensor, FlexAuxOutput]"
TYPES = [
    *(TENSOR, TENSOR, PAIR, f"{TENSOR} | {PAIR}", TENSOR, PAIR, TENSOR, PAIR, "Tensor | None", TENSOR),
    *(TENSOR, TENSOR, LSE, FLEX, "Tensor | None", f"{TENSOR} | {LSE} | {FLEX}"),
    *(TENSOR, f"{TENSOR} | {LSE}", f"{TENSOR} | {LSE}"),
]


@pytest.mark.slow
def test_a_type_checker_knows_the_result(tmp_path):
    pytest.importorskip("mypy")
    script = tmp_path / "user.py"
    script.write_text(REVEALED, encoding="utf-8")
    words = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(tmp_path / "cache"), str(script)]
    done = subprocess.run(words, env={"MYPYPATH": str(SOURCE)}, cwd=tmp_path, capture_output=True, text=True)
    said = re.sub(r"\b(?:torch\._tensor|torch|foci\.api|foci\.functional|builtins)\.", "", done.stdout)
    said = re.sub(r"tuple\[[^\[\]]*, fallback=(AuxOutput|FlexAuxOutput)\]", r"\1", said)
    assert re.findall(r'Revealed type is "(.*)"', said) == TYPES, done.stdout + done.stderr
    assert re.findall(r"error: .*\[([\w-]+)\]", said) == ["call-overload", "attr-defined"] * 2, done.stdout
