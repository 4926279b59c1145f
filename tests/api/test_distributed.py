"""Sequences and heads spread over processes, beside one process that holds all of it."""

# DIST-01

import copy
import datetime as dt
import faulthandler
import functools
import os
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import foci
import foci.distributed
import foci.nn
from foci.compat.lookup import NAMES
from foci.prepare import Extras, Part, prepare
from foci.problem import Outputs

RANKS = 2
TABLE = torch.randn(4, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
DOCUMENTS = torch.arange(24) // 5

MASKS = {
    "none": None,
    "causal": foci.masks.causal(),
    "causal from the last": foci.masks.causal_lower_right(),
    "window": foci.masks.window(5, 2),
    "document": foci.masks.document(DOCUMENTS, torch.arange(48) // 5),
    "heads": lambda b, h, q_idx, kv_idx: (q_idx + h) % 3 != kv_idx % 3,
    "lengths": lambda b, h, q_idx, kv_idx: (q_idx < foci.q_len() - 3) & (kv_idx < foci.kv_len() - 2),
}
SCORES = {
    "none": lambda table: None,
    "alibi": lambda table: foci.scores.alibi(4),
    "learned": lambda table: lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx % 40],
    "row": lambda table: lambda score, b, h, q_idx, kv_idx: score * (1 + 0.1 * table[h].sum(-1)) - 0.01 * q_idx * kv_idx,
}
CASES = {
    **{f"{mask} mask": (mask, "learned", 24, {}) for mask in MASKS},
    **{f"{score} score": ("causal", score, 24, {}) for score in SCORES},
    "longer keys": ("causal from the last", "row", 48, {}),
    "sink": ("window", "alibi", 24, {"sink": True}),
    "auxiliary": ("causal", "none", 24, {"aux": foci.AuxRequest(lse=True, row_max=True, weights=True)}),
    "scale": ("causal", "none", 24, {"scale": 0.3}),
}


def cut(tensor, shards, rank):
    return tensor.chunk(RANKS, 2 if shards == "sequence" else 1)[rank]


def attended(attention, tensors, mask, score, sink, aux, **options):
    """Results of an attention, and gradients of its query, key, value, table and sink."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    query, key, value, table = leaves[:4]
    result = attention(query, key, value, mask=mask, score=score(table), sink=leaves[4] if sink else None, return_aux=aux, **options)
    out, more = (result, ()) if aux is None else (result[0], [t for t in result[1] if t is not None])
    loss = sum((t - 0.3).square().sum() for t in (out, *more) if t.requires_grad)
    return [out, *more], torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


def check(name, shards, rank, compiled):
    mask, score, keys, options = CASES[name]
    generator = torch.Generator().manual_seed(1)
    rand = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
    full = [rand(2, 4, 24, 8), rand(2, 2, keys, 8), rand(2, 2, keys, 6), TABLE, rand(4)]
    scale, aux, has_sink = options.get("scale"), options.get("aux"), "sink" in options
    wanted, gradients = attended(foci.attention, full, MASKS[mask], SCORES[score], has_sink, aux, scale=scale)

    mine = [*(cut(t, shards, rank) for t in full[:3]), TABLE, full[4].chunk(RANKS)[rank] if shards == "heads" else full[4]]
    here = functools.partial(foci.distributed.attention, shards=shards)
    if compiled:
        torch._dynamo.reset()
        # one length: every case starts processes of its own; lengths in graphs are those of test_compile.py
        here = torch.compile(here, backend="aot_eager", fullgraph=True)
    actual, parts = attended(here, mine, MASKS[mask], SCORES[score], has_sink, aux, scale=scale)
    for got, want in zip(actual, wanted, strict=True):
        torch.testing.assert_close(got, cut(want, shards, rank))
    for got, want in zip(parts[:3], gradients[:3], strict=True):
        torch.testing.assert_close(got, cut(want, shards, rank))
    dist.all_reduce(parts[3])
    torch.testing.assert_close(parts[3], gradients[3])
    if has_sink and shards == "heads":
        torch.testing.assert_close(parts[4], gradients[4].chunk(RANKS)[rank])
    elif has_sink:
        dist.all_reduce(parts[4])
        torch.testing.assert_close(parts[4], gradients[4])


def check_refusal():
    """Of DTensors, which need a group to be made."""
    full = distribute_tensor(torch.zeros(1, 2, 4, 8), init_device_mesh("cpu", (RANKS,)), [Shard(1)])
    with pytest.raises(TypeError, match=r"^query must be this rank's part as an ordinary tensor; got a DTensor: pass query.to_local\(\)"):
        foci.distributed.attention(full, full, full, shards="heads")
    part = full.to_local()
    assert foci.distributed.attention(part, part, part, shards="heads").shape == (1, 1, 4, 8)


def check_modules(wrap, rank):
    """An encoder whose ranks have half of the batch each, its parameters' gradients summed."""
    torch.manual_seed(0)
    layer = foci.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, mask=foci.masks.window(5, 5))
    reference = foci.nn.TransformerEncoder(layer, 2)
    model = wrap(copy.deepcopy(reference))
    tokens, padding = torch.randn(4, 12, 16), torch.arange(12) >= torch.tensor([[12], [7], [3], [10]])
    reference(tokens, src_key_padding_mask=padding).square().sum().backward()
    mine = slice(2 * rank, 2 * rank + 2)
    (model(tokens[mine], src_key_padding_mask=padding[mine]).square().sum() * RANKS).backward()
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(gradient, other.grad, atol=1e-4, rtol=1e-4)


