"""Multi-head attention: torch.nn's module on foci, with grouped heads, rotary positions, variants and a cache."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.jit import is_scripting  # type: ignore[attr-defined]

import foci
from foci.dispatch import run, run_packed
from foci.nn import masking, torchscript
from foci.nn.attention_inputs import (
    Projected,
    are_same_sequences,
    as_pair,
    cut_mask,
    mark_padding,
    of_sequences,
    read_packing,
    unsqueezed,
    within_mask,
)
from foci.nn.cache import LayerCache, Memory, Stored
from foci.nn.fx_leaf import is_traced, leaf
from foci.nn.grouped_heads import Variant, group, plug, regroup
from foci.nn.linear_ops import linear
from foci.nn.masking import Functions
from foci.nn.packing import Packing, Pair, append_rows, check_same_sequences, round_bound
from foci.nn.rotary import RotaryEmbedding
from foci.nn.skip_module_call import parameter, project_out
from foci.normalize import check_outputs
from foci.prepare import Extras, check_inputs
from foci.problem import OUT_ALONE
from foci.variant import Mask, Score, check_heads

__all__ = ["MultiheadAttention", "adopt"]

_NEEDS_MASK: Final = (
    "Need attn_mask if specifying the is_causal hint. "
    "You may use the Transformer module method `generate_square_subsequent_mask` to create this mask."
)


class MultiheadAttention(torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` (Vaswani et al., 2017, section 3.2.2) on foci, and what torch's has not.

    Parameters, their names and their initialisation are torch's. Weights are computed only where they are asked for; a
    row that may attend to nothing gives zeros, in the weights too.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in torch.
        num_kv_heads: heads of key and value, a divisor of num_heads (Ainslie et al., 2023); num_heads by default.
        rotary: turns queries and keys by their positions; for self-attention.
        mask: which keys each query attends to, besides what `forward` is given: a `foci.Mask`, a function
            (b, h, q_idx, kv_idx) -> bool, or a module that returns one. Indices are positions in the padded sequence.
        score: what happens to the scaled scores: a `foci.Score`, a function, or a module that returns one, whose
            parameters are then learned.

    Raises:
        ValueError, AssertionError: as torch; ValueError for num_kv_heads that does not divide num_heads.
        TypeError: for a num_kv_heads, rotary, mask or score of another type.

    Example:
        >>> import torch, foci, foci.nn
        >>> attention = foci.nn.MultiheadAttention(64, 8, batch_first=True, num_kv_heads=2, mask=foci.masks.causal())
        >>> x = torch.randn(2, 10, 64)
        >>> out, weights = attention(x, x, x)
        >>> out.shape, weights.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 10]))
    """

    __constants__ = ["batch_first", "_as_it_is", "_added"]
    _as_it_is = torchscript.AS_IT_IS
    _added = torchscript.ADDED

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
        add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None, batch_first: bool = False,
        device: Any = None, dtype: torch.dtype | None = None, *, num_kv_heads: int | None = None,
        rotary: RotaryEmbedding | None = None, mask: Variant = None, score: Variant = None,
    ) -> None:  # fmt: skip
        super().__init__(embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype)
        adopt(self, num_kv_heads=num_kv_heads, rotary=rotary, mask=mask, score=score)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "num_kv_heads" not in self.__dict__:  # pickled by torch.nn
            plug(self, num_kv_heads=self.num_heads)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "num_heads" and "num_kv_heads" in self.__dict__:
            regroup(self, value)
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Return the sizes that `repr` shows."""
        return f"{self.embed_dim}, {self.num_heads}, num_kv_heads={self.num_kv_heads}, batch_first={self.batch_first}"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None, need_weights: bool = True,
        attn_mask: Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False, cache: Any = None,
        return_aux: Any = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attention of query over key and value.

        Args:
            query: [L, B, E], [B, L, E] with batch_first, [L, E], or a NestedTensor [B, ragged, E].
            key, value: the same with their own length and dims.
            key_padding_mask: [B, S] or [S], bool, true for keys to leave out, or floating, added to their scores; or, with tokens
                [T, E] in place of query, key and value, their `foci.nn.Packing`.
            need_weights: also return the weights.
            attn_mask: [L, S] or [B * H, L, S], bool, true where not to attend, or floating, added; may require grad. Of nested inputs L and
                S are the longest, or more.
            average_attn_weights: weights averaged over heads.
            is_causal: a hint that attn_mask is causal, which is then not read; needs attn_mask.
            cache: a layer's part of a `foci.nn.KVCache`, whose tokens the new ones join; queries then see none after their own.
            return_aux: a `foci.AuxRequest`: row statistics instead of weights.

        Returns:
            The output in the query's layout, and weights [B, L, S], or [B, H, L, S] if not averaged, before dropout; or
            None; or with return_aux a `foci.AuxOutput`. Unbatched ones without B. Weights of nested inputs and of tokens are padded with
            zeros, to the longest, or to a bound of it under torch.compile; row statistics are nested, or [H, T] of tokens.

        Raises:
            AssertionError, RuntimeError: for wrong arguments, in torch's words.
        """
        if is_scripting():
            return self._scripted(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        else:
            if is_traced(query, key, value):
                return leaf(  # type: ignore[no-any-return]
                    self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal, cache, return_aux
                )
            return self._attend(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal, cache, return_aux
            )

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Any, need_weights: bool, attn_mask: Tensor | None, average: bool,
        is_causal: bool, cache: LayerCache | Memory | None, return_aux: foci.AuxRequest | None,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        asked = return_aux if return_aux is not None else foci.AuxRequest(weights=True) if need_weights else None
        check_inputs(query, key, value)
        if not isinstance(cache, (LayerCache, Memory, type(None))):
            raise TypeError(f"cache must be a layer's part of a foci.nn.KVCache, cache[n]; got {type(cache).__name__}")
        if isinstance(padding, (Packing, Pair)):
            masking.check_packed(cache)
            inputs = (query, key, value)
            if return_aux is not None:
                return self._with_statistics(inputs, padding, attn_mask, is_causal=is_causal, asked=return_aux)[:2]
            if need_weights:
                return self._weighed(inputs, as_pair(padding), attn_mask, average=average, is_causal=is_causal)
            return self._packed(inputs, padding, attn_mask, is_causal=is_causal), None
        if query.is_nested or key.is_nested or value.is_nested:
            if isinstance(cache, LayerCache):
                raise ValueError("cache takes padded batches only; got nested inputs")
            options: Any = {"need_weights": need_weights, "average": average, "is_causal": is_causal, "return_aux": return_aux}
            return self._nested((query, key, value), padding, attn_mask, **options)
        masking.check_mask("key_padding_mask", padding)
        masking.check_mask("attn_mask", attn_mask)
        batched = masking.check_shapes(query, key, value, padding, attn_mask)
        if is_causal and attn_mask is None and not isinstance(cache, LayerCache):
            raise RuntimeError(_NEEDS_MASK)
        if not batched:
            query, key, value = unsqueezed((query, key, value), 0 if self.batch_first else 1)
            padding = None if padding is None else padding.unsqueeze(0)
        self._check_inputs(query, key, value)
        out, aux = self._dense((query, key, value), padding, attn_mask, is_causal=is_causal, cache=cache, asked=asked)
        if not self.batch_first:
            out = out.transpose(0, 1)
        if not batched:
            out = out.squeeze(0 if self.batch_first else 1)
            aux = None if aux is None else foci.AuxOutput(*(None if t is None else t.squeeze(0) for t in aux))
        if aux is None or return_aux is not None:
            return out, aux
        weights = aux.weights
        assert weights is not None
        return out, weights.mean(dim=-3) if average else weights

    def _scripted(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, need_weights: bool, attn_mask: Tensor | None,
        average_attn_weights: bool, is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """`forward` as TorchScript runs it."""
        if self.mask is not None or self.score is not None or self.rotary is not None or self.bias_k is not None or self.add_zero_attn:  # type: ignore[unreachable]
            raise RuntimeError("a scripted MultiheadAttention takes no mask, score, rotary, add_bias_kv or add_zero_attn: use torch.export")
        if is_causal and attn_mask is None:  # type: ignore[unreachable]
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        padding = torchscript.additive(key_padding_mask, query.dtype, "key_padding_mask")
        blocked = torchscript.additive(attn_mask, query.dtype, "attn_mask")
        batched = query.dim() == 3
        if not batched:
            at = 0 if self.batch_first else 1
            query, key, value = query.unsqueeze(at), key.unsqueeze(at), value.unsqueeze(at)
            padding = None if padding is None else padding.unsqueeze(0)
        weights = torchscript.Parameters(self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight, self.in_proj_bias)
        q, k, v = torchscript.project(query, key, value, weights, self.embed_dim)
        if not self.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        q = q.unflatten(-1, [self.num_heads, self.head_dim]).transpose(1, 2)
        k = k.unflatten(-1, [self.num_kv_heads, self.head_dim]).transpose(1, 2)
        v = v.unflatten(-1, [self.num_kv_heads, self.head_dim]).transpose(1, 2)
        dropout = float(self.dropout) if self.training else 0.0  # TorchScript tells 0 from 0.0
        out, attn_weights = torchscript.attention((q, k, v), blocked, padding, dropout, need_weights, (self._as_it_is, self._added))
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if not self.batch_first:
            out = out.transpose(0, 1)
        if attn_weights is not None and average_attn_weights:
            attn_weights = attn_weights.mean(dim=1)
        if not batched:
            out = out.squeeze(0 if self.batch_first else 1)
            attn_weights = None if attn_weights is None else attn_weights.squeeze(0)
        return out, attn_weights

    def _check_features(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        got, wanted = (query.shape[-1], key.shape[-1], value.shape[-1]), (self.embed_dim, self.kdim, self.vdim)
        if got == wanted:
            return
        if got[0] != wanted[0]:
            raise AssertionError(f"was expecting embedding dimension of {wanted[0]}, but got {got[0]}")
        name, n = ("key", 1) if got[1] != wanted[1] else ("value", 2)
        raise RuntimeError(f"was expecting a {name} of {wanted[n]} features, but got {got[n]}")

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._check_features(query, key, value)
        masking.check_batches(*(t.shape[0 if self.batch_first else 1] for t in (query, key)))
        is_packed = self.kdim == self.vdim == self.embed_dim
        if not is_packed and key.shape[:2] != value.shape[:2]:
            raise AssertionError(f"key's sequence and batch dims {key.shape[:2]} do not match value's {value.shape[:2]}")
        if is_packed and key.shape != value.shape:
            raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Projected:
        """[..., H, D], [..., Hkv, D] and [..., Hkv, D]; one product where the inputs are one tensor, two where key and value are."""
        module: Any = self
        size, kv_heads = self.embed_dim, module.num_kv_heads
        width = kv_heads * self.head_dim
        weight: Tensor | None = parameter(self, "in_proj_weight")
        bias: Tensor | None = parameter(self, "in_proj_bias")
        if weight is not None and query is key and key is value:
            q, k, v = self._split_heads(linear(query, weight, bias), [self.num_heads, kv_heads, kv_heads])
        elif weight is not None and key is value:
            weights = torch.split_with_sizes(weight, [size, 2 * width])
            biases: Any = (None, None) if bias is None else torch.split_with_sizes(bias, [size, 2 * width])
            (q,) = self._split_heads(linear(query, weights[0], biases[0]), [self.num_heads])
            k, v = self._split_heads(linear(key, weights[1], biases[1]), [kv_heads, kv_heads])
        else:
            separate: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights = separate if weight is None else torch.split_with_sizes(weight, [size, width, width])
            biases = (None,) * 3 if bias is None else torch.split_with_sizes(bias, [size, width, width])
            parts = (linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
            q, k, v = (torch.unflatten(part, -1, (-1, self.head_dim)) for part in parts)
        return q, k, v

    def _split_heads(self, projected: Tensor, heads: list[int]) -> tuple[Tensor, ...]:
        """[..., h, D] for each number of heads h."""
        rows = torch.unflatten(projected, -1, (sum(heads), self.head_dim))
        return torch.split_with_sizes(rows, heads, dim=-2) if len(heads) > 1 else (rows,)

    def _own(self) -> Functions:
        """The module's own mask and score."""
        module: Any = self
        variants: tuple[Any, Any] = (module.mask, module.score)
        if variants[0] is None and variants[1] is None:
            return masking.NOTHING
        mask, score = (variant() if isinstance(variant, torch.nn.Module) else variant for variant in variants)
        if mask is not None and not isinstance(mask, Mask):
            mask = Mask(mask)
        check_heads(score, self.num_heads)
        return Functions(mask, score if score is None or isinstance(score, Score) else Score(score))

    def _extra_keys(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values [n, Hkv, D] that every sequence has besides its own: bias_k and bias_v, then zeros."""
        keys, values = [], []
        if self.bias_k is not None and self.bias_v is not None:
            keys.append(self.bias_k.view(1, -1, self.head_dim))
            values.append(self.bias_v.view(1, -1, self.head_dim))
        if self.add_zero_attn:
            module: Any = self
            zeros = self.out_proj.weight.new_zeros((1, module.num_kv_heads, self.head_dim))
            keys.append(zeros)
            values.append(zeros)
        return (torch.cat(keys), torch.cat(values)) if keys else None

    def _dense(
        self, inputs: Projected, padding: Tensor | None, attn_mask: Tensor | None, *, is_causal: bool,
        cache: LayerCache | Memory | None, asked: foci.AuxRequest | None,
    ) -> tuple[Tensor, foci.AuxOutput | None]:  # fmt: skip
        """Output [B, L, E], and the auxiliary outputs."""
        order = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        q, k, v, stored = self._heads(inputs, padding, order, cache)
        functions, extra = self._own(), self._extra_keys()
        pages = None if stored is None else stored.pages
        if stored is not None and (attn_mask is not None or extra is not None or (asked is not None and asked.weights)):
            k, v = stored.in_one_piece()  # matrices, weights and keys of the module's own are made for one length
            pages = None
        if stored is not None:
            place = masking.cached_place(stored)
            functions = masking.placed(functions.and_(masking.CAUSAL), place, masking.itself)
            padding = None
        if padding is not None:
            masking.check_padding_shape(padding, k.shape[0], k.shape[2])
            functions = functions.and_(masking.key_padding(padding))
        if attn_mask is not None and is_causal:
            functions = functions.and_(masking.CAUSAL)
        elif attn_mask is not None:
            lengths = (q.shape[2], k.shape[2])
            functions = functions.and_(masking.matrix(masking.explicit(attn_mask, lengths, batch=q.shape[0], heads=self.num_heads)))
        if extra is not None:
            functions = masking.with_extra_keys(functions, extra[0].shape[0], longest=k.shape[2])
            more = (e.to(k.dtype).transpose(0, 1).expand(k.shape[0], -1, -1, -1) for e in extra)
            k, v = (torch.cat((t, e), dim=2) for t, e in zip((k, v), more, strict=True))
        options: Any = {"mask": functions.mask, "score": functions.score, "dropout_p": self.dropout if self.training else 0.0}
        if pages is None:
            results = foci.attention(q, k, v, return_aux=asked, **options)
        else:
            results = foci.paged_attention(q, k, v, pages.table, pages.lengths, max_kv=pages.longest, return_aux=asked, **options)
        out, aux = results if isinstance(results, tuple) else (results, None)
        return project_out(self.out_proj, out.transpose(1, 2).flatten(2)), aux

    def _heads(
        self, inputs: Projected, padding: Tensor | None, order: tuple[int, ...], cache: LayerCache | Memory | None
    ) -> tuple[Tensor, Tensor, Tensor, Stored | None]:
        """Projected, turned and joined with the cache: [B, H, L, D], [B, Hkv, S, D] twice."""
        if isinstance(cache, Memory) and cache.key is not None and cache.value is not None:
            weight, bias = self._query_parameters()
            q = torch.unflatten(linear(inputs[0], weight, bias), -1, (-1, self.head_dim)).permute(order)
            return q, cache.key, cache.value, None
        q, k, v = (part.permute(order) for part in self._project(*inputs))
        if isinstance(cache, Memory):
            cache.key, cache.value = k.detach(), v.detach()
            return q, k, v, None
        dropped = None if cache is None else masking.dropped(padding)
        rotary: Any = self.rotary
        if rotary is not None:
            if cache is None:
                turns = [torch.arange(t.shape[2], device=t.device) for t in (q, k)]
            else:
                turns = [cache.positions(q.shape[0], q.shape[2], dropped, q.device)] * 2
            q, k = (rotary(t, positions) for t, positions in zip((q, k), turns, strict=True))
        if cache is None:
            return q, k, v, None
        stored = cache.append(k, v, dropped)
        return q, stored.key, stored.value, stored

    def _query_parameters(self) -> tuple[Tensor, Tensor | None]:
        packed, bias = self.in_proj_weight, self.in_proj_bias
        weight: Any = self.q_proj_weight if self.q_proj_weight is not None else packed[: self.embed_dim]
        return weight, None if bias is None else bias[: self.embed_dim]

    def _packed(self, inputs: Projected, padding: Packing | Pair, attn_mask: Tensor | None, *, is_causal: bool) -> Tensor:
        """[T, E] of tokens [T, E], [Tk, Ek] and [Tk, Ev]."""
        tensors, functions, extras = self._call_of_packed(inputs, padding, attn_mask, is_causal=is_causal)
        mask, score = functions.mask, functions.score
        out = run_packed(tensors, None if score is None else score.function, None if mask is None else mask.function, extras).out
        return project_out(self.out_proj, out.flatten(1))

    def _with_statistics(
        self, inputs: Projected, padding: Packing | Pair, attn_mask: Tensor | None, *, is_causal: bool, asked: foci.AuxRequest
    ) -> tuple[Tensor, foci.AuxOutput, Tensor]:  # fmt: skip
        """[T, E]; statistics of rows, [H, T], and of columns, [H, Tk]; and the offsets of these, which count the module's own keys."""
        if check_outputs(asked, None).weights:
            raise ValueError("return_aux asks for the weights of nested inputs or tokens: need_weights=True gives them, without return_aux")
        tensors, functions, extras = self._call_of_packed(inputs, padding, attn_mask, is_causal=is_causal)
        mask, score = functions.mask, functions.score
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in tensors)
        which = (None if score is None else score.function, None if mask is None else mask.function)
        results = run((q, k, v), *which, extras._replace(outputs=asked))
        statistics = (results.lse if asked.lse else None, results.row_max, results.column_sums)
        lse, row_max, column_sums = (None if t is None else t.squeeze(0) for t in statistics)
        aux = foci.AuxOutput(lse, row_max, column_sums, None)
        assert extras.cu_kv is not None
        return project_out(self.out_proj, results.out.squeeze(0).transpose(0, 1).flatten(1)), aux, extras.cu_kv

    def _call_of_packed(
        self, inputs: Projected, padding: Packing | Pair, attn_mask: Tensor | None, *, is_causal: bool
    ) -> tuple[Projected, Functions, Extras]:  # fmt: skip
        """Return what `run_packed` is given for tokens."""
        query, key = within_mask(as_pair(padding), attn_mask, is_causal=is_causal)
        if not inputs[0].dim() == inputs[1].dim() == inputs[2].dim() == 2:
            got = ", ".join(str(t.dim()) for t in inputs)
            raise ValueError(f"query, key and value beside a Packing must be tokens [tokens, features]; got {got} dimensions")
        self._check_features(*inputs)
        if query is not key:
            masking.check_batches(query.batch, key.batch)
        if is_causal and attn_mask is None:
            raise RuntimeError(_NEEDS_MASK)
        q, k, v = self._project(*inputs)
        rotary: Any = self.rotary
        if rotary is not None:
            q, k = (rotary(t.transpose(0, 1)[None], p.positions(t.shape[0]))[0].transpose(0, 1) for t, p in ((q, query), (k, key)))
        functions = self._of_packed(query, key, attn_mask, is_causal=is_causal)
        offsets, longest, extra = key.offsets, key.longest, self._extra_keys()
        if extra is not None:
            count = extra[0].shape[0]
            k, v = (append_rows(t, e.to(t.dtype), key) for t, e in zip((k, v), extra, strict=True))
            offsets, longest = offsets + count * torch.arange(key.batch + 1, device=offsets.device), longest + count
            functions = masking.with_extra_keys(functions, count, longest=key.longest)
        return (q, k, v), functions, self._extras(query, offsets, longest, functions)

    def _of_packed(self, query: Packing, key: Packing, attn_mask: Tensor | None, *, is_causal: bool) -> Functions:
        """Mask and score of indices within packed sequences."""
        functions = self._own()
        if attn_mask is not None and not is_causal:
            matrix = masking.explicit(
                cut_mask(attn_mask, query, key), (query.shape[1], key.shape[1]), batch=query.batch, heads=self.num_heads
            )
            functions = functions.and_(masking.matrix(matrix))
        elif is_causal and query is not key:
            functions = functions.and_(masking.CAUSAL)
        functions = masking.placed(functions, masking.packed_place(query), masking.packed_place(key))
        if is_causal and query is key:  # packing keeps the order
            functions = functions.and_(masking.CAUSAL)
        return functions.and_(masking.packed_bias(key))

    def _extras(self, query: Packing, offsets: Tensor, longest: int, functions: Functions) -> Extras:
        q_longest = query.longest
        if functions.score is None and functions.mask in (None, masking.CAUSAL.mask) and not torch.compiler.is_compiling():
            q_longest, longest = round_bound(q_longest), round_bound(longest)  # nothing is captured that lengths are checked against
        dropout_p = self.dropout if self.training else 0.0
        return Extras(OUT_ALONE, dropout_p=dropout_p, cu_q=query.offsets, cu_kv=offsets, max_q=q_longest, max_kv=longest)

    def _nested(
        self, inputs: Projected, padding: Any, attn_mask: Tensor | None, *, need_weights: bool, average: bool, is_causal: bool,
        return_aux: foci.AuxRequest | None,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """NestedTensors [B, ragged, E], or dense tensors beside them."""
        if padding is not None:
            raise ValueError("nested inputs take no key_padding_mask: their offsets say where each sequence ends")
        query, key, value = inputs
        query_packing = read_packing(query, batch_first=self.batch_first)
        key_packing = query_packing if are_same_sequences(query, key) else read_packing(key, batch_first=self.batch_first)
        if value is not key:
            check_same_sequences(key, value, key_packing)
        q = query_packing.pack(query)
        k = q if key is query else key_packing.pack(key)
        v = k if value is key else key_packing.pack(value)
        packings = Pair(query_packing, key_packing)
        if return_aux is not None:
            out, aux, ends = self._with_statistics((q, k, v), packings, attn_mask, is_causal=is_causal, asked=return_aux)
            lse, row_max = (of_sequences(t, query_packing.offsets, query_packing) for t in (aux.lse, aux.row_max))
            return query_packing.pad(out), foci.AuxOutput(lse, row_max, of_sequences(aux.column_sums, ends, key_packing), None)
        if not need_weights:
            return query_packing.pad(self._packed((q, k, v), packings, attn_mask, is_causal=is_causal)), None
        out, weights = self._weighed((q, k, v), packings, attn_mask, average=average, is_causal=is_causal)
        return query_packing.pad(out), weights

    def _weighed(
        self, tokens: Projected, packings: Pair, attn_mask: Tensor | None, *, average: bool, is_causal: bool
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Output of tokens [T, E], [Tk, Ek] and [Tk, Ev], and weights of the padded batch, zeros where there is padding."""
        query, key = packings = within_mask(packings, attn_mask, is_causal=is_causal)
        padded = (packing.spread(t) for t, packing in zip(tokens, (query, key, key), strict=True))
        q, k, v = (t if self.batch_first else t.transpose(0, 1) for t in padded)
        hidden, blocked = (mark_padding(packing, t) for packing, t in zip(packings, tokens, strict=False))
        if key.bias is not None:
            blocked = key.spread(key.bias).masked_fill(blocked, -torch.inf)
        attn_mask = None if attn_mask is None else cut_mask(attn_mask, query, key)
        out, weights = self._attend(q, k, v, blocked, True, attn_mask, average, is_causal, None, None)
        out = out if self.batch_first else out.transpose(0, 1)
        return query.gathered(out, tokens[0].shape[0]), weights.masked_fill(
            hidden[:, :, None] if average else hidden[:, None, :, None], 0.0
        )


def adopt(
    module: torch.nn.MultiheadAttention, *, num_kv_heads: int | None = None, rotary: RotaryEmbedding | None = None, mask: Variant = None,
    score: Variant = None,
) -> None:  # fmt: skip
    """Makes torch's attention foci's, in place, its parameters kept; new ones where key heads are grouped.

    Raises:
        TypeError: for arguments of a wrong type.
        ValueError: for num_kv_heads that does not divide num_heads.
    """
    if num_kv_heads is not None and (isinstance(num_kv_heads, bool) or not isinstance(num_kv_heads, int)):
        raise TypeError(f"num_kv_heads must be an integer or None; got {type(num_kv_heads).__name__}")
    if rotary is not None and not callable(rotary):
        raise TypeError(f"rotary must be a foci.nn.RotaryEmbedding or None; got {type(rotary).__name__}")
    if isinstance(rotary, RotaryEmbedding) and rotary.dim > module.head_dim:
        raise ValueError(f"rotary turns {rotary.dim} features of a head; there are {module.head_dim}")
    masking.check_variants(mask=mask, score=score)
    heads = module.num_heads if num_kv_heads is None else num_kv_heads
    if heads < 1 or module.num_heads % heads:
        raise ValueError(f"num_kv_heads must divide num_heads = {module.num_heads}; got {num_kv_heads}")
    if not isinstance(module, MultiheadAttention):
        module.__class__ = MultiheadAttention
    plug(module, num_kv_heads=heads, rotary=rotary, mask=mask, score=score)
    if heads != module.num_heads:
        group(module, heads * module.head_dim)
