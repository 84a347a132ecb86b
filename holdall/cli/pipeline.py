"""`holdall pipeline`: a pipeline schedule in time and memory, simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdall.cli import _options as given
from holdall.cli._console import add_row, grid, say, show, show_json
from holdall.errors import InvalidInput
from holdall.types._json import write_text
from holdall.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from holdall.pipelines import PipeTimeline, StageCosts


def pipeline(
    schedule: Annotated[
        str | None,
        typer.Argument(
            help="A schedule, such as 1f1b or interleaved:chunks=3; without one, all are compared.", show_default=False
        ),
    ] = None,
    *,
    stages: Annotated[int, typer.Option("--stages", help="Ranks that the model is cut over.")] = 4,
    micro_batches: Annotated[int, typer.Option("--micro-batches", help="Micro-batches of a step.")] = 8,
    forward: Annotated[float, typer.Option("--forward", help="Time of a rank's forward of one micro-batch.")] = 1.0,
    backward: Annotated[float, typer.Option("--backward", help="Time of its backward; half of it is for weights.")] = 2.0,
    hop: Annotated[float, typer.Option("--hop", help="Time of a message between two ranks.")] = 0.0,
    activations: Annotated[
        str | None, typer.Option("--activations", help="Bytes that a rank holds for one micro-batch.", show_default=False)
    ] = None,
    weights: Annotated[str | None, typer.Option("--weights", help="Bytes of a rank's weights.", show_default=False)] = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write the picture: who does what when.", show_default=False)
    ] = None,
    json: given.Json = False,
) -> None:
    """Simulate a pipeline schedule: bubble, makespan, and the peak of every rank.

    Times are in units of your choice. A rank's work is the same for all schedules; those with several stages a rank divide it.
    Nothing is measured.

    \b
    Examples:
      holdall pipeline 1f1b --stages 4 --micro-batches 8 --html 1f1b.html
      holdall pipeline interleaved:chunks=3 --stages 8 --micro-batches 32 --hop 0.1
      holdall pipeline --stages 4 --micro-batches 16
    """
    from holdall.pipelines import StageCosts

    if forward <= 0 or backward <= 0 or hop < 0:
        raise InvalidInput(
            "--forward and --backward take positive times, --hop none or more", hint="use --forward 1 --backward 2"
        )
    work = StageCosts(
        forward=forward,
        input=backward / 2,
        weight=backward / 2,
        activations=parse_bytes(activations, what="--activations") if activations else 0,
        weights=parse_bytes(weights, what="--weights") if weights else 0,
    )
    if schedule is None:
        if html is not None:
            raise InvalidInput("--html draws one schedule", hint="name it: holdall pipeline 1f1b --html 1f1b.html")
        _compare(stages, micro_batches, work, hop, json)
        return
    found = _simulated(schedule, stages, micro_batches, work, hop)
    if html is not None:
        from holdall.pipelines.picture import pipeline_page

        facts = {"forward": f"{forward:g}", "backward": f"{backward:g}", "message": f"{hop:g}"}
        write_text(html, pipeline_page(found, facts=facts))
    if json:
        show_json(_summary(found))
        return
    _show(found)
    if html is not None:
        say(f"\nwritten to {html}")


def _simulated(name: str, ranks: int, micro_batches: int, work: StageCosts, hop: float) -> PipeTimeline:
    from holdall.pipelines import PipeCosts, simulate
    from holdall.pipelines import pipeline as make

    made = make(name, ranks=ranks, micro_batches=micro_batches)
    return simulate(made, PipeCosts.shared_out(made, work, hop=hop))


def _summary(found: PipeTimeline) -> dict[str, Any]:
    made = found.pipeline
    return {
        "schedule": made.name,
        "ranks": made.ranks,
        "stages": made.chain,
        "copies": made.copies,
        "micro_batches": made.micro_batches,
        "makespan": found.makespan,
        "bubble": found.bubble,
        "source": "simulated",
        "held": [
            {
                "rank": rank,
                "idle": found.idle(rank),
                "micro_batches": held.micro_batches,
                "versions": held.versions,
                "bytes": held.bytes,
            }
            for rank, held in enumerate(found.held)
        ],
    }


def _show(found: PipeTimeline) -> None:
    made = found.pipeline
    copies = f", {made.copies} copies of the weights" if made.copies > 1 else ""
    say(f"{made.name}: {made.ranks} ranks, {made.chain} stages{copies}, {made.micro_batches} micro-batches (simulated)")
    say(f"bubble {100 * found.bubble:.1f} %, makespan {found.makespan:g}\n")
    with_bytes = any(found.peak)
    table = grid("rank", "stages", "busy", "idle", "held", "versions", *(["peak"] if with_bytes else []), left=2)
    for rank, held in enumerate(found.held):
        own = " ".join(map(str, made.stages_of(rank)))
        peak = [format_bytes(held.bytes)] if with_bytes else []
        add_row(table, rank, own, f"{found.busy(rank):g}", f"{found.idle(rank):g}", held.micro_batches, held.versions, *peak)
    show(table)
    say("\nheld: micro-batches whose activations a rank holds at once, over its stages; versions: of its weights")


def _compare(ranks: int, micro_batches: int, work: StageCosts, hop: float, json: bool) -> None:
    from holdall.pipelines import schedule, schedule_names

    rows, refused = [], {}
    for name in schedule_names():
        try:
            rows.append((name, _simulated(name, ranks, micro_batches, work, hop)))
        except InvalidInput as error:
            refused[name] = error.fact
    rows.sort(key=lambda row: row[1].makespan)
    if json:
        show_json({"schedules": [_summary(found) for _, found in rows], "refused": refused})
        return
    say(f"{ranks} ranks, {micro_batches} micro-batches (simulated)\n")
    table = grid("schedule", "exact", "makespan", "bubble", "held", "copies", left=2)
    for name, found in rows:
        parts = max(1, found.pipeline.chain // ranks)
        held = max(found.activations) / parts
        exact = "yes" if schedule(name).is_exact else "no"
        add_row(table, name, exact, f"{found.makespan:g}", f"{100 * found.bubble:.1f} %", f"{held:g}", found.pipeline.copies)
    show(table)
    say("\nheld: micro-batches on the fullest rank, in whole ranks' activations; copies: of the weights")
    for fact in refused.values():
        say(fact)
