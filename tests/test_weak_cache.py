"""What was computed from tensors goes with them, at once, and nothing else goes with it."""

import dataclasses
import gc
import threading
import weakref

import pytest
import torch

import foci
from foci import block_mask, cache_check, weak_cache
from foci.cache_check import StaleCacheError
from foci.nn import Packing
from foci.nn.padding_mask_scan import find_tokens
from foci.weak_cache import WeakCache, tensor_state


@pytest.fixture(autouse=True)
def store(monkeypatch):
    made = weak_cache.make_store()
    monkeypatch.setattr(weak_cache, "_derived", made)
    return made


class Value:
    """What a cache holds."""


def test_an_entry_goes_with_any_of_its_sources():
    cache, value = WeakCache(8), Value()
    first, second = torch.zeros(2), torch.zeros(2)
    cache.add(("both",), (first, second), value)
    cache.add(("first",), (first,), value)
    cache.add(("none",), (), value)
    assert cache.find(("both",)) is value
    del second
    assert cache.find(("both",)) is None
    assert len(cache) == 2
    del first
    assert len(cache) == 1 and cache.find(("none",)) is value


def test_an_entry_that_was_replaced_does_not_go_with_its_first_sources():
    cache, old, new = WeakCache(8), torch.zeros(2), torch.zeros(2)
    cache.add(("key",), (old,), Value())
    cache.add(("key",), (new,), value := Value())
    del old
    assert cache.find(("key",)) is value


def test_the_oldest_goes_where_there_are_too_many():
    cache = WeakCache(3)
    for n in range(5):
        cache.add((n,), (), n)
    assert [cache.find((n,)) for n in range(5)] == [None, None, 2, 3, 4]


def test_a_cache_is_freed_with_its_owner_without_the_garbage_collector():
    tensor, cache, value = torch.zeros(2), WeakCache(4), Value()
    cache.add(("key",), (tensor,), value)
    gone = weakref.ref(value)
    del value
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()
    del tensor  # nothing is left that hears of it


def test_sources_that_go_in_other_threads():
    cache = WeakCache(16)

    def work():
        for n in range(300):
            tensor = torch.zeros(1)
            key = (threading.get_ident(), n, *tensor_state(tensor))
            cache.add(key, (tensor,), n)
            assert cache.find(key) in (n, None)  # another thread may have pushed it out
            del tensor

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache) == 0


def lists_of(mask):
    return [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]


def make_block_mask():
    return foci.create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu")


def test_classes_go_with_the_block_mask_and_are_made_anew_for_changed_lists(store):
    mask = make_block_mask()
    classes = block_mask.block_classes(mask)
    assert block_mask.block_classes(mask) is classes
    mask.kv_num_blocks.zero_()
    assert not torch.equal(block_mask.block_classes(mask), classes)
    other = torch.zeros_like(mask.full_kv_num_blocks)
    before = block_mask.block_classes(mask)
    mask.full_kv_num_blocks.data = other  # no version tells
    assert not torch.equal(block_mask.block_classes(mask), before)
    del mask
    gc.collect()
    assert len(store["block classes"]) == 0


def test_wrong_classes_are_found_in_check_mode(store, monkeypatch):
    monkeypatch.setattr(cache_check, "ENABLED", True)
    mask = make_block_mask()
    block_mask.block_classes(mask)
    block_mask.block_classes(mask)
    ((_, classes),) = store["block classes"]._found.values()
    classes.zero_()
    with pytest.raises(StaleCacheError, match="the cache of block classes"):
        block_mask.block_classes(mask)


@pytest.mark.parametrize(
    "hidden", [[[0, 0, 1], [0, 1, 1]], [[1, 0, 0], [0, 0, 1]], [[0, 0, 0], [0, 0, 0]]], ids=["right", "left", "nothing"]
)
def test_wrong_tokens_of_a_mask_are_found_in_check_mode(store, monkeypatch, hidden):
    monkeypatch.setattr(cache_check, "ENABLED", True)
    padding = torch.tensor(hidden, dtype=torch.bool)
    for _ in range(2):
        find_tokens(padding, batch_first=True)
    ((key, (sources, cached)),) = store["padding"]._found.items()
    wrong = (torch.tensor([0, 1, 2]), *cached.tensors[1:])
    store["padding"]._found[key] = sources, cached._replace(tensors=wrong, states=tuple(map(weak_cache.tensor_state, wrong)))
    with pytest.raises((StaleCacheError, ValueError)):
        find_tokens(padding, batch_first=True)


def test_a_packing_counts_its_own_offsets_alone():
    packing = Packing.from_mask(torch.tensor([[False, False, True], [False, True, True]]))
    assert packing.is_whole(3) and not packing.is_whole(4)
    other = dataclasses.replace(packing, offsets=torch.tensor([0, 1, 2]))
    assert not other.is_whole(3) and not other.is_whole(2)
    assert "_counted" not in repr(packing)
    packing.offsets[1] = 1
    assert not packing.is_whole(3)
