"""Explains an out-of-memory error in one paragraph and, if a folder was given, in files.

    oom-N/report.txt       the paragraph
    oom-N/oom.json         the same as data: by role, by block, and the memory predicted at the peak
    oom-N/plan.json        the installed plan
    oom-N/snapshot.pickle  on a GPU: torch's own dump, for https://docs.pytorch.org/memory_viz

Bytes by role and by block are measured: the storages on the device at that moment. Everything that is not a weight, a gradient,
an optimizer state or a buffer counts as activations and temporaries; their names are known only from the plan's prediction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from holdall.types import Action
from holdall.units import format_bytes

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

_LARGEST = 8  # storages and blocks to name
_ENTRIES = 100_000  # length of the allocator's history


@dataclass(frozen=True, kw_only=True)
class OomMoment:
    """The step that ran out of memory, and what was done about it."""

    phase: str  # forward or backward
    batch: list[list[int]]  # shapes of the model's inputs
    outcome: str


class FlightRecorder:
    """Describes out-of-memory errors. Without a folder it makes only the paragraph."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = Path(folder) if folder is not None else None

    def start(self, device: torch.device) -> Callable[[], None]:
        """Turn on the allocator's history if it is to be dumped; returns the function that turns it off."""
        is_on = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: True)
        if self._folder is None or device.type != "cuda" or is_on():
            return lambda: None
        # Record stacks of allocations only: a stack taken at a free while a Python error passes through C++ loses the error.
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_ENTRIES)
        return lambda: torch.cuda.memory._record_memory_history(enabled=None)

    def add_to(self, error: BaseException, harness: Harness, moment: OomMoment) -> None:
        """Attach the paragraph to an error that ends the run."""
        paragraph = self.write(error, harness, moment)
        if hasattr(error, "add_note"):
            error.add_note(paragraph)
        else:  # Python 3.10
            error.__notes__ = [*getattr(error, "__notes__", []), paragraph]

    def write(self, error: BaseException, harness: Harness, moment: OomMoment) -> str:
        """The paragraph; also writes the files if there is a folder."""
        found = describe(error, harness, moment)
        paragraph = _paragraph(found)
        if self._folder is not None:
            try:
                paragraph += f" Written to `{self._write_files(found, paragraph, harness)}`."
            except OSError as wrong:  # a full disk must not hide the error itself
                paragraph += f" The report could not be written to `{self._folder}`: {wrong}."
        return paragraph

    def _write_files(self, found: dict[str, Any], paragraph: str, harness: Harness) -> Path:
        assert self._folder is not None
        number = 0
        while (self._folder / f"oom-{number}").exists():
            number += 1
        folder = self._folder / f"oom-{number}"
        folder.mkdir(parents=True)
        (folder / "report.txt").write_text(paragraph + "\n")
        (folder / "oom.json").write_text(json.dumps(found, indent=1))
        harness.plan.save(folder / "plan.json")
        if harness.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(folder / "snapshot.pickle"))
        return folder


def describe(error: BaseException, harness: Harness, moment: OomMoment) -> dict[str, Any]:
    """The measured live bytes, and the memory the plan predicted at its peak."""
    sizes = _sizes(harness)
    roles: dict[str, int] = {}
    blocks: dict[str, dict[str, int]] = {}
    paths = {name.partition("#")[0] for name, _ in harness.plan.about.blocks}
    for role, name, nbytes in sizes:
        roles[role] = roles.get(role, 0) + nbytes
        own = blocks.setdefault(_block_of(name, paths), {})
        own[role] = own.get(role, 0) + nbytes
    live, reserved = _live(harness)
    roles["activations and temporaries"] = max(0, live - sum(roles.values()))
    predicted = harness.plan.predicted
    largest = sorted(blocks.items(), key=lambda item: -sum(item[1].values()))[:_LARGEST]
    home = next(iter(harness.plan.budget), "cpu")
    found = {
        "phase": moment.phase,
        "step": len(harness.all_peaks),
        "error": str(error).splitlines()[0] if str(error) else type(error).__name__,
        "outcome": moment.outcome,
        "plan": harness.plan.summary(),
        "budget": harness.plan.budget.get(home),
        "expected_peak": predicted.peak.get(home),
        "live": live,
        "reserved": reserved,
        "roles": roles,
        "blocks": [{"block": name, **own} for name, own in largest],
        "largest": [
            {"name": name, "role": role, "bytes": n} for role, name, n in sorted(sizes, key=lambda s: -s[2])[:_LARGEST]
        ],
        "expected_at_peak": [{"name": h.name, "kind": h.kind.value, "bytes": h.nbytes} for h in predicted.at_peak[:_LARGEST]],
        "expected_where": predicted.peak_where,
        "batch": moment.batch,
        "planned_batch": [list(shape) for shape in harness.plan.about.batch or ()] or None,
        "actions": sorted(harness.plan.count()),
        "torch": torch.__version__,
    }
    return {**found, "advice": _advice(found, harness.plan.actions)}


