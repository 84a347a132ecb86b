"""Recurrent layers on a GPU: cuDNN's ops, with the memory that cuDNN uses.

`torch.lstm` and its like choose their kernel below Python, in ways that fail on fake tensors: they compare addresses of weights
and draw a seed for cuDNN's dropout. The op's own fake kernel returns no weight buffer, and its backward has none. So the layer
is decomposed here as torch does it (`RecurrentOps`), and the two ops get kernels of their own (`KERNELS`).

cuDNN reads all weights of a layer from one buffer. Weights outside such a buffer, as working copies always are, are copied into
a new one in each forward; autograd keeps it for backward, with the *reserve*, where cuDNN stores what backward needs. Only
cuDNN knows both sizes: on a GPU it is asked, once per shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from holdall.tracing.autocast import autocast_now
from holdall.tracing.values.packing import pack, pad

_MODES: dict[Any, int] = {torch.rnn_relu: 0, torch.rnn_tanh: 1, torch.lstm: 2, torch.gru: 3}  # cuDNN's numbers
_PACKING: dict[Any, Callable[..., Any]] = {torch._pack_padded_sequence: pack, torch._pad_packed_sequence: pad}
_LSTM = 2
_GATES = (1, 1, 4, 3)
_KEPT = (2, 2, 6, 5)  # hidden sizes that a step of a layer leaves in the reserve: an estimate, without a GPU
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_STATE = 2**21 + 2**16  # bytes of cuDNN's random state without a GPU: a little over 2 MiB


class RecurrentOps(TorchFunctionMode):
    """Runs recurrent layers by cuDNN's op on `device`, which may be a stand-in for a GPU."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        super().__init__()
        self._device = device
        layers = [m for m in model.modules() if isinstance(m, torch.nn.RNNBase)]
        self._state = None  # cuDNN's random state, shared by all layers and kept for good
        if any(m.dropout > 0 and m.training for m in layers):
            self._state = torch.empty(_state_bytes(device), dtype=torch.uint8, device=device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PACKING and not kwargs:
            return _PACKING[func](*args)
        if func not in _MODES or kwargs or len(args) != 9 or not _is_acceptable(args[0]):
            return func(*args, **(kwargs or {}))
        return self._run(_MODES[func], args)

    def _run(self, mode: int, args: Any) -> Any:
        is_packed = not isinstance(args[3], bool)
        batch_sizes: list[int] = args[1].tolist() if is_packed else []
        hidden, weights, has_biases, layers, dropout, train, both_ways = args[2:9] if is_packed else args[1:8]
        hx, cx = (hidden[0], hidden[1]) if mode == _LSTM else (hidden, None)
        batch_first = False if is_packed else bool(args[8])
        size, projected = hx.shape[2], 0
        if cx is not None and cx.shape[2] != size:
            size, projected = cx.shape[2], size
        x, buffer = args[0], None
        narrow = autocast_now(self._device.type)
        if narrow is not None:  # the weights are cast while they are copied into the buffer
            x, hx, *weights = (t.to(narrow) for t in (x, hx, *weights))
            cx = cx.to(narrow) if cx is not None else None
            buffer = weights[0].detach()
        with torch.autocast(self._device.type, enabled=False):
            out = torch.ops.aten._cudnn_rnn.default(
                x,
                list(weights),
                (4 if has_biases else 2) + (projected > 0),
                buffer,
                hx.contiguous(),
                cx.contiguous() if cx is not None else None,
                mode,
                size,
                projected,
                layers,
                batch_first,
                float(dropout),
                bool(train),
                bool(both_ways),
                batch_sizes,
                self._state if train and dropout > 0 else None,
            )
        return (out[0], out[1], out[2]) if mode == _LSTM else (out[0], out[1])


def _is_acceptable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in _DTYPES and x.numel() > 0 and torch.backends.cudnn.enabled


class _Layer(NamedTuple):
    """Everything that cuDNN's sizes depend on."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    stride0: int
    mode: int
    hidden: int
    projected: int
    layers: int
    batch_first: bool
    dropout: float
    train: bool
    both_ways: bool
    batch_sizes: tuple[int, ...]
    has_cell: bool

    @property
    def rows(self) -> int:
        """Steps times sequences."""
        return self.shape[0] if self.batch_sizes else self.shape[0] * self.shape[1]

    @property
    def batch(self) -> int:
        return self.batch_sizes[0] if self.batch_sizes else self.shape[0 if self.batch_first else 1]

    @property
    def directions(self) -> int:
        return 2 if self.both_ways else 1


class _Sizes(NamedTuple):
    reserve: int  # bytes
    weights: int  # elements


def _forward(func: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG001
    x, weights, stride0, buffer, hx, cx, mode, hidden, projected, layers, batch_first, dropout, train, both_ways, sizes = args[
        :15
    ]
    layer = _Layer(
        x.device,
        x.dtype,
        tuple(x.shape),
        tuple(tuple(w.shape) for w in weights),
        stride0,
        mode,
        hidden,
        projected,
        layers,
        batch_first,
        dropout,
        train,
        both_ways,
        tuple(sizes),
        cx is not None,
    )
    asked = _sizes(layer)
    width = (projected or hidden) * layer.directions
    output = _time_first(x, (*x.shape[:-1], width), batch_first and not sizes)
    hy = hx.new_empty(layers * layer.directions, layer.batch, projected or hidden)
    cy = cx.new_empty(layers * layer.directions, layer.batch, hidden) if cx is not None else x.new_empty(0)
    reserve = x.new_empty(asked.reserve if train else 0, dtype=torch.uint8)
    return output, hy, cy, reserve, x.new_empty(asked.weights) if buffer is None else buffer.detach()


def _backward(func: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG001
    x, weights, hx, cx, batch_first, sizes = args[0], args[1], args[4], args[5], args[14], args[18]
    dx = _time_first(x, tuple(x.shape), batch_first and not sizes)
    dcx = torch.empty_like(cx) if cx is not None else x.new_empty(0)
    # really one buffer; its parts have the same lifetime
    return dx, torch.empty_like(hx), dcx, [torch.empty_like(w) for w in weights] if args[-1][3] else []


def _time_first(x: torch.Tensor, shape: tuple[int, ...], is_turned: bool) -> torch.Tensor:
    """An empty tensor with steps outermost in memory, whatever their order in the shape."""
    if not is_turned:
        return x.new_empty(shape)
    rows, steps, width = shape
    return x.new_empty(steps, rows, width).as_strided(shape, (width, rows * width, 1))


@lru_cache(maxsize=256)
def _sizes(layer: _Layer) -> _Sizes:
    if layer.device.type == "cuda" and torch.cuda.is_available():
        try:
            return _ask(layer)
        except (RuntimeError, torch.OutOfMemoryError):  # not enough memory to measure now
            pass
    return _estimate(layer)


def _estimate(layer: _Layer) -> _Sizes:
    element = torch.empty(0, dtype=layer.dtype, device="meta").element_size()
    kept = _KEPT[layer.mode] * layer.rows * layer.hidden * layer.layers * layer.directions * element
    numel = sum(torch.Size(shape).numel() for shape in layer.weights)
    if all(len(shape) > 1 for shape in layer.weights):  # cuDNN always has biases
        numel += 2 * _GATES[layer.mode] * layer.hidden * layer.layers * layer.directions
    return _Sizes(kept, numel)


def _ask(layer: _Layer) -> _Sizes:
    """Measure the sizes by a forward on empty tensors."""
    with _disable_current_modes(), torch.no_grad():
        on: dict[str, Any] = {"device": layer.device, "dtype": layer.dtype}
        depth = layer.layers * layer.directions
        has_dropout = layer.train and layer.dropout > 0
        found = torch.ops.aten._cudnn_rnn.default(
            torch.zeros(layer.shape, **on),
            [torch.zeros(shape, **on) for shape in layer.weights],
            layer.stride0,
            None,
            torch.zeros(depth, layer.batch, layer.projected or layer.hidden, **on),
            torch.zeros(depth, layer.batch, layer.hidden, **on) if layer.has_cell else None,
            layer.mode,
            layer.hidden,
            layer.projected,
            layer.layers,
            layer.batch_first,
            layer.dropout,
            layer.train,
            layer.both_ways,
            list(layer.batch_sizes),
            _state(layer.dropout, layer.device) if has_dropout else None,
        )
    return _Sizes(found[3].numel(), found[4].numel())


def _state_bytes(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return _STATE
    with _disable_current_modes():
        return _state(0.5, device).numel()


def _state(dropout: float, device: torch.device) -> torch.Tensor:
    """Another random state of cuDNN; torch's own and its generator are not touched."""
    made: torch.Tensor = torch._cudnn_init_dropout_state(dropout, True, 0, dtype=torch.uint8, device=device)  # type: ignore[attr-defined]
    return made


KERNELS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "aten._cudnn_rnn.default": _forward,
    "aten._cudnn_rnn_backward.default": _backward,
}
