"""Caches of what was computed from tensors, and launches of a program: each entry goes with what it was computed from."""

import gc
import sys
import weakref

import torch
from kernel_stand_ins import DOCUMENTS, OFFSETS, USED, leaves, packed_call

import foci
from foci import call_cache, weak_cache
from foci.backends.gpu import tile_tables
from foci.backends.gpu.launch_list import LaunchList


def test_what_is_computed_from_offsets_goes_with_them(logs, calls):
    """Launch lists of a program and tables of a mask are bound to sequences, which hold memory of the device."""
    tensors = leaves(packed=True)
    for used in (None, USED.clone()):
        offsets = OFFSETS.clone()
        out = packed_call(*tensors, offsets, window_size=(3, 0), seqused_k=used)
        out.backward(torch.zeros_like(out))
        programs = {known.outline.program for known in call_cache._calls.values()}
        lists = [entry for program in programs for entry in program.launches._found.values() if isinstance(entry[1], LaunchList)]
        assert len(lists) == 2
        assert len(weak_cache._derived["sequences"]) == 1 and len(weak_cache._derived["tile tables"]) > 0
        logs[0].clear()
        del out, offsets, lists, used
        gc.collect()
        assert len(weak_cache._derived["sequences"]) == len(weak_cache._derived["tile tables"]) == 0
        left = [entry[1] for program in programs for entry in program.launches._found.values()]
        assert not any(isinstance(value, LaunchList) for value in left)
        assert len(left) <= 2
        call_cache._calls.clear()
    assert not tile_tables._DENSE_SEQUENCES.task_records


def test_offsets_in_other_memory_are_other_offsets(logs, calls):
    _, launched = logs
    tensors, offsets = leaves(packed=True, wanted=(False,) * 3), OFFSETS.clone()
    packed_call(*tensors, offsets)
    packed_call(*tensors, offsets)
    launched.clear()
    offsets.data = torch.tensor([0, 100, 256])  # no version tells
    packed_call(*tensors, offsets)
    assert [name for name, *_ in launched].count("place_sequences") == 1


def test_launches_go_with_their_program(logs, calls):
    foci.attention(*leaves(wanted=(False,) * 3))
    (known,) = call_cache._calls.values()
    ((_, launch_list),) = known.outline.program.launches._found.values()
    program = weakref.ref(known.outline.program)
    del known
    gc.disable()
    try:
        call_cache._calls.clear()
        assert program() is None
        assert sys.getrefcount(launch_list) == 2  # this function and its call
    finally:
        gc.enable()


def test_tile_tables_are_of_their_sequences(logs, calls):
    """Another program of the same mask builds its own launches, but takes the tables of sequences that it shares."""
    tensors, tables = leaves(packed=True, wanted=(False,) * 3), weak_cache._derived["tile tables"]
    first, second = OFFSETS.clone(), torch.tensor([0, 120, 256])
    packed_call(*tensors, first, window_size=(3, 0))
    assert len(tables) == 1
    packed_call(*tensors, first, window_size=(3, 0), return_aux=foci.AuxRequest(lse=True))
    assert len(tables) == 1
    packed_call(*tensors, second, window_size=(3, 0), scale=0.3)
    assert len(tables) == 2


def by_documents(ids):
    return lambda b, h, i, j: ids[i] == ids[j]


def test_tile_tables_and_launches_are_of_what_a_mask_reads(logs, calls):
    tensors, ids = leaves(wanted=(False,) * 3), DOCUMENTS.clone()
    tables = weak_cache._derived["tile tables"]
    for number in range(1, 4):
        foci.attention(*tensors, mask=by_documents(ids))
        foci.attention(*tensors, mask=by_documents(ids))
        (known,) = call_cache._calls.values()
        assert len(tables) == len(known.outline.program.launches) == number
        if number == 1:
            ids[:100] = 7
        else:
            ids.data = ids.clone()  # no version tells
    logs[0].clear()
    del ids
    gc.collect()
    assert len(tables) == len(weak_cache._derived["tile classes"]) == len(known.outline.program.launches) == 0
