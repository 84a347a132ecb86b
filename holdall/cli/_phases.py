"""The table of phases below a plan: the peak of each phase in every memory, and the phases with the highest peaks."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from holdall.analysis import PhasePeak, deciding, phases, tied_bytes, trace_evaluation
from holdall.cli._console import add_row, cell, grid, say, show
from holdall.cost.roofline import cost_trace
from holdall.errors import InvalidInput
from holdall.experiments.request import PreparedRun, Request
from holdall.experiments.workload import Workload, describe_workload, quiet
from holdall.reporting.text import tier_label
from holdall.types import Plan, Problem, Progress, Trace
from holdall.units import format_bytes


def find_phases(
    request: Request, prepared: PreparedRun, plan: Plan, *, longest_seq: int | None, progress: Progress
) -> tuple[PhasePeak, ...]:
    """The peaks of every phase; with a trace instead of a model, evaluation is bounded and no longer batch can be looked at."""
    machine = prepared.machine
    problem = Problem(trace=cost_trace(prepared.trace, machine), hardware=machine, budget=prepared.budget)
    if request.model is None:
        if longest_seq is not None:
            raise InvalidInput(
                "`--longest-seq` needs a model, not a trace",
                hint="name the model, as in `holdall plan gpt2 --longest-seq 2048`",
            )
        return phases(problem, plan)
    workload = describe_workload(
        request.model,
        batch=request.batch,
        seq=request.seq,
        dtype=request.dtype,
        optimizer=request.optimizer,
        autocast=request.autocast,
        precision=request.precision,
    )
    longest = None
    if longest_seq is not None:
        progress("tracing the longest batch", 0, 0, "")
        longest = _longer(workload, longest_seq).trace(machine.device)
    progress("tracing evaluation", 0, 0, "")
    model, evaluation = _evaluation(workload, machine.device)
    return phases(problem, plan, evaluation=evaluation, longest=longest, tied=tied_bytes(model))


def _longer(workload: Workload, seq: int) -> Workload:
    if workload.is_image:
        raise InvalidInput(f"{workload.source.name} takes images, which have no length", hint="leave `--longest-seq` out")
    longer = replace(workload, seq=seq)
    longer.sample()  # raises if the model does not support this length
    return longer


def _evaluation(workload: Workload, device: str) -> tuple[torch.nn.Module, Trace]:
    model, _ = workload.build()
    with quiet():
        precision, autocast = workload.precision, workload.autocast or False
        return model, trace_evaluation(model, workload.sample(), device=device, precision=precision, autocast=autocast)


def show_phases(found: tuple[PhasePeak, ...], prepared: PreparedRun) -> None:
    machine = prepared.machine
    home, far = machine.home.name, machine.far.name if machine.far else ""
    heads = {"device": tier_label(home, home), "host": tier_label(far, home), "pinned": "pinned", "disk": "disk"}
    limits = _limits(prepared)
    decides = deciding(found)
    table = grid("phase", *(heads[m] for m in decides), "known by", "", left=1)
    for column in table.columns[-2:]:
        column.justify = "left"
    for phase in found:
        cells = [_size(getattr(phase, m), limits.get(m), phase is decides[m]) for m in decides]
        add_row(table, phase.name, *cells, cell(phase.how, "dim"), cell(phase.note, "dim"))
    add_row(
        table, cell("budget", "dim"), *(cell(format_bytes(limits[m]) if m in limits else "", "dim") for m in decides), "", ""
    )
    show(table)
    say("decided by: " + ", ".join(f"{heads[m]} {p.name}" for m, p in decides.items()))
    for phase in found:
        for memory, limit in limits.items():
            if getattr(phase, memory) > limit:
                say(_warning(phase, heads[memory], getattr(phase, memory), limit))


def _warning(phase: PhasePeak, label: str, size: int, limit: int) -> str:
    advice = {
        "longest batch": "plan for that length with --seq, or cut longer sequences",
        "evaluation": "evaluate with a smaller batch",
        "first step": "plan for a little less",
    }.get(phase.name, "use a smaller model or a larger budget")
    return f"warning: {phase.name} needs {format_bytes(size)} of {label}, over the budget of {format_bytes(limit)}: {advice}"


def _limits(prepared: PreparedRun) -> dict[str, int]:
    """The limit of each memory; pinned memory and the disk have no budget."""
    names = [tier.name for tier in prepared.machine.tiers][:2]
    return {memory: prepared.budget[tier] for memory, tier in zip(("device", "host"), names, strict=False)}


def _size(size: int, limit: int | None, decides: bool) -> Any:
    if not size:
        return cell("-", "dim")
    return cell(format_bytes(size), "red" if limit is not None and size > limit else "bold" if decides else "")


def phases_json(found: tuple[PhasePeak, ...]) -> dict[str, Any]:
    """The phases as JSON, with the phase that has the highest peak in each memory."""
    return {"phases": [asdict(p) for p in found], "deciding": {m: p.name for m, p in deciding(found).items()}}
