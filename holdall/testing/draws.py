"""One random training run, drawn by a number: a family, where its states live, how it is clipped; held against plain training.

The reference is the same loop without a plan. Where the head is taken in rows, it has that too, since the loss is another then;
where the model computes in bfloat16, the parameters stay in float32 and a narrow copy makes the gradients.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

import holdall
from holdall.actions.offload import Offload
from holdall.actions.place import Place, streamable
from holdall.actions.recompute import Recompute, obstacle
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.problem import resolve_budget, resolve_hardware
from holdall.runtime.harness import Harness
from holdall.runtime.head.lazy_logits import chunk_head, head_of
from holdall.testing.contracts import problem_for
from holdall.testing.readers import READERS
from holdall.testing.states import differences
from holdall.testing.worlds import HUGGING_FACE, PLAIN, family
from holdall.tiers.nvme import Nvme
from holdall.tracing.step import default_loss
from holdall.types import Plan, Problem, Tier, Trace
from holdall.types.layout import PAGE

STEPS = 6
ROWS = 5  # of a head that is taken in rows
UNTIED = ("tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mixtral", "tiny-gpt2")
FAMILIES = (*(name for name in PLAIN if name != "branching"), *READERS, *HUGGING_FACE)
KINDS = (
    ("resident", "device"),
    ("resident", "host"),
    ("resident", "via_device"),
    ("streamed", "host"),
    ("streamed", "via_device"),
    ("streamed", "device"),
)
CLIPPED: dict[str, tuple[float | None, ...]] = {
    "never": (None,),
    "in vain": (1e6,),
    "always": (1e-2,),
    "sometimes": (1e6, 1e-2, 1e6, 1e6, 1e-2),
    "not every step": (None, 1e-2, None, 1e6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    number: str  # seed and number of the draw
    family: str
    rule: str
    narrow: bool
    rows: int  # of the head; 0: whole
    tied: bool
    clipped: str
    accumulate: int
    when: str
    kind: tuple[str, str] | None  # the same for all units; None: each by itself
    ahead: bool
    overlap: bool
    share: bool
    activations: bool
    disk: int = 0  # buffers for stretches of states that lie on a disk; 0: none do
    all_on_disk: bool = False  # weights and gradients, too

    def __str__(self) -> str:
        kind = "mixed" if self.kind is None else " ".join(self.kind)
        words = [self.family, self.rule, "bf16" if self.narrow else "fp32", f"{kind} at {self.when}", f"clipped {self.clipped}"]
        words += [f"{self.accumulate} backwards"] * (self.accumulate > 1) + [f"head in rows of {self.rows}"] * bool(self.rows)
        words += [f"states on disk by {self.disk} buffers"] * bool(self.disk) + ["weights on disk"] * self.all_on_disk
        words += [name for name in ("tied", "ahead", "overlap", "share", "activations") if getattr(self, name)]
        return f"{self.number}: {', '.join(words)}"


def draw(seed: int, number: int, families: Iterable[str] = FAMILIES, *, disk: bool = False) -> Draw:
    """The draw of this number: the same on every machine. `disk`: with states on a disk, in the folder of the tier `nvme`."""
    if disk:
        rng = random.Random(f"{seed} {number} disk")
        kind = rng.choice([None, ("resident", "host"), ("streamed", "host"), ("streamed", "host")])
        found = replace(draw(seed, number, families), kind=kind, ahead=False)
        return replace(found, disk=rng.choice([1, 2, 3, 3]), all_on_disk=rng.random() < 0.3)
    rng = random.Random(f"{seed} {number}")
    name = rng.choice(sorted(families))
    has_head = name in UNTIED
    accumulate = rng.choice([1, 1, 1, 2])
    when = rng.choice(["step", "overlap_forward", "overlap_forward", "overlap_forward", "backward"])
    narrow = name not in ("tiny-mixtral", "recurrent", "convnet", "choosing") and rng.random() < 0.5
    return Draw(
        number=f"{seed}/{number}",
        family=name,
        rule=rng.choice(["fused", "fused", "plain", "sgd"]),
        narrow=narrow,
        rows=ROWS if has_head and rng.random() < 0.6 else 0,
        tied=has_head and rng.random() < 0.4,
        clipped="never" if when == "backward" else rng.choice(sorted(CLIPPED)),
        accumulate=1 if when == "backward" or name == "choosing" else accumulate,  # two backwards must have the same experts
        when=when,
        kind=rng.choice([None, *KINDS]),
        ahead=when == "overlap_forward" and rng.random() < 0.6,
        overlap=rng.random() < 0.7,
        share=accumulate == 1 and rng.random() < 0.6,
        activations=rng.random() < 0.5,
    )


# a model, its loop, and plain training of it


def make_optimizer(rule: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if rule == "sgd":
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2, fused=rule == "fused")


def start(name: str, tied: bool, device: str = "cpu") -> tuple[torch.nn.Module, Any]:
    """(model, batch), the same every time; to be trained on `device`."""
    if name in READERS:
        torch.manual_seed(0)
        model, batch = READERS[name]()
        return model.train(), batch
    model, batch = copy.deepcopy(_start(name, tied))
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase) and device != "cpu":
            module.dropout = 0.0  # cuDNN's draws from a state of its own, which is made anew whenever torch's is set
    return model, batch


@cache
def _start(name: str, tied: bool) -> tuple[torch.nn.Module, Any]:
    model, batch = family(name)
    if name in UNTIED:
        tie = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
        tie[0].weight = tie[1].weight if tied else torch.nn.Parameter(tie[1].weight.detach().flip(0).clone())
        model.config.tie_word_embeddings = tied  # type: ignore[union-attr]
    return model, batch


def batches_of(batch: Any, accumulate: int, step: int) -> list[Any]:
    """Other batches of the same shapes."""
    if isinstance(batch, dict):
        parts = {k: batches_of(v, accumulate, step) for k, v in batch.items()}
        return [{k: v[n] for k, v in parts.items()} for n in range(accumulate)]
    if isinstance(batch, tuple):
        return list(zip(*(batches_of(v, accumulate, step) for v in batch), strict=True))
    return [batch.roll(step + n, -1) if isinstance(batch, torch.Tensor) and batch.dim() else batch for n in range(accumulate)]


def loop(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any, d: Draw, work: torch.nn.Module | None = None
) -> Any:
    """Losses, norms, and everything at the end. `work`: a narrow copy that makes the gradients."""
    seen: list[float] = []
    limits = CLIPPED[d.clipped]
    for n in range(STEPS):
        torch.manual_seed(100 + n)
        for b in batches_of(batch, d.accumulate, n):
            loss = default_loss(model if work is None else work, b) / d.accumulate
            loss.backward()
            seen.append(loss.item())
            if work is not None:
                hand_over(model, work)
        limit = limits[n % len(limits)]
        if limit is not None:
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
        if work is not None:
            for p, w in zip(model.parameters(), work.parameters(), strict=True):
                w.data.copy_(p.data)
    return copy.deepcopy({"seen": seen, "model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})


def hand_over(model: torch.nn.Module, work: torch.nn.Module) -> None:
    """Gradients of the narrow copy are added up in the parameters' precision."""
    for p, w in zip(model.parameters(), work.parameters(), strict=True):
        if w.grad is not None:
            p.grad = w.grad.to(p.dtype) if p.grad is None else p.grad + w.grad.to(p.dtype)
            w.grad = None


