"""The inverse questions of `holdall plan`: the largest batch, length or model that fits, the smallest budget, and the curve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdall.analysis import Curve, Largest, Probe, Smallest, largest, needed, pareto, smallest_budget
from holdall.analysis.pareto_page import done, pareto_page
from holdall.cli._console import add_row, cell, grid, in_color, say, show, show_json
from holdall.cli.plan import plan_json
from holdall.errors import Infeasible, InvalidInput, unknown_name
from holdall.experiments.request import PreparedRun, Request, prepare
from holdall.experiments.workload import describe_workload
from holdall.models import build, describe, family_names
from holdall.reporting.text import plan_text
from holdall.types import Plan, Progress
from holdall.types._json import write_text
from holdall.units import format_bytes, format_seconds

KINDS = ("batch", "seq", "model")
_SEQ_STEP = 64  # tokens: finer answers are rarely used, and kernels like round lengths
_SEQ_NEAR = 0.02  # planning a long sequence takes a while


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise unknown_name("thing to make larger", kind, KINDS)


def ask_largest(request: Request, kind: str, *, step: int | None, progress: Progress) -> tuple[Largest, str, list[str]]:
    """(the answer, its value in words, the names of the models if `kind` is model)"""
    check_kind(kind)
    if request.model is None:
        raise InvalidInput(
            "`--largest` needs a model, not a trace", hint="name a model, as in `holdall plan gpt2 --largest batch`"
        )
    if kind == "model":
        names = family_by_size(request.model, progress)
        begin = names.index(request.model) + 1 if request.model in names else 1

        def named(n: int) -> str:
            return names[n - 1]

        found = _search(request, "model", named, begin, 1, len(names), progress)
        return found, names[found.value - 1], names
    if kind == "seq" and _is_image(request):
        raise InvalidInput(f"{request.model} takes images, which have no length", hint="ask for `--largest batch`")
    grain = step or (_SEQ_STEP if kind == "seq" else 1)
    near = _SEQ_NEAR if kind == "seq" and step is None else 0.0
    found = _search(request, kind, int, getattr(request, kind), grain, 2**24, progress, near)
    return found, str(found.value), []


def _search(
    request: Request,
    field: str,
    value: Callable[[int], Any],
    start: int,
    step: int,
    most: int,
    progress: Progress,
    near: float = 0.0,
) -> Largest:
    def make_plan(n: int) -> Plan:
        asked = replace(request, **{field: value(n)})

        def inner(what: str, done: int, total: int, best: str) -> None:
            progress(f"{field} {value(n)}: {what}", done, total, best)

        return prepare(asked, inner).plan(inner)

    return largest(make_plan, start=start, step=step, most=most, near=near, progress=progress)


def _is_image(request: Request) -> bool:
    assert request.model is not None
    return describe_workload(request.model, batch=1, seq=1, optimizer=request.optimizer).is_image


def family_by_size(model: str, progress: Progress) -> list[str]:
    """The presets of a model's type and task, from the one with the fewest parameters up."""
    wanted = describe(model)
    names = family_names(wanted)
    alike = []
    for n, name in enumerate(names):
        progress("looking for the family", n, len(names), name)
        alike.append((sum(p.numel() for p in build(describe(name)).parameters()), name))
    if not alike:
        raise InvalidInput(
            f"no preset has the model type of {model} ({wanted.config.model_type})", hint="ask for `--largest batch`"
        )
    return [name for _, name in sorted(alike)]


def show_largest(found: Largest, kind: str, value: str, names: list[str], *, json: bool) -> None:
    beyond = found.beyond
    next_up = "" if beyond is None else names[beyond.value - 1] if names else str(beyond.value)
    if json:
        said: dict[str, Any] = {"largest": kind, "value": value if names else found.value, "plan": plan_json(found.plan)}
        said["next"] = (
            {"value": next_up if names else beyond.value, "why": why_not(beyond)} if beyond and beyond.error else None
        )
        said["tried"] = [{"value": names[p.value - 1] if names else p.value, "fits": p.fits} for p in found.probes]
        show_json(said)
        return
    say(f"largest {kind} that fits: {value}")
    if beyond is not None and beyond.error is not None:
        say(f"{next_up} does not: {why_not(beyond)}")
    elif names:
        say("it is the largest preset of its family")
    say(f"\n{plan_text(found.plan, color=in_color())}")


