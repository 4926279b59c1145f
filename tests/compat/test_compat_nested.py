"""foci.compat.nested gives the same results by private names and by public means."""

# NOW-03

import os
import subprocess
import sys

import pytest
import torch
from without import load_without

from foci.compat import nested as compat

public = load_without("nested", "torch.*")


@pytest.mark.parametrize("ragged", [1, 2])
def test_the_tensors_inside(ragged):
    nested = torch.nested.nested_tensor([torch.randn(n, 2, 3) for n in (3, 5, 2)], layout=torch.jagged)
    nested = nested.transpose(1, 2) if ragged == 2 else nested
    assert compat.HAS_FIELDS and not public.HAS_FIELDS
    assert public.NestedTensor is compat.NestedTensor is public.LearnedNested
    for module in (compat, public):
        assert module.ragged_dim(nested) == ragged and module.length_extremes(nested) == (5, 2)
        assert module.inner_offsets(nested) is nested.offsets() and module.inner_lengths(nested) is None
        assert torch.equal(module.inner_values(nested), nested.values())
        again = module.nested_of_rows(nested.values() * 2, nested)
        assert torch.equal(again.values(), nested.values() * 2) and again.shape == nested.shape


@pytest.mark.parametrize("ragged", [1, 2])
@pytest.mark.parametrize("is_alike", [True, False])
def test_a_nested_tensor_of_rows_is_as_torch_constructs_it(ragged, is_alike):
    like = torch.nested.nested_tensor([torch.randn(n, 2, 3) for n in (3, 5, 2)], layout=torch.jagged)
    like = like.transpose(1, 2) if ragged == 2 else like
    values = like.values() * 2 if is_alike else torch.randn(*like.values().shape[:2], 7)
    found, wanted = compat.nested_of_rows(values, like), compat.NestedTensor(values.clone(), like.offsets(), _ragged_idx=ragged)
    assert (found.shape, found.stride(), found.dtype, found.requires_grad) == (wanted.shape, wanted.stride(), wanted.dtype, False)
    assert vars(found).keys() == vars(wanted).keys()
    for one, other in ((found, wanted), (found._values, wanted._values)):
        marks = [{name: mark for name, mark in vars(t).items() if "dynamo" in name} for t in (one, other)]
        assert marks[0] == marks[1]
    assert found._metadata_cache == like._metadata_cache and found._metadata_cache is not like._metadata_cache


def test_sequences_with_gaps_between_them():
    padded = torch.randn(3, 6, 4, requires_grad=True)
    nested = torch.nested.narrow(padded, 1, torch.tensor([0, 2, 1]), torch.tensor([3, 4, 2]), layout=torch.jagged)
    for module in (compat, public):
        assert module.inner_lengths(nested).tolist() == [3, 4, 2] and module.length_extremes(nested) == (4, 2)
        assert torch.equal(module.inner_values(nested), padded.flatten(0, 1))
    assert not public.inner_values(nested).requires_grad


def test_without_names_nested_tensors_are_made_by_public_functions():
    like = torch.nested.nested_tensor([torch.randn(n, 4) for n in (3, 5)], layout=torch.jagged)
    nested = public.nested_like(torch.ones(8, 4), like)
    assert type(nested) is compat.NestedTensor and nested.shape == like.shape and nested.values().sum() == 32


def test_sizes_of_strided_nested_tensors():
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(5, 4)])
    assert compat.strided_sizes(nested).tolist() == public.strided_sizes(nested).tolist() == [[2, 4], [5, 4]]


@pytest.mark.slow
def test_attention_and_modules_without_any_of_them():
    code = """
import torch, foci, foci.nn
from foci.compat import nested
assert not nested.HAS_FIELDS
torch.manual_seed(0)
parts = [torch.randn(n, 2, 8) for n in (3, 5)]
x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
heads = x.transpose(1, 2)
out = foci.attention(heads, heads, heads)
for part, found in zip(parts, out.unbind()):
    q = part.transpose(0, 1).double()
    torch.testing.assert_close(found.double(), torch.softmax(q @ q.mT / 8**0.5, -1) @ q, atol=1e-5, rtol=1e-5)
out.values().sum().backward()
assert x.grad is not None
layer = foci.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
whole = torch.nested.nested_tensor([p.flatten(1) for p in parts], layout=torch.jagged)
found = layer(whole)
torch.testing.assert_close(found.values()[:3], layer(parts[0].flatten(1)[None])[0])
found.values().sum().backward()
def causal(x):
    heads = x.transpose(1, 2)
    return foci.attention(heads, heads, heads, mask=foci.masks.causal())
compiled = torch.compile(causal, backend="aot_eager", fullgraph=True)
for lengths in ((3, 5), (2, 7, 4), (6, 1), (4, 4)):
    x, again = (torch.nested.nested_tensor([torch.arange(16.0 * n).view(n, 2, 8).cos() for n in lengths], layout=torch.jagged, requires_grad=True) for _ in "ab")
    found, expected = compiled(x), causal(again)
    torch.testing.assert_close(found.values(), expected.values())
    found.values().sin().sum().backward(), expected.values().sin().sum().backward()
    torch.testing.assert_close(x.grad.values(), again.grad.values())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"FOCI_WITHOUT": "*ested*"})
    assert done.returncode == 0, done.stderr
