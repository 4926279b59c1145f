"""NestedTensors that do not fit are refused in torch's words."""

import pytest
import torch
from drawn import rand
from packed import nested

import foci


# JAG-09
def test_no_backend_says_why():
    _, q = nested((3, 5), 2, 8)
    with foci.use("aten"), pytest.raises(foci.NoViableBackend, match="aten .* dense layout") as caught:
        foci.attention(q, q, q)
    assert all(name in str(caught.value) for name in foci.backends.names())


def test_a_nested_mask_is_refused():
    q = nested((3, 5), 2, 8)[1]
    with pytest.raises(TypeError, match="attn_mask must be a dense tensor; got a NestedTensor"):
        foci.scaled_dot_product_attention(q, q, q, attn_mask=q)


def wrong(name):
    _, q = nested((3, 5), 2, 8)
    _, k = nested((3, 5), 2, 8, seed=1)
    dense = rand(2, 2, 5, 8)
    flat = torch.nested.nested_tensor_from_jagged(rand(8, 2, 8), offsets=torch.tensor([0, 3, 8]))
    return {
        "dtype": (q, k.float(), k),
        "device": (q, k.to("meta"), k),
        "key dense": (q, dense, k),
        "dims": (rand(2, 8), k, k),
        "other dims": (rand(2, 5, 8), k, k),
        "ragged": (flat, k, k),
        "head dim": tuple(
            torch.nested.nested_tensor_from_jagged(rand(2, 4, 8), offsets=torch.tensor([0, 3, 8]), jagged_dim=3) for _ in range(3)
        ),
        "batch": (q, *(nested((3, 5, 1), 2, 8)[1] for _ in range(2))),
        "tokens": (q, nested((3, 5), 2, 8)[1], nested((3, 6), 2, 8)[1]),
        "lengths": (q, nested((3, 5), 2, 8)[1], nested((5, 3), 2, 8)[1]),
        "narrowed": (
            q,
            k,
            torch.nested.nested_tensor_from_jagged(rand(8, 2, 8), torch.tensor([0, 3, 8]), torch.tensor([3, 4])).transpose(1, 2),
        ),
        "grouped": (nested((3, 5), 4, 8)[1], k, k),
        "strided": tuple(torch.nested.nested_tensor([rand(2, 3, 8), rand(3, 3, 8)]) for _ in range(3)),
        "heads": (q, *(nested((3, 5), 3, 8)[1] for _ in range(2))),
    }[name]


MESSAGES = {
    "dtype": "to have the same dtype; got query torch.float64, key torch.float32, value torch.float64",
    "device": "to have the same device; got query cpu, key meta, value cpu",
    "key dense": "key and value to be nested together; got a nested value and a dense key",
    "dims": "at least 3 dimensional; got 2, 4 and 4",
    "other dims": "one number of dimensions; got 3, 4 and 4",
    "ragged": r"ragged on the same dimension; got ragged dims \[1, 2, 2\]",
    "head dim": "ragged in the head dim",
    "batch": "query has batch size 2; it must be 3 or 1",
    "tokens": "same sequences; got float64.1, 2, 8, 8. on cpu and float64.1, 2, 9, 8. on cpu when packed",
    "lengths": r"same sequences; got tokens \[\(0, 3\), \(3, 8\)\] and \[\(0, 5\), \(5, 8\)\]",
    "narrowed": r"same sequences; got tokens \[\(0, 3\), \(3, 8\)\] and \[\(0, 3\), \(3, 7\)\]",
    "grouped": "have 4, 2, 2 heads: grouped heads need enable_gqa=True",
    "strided": "query must be ragged in the length alone",
    "heads": "have 2, 3, 3 heads: grouped heads need enable_gqa=True",
}


# JAG-02
@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_wrong_nested_tensors(name):
    with pytest.raises(ValueError, match=MESSAGES[name]):
        foci.scaled_dot_product_attention(*wrong(name))


def test_grouped_heads_of_entries_are_asked_for():
    offsets = torch.tensor([0, 2, 5])
    query, key = (torch.nested.nested_tensor_from_jagged(rand(5, heads, 6, 8), offsets=offsets) for heads in (4, 2))
    with pytest.raises(ValueError, match="^query, key and value have 4, 2, 2 heads: grouped heads need enable_gqa=True"):
        foci.scaled_dot_product_attention(query, key, key)
    assert foci.scaled_dot_product_attention(query, key, key, enable_gqa=True).shape[2] == 4


def test_names_of_arguments_that_do_not_fit():
    _, query = nested((3, 5), 2, 8)
    with pytest.raises(ValueError, match="^attn_mask must broadcast to .*; got float64.1, 1, 1, 5, 5. on cpu"):
        foci.scaled_dot_product_attention(query, query, query, attn_mask=rand(1, 1, 1, 5, 5))


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (3, 3, 3), (5, 1, 3, 3)], ids=str)
def test_matrices_too_small_for_the_longest(sizes):
    _, q = nested((2, 3), 4, 8)
    message = r"^attn_mask must broadcast to .* = \[2, 4, 3, 3\], or have room for longer ones; got float64"
    for key in (q, rand(2, 4, 3, 8)):
        with pytest.raises(ValueError, match=message):
            foci.scaled_dot_product_attention(q, key, key, rand(*sizes))
    assert foci.scaled_dot_product_attention(q, q, q, rand(2, 1, 5, 7)).is_nested
