"""`holdall compare`: every planner at every budget in one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdall.cli import _options as given
from holdall.cli._console import add_row, grid, say, show, show_json
from holdall.cli._errors import FAILED
from holdall.cli._progress import progress_bar
from holdall.errors import InvalidInput
from holdall.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.table import Table

    from holdall.experiments.sweep import Comparison, PeerRow, SweepRow
    from holdall.experiments.workload import Workload
    from holdall.reporting.standings import Contest
    from holdall.types import Outcome, Progress

_FEW = 8  # planners that are shown with all figures, a line for each budget


def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="Presets such as gpt2 or llama-3.2-1b, Hugging Face folders, or files config.json."
        ),
    ],
    *,
    budgets: Annotated[
        str,
        typer.Option("--budgets", metavar="A,B", help="Shares of plain training's activation memory to leave, or sizes."),
    ] = "100%,75%,50%,35%",
    planners: Annotated[
        str,
        typer.Option("--planners", metavar="A,B", help="Some of `holdall planners`; options as in rotor,rockmate:menus=cut."),
    ] = "auto,chen",
    everyone: Annotated[
        bool,
        typer.Option(
            "--all",
            help="All planners of `holdall planners`, instead of --planners; exact ones get 10 seconds for each graph.",
        ),
    ] = False,
    peers: Annotated[
        str,
        typer.Option(
            "--peers",
            metavar="A,B",
            help="With --measure, also run compile, checkpoint, selective, rockmate; options as in compile:ratios=[1,0.5].",
            show_default=False,
        ),
    ] = "",
    batch: given.Batch = 1,
    seq: given.Seq = 512,
    dtype: given.Dtype = "float32",
    precision: given.Precision = None,
    optimizer: given.Optimizer = "adamw",
    gpu: given.Gpu = None,
    hardware: given.HardwareFile = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Also run each plan for three steps on this machine.")
    ] = False,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the rows here.", show_default=False)] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw time against memory here.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write a page here: who wins where, and each paper's claims.", show_default=False
        ),
    ] = None,
    commit: Annotated[
        str, typer.Option("--commit", metavar="TEXT", help="Goes into every row of the CSV.", show_default=False)
    ] = "",
    json: given.Json = False,
) -> None:
    """Compare planners over budgets: peak and step time, predicted and measured, overhead over plain, solve time.

    Exit code 1: a planner or its measured run failed, exceeded the budget, or gave other losses than plain training.

    Peers are other projects' methods. They are measured only, and their overhead is relative to their own run without a limit.
    torch.compile takes a ratio of what its graph saves instead of bytes, so several are run: with inductor, or with
    `compile:backend=aot_eager`, which compiles faster, needs no C++ compiler on a CPU, and fuses nothing.

    \b
    Example:
      holdall compare tiny-gpt2 --batch 4 --seq 128 --planners auto,chen \\
          --budgets 100%,50% --measure --peers checkpoint --csv rows.csv
      holdall compare tiny-gpt2 tiny-llama --seq 64 --all --html page.html
    """
    from holdall.experiments.choices import every_planner, read_peers, read_planners
    from holdall.experiments.request import find_machine
    from holdall.experiments.sweep import prepare_sweep, run_sweep
    from holdall.experiments.sweep_files import check_drawable, draw, write_csv
    from holdall.experiments.workload import check_runnable, describe_workload
    from holdall.reporting.standings import standings
    from holdall.types._json import write_text

    choices = every_planner() if everyone else read_planners(planners) or read_planners("auto")
    others = read_peers(peers)
    if others and not measure:
        raise InvalidInput("--peers needs --measure, since peers cannot be predicted", hint="add --measure, or leave them out")
    if measure and gpu is not None:
        raise InvalidInput("--measure runs on this machine, but --gpu names another", hint="leave one of them out")
    if plot is not None:
        if len(models) > 1:
            raise InvalidInput("--plot draws one model, but several are named", hint="use --html, or name one model")
        check_drawable(plot)
    workloads = [
        describe_workload(model, batch=batch, seq=seq, dtype=dtype, optimizer=optimizer, precision=precision)
        for model in models
    ]
    with progress_bar() as progress:
        machine = find_machine(gpu, hardware, progress)
        if measure:
            check_runnable(machine.device)
        comparisons = []
        for count, workload in enumerate(workloads, 1):
            here = _among(progress, count, workloads)
            sweep = prepare_sweep(
                workload,
                machine,
                planners=choices,
                budgets=budgets,
                measure=measure,
                progress=here,
                peers=others,
                commit=commit,
            )
            comparisons.append(run_sweep(sweep, here))
    records = [record for found in comparisons for record in found.records()]
    if csv is not None:
        write_csv(csv, records)
    if plot is not None:
        plain = comparisons[0].sweep.plain
        draw(plot, records, plain=(plain.peak[machine.home.name], plain.seconds))
    if html is not None:
        write_text(html, _page(records))
    if json:
        show_json(records)
    else:
        for found in comparisons:
            _show(found)
            say("")
        say(standings(records).verdict())
        _show_orders(records)
        for path in (csv, plot, html):
            if path is not None:
                say(f"written to {path}")
    if any(row.failed or row.identical is False for found in comparisons for row in found.rows):
        raise typer.Exit(FAILED)


def _among(progress: Progress, count: int, workloads: Sequence[Workload]) -> Progress:
    """The progress of one model, named if there are several."""
    if len(workloads) == 1:
        return progress
    model = f"{workloads[count - 1].source.name} ({count} of {len(workloads)})"

    def told(what: str, done: int, total: int, best: str) -> None:
        progress(f"{model}: {what}", done, total, best)

    return told


def _show_orders(records: Sequence[Mapping[str, Any]]) -> None:
    """Published orders of planners that do not hold in all of the cells; one line for those that do."""
    from holdall.catalog import orderings
    from holdall.reporting.standings import standings, tally

    found = standings(records)
    tallies = [t for o in orderings() if (t := tally(found, o.faster, o.slower)) is not None]
    if not tallies:
        return
    kept = [t for t in tallies if t.kept == t.cells]
    say(f"published orders of two planners: {len(kept)} of {len(tallies)} hold wherever both have a plan")
    for other in (t for t in tallies if t.kept < t.cells):
        say(f"  {other}")


def _page(records: Sequence[Mapping[str, Any]]) -> str:
    """The page of all rows, with what is published about their planners."""
    from holdall.catalog import claims, orderings, systems
    from holdall.registry import member_class
    from holdall.reporting.comparison import Published, PublishedOrder, render_comparison
    from holdall.reporting.standings import standings

    published = []
    for label in dict.fromkeys(r["planner"] for r in records if r["kind"] == "planner"):
        name = label.partition(":")[0]
        known = [s for s in systems() if any(f"/planners/{name}." in f or f"/planners/{name}/" in f for f in s.lives)]
        published.append(
            Published(
                planner=label,
                paper=member_class("planners", name).paper,
                idea=known[0].idea if known else "",
                claims=[(c.says, c.test) for system in known for c in claims(system.id)],
                missing=[text for system in known for text in system.missing],
            )
        )
    first = records[0]
    facts = {
        "hardware": first["hardware"],
        "batch": f"{first['batch']} x {first['seq']}, {first['precision'] or first['dtype']}, {first['optimizer']}",
        "versions": f"torch {first['torch']}, holdall {first['holdall']}",
        "commit": first["commit"],
    }
    orders = [PublishedOrder(faster=o.faster, slower=o.slower, says=o.says) for o in orderings()]
    return render_comparison(standings(records), published, facts, orders)


def _show(found: Comparison) -> None:
    from holdall.experiments.sweep import outcome_of

    sweep = found.sweep
    say(f"{sweep.workload}, on {sweep.machine.name}")
    say(f"plain: {_cost(sweep.plain, sweep.home)} predicted")
    seen = outcome_of(found.reference)
    if seen is not None:
        say(f"       {_cost(seen, sweep.home)} measured")
    say("budgets: " + ", ".join(f"{target.label} = {format_bytes(target.nbytes)}" for target in sweep.targets) + "\n")
    crowded = len(sweep.planners) > _FEW and not sweep.measure
    show(_matrix(found) if crowded else _table(found))
    if crowded:
        say("predicted step time over plain training; * the fastest, ~ lossy or too little room for the allocator")
        say("peaks and planning times are in the files of --csv and --html")
    if any(row.smallest for row in found.rows):
        say('"needs": no plan fits that budget; the smallest budget with a plan')
    for row in found.rows:
        if row.problem and not row.smallest:
            say(f"note: {row.planner} at {row.target.label}: {row.problem}")
        if row.identical is False:
            say(f"note: {row.planner} at {row.target.label}: losses or weights DIFFER from plain training")
    for peer in found.peers:
        if peer.problem:
            say(f"note: {peer.variant}: {peer.problem}")
    if any(peer.seen is not None for peer in found.peers):
        say("peers: overhead is relative to the same peer without a limit; solve is the time of the first step, which compiles")
        if sweep.machine.device == "cpu":
            say("on a CPU, plans count bytes op by op, which takes time: compare their peaks with peers, not their seconds")
    ran = [row for row in found.rows if row.run is not None]
    if seen is not None and ran and all(row.identical for row in ran):
        whose = "plan's run" if found.peers else "measured run"
        say(f"\nlosses and weights of every {whose} are those of plain training, bit for bit")


def _matrix(found: Comparison) -> Table:
    """Planners as rows and budgets as columns, the one with most wins first: for more planners than `_FEW`."""
    from holdall.reporting.standings import standings

    contest = standings(found.records())
    wins = contest.wins()
    table = grid("planner", *(target.label for target in found.sweep.targets))
    for choice in sorted(found.sweep.planners, key=lambda c: (-wins[c.label], c.label)):
        cells = [_standing(cell, choice.label) for cell in contest.cells]
        if any(cells):
            add_row(table, choice.label, *cells)
    return table


def _standing(cell: Contest, planner: str) -> str:
    entry = cell.of(planner)
    if entry is None:
        why = cell.refused.get(planner, "")
        return why if why.startswith("needs ") else "--"
    mark = " *" if entry.wins else " ~" if not entry.counts else "  "
    return f"{entry.overhead:+.1%}{mark}"


def _table(found: Comparison) -> Table:
    measured = found.sweep.measure
    seen = ("measured",) if measured else ()
    table = grid("planner", "budget", "peak", *seen, "step", *seen, "overhead", "solve")
    for row in found.rows:
        add_row(table, *_cells(row, found, measured))
    for peer in found.peers:
        add_row(table, *_peer_cells(peer, found))
    return table


def _peer_cells(row: PeerRow, found: Comparison) -> list[str]:
    record = found.peer_record(row)
    peak, step = _known(record["measured_peak_bytes"], format_bytes), _known(record["measured_seconds"], format_seconds)
    over, setup = _known(record["measured_overhead"], "{:+.1%}".format), _known(record["setup_seconds"], format_seconds)
    return [row.variant.peer, row.variant.setting, "--", peak, "--", step, over, setup]


def _cells(row: SweepRow, found: Comparison, measured: bool) -> list[str]:
    record = found.record(row)
    kinds = ("predicted", "measured") if measured else ("predicted",)
    peaks = [_known(record[f"{kind}_peak_bytes"], format_bytes) for kind in kinds]
    if row.smallest:
        peaks[0] = f"needs {format_bytes(row.smallest)}"
    steps = [_known(record[f"{kind}_seconds"], format_seconds) for kind in kinds]
    over = _known(record[f"{kinds[-1]}_overhead"], "{:+.1%}".format)
    return [row.planner, row.target.label, *peaks, *steps, over, _known(record["solve_seconds"], format_seconds)]


def _cost(outcome: Outcome, home: str) -> str:
    return f"{format_bytes(outcome.peak[home])}, {format_seconds(outcome.seconds)}/step"


def _known(value: float | None, show_value: Callable[[float], str]) -> str:
    return "--" if value is None else show_value(value)
