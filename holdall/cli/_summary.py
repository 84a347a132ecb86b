"""A summary of a trace: blocks by kind, bytes by kind and class, the plain peak, and a closed-form estimate for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdall.cost.closed_form import Shape, activation_bytes, parameters, selective_bytes, state_bytes
from holdall.experiments.request import plain_outcome
from holdall.experiments.workload import Workload
from holdall.models import DTYPES
from holdall.reporting.text import KIND_LABELS
from holdall.types import Kind, Outcome, Trace
from holdall.units import format_bytes

CLASSES = {
    "M_p": ("parameters", (Kind.PARAM,)),
    "M_s": ("model states", (Kind.GRAD, Kind.STATE)),
    "M_a": ("activations", (Kind.ACTIVATION, Kind.INPUT, Kind.BUFFER, Kind.TEMP)),
}
"""The survey's three classes: parameters, model states, activations."""

_RECIPES = {("adamw", "float32"): "adam-fp32", ("sgd", "float32"): "sgd-fp32", ("adamw", "bfloat16"): "adam-bf16"}


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    kind: str  # class name
    count: int
    saved: int  # bytes kept for backward, all together; a tensor kept by two blocks counts for the first


@dataclass(frozen=True, kw_only=True)
class Check:
    """One figure by formula and as traced."""

    label: str
    show: Callable[[float], str]
    expected: int
    traced: int

    @property
    def difference(self) -> float:
        """The relative difference of the traced figure from the formula."""
        return self.traced / self.expected - 1


@dataclass(frozen=True, kw_only=True)
class Summary:
    workload: Workload
    trace: Trace
    blocks: tuple[BlockKind, ...]
    kinds: dict[Kind, int]  # bytes of model states, gradients and tensors saved for backward
    outcome: Outcome
    check: tuple[Check, ...]  # empty: not a classic transformer

    @property
    def classes(self) -> dict[str, int]:
        return {name: sum(self.kinds[k] for k in kinds) for name, (_, kinds) in CLASSES.items()}

    @property
    def peak(self) -> int:
        return next(iter(self.outcome.peak.values()))

    @property
    def facts(self) -> dict[str, object]:
        about, traced = self.trace.about, self.trace
        size = f"{len(traced.ops)} ops, {len(traced.tensors)} tensors, {len(traced.blocks)} blocks"
        return {
            "workload": self.workload,
            "traced": f"{size}, on {about.device}",
            **{f"{label} ({name})": self._parts(kinds) for name, (label, kinds) in CLASSES.items()},
            "plain peak": format_bytes(self.peak),
            "notes": "; ".join(about.notes),
        }

    def _parts(self, kinds: tuple[Kind, ...]) -> str:
        """The sum, followed by its parts if there is more than one."""
        sizes = {KIND_LABELS[k]: self.kinds[k] for k in kinds if self.kinds[k]}
        parts = ", ".join(f"{label} {format_bytes(size)}" for label, size in sizes.items())
        return format_bytes(sum(sizes.values())) + (f" ({parts})" if len(sizes) > 1 else "")

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.workload.source.name,
            "device": self.trace.about.device,
            "fingerprint": self.trace.fingerprint,
            "ops": len(self.trace.ops),
            "tensors": len(self.trace.tensors),
            "blocks": [{"kind": b.kind, "count": b.count, "saved": b.saved} for b in self.blocks],
            "kinds": {kind.value: size for kind, size in self.kinds.items()},
            "classes": self.classes,
            "peak": self.peak,
            "peak_kinds": {kind.value: size for kind, size in self.outcome.peak_kinds.items()},
            "closed_form": [{"what": c.label, "expected": c.expected, "traced": c.traced} for c in self.check],
        }


def summarise(workload: Workload, trace: Trace) -> Summary:
    blocks = _block_kinds(trace)
    return Summary(
        workload=workload,
        trace=trace,
        blocks=blocks,
        kinds=trace.bytes_by_kind(),
        outcome=plain_outcome(trace),
        check=_against_closed_form(workload, trace, blocks),
    )


def _block_kinds(trace: Trace) -> tuple[BlockKind, ...]:
    counted: set[int] = set()
    count: dict[str, int] = {}
    saved: dict[str, int] = {}
    for block in trace.blocks:
        kept = {trace.saves[i].tensor for i in block.saves} - counted
        counted |= kept
        size = sum(t.nbytes for t in (trace.tensors[x] for x in kept) if t.born >= 0)
        count[block.kind] = count.get(block.kind, 0) + 1
        saved[block.kind] = saved.get(block.kind, 0) + size
    return tuple(BlockKind(kind=kind, count=n, saved=saved[kind]) for kind, n in count.items())


def _against_closed_form(workload: Workload, trace: Trace, blocks: tuple[BlockKind, ...]) -> tuple[Check, ...]:
    shape = _classic_shape(workload) if workload.precision is None else None
    layers = next((b for b in blocks if shape is not None and b.count == shape.layers), None)
    if shape is None or layers is None:
        return ()
    element = DTYPES[workload.dtype].itemsize
    fused = any("_scaled_dot_product_" in op.site.op for op in trace.ops)
    kept = (selective_bytes if fused else activation_bytes)(shape, batch=workload.batch, seq=workload.seq, element=element)
    kinds = trace.bytes_by_kind()
    count = kinds[Kind.PARAM] // element
    found = [Check(label="parameters", show="{:,.0f}".format, expected=parameters(shape), traced=count)]
    recipe = _RECIPES.get((workload.optimizer, workload.dtype))
    if recipe is not None:
        states = kinds[Kind.PARAM] + kinds[Kind.GRAD] + kinds[Kind.STATE]
        found.append(
            Check(label="M_p + M_s", show=format_bytes, expected=state_bytes(parameters(shape), recipe), traced=states)
        )
    label = f"kept by {layers.count} x {layers.kind}"
    return (*found, Check(label=label, show=format_bytes, expected=kept, traced=layers.saved))


def _classic_shape(workload: Workload) -> Shape | None:
    """The shape of a classic transformer: GELU MLP of four times the width, as many keys as queries, tied embedding."""
    config = workload.source.config
    width = getattr(config, "hidden_size", None)
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * (width or 0)
    activation = getattr(config, "hidden_act", None) or getattr(config, "activation_function", "")
    classic = (
        workload.source.task in ("causal-lm", "masked-lm")
        and width
        and inner == 4 * width
        and "gelu" in str(activation)
        and not hasattr(config, "num_key_value_heads")
        and getattr(config, "tie_word_embeddings", False)
    )
    if not classic:
        return None
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        vocabulary=config.vocab_size,
    )
