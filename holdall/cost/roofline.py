"""Seconds for ops: the launch, then the longer of arithmetic and memory traffic (roofline: Williams et al., 2009).

Rates come from points measured on this machine if there are any, otherwise from the datasheet's peak and the share of it that
large products reach. Ops are grouped into a few families, because a product, an attention kernel and a convolution of the same
FLOPs do not reach the same rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from holdall.cost.table import Curves, build_curves, rate_at
from holdall.types import Hardware, Kind, Op, Rate, TensorInfo, Trace
from holdall.types.trace import Seconds

KERNEL = 3e-6  # seconds of a GPU kernel that does almost nothing
VIEW_SHARE = 0.5  # share of the overhead for an op that starts no kernel, such as a view

families: dict[str, str] = {
    "mm": "matmul",
    "addmm": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "addbmm": "matmul",
    "matmul": "matmul",
    "linear": "matmul",
    "linear_backward": "matmul",
    "mv": "matmul",
    "addmv": "matmul",
    "dot": "matmul",
    "_addmm_activation": "matmul",
    "_int_mm": "matmul",
    "_scaled_mm": "matmul",
    "_grouped_mm": "matmul",
    "_scaled_grouped_mm": "matmul",
    "mkldnn_rnn_layer": "matmul",
    "mkldnn_rnn_layer_backward": "matmul",
    "_cudnn_rnn": "matmul",
    "_cudnn_rnn_backward": "matmul",
    "flex_attention": "attention",
    "flex_attention_backward": "attention",
}
"""aten op name (without overload) -> family; other names are matched by `_PREFIXES`, then count as memory."""

_PREFIXES = {
    "_scaled_dot_product_": "attention",
    "scaled_dot_product_": "attention",
    "_flash_attention_": "attention",
    "_efficient_attention_": "attention",
    "_cudnn_attention_": "attention",
    "convolution": "conv",
    "_convolution": "conv",
    "cudnn_convolution": "conv",
    "mkldnn_convolution": "conv",
    "miopen_convolution": "conv",
    "slow_conv": "conv",
    "_slow_conv": "conv",
    "_conv_depthwise": "conv",
    "conv_depthwise": "conv",
}


@lru_cache(maxsize=4096)
def family_of(name: str) -> str:
    """The family of an op, from its name as in traces: "aten.mm.default", "aten::mm" or "mm"."""
    parts = name.rsplit("::", maxsplit=1)[-1].split(".")
    base = parts[1] if len(parts) > 1 and parts[0] == "aten" else parts[0]
    if base in families:
        return families[base]
    return next((family for prefix, family in _PREFIXES.items() if base.startswith(prefix)), "memory")


_LIBRARIES, _CONTEXT, _BESIDES = "library workspaces", "driver and kernels", "tensors besides this training"


def op_seconds(op: Op, hardware: Hardware) -> Seconds:
    """Seconds of one op on this machine. On a GPU its launch hides behind the previous op; see `simulator/replay.py`."""
    if hardware.device == "cuda":
        start, view = 0.0, 0.0
        least = KERNEL
    else:
        start, view, least = hardware.overhead, hardware.overhead * VIEW_SHARE, 0.0
    if op.flops == 0 and op.moved == 0:
        return view
    arithmetic = op.flops / rate if op.flops and (rate := _flop_rate(op, hardware)) else 0.0
    return start + max(least, arithmetic, op.moved / _byte_rate(op.moved, hardware))


def cost_trace(trace: Trace, hardware: Hardware) -> Trace:
    """The trace with the seconds of every op on this machine, and with the memory that libraries keep.

    Repeated layers repeat their ops, so each kind is priced once. Seconds measured on this device stay.
    """
    timed = trace.about.timed == hardware.name
    known: dict[tuple[str, int, int, str], Seconds] = {}
    ops = []
    for op in trace.ops:
        if timed and op.seconds > 0:
            ops.append(op)
            continue
        key = (op.site.op, op.flops, op.moved, op.dtype)
        seconds = known.get(key)
        if seconds is None:
            seconds = known[key] = op_seconds(op, hardware)
        ops.append(replace(op, seconds=seconds))
    tensors = dict(trace.tensors)
    besides = trace.about.besides if hardware.device == "cuda" else 0
    for name, size in ((_LIBRARIES, hardware.resident), (_CONTEXT, hardware.context), (_BESIDES, besides)):
        if size and not any(t.name == name for t in tensors.values()):
            new = max(tensors, default=-1) + 1
            tensors[new] = TensorInfo(
                id=new, name=name, kind=Kind.BUFFER, shape=(size,), dtype="uint8", nbytes=size, born=-1, freed=None
            )
    return replace(trace, ops=tuple(ops), tensors=tensors)


@lru_cache(maxsize=16)
def _curves(table: tuple[Rate, ...]) -> Curves:
    return build_curves(table)


def _flop_rate(op: Op, hardware: Hardware) -> float:
    """FLOP/s for this op; 0: unknown for its dtype, so only its bytes count."""
    curves = _curves(hardware.table)
    family = family_of(op.site.op)
    for dtype in _stand_ins(op.dtype):
        for kind in (family, "matmul"):  # an unmeasured family uses the products of its dtype
            if kind != "memory" and (kind, dtype) in curves:
                return rate_at(curves[kind, dtype], op.flops)
        if dtype in hardware.flops:
            return hardware.flops[dtype] * hardware.efficiency
    return 0.0


def _stand_ins(dtype: str) -> Iterator[str]:
    """The dtypes whose rates may be used instead, best first. Integers have none: their ops are bound by bytes."""
    dtype = dtype.removeprefix("torch.")
    if dtype.startswith(("int", "uint", "bool", "quint", "qint", "bits")):
        return
    if dtype:
        yield dtype
    if dtype.startswith("float8_"):
        yield "float8"
    if dtype.startswith(("float8", "float16", "bfloat16", "half", "float4")):
        yield from ("bfloat16", "float16")
    yield "float32"


def _byte_rate(moved: int, hardware: Hardware) -> float:
    curve = _curves(hardware.table).get(("memory", ""))
    return rate_at(curve, moved) if curve else hardware.bandwidth