def fully_sharded(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


WRAPPERS = {"DistributedDataParallel": torch.nn.parallel.DistributedDataParallel, "FSDP": fully_sharded}


def work(rank, file, tried, results):
    faulthandler.enable(all_threads=True)
    gathers = [name.is_found for name in NAMES.values() if name.path.startswith("torch.distributed.")]
    assert gathers == ["FOCI_WITHOUT" not in os.environ]
    torch.set_num_threads(1)
    timeout = dt.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS, timeout=timeout)
    for shards, name, compiled in tried:
        try:
            if shards == "refusal":
                check_refusal()
            elif shards == "modules":
                check_modules(WRAPPERS[name], rank)
            else:
                check(name, shards, rank, compiled)
            results[shards, name, compiled, rank] = None
        except Exception:
            results[shards, name, compiled, rank] = traceback.format_exc()
            break  # the other rank may wait for this one
    dist.destroy_process_group()


TRIED = [
    *((shards, name, False) for shards in ("sequence", "heads") for name in CASES),
    *((shards, name, True) for shards in ("sequence", "heads") for name in ("lengths mask", "sink")),
    *(("modules", name, False) for name in WRAPPERS),
    ("refusal", "DTensor", False),
]
FEW = [("sequence", "lengths mask", False), ("sequence", "auxiliary", False), ("sequence", "sink", True)]


# NOW-03
@pytest.mark.slow
@pytest.mark.parametrize(("without", "tried"), [(None, TRIED), ("torch.distributed.*", FEW)], ids=["all names", "public names"])
def test_each_rank_finds_its_part(tmp_path, monkeypatch, without, tried):
    if without is not None:
        monkeypatch.setenv("FOCI_WITHOUT", without)
    # One test of all: processes that each import torch are what takes time, and workers of pytest share no fixture.
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        try:
            torch.multiprocessing.spawn(work, (str(tmp_path / "store"), tried, results), nprocs=RANKS)
        except torch.multiprocessing.ProcessExitedException as error:
            pytest.fail(f"{error}; faulthandler has written where. Before that ended: {sorted(map(str, results.keys()))}")
        results_by_case = dict(results)
    for each in tried:
        for rank in range(RANKS):
            assert results_by_case.get((*each, rank), "not reached") is None, each


PART = torch.zeros(1, 2, 4, 8)


@pytest.mark.parametrize("part", [Part(first_head=2), Part(first_query=4, queries=8)])
def test_captured_tensors_are_those_of_the_whole(part):
    table = torch.zeros(3, 7)
    with pytest.raises(ValueError, match=r"captured tensor 0, float32\[3, 7\] on cpu, is indexed by (h|q_idx) .* runs to (4|8)"):
        prepare((PART, PART, PART), lambda s, b, h, i, j: s + table[h, i], None, Extras(Outputs(), part=part))


@pytest.mark.parametrize(
    "arguments, options, kind, message",
    [
        ([PART] * 3, {"shards": "batch"}, ValueError, r"^shards must be 'sequence' or 'heads'; got 'batch'"),
        ([PART[0], PART, PART], {"shards": "heads"}, ValueError, r"^query must have 4 dimensions"),
        ([PART, PART, PART[:, :, :2]], {"shards": "sequence"}, ValueError, r"key and value must have one length; got 4 and 2"),
        ([PART, None, PART], {"shards": "heads"}, TypeError, r"^key must be a tensor; got NoneType"),
        (
            [PART] * 3,
            {"shards": "heads", "mask": torch.ones(4, 4, dtype=torch.bool)},
            TypeError,
            r"^mask must be a foci.Mask or a function, of indices in the whole",
        ),
        ([PART] * 3, {"shards": "sequence", "return_aux": foci.AuxRequest(column_sums=True)}, ValueError, r"^column_sums of shards"),
        ([PART] * 3, {"shards": "heads", "scale": float("nan")}, (ValueError, RuntimeError), r"scale must be finite|needs a process group"),
        ([PART] * 3, {"shards": "heads"}, RuntimeError, r"needs a process group: call torch.distributed.init_process_group first"),
    ],
)
def test_wrong_arguments(arguments, options, kind, message):
    with pytest.raises(kind, match=message):
        foci.distributed.attention(*arguments, **options)