@cache
def reference(
    name: str, tied: bool, rule: str, narrow: bool, rows: int, clipped: str, accumulate: int, device: str, nudge: int = 0
) -> Any:
    """Plain training. `nudge`: a seed; weights begin a ten-millionth off, as rounding in another order may leave them."""
    model, batch = _nudged(name, tied, device, nudge)
    d = replace(draw(0, 0), clipped=clipped, accumulate=accumulate)
    model, batch = model.to(device), _to(batch, device)
    work = None
    if narrow:
        work = _nudged(name, tied, device, nudge)[0].to(device)
        for w in work.parameters():
            w.data = w.data.bfloat16()
    found = head_of(model if work is None else work) if rows else None
    undo = chunk_head(found[1], rows=rows) if found is not None else lambda: None
    try:
        found = loop(model, make_optimizer(rule, model), batch, d, work)
    finally:
        undo()
    assert all(math.isfinite(value) for value in found["seen"]), f"plain training of {name} by {rule} leaves the finite numbers"
    return found


@torch.no_grad()
def _nudged(name: str, tied: bool, device: str, seed: int) -> tuple[torch.nn.Module, Any]:
    model, batch = start(name, tied, device)
    draws = torch.Generator().manual_seed(seed)
    for p in model.parameters() if seed else ():
        p.mul_(1 + 1e-7 * torch.randn(p.shape, generator=draws))
    return model, batch


def spread(d: Draw, device: str) -> list[float]:
    """How far plain training leaves itself when its weights begin a ten-millionth off: by what is seen, the largest."""
    plain = _plain(d, device)["seen"]
    nudged = [_plain(d, device, nudge)["seen"] for nudge in range(1, 9)]
    return [max(_apart(other[n], value) for other in nudged) for n, value in enumerate(plain)]


def _plain(d: Draw, device: str, nudge: int = 0) -> Any:
    return reference(d.family, d.tied, d.rule, d.narrow, d.rows, d.clipped, d.accumulate, device, nudge)


def _to(batch: Any, device: str) -> Any:
    if isinstance(batch, dict):
        return {k: _to(v, device) for k, v in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_to(v, device) for v in batch)
    return batch.to(device) if isinstance(batch, torch.Tensor) else batch


