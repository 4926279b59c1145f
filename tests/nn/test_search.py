"""Masks that were seen before are not searched again, and those that only look like them are."""

import pytest
import torch

import foci.nn
from foci import weak_cache
from foci.nn import padding_mask_scan


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(weak_cache, "_derived", weak_cache.make_store())


def mask(*lengths, longest=6):
    return torch.arange(longest) >= torch.tensor(lengths)[:, None]


def tokens_of(packing):
    return None if packing is None else (packing.offsets.tolist(), packing.indices.tolist())


MASKS = {"right": mask(4, 0, 6), "left": mask(4, 1, 6).flip(1), "holes": mask(4, 3, 6) ^ (torch.arange(6) == 1), "nothing": mask(6, 6, 6)}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", list(MASKS))
def test_known_by_what_it_masks(name, batch_first):
    hidden = MASKS[name]
    first = padding_mask_scan.find_tokens(hidden, batch_first=batch_first)
    again = padding_mask_scan.find_tokens(hidden.clone(), batch_first=batch_first)
    assert again is first
    changed = hidden.clone()
    changed[0, 3] ^= True
    assert tokens_of(padding_mask_scan.find_tokens(changed, batch_first=batch_first)) != tokens_of(first)
    assert padding_mask_scan.find_tokens(hidden, batch_first=batch_first) is first


def test_one_mask_written_to_in_place():
    hidden = mask(4, 2)
    for _ in range(2):
        assert padding_mask_scan.find_tokens(hidden, batch_first=True).offsets.tolist() == [0, 4, 6]
        hidden.numpy()[0] = True  # no version tells
        assert padding_mask_scan.find_tokens(hidden, batch_first=True).offsets.tolist() == [0, 0, 2]
        hidden.copy_(mask(4, 2))


def test_masks_of_the_same_bytes():
    rows = mask(6, 2)
    assert tokens_of(padding_mask_scan.find_tokens(rows, batch_first=True)) == ([0, 6, 8], [0, 1, 2, 3, 4, 5, 6, 7])
    assert padding_mask_scan.find_tokens(rows.view(1, 12), batch_first=True).offsets.tolist() == [0, 8]
    assert padding_mask_scan.find_tokens(rows, batch_first=False).indices.tolist() == [0, 2, 4, 6, 8, 10, 1, 3]


@pytest.mark.parametrize("is_moved", [False, True])
@pytest.mark.parametrize("name", ["offsets", "indices"])
def test_who_writes_to_what_was_found_changes_his_own_call_alone(name, is_moved):
    hidden = mask(4, 2)
    found = getattr(foci.nn.Packing.from_mask(hidden), name)
    if is_moved:
        found.data = torch.zeros_like(found)
    else:
        found.zero_()
    assert tokens_of(padding_mask_scan.find_tokens(hidden, batch_first=True)) == ([0, 4, 6], [0, 1, 2, 3, 6, 7])


def test_few_are_kept():
    for n in range(40):
        padding_mask_scan.find_tokens(mask(n % 6, n // 6), batch_first=True)
    assert len(weak_cache._derived["padding"]) <= 8


def test_kept_tensors_are_no_inference_tensors():
    with torch.inference_mode():
        for hidden in (mask(4, 2), mask(4, 2).flip(1)):
            packing = padding_mask_scan.find_tokens(hidden, batch_first=True)
            assert not packing.offsets.is_inference()
            assert not packing.indices.is_inference()