def _sizes(harness: Harness) -> list[tuple[str, str, int]]:
    """(role, name, bytes) of every storage on the device that outlives a step."""
    seen: set[int] = set()
    away = harness.engine.away if harness.engine is not None else set()
    found = []
    for role, name, t in _named(harness):
        storage = t.untyped_storage()
        if t.device.type != harness.device.type or storage._cdata in seen or storage._cdata in away:
            continue
        seen.add(storage._cdata)
        found.append((role, name, storage.nbytes()))
    return found


def _named(harness: Harness) -> Iterator[tuple[str, str, torch.Tensor]]:
    names = {id(p): name for name, p in harness.model.named_parameters()}
    for name, p in harness.model.named_parameters():
        yield "weights", name, p
        if p.grad is not None and type(p.grad) is torch.Tensor:
            yield "gradients", f"{name}.grad", p.grad
    for name, b in harness.model.named_buffers():
        yield "buffers", name, b
    if harness.optimizer is not None:
        for owner, states in harness.optimizer.state.items():
            for key, value in states.items():
                if isinstance(value, torch.Tensor):
                    yield "optimizer states", f"{names.get(id(owner), 'parameter')}.{key}", value
    if harness.engine is not None:
        for held in harness.engine.held.values():
            for t in held.here:
                yield "gradients", held.unit.name, t
        for unit in harness.engine.units:
            if unit.flat is not None:
                yield "weights", unit.name, unit.flat


def _block_of(name: str, paths: set[str]) -> str:
    """The block that contains a parameter, or its module if it is outside every block."""
    path = name
    while path:
        if path in paths:
            return path
        path = path.rpartition(".")[0]
    return name.partition(".")[0]


def _live(harness: Harness) -> tuple[int, int | None]:
    """(bytes in use, bytes reserved by the allocator; None: no allocator reserves memory)."""
    if harness.ledger is not None:
        return harness.ledger.live, None
    if harness.device.type == "cuda":
        return torch.cuda.memory_allocated(harness.device), torch.cuda.memory_reserved(harness.device)
    return 0, None


def _paragraph(found: dict[str, Any]) -> str:
    roles = ", ".join(f"{role} {format_bytes(n)}" for role, n in sorted(found["roles"].items(), key=lambda r: -r[1]) if n)
    blocks = ", ".join(
        f"`{b['block']}` {format_bytes(sum(v for v in b.values() if isinstance(v, int)))}" for b in found["blocks"][:3]
    )
    expected = ", ".join(f"{h['name']} {format_bytes(h['bytes'])}" for h in found["expected_at_peak"][:3])
    budget = f" of {format_bytes(found['budget'])}" if found["budget"] is not None else ""
    parts = [
        f"holdall: out of memory in {found['phase']} of step {found['step']}.",
        f"In use: {format_bytes(found['live'])}{budget}: {roles}.",
        f"Largest blocks: {blocks}." if blocks else "",
        f"The plan ({found['plan']}) predicted its peak at {found['expected_where'] or 'no op'}, with {expected or 'nothing'}.",
        f"{found['outcome']}." if found["outcome"] else "",
        found["advice"],
    ]
    return " ".join(part for part in parts if part)


def _advice(found: dict[str, Any], actions: Sequence[Action]) -> str:
    """What to try, the most telling first."""
    batch, planned = found["batch"], found["planned_batch"]
    advice = []
    if batch and planned and sorted(batch) != sorted(planned):
        advice.append(f'the batch was {batch} and the plan is for {planned}: use `holdall.fit(..., lengths="auto")`')
    reserved, live = found["reserved"], found["live"]
    if reserved is not None and reserved - live > 0.1 * reserved:
        advice.append(f"{format_bytes(reserved - live)} are fragmented: call `fit` with a budget 10 % smaller")
    roles = found["roles"]
    states = sum(roles.get(role, 0) for role in ("weights", "gradients", "optimizer states"))
    if not any(a.places_states for a in actions) and states > roles["activations and temporaries"]:
        advice.append("weights, gradients and states take most of it: allow `place`, which moves them off the device")
    elif not any(a.spares_activations for a in actions):
        advice.append("activations take most of it, and nothing is recomputed or offloaded: allow `recompute` and `offload`")
    if not advice:
        advice.append("use a smaller batch or a larger budget, or call `fit` with a budget 10 % smaller, which leaves room")
    return "Advice: " + "; ".join(advice) + "."
