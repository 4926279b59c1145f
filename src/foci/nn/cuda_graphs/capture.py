"""Encoders and decoders as CUDA graphs, for batches of any lengths."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from foci.environment import allowed_backends, autocast_dtype, matmul_precision, read_environment
from foci.nn import decoder, encoder
from foci.nn.capture_guards import Watch
from foci.nn.cuda_graphs.buckets import Bucket, check_sizes, choose_shape
from foci.nn.cuda_graphs.graphs import CUDA, Engine
from foci.nn.cuda_graphs.replay import Batch, Recordings
from foci.nn.masking import check_mask, detect_causal
from foci.nn.packing import Packing, is_nested, is_readable, pack_batch, pack_whole, restore_batch

__all__ = ["Captured", "capture", "release"]

Model = TypeVar("Model", bound=torch.nn.Module)


class _Masked(NamedTuple):
    """A mask argument, and the hint that it is causal."""

    mask: str
    hint: str


@dataclass(frozen=True)
class _Stack:
    """A class of modules: its inputs with their padding masks, the queries' first, its other masks, and which of its layers take no
    tokens."""

    kind: type[torch.nn.Module]
    inputs: tuple[tuple[str, str], ...]
    masks: tuple[_Masked, ...]
    overridden: Callable[[torch.nn.Module], str | None]


_SOURCE: Final = (("src", "src_key_padding_mask"),)
_BOTH: Final = (("tgt", "tgt_key_padding_mask"), ("memory", "memory_key_padding_mask"))
_DECODES: Final = (_Masked("tgt_mask", "tgt_is_causal"), _Masked("memory_mask", "memory_is_causal"))
_STACKS: Final = (
    _Stack(encoder.TransformerEncoder, _SOURCE, (_Masked("mask", "is_causal"),), encoder.overridden),
    _Stack(encoder.TransformerEncoderLayer, _SOURCE, (_Masked("src_mask", "is_causal"),), encoder.overridden),
    _Stack(decoder.TransformerDecoder, _BOTH, _DECODES, decoder.overridden),
    _Stack(decoder.TransformerDecoderLayer, _BOTH, _DECODES, decoder.overridden),
)


def capture(model: Model, *, sizes: Sequence[int] | None = None, limit: int = 64) -> Model:
    """Makes the encoders and decoders of a model run as CUDA graphs, in place: a call costs the host a few launches, in training too.

    Arguments and results stay as they are: padded batches with a mask, NestedTensors, tokens with a `foci.nn.Packing`. A batch is
    computed in the next of a row of sizes, whose spare rows belong to no sequence: they are zeros, attention does not read them,
    and they have no gradient. Each size is captured when it first comes, forward and backward, and all share their memory.

    Parameters and buffers are read where they lie, so optimizers work as ever. What else a module is made of is looked at in each
    call: other parameters or submodules, other masks, scores, dropout are captured anew; train and eval, frozen parameters,
    autocast and the backends that `foci.use` allows have captures of their own. Dropout draws new numbers in each call.

    Where Python may not read values (torch.compile, transforms, a CUDA graph of the caller's), modules compute as before.

    Args:
        model: a `foci.nn` encoder, decoder or layer of them, or a model that has some; their largest are captured.
        sizes: numbers of tokens to round up to; by default some at each power of two, that leave 6 % spare rows at most.
        limit: graphs kept for each of them; the one that was not used for longest goes.

    Returns:
        The model. When called, its modules raise ValueError for tensors that are not on a CUDA device, a cache, masks that require grad,
        unbatched inputs, submodules with hooks, or more tokens than `sizes` go to, and RuntimeError for attention that waits for the
        device and for a second backward of one forward.

    Raises:
        TypeError: for a model that is no module, or sizes that are no sequence.
        ValueError: for a model without a module to capture, a module that is not given tokens, or a wrong number.

    Example:
        >>> import torch, foci.nn
        >>> encoder = foci.nn.TransformerEncoder(foci.nn.TransformerEncoderLayer(64, 4, batch_first=True), 2)
        >>> encoder = foci.nn.capture(encoder)
        >>> if torch.cuda.is_available():
        ...     padding = torch.arange(50, device="cuda") >= torch.tensor([[50], [7]], device="cuda")
        ...     out = encoder.cuda()(torch.randn(2, 50, 64, device="cuda"), src_key_padding_mask=padding)
        ...     out.sum().backward()
    """
    rows = check_sizes(sizes)
    if type(limit) is not int or limit < 1:
        raise ValueError(f"limit must be a positive integer; got {limit!r}")
    modules = _outermost(release(model))
    if not modules:
        raise ValueError(f"model has no encoder or decoder of foci.nn to capture; got {type(model).__name__}")
    for module in modules:
        reason = _refusal(module)
        if reason is not None:
            raise ValueError(f"model has a module that cannot be captured: {reason}")
    for module in modules:
        module.forward = Captured(module, rows, limit)
    return model


def release(model: Model) -> Model:
    """Undoes `capture`, in place.

    Raises:
        TypeError: for a model that is no module.

    Example:
        >>> import torch, foci.nn
        >>> model = foci.nn.capture(foci.nn.TransformerEncoderLayer(32, 4, batch_first=True))
        >>> foci.nn.release(model)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    for module in model.modules():
        if isinstance(vars(module).get("forward"), Captured):
            del module.forward
    return model


def _outermost(module: torch.nn.Module) -> list[torch.nn.Module]:
    if isinstance(module, tuple(stack.kind for stack in _STACKS)):
        return [module]
    return [descendant for child in module.children() for descendant in _outermost(child)]


def _refusal(module: Any) -> str | None:
    """Why a module cannot be given packed tokens, if it cannot."""
    stack, kind = _find_stack(module), type(module)
    overrides = [name for name in ("forward", "_run") if name in vars(module) or getattr(kind, name) is not getattr(stack.kind, name)]
    if overrides:
        return f"{kind.__name__} has a {overrides[0]} of its own"
    if not getattr(module, "use_nested_tensor", True):
        return f"{kind.__name__} has enable_nested_tensor=False, so that its layers are given padded batches"
    return next((reason for reason in map(stack.overridden, _layers(module)) if reason is not None), None)


def _layers(module: Any) -> Any:
    return getattr(module, "layers", [module])


def _find_stack(module: torch.nn.Module) -> _Stack:
    return next(stack for stack in _STACKS if isinstance(module, stack.kind))


class _Call(NamedTuple):
    """A call, its inputs packed."""

    tokens: tuple[Tensor, ...]
    packings: tuple[Packing, ...]
    masks: tuple[Tensor, ...]
    settings: tuple[object, ...]
    """For each mask argument: the number of its tensor in `masks`, None where it is not read; whether it is given; the hint."""


class Captured:
    """The forward of a captured module.

    Attributes:
        module: whose forward it is.
    """

    engine: Engine = CUDA

    def __init__(self, module: torch.nn.Module, sizes: tuple[int, ...] | None, limit: int) -> None:
        self.module = module
        self._stack = _find_stack(module)
        self._sizes, self._limit = sizes, limit
        self._defaults = {name: p.default for name, p in inspect.signature(type(module).forward).parameters.items() if name != "self"}
        self._recordings = Recordings(self.engine, limit)
        self._watch: Watch | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Captured, (self.module, self._sizes, self._limit)  # graphs are of this process, and of this module

    @property
    def count(self) -> int:
        """How many graphs there are, forward and backward as one."""
        return len(self._recordings.keys)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's forward."""
        module, arguments = self.module, self._bound(args, kwargs)
        first, padding = (arguments[name] for name in self._stack.inputs[0])
        if not isinstance(first, Tensor) or not (is_nested(first) or is_readable(first)) or torch.compiler.is_compiling():
            return type(module).forward(module, *args, **kwargs)  # type: ignore[no-any-return]
        device = self._check(arguments)
        call = self._pack_call(arguments)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            out = self._run(call, device)
        return restore_batch(out, call.packings[0], batch_first=self._batch_first, input_padding=padding)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        positional = dict(zip(self._defaults, args, strict=False))
        if len(args) > len(self._defaults) or not kwargs.keys() <= self._defaults.keys() - positional.keys():
            inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs)  # raises what Python says
        return {**self._defaults, **positional, **kwargs}

    @property
    def _batch_first(self) -> bool:
        return encoder.is_batch_first(_layers(self.module))

    def _check(self, arguments: dict[str, Any]) -> torch.device:
        """The device of all tensors."""
        if arguments["cache"] is not None:
            raise ValueError("cache must be None in a captured module: what it holds grows from call to call")
        first = self._stack.inputs[0][0]
        device: torch.device = arguments[first].device
        for name, _ in self._stack.inputs:
            if not isinstance(arguments[name], Tensor):
                raise ValueError(f"{name} must be a tensor; got {type(arguments[name]).__name__}")
        for name, value in arguments.items():
            tensor = value.offsets if isinstance(value, Packing) else value
            if isinstance(tensor, Tensor) and (tensor.device != device or not self.engine.takes(tensor)):
                raise ValueError(f"{name} must be on the CUDA device of {first} in a captured module; got {tensor.device}")
        masks = [masked.mask for masked in self._stack.masks] + [padding for _, padding in self._stack.inputs]
        for name in masks:
            check_mask(name, arguments[name])
            bias = arguments[name].bias if isinstance(arguments[name], Packing) else arguments[name]
            if isinstance(bias, Tensor) and bias.requires_grad:
                raise ValueError(f"{name} must not require grad in a captured module")
        return device

    def _pack_call(self, arguments: dict[str, Any]) -> _Call:
        tokens, packings, lengths, batch_first = [], [], [], self._batch_first
        for name, mask in self._stack.inputs:
            x, padding = arguments[name], arguments[mask]
            if x.dim() == 2 and not isinstance(padding, Packing):
                raise ValueError(f"{name} must be batched in a captured module, or tokens with a Packing; got {list(x.shape)}")
            lengths.append(None if is_nested(x) or isinstance(padding, Packing) else x.shape[1 if batch_first else 0])
            x, packing = pack_batch(x, padding, batch_first=batch_first)
            if packing is None:
                packing = pack_whole(x, batch_first=batch_first)
                x = packing.pack(x)
            tokens.append(x)
            packings.append(packing)
        sizes = [packing.batch for packing in packings]
        if len(set(sizes)) > 1:
            (query, _), (key, _) = self._stack.inputs
            raise ValueError(f"{key} must have the batch size of {query}, {sizes[0]}; got {sizes[1]}")
        masks: list[Tensor] = []
        settings: list[object] = []
        for masked in self._stack.masks:
            mask = arguments[masked.mask]
            is_causal = detect_causal(mask, arguments[masked.hint], lengths[0])
            read = mask is not None and not is_causal
            settings += [len(masks) if read else None, mask is not None, is_causal]
            masks += [mask] if read else []
        return _Call(tuple(tokens), tuple(packings), tuple(masks), tuple(settings))

    def _run(self, call: _Call, device: torch.device) -> Tensor:
        if self._watch is None or self._watch.has_changed():
            self._watch = Watch(self.module)
            self._recordings.clear()
        watch = self._watch
        watch.check()
        autocast = autocast_dtype(device.type)
        exact = watch.is_exact or bool(call.masks)
        rooms = [choose_shape(p, t.shape[0], self._sizes, exact=exact) for t, p in zip(call.tokens, call.packings, strict=True)]
        seats = tuple(map(Bucket.of, call.packings, rooms))
        learning = watch.learning() if torch.is_grad_enabled() else ()
        needs_grad = bool(learning) or (torch.is_grad_enabled() and any(t.requires_grad for t in call.tokens))
        tensors = (*call.tokens, *(p.offsets for p in call.packings), *(p.bias for p in call.packings if p.bias is not None))
        key: Hashable = (
            seats, call.settings, tuple((t.dtype, t.shape[1:], needs_grad and t.requires_grad) for t in tensors),
            tuple((t.dtype, t.shape) for t in call.masks), watch.in_training(), tuple(map(id, learning)), needs_grad,
            read_environment(allowed_backends(), device), matmul_precision(),
        )  # fmt: skip

        def compute(tokens: Sequence[Tensor], packings: Sequence[Packing], masks: Sequence[Tensor]) -> Tensor:
            with torch.autocast(device.type, autocast, autocast is not None, cache_enabled=False):
                return self._compute(tokens, packings, masks, call.settings)

        batch = Batch(call.tokens, call.packings, seats, call.masks)
        return self._recordings.run((device, _stream(device)), key, compute, batch, watch.places, learning, needs_grad=needs_grad)

    def _compute(self, tokens: Sequence[Tensor], packings: Sequence[Packing], masks: Sequence[Tensor], settings: Any) -> Tensor:
        module, arguments = self.module, dict[str, Any]()
        for (name, padding), x, packing in zip(self._stack.inputs, tokens, packings, strict=True):
            arguments |= {name: x, padding: packing}
        for n, masked in enumerate(self._stack.masks):
            number, is_given, is_causal = settings[3 * n : 3 * n + 3]
            arguments[masked.hint] = is_causal
            if is_given:  # a mask that is causal is not read
                arguments[masked.mask] = tokens[0].new_empty(0) if number is None else masks[number]
        return type(module).forward(module, **arguments)  # type: ignore[no-any-return]


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