def why_not(probe: Probe) -> str:
    """Why a value does not fit, in a few words; an error of the model itself is quoted."""
    if isinstance(probe.error, Infeasible) and probe.error.smallest is not None:
        return f"the smallest plan found needs {format_bytes(probe.error.smallest)}"
    return probe.error.fact if probe.error is not None else ""


def ask_smallest(prepared: PreparedRun, keep_speed: float | None, progress: Progress) -> Smallest:
    home = prepared.machine.home
    return smallest_budget(
        _plan_for(prepared, progress), most=prepared.budget[home.name], keep_speed=keep_speed, progress=progress
    )


def show_smallest(found: Smallest, prepared: PreparedRun, keep_speed: float | None, *, json: bool) -> None:
    if json:
        show_json(
            {
                "smallest_budget": found.budget,
                "not_enough": found.below,
                "keep_speed": keep_speed,
                "speed": found.speed,
                "plan": plan_json(found.plan),
            }
        )
        return
    kept = "" if keep_speed is None else f" that keeps {keep_speed:.0%} of the speed"
    say(f"smallest budget{kept}: {format_bytes(found.budget)} of {prepared.machine.home.name} ({found.budget} bytes)")
    fast = found.fastest.predicted.seconds
    full = f"{format_seconds(fast)} with {format_bytes(needed(found.fastest))}"
    say(f"{format_seconds(found.plan.predicted.seconds)}/step, {found.speed:.0%} of the fastest ({full})")
    say(f"{format_bytes(found.below)} ({found.below} bytes) is not enough; {found.tried} plans were made")
    say(f"\n{plan_text(found.plan, color=in_color())}")


def ask_pareto(prepared: PreparedRun, points: int, progress: Progress) -> Curve:
    home = prepared.machine.home.name
    return pareto(_plan_for(prepared, progress), most=prepared.budget[home], points=points, progress=progress)


def show_pareto(curve: Curve, *, json: bool) -> None:
    if json:
        rows = [
            {
                "budget": p.budget,
                "peak": dict(p.plan.predicted.peak),
                "seconds": p.seconds,
                "best": p.is_best,
                "actions": p.plan.count(),
            }
            for p in curve.points
        ]
        show_json({"points": rows, "refused": list(curve.refused)})
        return
    fastest = min(p.seconds for p in curve.points)
    table = grid("budget", "peak", "time/step", "of the speed", "", left=0)
    table.columns[-1].justify = "left"
    for p in reversed(curve.points):
        speed = f"{fastest / p.seconds:.0%}" if p.seconds else ""
        style = "" if p.is_best else "dim"
        words = done(p) + ("" if p.is_best else " (no faster than with less)")
        row = (format_bytes(p.budget), format_bytes(needed(p.plan)), format_seconds(p.seconds), speed, words)
        add_row(table, *(cell(text, style) for text in row))
    for budget in reversed(curve.refused):
        add_row(table, format_bytes(budget), "", "", "", "no plan was found")
    show(table)


def write_page(path: Path, curve: Curve, request: Request, prepared: PreparedRun) -> None:
    """Write the curve as one HTML page."""
    name = request.model or (prepared.trace.about.model or "trace")
    facts = {
        "workload": f"batch {request.batch} x {request.seq}, {request.dtype}, {request.optimizer}" if request.model else "",
        "planner": prepared.planner,
        "hardware": prepared.machine.name,
        "rates": prepared.machine.source,
    }
    write_text(path, pareto_page(curve, title=name, facts=facts))


def _plan_for(prepared: PreparedRun, progress: Progress) -> Callable[[int], Plan]:
    home = prepared.machine.home.name

    def plan_for(budget: int) -> Plan:
        return replace(prepared, budget={**prepared.budget, home: budget}).plan(progress)

    return plan_for