# the same under a plan


@cache
def traced(name: str, tied: bool, rule: str, narrow: bool, rows: int, device: str) -> Trace:
    model, batch = start(name, tied, device)
    optimizer = make_optimizer(rule, model)
    precision = "bf16" if narrow else None
    return holdall.trace(
        model, _to(batch, device), optimizer=optimizer, precision=precision, head=rows or "whole", device=device
    )


def plan_of(d: Draw, trace: Trace) -> Plan:
    rng = random.Random(d.number)
    can = streamable(trace)
    rows: dict[str, tuple[str, str]] = {}
    for unit in trace.units:
        weights, update = d.kind or rng.choice(KINDS)
        is_mixed = bool(unit.numel) and len(unit.grads) < len(unit.weights)
        if unit.name not in can or (is_mixed and update != "host"):
            weights = "resident"
        if weights == "streamed" and update == "device" and not d.narrow:
            update = "host"
        rows[unit.name] = weights, update
    place = Place.of(trace, rows, when=d.when, share=d.share, ahead=d.ahead, overlap=d.overlap)
    place = _on_disk(d, trace, place) if d.disk else place
    actions: list[Any] = [place]
    for block in trace.blocks if d.activations else ():
        if not block.saves or block.backward is None:
            continue
        choice = rng.choice(["keep", "recompute", "offload", "both"])
        if choice in ("recompute", "both") and not obstacle(trace, [block]):
            actions.append(Recompute.of(trace, [block]))
        if choice in ("offload", "both"):
            actions.append(Offload.of(trace, block, overlap=rng.random() < 0.5))
    problem = problem_for(trace) if trace.about.device == "cpu" else _on_gpu(trace)
    if d.disk:
        tier = Tier(name="nvme", capacity=2**50, read=1e9, write=1e9)
        hardware = replace(problem.hardware, tiers=(*problem.hardware.tiers, tier))
        problem = replace(problem, hardware=hardware, budget={**problem.budget, tier.name: tier.capacity})
    return finish(Nop(), replace(problem, accumulate=d.accumulate), actions)


def _on_disk(d: Draw, trace: Trace, place: Place) -> Place:
    """The same with masters and states of all units on a disk that can be there, in the shortest stretches."""
    by_host = [unit for unit, _, update in place.units if update == "host"]
    whole = {u.name for u in trace.units if d.narrow or len(u.grads) == len(u.weights)}
    states = tuple((unit, "nvme") for unit in by_host if unit in whole)
    elsewhere = tuple((unit, "nvme") for unit in by_host) if d.all_on_disk else ()
    return replace(place, states=states, elsewhere=elsewhere, stretch=PAGE, buffers=d.disk)


def _on_gpu(trace: Trace) -> Problem:
    hardware = resolve_hardware(None, "cuda")
    return Problem(trace=trace, hardware=hardware, budget=resolve_budget({}, hardware))


def make_store(device: str) -> Any:
    if device == "cpu":
        from holdall.tiers.far import Far

        return Far()
    from holdall.tiers.cpu import Cpu

    return Cpu(device=device)


def prepare(d: Draw, device: str = "cpu") -> None:
    """Make what `run` will find made: plain training, and the trace."""
    _plain(d, device)
    traced(d.family, d.tied, d.rule, d.narrow, d.rows, device)


def run(d: Draw, device: str = "cpu", *, tolerance: float = 0.0) -> list[str]:
    """Train under the plan; where that differs from plain training.

    `tolerance`: losses and norms alone, within it or, where plain training leaves itself further by rounding, within that.
    """
    expected = _plain(d, device)
    plan = plan_of(d, traced(d.family, d.tied, d.rule, d.narrow, d.rows, device))
    model, batch = start(d.family, d.tied, device)
    optimizer = make_optimizer(d.rule, model)
    stores = [make_store(device), *([Nvme(device=device)] if d.disk else [])]
    with Harness(plan, model, optimizer, stores=stores, enforce=False):
        found = loop(model, optimizer, _to(batch, device), d)
    if tolerance:
        return _far_apart(found["seen"], expected["seen"], tolerance, d, device)
    return differences(found, expected)


def _far_apart(mine: list[float], theirs: list[float], tolerance: float, d: Draw, device: str) -> list[str]:
    apart = [_apart(a, b) for a, b in zip(mine, theirs, strict=True)]
    if all(far <= tolerance for far in apart):
        return []
    limits = [max(tolerance, by_itself) for by_itself in spread(d, device)]
    return [f"/seen/{n}: {mine[n]} for {theirs[n]}" for n, far in enumerate(apart) if not far <= limits[n]]


def _apart(value: float, expected: float) -> float:
    return abs(value - expected) / max(1.0, abs(expected))
