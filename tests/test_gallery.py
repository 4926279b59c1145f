"""docs/gallery.md is what docs/gallery.py writes, and each formula in it computes what its mask or score computes."""

import importlib.util
import inspect
import math
import re
import sys
from pathlib import Path

import pytest
import torch

import foci

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("docs_gallery", ROOT / "docs" / "gallery.py")
gallery = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = gallery
SPEC.loader.exec_module(gallery)

MASKS = [example for example in foci.masks.EXAMPLES if gallery.function_of(example)]
SCORES = [example for example in foci.scores.EXAMPLES if gallery.function_of(example)]


def test_page_is_up_to_date():
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert text == gallery.page(), "write it anew: make gallery"
    guide = (ROOT / "docs" / "masks-and-scores.md").read_text(encoding="utf-8")
    assert guide == gallery.guide(guide), "write it anew: make gallery"
    pictures = set(re.findall(r"\((pictures/\S+?\.png)\)", text))
    assert pictures == {f"pictures/{path.name}" for path in (ROOT / "docs" / "pictures").iterdir()}


def test_every_public_name_is_on_the_page():
    assert set(gallery.MASKS) == set(foci.masks.__all__)
    assert set(gallery.SCORES) == set(foci.scores.__all__) - {"alibi_slopes"}
    assert {gallery.function_of(example) for example in MASKS} == set(gallery.MASKS)
    assert {gallery.function_of(example) for example in SCORES} == set(gallery.SCORES)


def parameters_of(mod, function):
    """The arguments, with defaults, that made a mask or a score."""
    _, args, kwargs = mod._recipe
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def expand_index(tensor, sizes):
    """An index [B, Hq, Sq, Skv] of a tensor that broadcasts to that."""
    return tensor.expand(sizes.B, sizes.Hq, sizes.Sq, sizes.Skv)


def evaluate(entry, names):
    names = {**names, "clamp": lambda x, low, high: torch.minimum(torch.clamp(x, min=low), torch.as_tensor(high))}
    for name, expression in entry.where:
        names[name] = eval(expression, {}, names)
    return torch.as_tensor(eval(entry.formula, {}, names))


def mask_by_formula(example, sizes):
    name = gallery.function_of(example)
    entry, (b, h, q_idx, kv_idx) = gallery.MASKS[name], sizes.positions()
    mask, names = example.build(sizes), {"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx, "q_len": sizes.Sq, "kv_len": sizes.Skv}
    if name == "document_offsets":  # its mask is one of `document`
        columns = [offsets[:, None, None, None, None] for offsets in example.captures(sizes)]
        return evaluate(entry, {**names, "offsets": columns[0], "kv_offsets": columns[1], "count": lambda hits: hits.sum(0)})
    parameters = parameters_of(mask, getattr(foci.masks, name))
    if name == "natten":
        extent = parameters["extent"]
        attend = torch.ones((), dtype=torch.bool)
        for i, size in enumerate(extent):
            kernel, dilation = (x[i] if isinstance(x, tuple) else x for x in (parameters["kernel"], parameters["dilation"]))
            q, kv = (x // math.prod(extent[i + 1 :]) % size for x in (q_idx, kv_idx))
            attend = attend & evaluate(entry, {"q": q, "kv": kv, "extent": size, "kernel": kernel, "dilation": dilation})
        return attend
    names.update(parameters)
    if name == "window":
        names.update({side: math.inf if parameters[side] is None else parameters[side] for side in ("left", "right")})
        if parameters["align"] == "lower_right":
            names["q_idx"] = q_idx + sizes.Skv - sizes.Sq
    elif name == "global_window":
        tokens = parameters["global_tokens"]
        names["is_global"] = lambda i: tokens[i] if isinstance(tokens, torch.Tensor) else i < tokens
    elif name == "prefix_lm":
        names["prefix"] = torch.as_tensor(parameters["prefix"]).expand(sizes.B)
    elif name == "document":
        ids = parameters["ids"]
        names["ids"], names["kv_ids"] = (
            x.expand(sizes.B, x.shape[-1]) for x in (ids, ids if parameters["kv_ids"] is None else parameters["kv_ids"])
        )
    elif name == "padding" and parameters["q_lengths"] is None:
        names["q_lengths"] = torch.full((sizes.B,), sizes.Sq)
    elif name == "dense":
        names["mask"] = expand_index(parameters["mask"], sizes)
    return evaluate(entry, names)


@pytest.mark.parametrize("example", MASKS, ids=lambda example: example.name)
def test_formula_of_a_mask(example):
    sizes = gallery.sizes_of(example)
    attend = expand_index(mask_by_formula(example, sizes), sizes)
    assert torch.equal(attend, example.expected(sizes))
    assert torch.equal(attend[0, 0], gallery.picture_of(example).attend)


@pytest.mark.parametrize("example", SCORES, ids=lambda example: example.name)
def test_formula_of_a_score(example):
    sizes, name = gallery.sizes_of(example), gallery.function_of(example)
    b, h, q_idx, kv_idx = sizes.positions()
    score = torch.randn(sizes.B, sizes.Hq, sizes.Sq, sizes.Skv, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    score_mod = example.build(sizes, dtype=torch.float64)
    names = {
        "b": b,
        "h": h,
        "q_idx": q_idx,
        "kv_idx": kv_idx,
        "score": score,
        "tanh": torch.tanh,
        **parameters_of(score_mod, getattr(foci.scores, name)),
    }
    if name == "alibi":
        slopes = names["slopes"]
        names["slopes"] = torch.tensor(foci.scores.alibi_slopes(slopes), dtype=torch.float64) if isinstance(slopes, int) else slopes
    elif name == "temperature":
        names["value"] = torch.as_tensor(names["value"]).expand(sizes.Hq)
    elif name == "bias":
        names["values"] = expand_index(names["values"], sizes)
    elif name == "relative_position":
        table = names["table"]
        names["table"], names["k"] = table.expand(sizes.Hq, table.shape[-1]), table.shape[-1] // 2
    elif name == "t5_bias":
        from foci.scores import _t5_bucket

        count, both = names["table"].shape[0], names["bidirectional"]
        names["bucket"] = lambda d: d.clone().apply_(lambda x: _t5_bucket(x, count, both))  # the examples' max_distance is 20
    torch.testing.assert_close(evaluate(gallery.SCORES[name], names), example.expected(score, sizes))


def test_pictures_are_drawn(tmp_path):
    gallery.write_row([example for example in foci.masks.EXAMPLES if example.name == "causal"], tmp_path / "mask.png")
    gallery.write_row([example for example in foci.scores.EXAMPLES if example.name in ("alibi", "softcap")], tmp_path / "score.png")
    gallery.write_sheet(tmp_path / "sheet.png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_colors_say_what_a_pair_is():
    from foci.cli.mask_picture import CELLS, color_cells, draw_mask

    cells = color_cells(draw_mask(foci.masks.causal(), q_len=6, kv_len=7, block=3))
    named = {tuple(int(color[i : i + 2], 16) for i in (1, 3, 5)): name for name, color in CELLS.items()}
    assert named[tuple(cells[0, 0].tolist())] == "attends, partial block"
    assert named[tuple(cells[0, 1].tolist())] == "pair is masked out"
    assert named[tuple(cells[5, 0].tolist())] == "attends, full block"
    assert named[tuple(cells[0, 6].tolist())] == "block is empty"
    assert cells.shape == (6, 7, 3)
