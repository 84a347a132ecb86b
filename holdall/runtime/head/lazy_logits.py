"""Logits that are computed only when their values are read.

The logits of a large vocabulary are the largest tensor of a step, and a loss makes two or three more of their size. Here the
head returns a tensor with a shape but no values. Ops that a language model's loss applies on the way to `cross_entropy`
(slicing off a position, flattening) are applied to the hidden states instead. Elementwise ops (soft-cap, scale, bias, cast up)
are recorded (`elementwise.py`). The loss is computed in chunks of rows (`chunked_loss.py`, which states the tolerance). Any
other op computes the logits whole, once, with their graph, and uses them: in-place changes, sampling, metrics and printing
behave as usual.

Where ranks have the logits of a part of the words each (`divided_words.py`), all of them read lazy logits together, or none.

Ownership: the lazy tensor holds the hidden states and the weight, as the graph of ordinary logits would. Reading it after the
weight has changed would give different values, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter, tree_map_only

from holdall.errors import InvalidInput, Unsupported
from holdall.runtime.head.chunked_loss import Asked, chunked_cross_entropy, no_autocast
from holdall.runtime.head.elementwise import COMMUTATIVE, NO_CHAIN, OPS, Chain, link_for, pulled_back
from holdall.runtime.head.head_call import HeadCall, record_call
from holdall.runtime.head.row_layout import TAKES
from holdall.sharded import is_engines

_CHUNK = 2**29  # bytes of float32 logits per chunk: large enough to keep a GPU busy, small against a model
_STEP = 128  # rows; the tile size of matrix products
FEWEST = 256  # rows; below this, reading the weight takes longer than computing with it


def head_of(model: torch.nn.Module) -> tuple[str, torch.nn.Module] | None:
    """(path, module) of the model's vocabulary head; None: it names none (as Hugging Face models do), or it is not linear."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if not isinstance(head, torch.nn.Module) or _obstacle(head):
        return None
    return next(((path, head) for path, module in model.named_modules() if module is head), None)


def rows_for(tokens: int, vocab: int) -> int:
    """Rows per chunk: at most 512 MiB of float32 logits, in chunks of nearly equal size."""
    most = max(FEWEST, _CHUNK // (4 * vocab) // _STEP * _STEP)
    chunks = max(1, -(-tokens // most))
    return max(FEWEST, -(-tokens // (chunks * _STEP)) * _STEP)


def chunk_head(head: torch.nn.Module, *, rows: int) -> Callable[[], None]:
    """Make a linear head return lazy logits whose loss takes `rows` at a time; call the result to undo it."""
    if rows < 1:
        raise InvalidInput(f"`rows` is {rows}", hint='use 1 or more, such as head=1024, or head="auto"')
    why_not = _obstacle(head)
    if why_not:
        raise Unsupported(f"{type(head).__name__} cannot be evaluated in chunks: {why_not}", hint='use head="whole"')
    plain, is_on = head.forward, True

    def chunked(*args: Any, **kwargs: Any) -> Tensor:
        (hidden,) = (*args, *kwargs.values())  # `input`, by position or by name
        # the current parameters: they may be replaced before the next call
        words = getattr(head, "holdall_words", None)
        call = record_call(hidden, head.weight, head.bias, rows, words) if is_on else None  # type: ignore[arg-type]
        whole: Tensor
        if call is None:
            whole = plain(*args, **kwargs)
            return whole
        return _lazy(call, hidden, call.dtype, None, NO_CHAIN)

    head.forward = chunked  # type: ignore[method-assign]

    def undo() -> None:
        nonlocal is_on
        is_on = False
        if head.__dict__.get("forward") is chunked:  # others may have wrapped it, and stay
            del head.forward

    return undo


def _obstacle(head: torch.nn.Module) -> str:
    """Why a module is not a plain linear layer; empty if it is."""
    if type(head).forward is not torch.nn.Linear.forward:
        return "its forward is not that of `torch.nn.Linear`"
    if "forward" in head.__dict__:
        return "its forward was replaced already"
    weight = head.weight
    if not isinstance(weight, Tensor) or is_traceable_wrapper_subclass(weight) or not weight.is_floating_point():
        return f"its weight is a {type(weight).__name__}, not a plain tensor of floats"
    return ""


class LazyLogits(torch.Tensor):
    """`linear(hidden, weight, bias)` and later ops on it, not computed. Made by `chunk_head` and by lazy ops."""

    _call: HeadCall
    _hidden: Tensor  # [..., H] for logits [..., V]
    _made: tuple[LazyLogits, Any, tuple[Any, ...], dict[str, Any]] | None  # (lazy input, op, arguments); None: made by the head
    _chain: Chain  # elementwise ops on the logits of `_hidden`
    _live: bool  # gradients flow through it
    _value: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in COMMUTATIVE and len(args) == 2 and isinstance(args[1], LazyLogits) and isinstance(args[0], Tensor):
            args = args[::-1] if not isinstance(args[0], LazyLogits) else args
        first = args[0] if args else None
        if any(isinstance(t, LazyLogits) and t._is_adopted() for t in tree_iter((args, kwargs))):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(first, LazyLogits):
            if first._call.whole is None:
                if func in _KNOWN or (func in _LAYOUT and first._made is None):
                    with torch._C.DisableTorchFunctionSubclass():
                        return func(*args, **kwargs)
                step = _STEPS.get(func)
                out = NotImplemented if step is None else step(first, func, args[1:], kwargs)
                if out is not NotImplemented:
                    return out
            if func is Tensor.register_hook and first._call.whole is None and is_engines(args[1]):
                return None if first._call.spent else first._hidden.register_hook(args[1])
            if func in _HOOKS and first._call.spent:
                raise Unsupported(
                    "a hook for the gradient of the logits was registered after their loss was computed in chunks",
                    hint='register it before the loss is computed, or call fit(..., head="whole")',
                )
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Reached only with `__torch_function__` off; autograd has then connected the result to `_Graph`."""
        args, kwargs = tree_map_only(LazyLogits, lambda lazy: lazy.whole().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _is_adopted(self) -> bool:
        """Did an autograd function return it (as reentrant checkpointing does)? Then its graph is not ours."""
        return bool(self._live != _plainly(self, _getter("requires_grad")))

    @property
    def is_spent(self) -> bool:
        """Was their loss computed in chunks? Then no gradient will arrive at the logits."""
        return self._call.spent

    def leave_graph(self) -> None:
        """Release the autograd graph; the values can still be computed."""
        call, lazy = self._call, self
        call.given = [(t if t.is_leaf else t.detach(), version) for t, version in call.given]
        call.whole = None if call.whole is None else call.whole.detach()
        while True:
            lazy._hidden, lazy._live = lazy._hidden.detach(), False
            lazy._value = None if lazy._value is None else lazy._value.detach()
            _plainly(lazy, Tensor.detach_)
            if lazy._made is None:
                return
            lazy = lazy._made[0]

    def whole(self) -> Tensor:
        """The logits with their ordinary graph; computed at the first call."""
        if self._value is None:
            # turning inference mode off also re-enables autograd inside a dispatcher
            with torch.inference_mode(False), torch.set_grad_enabled(self._live):
                self._value = self._compute()
        return self._value

    def _compute(self) -> Tensor:
        call = self._call
        if self._made is None:
            call.whole = call.logits(self._hidden)
            call.version = call.whole._version
            return call.whole
        parent, func, args, kwargs = self._made
        self._chain.check()
        value = parent.whole()
        if call.whole is not None and call.whole._version != call.version:
            raise Unsupported(
                "the logits were changed in place after a slice or a copy of them was made",
                hint='change them before, or call fit(..., head="whole")',
            )
        made: Tensor = func(value, *args, **kwargs)
        return made


def _getter(name: str) -> Any:
    """The function that `__torch_function__` receives when a property is read."""
    return getattr(Tensor, name).__get__


def _plainly(lazy: LazyLogits, func: Any) -> Any:
    """Call a method that needs only the tensor's metadata."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(lazy)


def _lazy(call: HeadCall, hidden: Tensor, dtype: torch.dtype, made: Any, chain: Chain) -> LazyLogits:
    lazy: LazyLogits = _Graph.apply(hidden, call.weight, call.bias, call, dtype, chain)
    lazy._call, lazy._hidden, lazy._made, lazy._value, lazy._chain = call, hidden, made, None, chain
    lazy._live = _plainly(lazy, _getter("requires_grad"))
    return lazy


class _Graph(torch.autograd.Function):
    """Connects lazy logits to the graph for code that bypasses `__torch_function__`, such as autograd functions."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: HeadCall, dtype: torch.dtype, chain: Chain
    ) -> Tensor:
        # not `save_for_backward`: this backward hardly ever runs, and no plan should count its tensors
        ctx.given = (hidden, weight, bias, call, chain)
        shape = (*hidden.shape[:-1], call.vocabulary)
        made: Tensor = Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=hidden.device)
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, call, chain = ctx.given
        call.check()
        with no_autocast(hidden.device.type):
            g = incoming.reshape(-1, call.vocabulary)
            if call.words is not None:
                g, chain = call.words.part(g), chain.part(call.words)
            g = pulled_back(g, call.own_logits(hidden).view_as(g), chain) if chain != NO_CHAIN else g.to(call.dtype)
            h = hidden.reshape(-1, weight.shape[1]).to(call.dtype)
            wants = ctx.needs_input_grad
            return (
                (g @ weight.to(call.dtype)).view(hidden.shape).to(hidden.dtype) if wants[0] else None,
                (g.t() @ h).to(weight.dtype) if wants[1] else None,
                g.sum(0).to(bias.dtype) if wants[2] else None,
                None,
                None,
                None,
            )


# lazy ops: each returns its result, or NotImplemented if the logits must be computed


def _derive(
    lazy: LazyLogits,
    func: Any,
    args: Any,
    kwargs: Any,
    take: Callable[[Tensor], Tensor],
    dtype: torch.dtype | None = None,
    chain: Chain | None = None,
) -> Tensor:
    """The lazy result of an op that does to rows of logits what `take` does to hidden rows. `chain`: its elementwise ops."""
    with torch.set_grad_enabled(lazy._live and torch.is_grad_enabled()):
        made = (lazy, func, args, kwargs)
        return _lazy(lazy._call, take(lazy._hidden), dtype or lazy.dtype, made, chain or lazy._chain)


def _same(hidden: Tensor) -> Tensor:
    return hidden


def _contiguous(lazy: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    return NotImplemented if args or kwargs else _derive(lazy, func, args, kwargs, _same)


def _float(lazy: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    return NotImplemented if args or kwargs else _cast(lazy, func, args, kwargs, torch.float32)


def _to(lazy: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    if any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
        return NotImplemented
    try:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
    except (TypeError, RuntimeError):  # `copy` by position, or an invalid call: let the computed logits decide
        return NotImplemented
    if layout is not None or (device is not None and device != lazy.device):
        return NotImplemented
    return _cast(lazy, func, args, kwargs, dtype or lazy.dtype)


def _cast(lazy: LazyLogits, func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    """Cast upwards only: the loss is computed in float32 from logits of `call.dtype`, without another rounding."""
    if dtype not in (lazy.dtype, torch.promote_types(lazy.dtype, torch.float32)):
        return NotImplemented
    return _derive(lazy, func, args, kwargs, _same, dtype)


def _elementwise(lazy: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    found = None if kwargs or any(isinstance(a, LazyLogits) for a in args) else link_for(func, args, lazy)
    if found is None or found[1] not in (lazy.dtype, torch.promote_types(lazy.dtype, torch.float32)):
        return NotImplemented
    link, dtype = found
    chain = lazy._chain.then(link, cast=dtype != lazy._call.dtype)
    return _derive(lazy, func, args, kwargs, _same, dtype, chain)


def _arranged(lazy: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    take = TAKES[func](lazy, args, kwargs)
    return NotImplemented if take is None else _derive(lazy, func, args, kwargs, take)


def _cross_entropy(lazy: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG001
    return _loss(lazy, *args, **kwargs)


def _loss(
    lazy: LazyLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    call, hidden = lazy._call, lazy._hidden
    tokens, vocab = lazy.shape if lazy.dim() == 2 else (0, 0)
    rows_of_labels = isinstance(target, Tensor) and target.dtype == torch.int64 and target.shape == (tokens,)
    if not tokens or not rows_of_labels or target.device != lazy.device or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    if size_average is not None or reduce is not None or not 0 <= label_smoothing <= 1:
        return NotImplemented
    if weight is not None and (
        label_smoothing or weight.shape != (vocab,) or weight.dtype != lazy.dtype or weight.device != lazy.device
    ):
        return NotImplemented
    call.check()
    lazy._chain.check()
    dtype = lazy.dtype
    if torch.is_autocast_enabled(lazy.device.type):
        dtype = torch.promote_types(dtype, torch.float32)  # the dtype of a loss under autocast
    asked = Asked(
        rows=call.rows,
        dtype=dtype,
        ignore_index=ignore_index,
        reduction=reduction,
        smoothing=float(label_smoothing),
        chain=lazy._chain if call.words is None else lazy._chain.part(call.words),
        words=call.words,
    )
    with torch.set_grad_enabled(lazy._live and torch.is_grad_enabled()):
        loss = chunked_cross_entropy(hidden.to(call.dtype), call.weight, call.bias, target, weight, asked)
    call.spent = call.spent or loss.requires_grad
    return loss


_STEPS: dict[Any, Callable[[LazyLogits, Any, Any, Any], Any]] = {
    Tensor.contiguous: _contiguous,
    Tensor.float: _float,
    Tensor.to: _to,
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys(TAKES, _arranged),
    **dict.fromkeys(OPS, _elementwise),
    # for byte counts and graph walks: report the hidden states until the logits are computed
    Tensor.untyped_storage: lambda lazy, *_: lazy._hidden.untyped_storage(),
    _getter("grad_fn"): lambda lazy, *_: lazy._hidden.grad_fn,
}

_HOOKS = frozenset({Tensor.register_hook, Tensor.retain_grad})

_KNOWN = frozenset(
    {
        *(getattr(Tensor, name) for name in ("__len__", "size", "dim", "ndimension", "numel", "nelement", "element_size")),
        *(getattr(Tensor, name) for name in ("get_device", "is_inference", "is_floating_point", "is_complex", "is_signed")),
        *(getattr(torch, name) for name in ("numel", "is_floating_point", "is_complex", "is_inference")),
        *map(_getter, ("shape", "ndim", "dtype", "device", "layout", "itemsize", "nbytes", "_base")),
        *map(_getter, ("requires_grad", "is_leaf", "_version", "grad")),
        *map(_getter, ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized")),
    }
)

# known of the head's direct result, not of its slices
_LAYOUT = frozenset({Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset})
