"""Recomputation on one GPU: planners over activation budgets beside `torch.compile` with `activation_memory_budget`.

python benchmarks/recompute_on_gpu.py [--time-limit 290] [--commit HASH] [--out recompute.csv] [--tiny]

A Llama of a billion parameters with random bf16 weights, batch 4 x 2048. Budgets leave 100 to 25 % of what plain training
holds for activations. One process and one model; every row starts from the same weights and sees the same batches, and goes to
the file at once. Eager is held against eager: the overhead of plans is over the bare model in eager mode, that of a compiled
peer over its own compiled run without a limit. Where the vocabulary head is taken in pieces, it is so for everybody, and the
compiled graph is all but the head. Whether a plan changes anything is seen in the losses: they must be those of the bare eager
run, bit for bit; unless that run differs from itself ("plain, again"), as it does where a kernel adds in no certain order.
`activation_memory_budget` is measured on eager kernels (`aot_eager`) too, to be held against eager plans.

Two plans with the same actions are run once (`same_as`). No row is begun after `--time-limit`, nor one that would end after it
if it took as long as the last of its kind. At the end, every measured plan is held against the compiled peer at the same share
of the activation memory, between the peer's best points, and at the same bytes.

`--compiled-blocks chen,rotor` also compiles the blocks under plans that run whole blocks again, to be held against blocks that
are compiled one by one. Other plans work on single ops and cannot have compiled blocks.

`--compile-programs auto,rockmate:menus=cut` also runs these planners' plans with every block as a compiled program
(`holdall.apply(..., compile=True)`): blocks that the plan keeps or recomputes whole become programs too, so that all blocks are
compiled, as they are under the peer. Their overhead is over the same planner's compiled run at 100 %; peaks are of the steps
after the first, as they are for peers: in the first, kernels are timed.

Planners that decide as the step runs (`dtr`, `coop`, `megtaichi`) want the vocabulary head whole. Where it is taken in pieces,
they are run on a second trace with the head whole, over an eager run of that step, and at shares of its activation memory.

`--tiny` runs everything small, on a CPU: there the ledger that counts the bytes of plans keeps blocks from being compiled by
`--compiled-blocks`, and makes plans slow, so that its overheads mean nothing.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import holdall
from holdall.experiments.choices import PlanChoice, read_peers, read_planners
from holdall.experiments.peer_runs import reason, run_peer
from holdall.experiments.peers import Subject, Variant, all_variants
from holdall.experiments.request import plain_outcome
from holdall.experiments.sweep import Target, read_targets, versions
from holdall.experiments.workload import Workload, describe_workload
from holdall.planning.to_programs import by_programs
from holdall.problem import make_problem, resolve_hardware
from holdall.registry import member_names
from holdall.types import Hardware, Outcome, Plan, Trace

FIRST = "auto,rockmate:menus=cut"  # planners that are run before the peers; the others after them
PLANNERS = f"{FIRST},rotor,chen,korthikanti,loongtrain,distflashattn,rockmate,dtr,coop,megtaichi"
ONLINE = ("dtr", "coop", "megtaichi")  # which refuse a trace with a chunked head
WHOLE_HEAD = "whole head"
BLOCKS, PROGRAMS = "planner, compiled blocks", "planner, compiled programs"
RATIOS = "[1,0.75,0.5,0.35,0.25,0.1,0]"
FIELDS = (
    "kind", "name", "setting", "status", "budget_bytes", "predicted_peak", "measured_peak", "peak_error", "reserved", "share",
    "predicted_s", "measured_s", "time_error", "overhead", "overhead_over", "losses_equal", "actions", "solve_s", "setup_s",
    "same_as", "row_s", "why", "fixed_bytes", "model", "batch", "seq", "dtype", "optimizer", "steps", "seed", "hardware",
    "torch", "python", "holdall", "transformers", "commit",
)  # fmt: skip
Row = dict[str, Any]


@dataclass
class Course:
    """A step to be planned for, and the bare run that its plans are held against."""

    trace: Trace
    targets: tuple[Target, ...]
    plain: str = "plain"  # the setting of its bare eager run
    losses: tuple[float, ...] | None = None  # of that run


@dataclass
class Bench:
    """What all rows share, and the rows so far."""

    workload: Workload
    machine: Hardware
    steps: int
    out: Path
    about: Row
    fixed: int  # bytes that no plan and no peer touches: weights, optimizer states, inputs, the device's context
    ends: float
    rows: list[Row] = field(default_factory=list)
    lasted: dict[str, float] = field(default_factory=dict)
    runs: dict[str, Row] = field(default_factory=dict)  # what plans did, by their actions
    model: torch.nn.Module | None = None
    start: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def home(self) -> str:
        return self.machine.home.name

    def fresh(self) -> tuple[torch.nn.Module, Any]:
        """The model as it was at first, and a new optimizer. Initial weights wait on the host, where they are not measured."""
        gc.collect()
        model, optimizer = self.workload.build(self.machine.device) if self.model is None else (self.model, None)
        if not self.start:
            self.start = {k: _on_host(v) for k, v in model.state_dict().items()}
        if self.model is not None:
            model.load_state_dict(self.start)
            model.zero_grad(set_to_none=True)
        self.model = model
        optimizer = optimizer or self.workload.build_optimizer(model)
        if self.machine.device == "cuda":
            torch.cuda.empty_cache()
        return model, optimizer

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.workload.sample(self.machine.device, seed=step) for step in range(self.steps))

    def has_time(self, kind: str) -> bool:
        return time.perf_counter() + self.lasted.get(kind, 0.0) < self.ends

    def note(self, row: Row, kind: str, began: float) -> None:
        """Complete a row from those before it, write it down now, and show it."""
        self.lasted[kind] = row["row_s"] = time.perf_counter() - began
        row |= self._relative(row)
        self.rows.append(row)
        _append(self.out, {**row, **self.about, "fixed_bytes": self.fixed})
        print(_line(row), flush=True)

    def _relative(self, row: Row) -> Row:
        peak, seconds = row.get("measured_peak"), row.get("measured_s")
        own = next((r for r in [*self.rows, row] if _label(r) == row.get("overhead_over")), None)
        if peak is None or own is None or not own.get("measured_s"):
            return {}
        whole = own["measured_peak"] - self.fixed
        return {"overhead": seconds / own["measured_s"] - 1, "share": (peak - self.fixed) / whole}


def _label(row: Row) -> str:
    """How others refer to a row as what they are held against."""
    return f"{row['name']}, {row['setting']}" + (", compiled programs" if row["kind"] == PROGRAMS else "")


# -- rows --------------------------------------------------------------------------------------------------------------


def peer_row(bench: Bench, course: Course, variant: Variant, over: str) -> None:
    began = time.perf_counter()
    row: Row = {"kind": "peer", "name": variant.peer, "setting": variant.setting, "overhead_over": over, "status": "ok"}
    try:
        model, optimizer = bench.fresh()
        subject = Subject.of(course.trace, model, bench.workload.sample(bench.machine.device))
        seen = run_peer(variant, subject, optimizer, bench.batches())
        if course.losses is None:
            course.losses = seen.losses
        row |= {"measured_peak": seen.peak, "measured_s": seen.seconds, "setup_s": seen.setup_seconds}
        row["losses_equal"] = seen.losses == course.losses
    except Exception as error:  # one peer's failure is one row
        row |= failed(error)
        bench.model = None
    bench.note(row, _kind(variant), began)


def failed(error: Exception) -> Row:
    """What a row says of it; where it happened goes to the screen, unless it is an answer."""
    if not isinstance(error, holdall.HoldallError):
        traceback.print_exception(error, limit=-12)
    return {"status": "failed", "why": reason(error)}


def _kind(variant: Variant) -> str:
    return variant.family if variant.family != "eager" else "eager"


def plan_row(
    bench: Bench, course: Course, choice: PlanChoice, target: Target, *, kind: str = "planner", backend: str = ""
) -> None:
    """A planner at a budget. `kind`: eager, or with blocks or programs compiled by `backend`."""
    began = time.perf_counter()
    row: Row = {"kind": kind, "name": choice.label, "setting": target.label, "budget_bytes": target.nbytes}
    unlimited = {BLOCKS: "compile, ratio 1 per block", PROGRAMS: _label({**row, "setting": "100%"})}
    row["overhead_over"] = unlimited.get(kind, f"eager, {course.plain}")
    try:
        asked = {"budget": {bench.home: target.nbytes}, "hardware": bench.machine}
        made = holdall.plan(course.trace, planner=choice.name, **asked, **choice.options)
        if kind == PROGRAMS:
            made = by_programs(make_problem(course.trace, **asked), made)
        row |= _predicted(made, bench.home)
        key = f"{kind} {made.to_json()['actions']}"
        if key not in bench.runs:
            seen = run_plan(bench, course, made, kind=kind, backend=backend)
            bench.runs[key] = {**seen, "same_as": f"{choice.label} at {target.label}"}
            row |= bench.runs[key] | {"same_as": ""}
        else:
            row |= bench.runs[key]
        row["status"] = "ok"
        row["peak_error"] = row["predicted_peak"] / row["measured_peak"] - 1
        row["time_error"] = row["predicted_s"] / row["measured_s"] - 1
    except holdall.Infeasible as error:
        row |= {"status": "does not fit", "why": f"needs {error.smallest}" if error.smallest else error.fact}
    except Exception as error:
        row |= failed(error)
        bench.model = None  # wherever it was caught, the next row gets a new one
    bench.note(row, f"{kind} {choice.label}", began)


def _predicted(made: Plan, home: str) -> Row:
    actions = " ".join(f"{count}x{name}" for name, count in sorted(made.count().items())) or "none"
    said = made.predicted
    return {"predicted_peak": said.peak[home], "predicted_s": said.seconds, "solve_s": made.solve_seconds, "actions": actions}


def run_plan(bench: Bench, course: Course, made: Plan, *, kind: str, backend: str) -> Row:
    """A few steps of the ordinary loop with the plan on the model."""
    model, optimizer = bench.fresh()
    torch.manual_seed(0)
    losses = []
    with (
        compiled_blocks(course, model, made, backend) if kind == BLOCKS else nullcontext(),
        holdall.apply(made, model, optimizer, enforce=False, compile=backend if kind == PROGRAMS else False) as harness,
    ):
        for batch in bench.batches():
            loss = model(**batch).loss
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        if optimizer is None:
            harness.close()
        measured = harness.measured()
    assert measured is not None
    same = tuple(loss.item() for loss in losses) == course.losses
    peak = measured.peak[bench.home]
    if harness.compiler is not None:
        print(*harness.compiler.faults, sep="\n", end="", file=sys.stderr, flush=True)
        if not harness.compiler.count:
            raise holdall.Unsupported(f"nothing was compiled: {'; '.join(harness.notes)}")
        peak = max(harness.step_peaks[1:] or harness.step_peaks)
    found = {"measured_peak": peak, "measured_s": measured.seconds, "reserved": measured.reserved}
    return {**found, "losses_equal": same, "why": "; ".join(harness.notes)}


@contextmanager
def compiled_blocks(course: Course, model: torch.nn.Module, made: Plan, backend: str) -> Iterator[None]:
    """Blocks whose forward is compiled, where the plan only ever runs them whole."""
    if any(a.name not in ("recompute", "keep", "head") or getattr(a, "keep", ()) for a in made.actions):
        raise holdall.Unsupported("the plan works on single ops of a block, which a compiled block does not have")
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    blocks = [model.get_submodule(name) for name in Subject.of(course.trace, model, None).blocks]
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend, dynamic=False)
    try:
        yield
        if not counters["stats"]["unique_graphs"]:
            raise holdall.Unsupported("nothing was compiled: the blocks ran eagerly")
    finally:
        for block in blocks:
            del block.forward
        torch._dynamo.reset()


# -- the verdict -------------------------------------------------------------------------------------------------------


def best_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other beats in both, from small to large: what someone who may choose the ratio gets."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not found or y < found[-1][1]:
            found.append((x, y))
    return found


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """The peer's overhead at `x`; None: none of its runs gets that low. More than it ever takes gives its best."""
    best = best_points(points)
    if not best or x < best[0][0]:
        return None
    for (a, low), (b, high) in pairwise(best):
        if a <= x <= b:
            return low + (high - low) * (x - a) / (b - a)
    return best[-1][1]


def verdict(rows: Sequence[Row]) -> Iterator[str]:
    """For every measured plan: each compiled peer at the same share of activations and at the same bytes, and who is better."""
    peers: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] == "peer" and row["name"] == "compile" and row.get("overhead") is not None:
            peers.setdefault(row["overhead_over"], []).append(row)
    for row in rows:
        if not row["kind"].startswith("planner") or row.get("overhead") is None:
            continue
        if row.get("overhead_over", "").endswith(WHOLE_HEAD):
            continue  # another step than the peers'
        own = f"{row['name']} at {row['setting']} ({row['kind']}): {row['share']:.0%} of activations, {row['overhead']:+.1%}"
        for over, points in peers.items():
            if row["kind"] == PROGRAMS and over.endswith("aot_eager") and len(peers) > 1:
                continue  # compiled beside compiled
            by_share = interpolate([(p["share"], p["overhead"]) for p in points], row["share"])
            by_bytes = interpolate([(p["measured_peak"], p["overhead"]) for p in points], row["measured_peak"])
            yield f"{own}; {over}: at this share {_against(row, by_share)}, at these bytes {_against(row, by_bytes)}"


def _against(row: Row, theirs: float | None) -> str:
    if theirs is None:
        return "not reached"
    return f"{theirs:+.1%} ({'ours <= it' if row['overhead'] <= theirs else 'ours is MORE'})"


# -- the file and the screen -------------------------------------------------------------------------------------------


def _append(path: Path, row: Row) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, extrasaction="raise", lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
        file.flush()
        os.fsync(file.fileno())


def _line(row: Row) -> str:
    """A line of the table."""

    def mib(key: str) -> str:
        return f"{row[key] / 2**20:.1f}" if row.get(key) else "--"

    def share(key: str, form: str) -> str:
        return format(row[key], form) if row.get(key) is not None else "--"

    told = [
        share("share", ".0%"),
        share("overhead", "+.1%"),
        {True: "equal", False: "differ"}.get(row.get("losses_equal"), "--"),
    ]
    cells = [mib("predicted_peak"), mib("measured_peak"), share("predicted_s", ".4f"), share("measured_s", ".4f"), *told]
    end = row.get("why") or (f"as {row['same_as']}" if row.get("same_as") else "")
    said = "" if row["status"] == "ok" else f"{row['status']}: "
    return f"{row['name'][:24]:24} {row['setting'][:20]:20}" + "".join(f"{c:>10}" for c in cells) + f"  {said}{end}"[:140]


HEADS = ("said MiB", "seen MiB", "said s", "seen s", "share", "overhead", "losses")


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().cpu().clone()
    return copy.pin_memory() if tensor.is_cuda else copy


def prepare(options: argparse.Namespace) -> tuple[Bench, Course]:
    began = time.perf_counter()
    workload = describe_workload(
        options.model, batch=options.batch, seq=options.seq, dtype=options.dtype, optimizer=options.optimizer
    )
    machine = holdall.probe("cpu" if options.tiny else "cuda", quick=True)
    trace = workload.trace(machine.device)
    plain = plain_outcome(trace, machine)
    fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0) + machine.context
    about = {k: getattr(options, k) for k in ("model", "batch", "seq", "dtype", "optimizer", "steps", "commit")}
    about |= {"seed": 0, "hardware": machine.name, **versions()}
    bench = Bench(
        workload=workload, machine=machine, steps=options.steps, out=options.out, about=about, fixed=fixed,
        ends=began + options.time_limit,
    )  # fmt: skip
    took = time.perf_counter() - began
    print(f"{workload}, on {machine.name}; probed and traced in {took:.1f} s; {fixed / 2**20:.0f} MiB are fixed")
    print(f"plain is said to peak at {plain.peak[bench.home] / 2**20:.0f} MiB and to take {plain.seconds:.4f} s")
    return bench, Course(trace=trace, targets=tuple(read_targets(options.budgets, plain)))


def with_whole_head(bench: Bench, course: Course, budgets: str) -> Course:
    """The same step with the vocabulary head whole; the course itself if it is so already."""
    if not course.trace.about.head:
        return course
    model, optimizer = bench.workload.build()
    trace = holdall.trace(model, bench.workload.sample(), optimizer=optimizer, device=bench.machine.device, head="whole")
    targets = tuple(read_targets(budgets, plain_outcome(trace, bench.machine)))
    return Course(trace=trace, targets=targets, plain=f"plain, {WHOLE_HEAD}")


def from_unlimited(course: Course, plain: Outcome) -> Course:
    """With the budget that everything fits in, and that one first: others are held against it."""
    whole = read_targets("100%", plain)
    return replace(course, targets=(*whole, *(t for t in course.targets if t.label != "100%")))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--model", default=None, help="default: llama-3.2-1b, tiny-llama with --tiny")
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--seq", type=int, default=None)
    parser.add_argument("--optimizer", default="sgd", help="sgd or adamw (fused)")
    parser.add_argument("--budgets", default="50%,35%,25%,75%,100%", help="shares of plain's activation memory")
    parser.add_argument("--planners", default=PLANNERS)
    parser.add_argument("--peers", default=None, help="as for `holdall compare`")
    parser.add_argument(
        "--compiled-blocks", default="", metavar="A,B", help="also these planners with compiled blocks: chen,rotor"
    )
    parser.add_argument(
        "--compile-programs",
        default="",
        metavar="A,B",
        help="also these planners' plans with every block as a compiled program",
    )
    parser.add_argument("--steps", type=int, default=None, help="of each run; the first does not count")
    parser.add_argument("--time-limit", type=float, default=290, help="seconds; the rows so far are in the file")
    parser.add_argument("--commit", default="", help="goes into every row")
    parser.add_argument("--out", type=Path, default=Path("recompute_on_gpu.csv"), help="rows are added at its end")
    options = parser.parse_args()
    options.dtype = "float32" if options.tiny else "bfloat16"
    options.backend = "aot_eager" if options.tiny else "inductor"
    options.model = options.model or ("tiny-llama" if options.tiny else "llama-3.2-1b")
    options.batch = options.batch or (2 if options.tiny else 4)
    options.seq = options.seq or (64 if options.tiny else 2048)
    options.steps = options.steps or (3 if options.tiny else 6)
    blocks = f"compile:scope=blocks:ratios={RATIOS}:backend={options.backend}"
    if options.backend != "aot_eager":
        blocks = f"compile:scope=blocks:ratios={RATIOS}:backend=aot_eager,{blocks}"
    whole = f"compile:ratios=[1,0.5,0.25,0.1]:backend={options.backend}"
    options.peers = f"{blocks},checkpoint,selective,{whole}" if options.peers is None else options.peers
    return options


def plan_rows(bench: Bench, course: Course, choices: Sequence[PlanChoice], *, kind: str = "planner", backend: str = "") -> int:
    """Planners at all budgets; how many rows there was no time for."""
    late = 0
    for choice in choices:
        for target in course.targets:
            if bench.has_time(f"{kind} {choice.label}"):
                plan_row(bench, course, choice, target, kind=kind, backend=backend)
            else:
                late += 1
    return late


def online_rows(bench: Bench, course: Course, choices: Sequence[PlanChoice], eager: Variant, budgets: str) -> int:
    """Those that decide as the step runs, on a step with a whole head, after a bare run of that."""
    late = len(choices) * len(course.targets)
    if not choices or not bench.has_time("eager"):
        return late
    whole = with_whole_head(bench, course, budgets)
    if whole is not course:
        peer_row(bench, whole, replace(eager, setting=whole.plain), f"eager, {whole.plain}")
    return plan_rows(bench, whole, choices)


def main() -> None:
    options = parse_options()
    names = [part for part in options.planners.split(",") if part.partition(":")[0] in member_names("planners")]
    planners = read_planners(",".join(names))
    ahead = [c for c in planners if c.label in FIRST.split(",")]
    after = [c for c in planners if c not in ahead]
    variants = all_variants(read_peers(f"eager,{options.peers}"), [])
    bench, course = prepare(options)
    print(f"{'':24} {'':20}" + "".join(f"{head:>10}" for head in HEADS))
    own = {v.family: str(v) for v in variants if v.unlimited}
    eager, *others = variants
    peer_row(bench, course, eager, own[eager.family])
    peer_row(bench, course, replace(eager, setting="plain, again"), own[eager.family])
    bench.machine = resolve_hardware(bench.machine, bench.machine.device)  # kernels are loaded now: that they take is fixed too
    course = replace(course, targets=tuple(read_targets(options.budgets, plain_outcome(course.trace, bench.machine))))
    left = plan_rows(bench, course, ahead)
    if options.compile_programs:
        unlimited = from_unlimited(course, plain_outcome(course.trace, bench.machine))
        compiled = read_planners(options.compile_programs)
        left += plan_rows(bench, unlimited, compiled, kind=PROGRAMS, backend=options.backend)
    for variant in others:
        if bench.has_time(_kind(variant)):
            peer_row(bench, course, variant, own[variant.family])
        else:
            left += 1
    left += plan_rows(bench, course, [c for c in after if c.name not in ONLINE])
    if options.compiled_blocks:
        left += plan_rows(bench, course, read_planners(options.compiled_blocks), kind=BLOCKS, backend=options.backend)
    left += online_rows(bench, course, [c for c in after if c.name in ONLINE], eager, options.budgets)
    if left:
        print(f"the time limit is over: {left} rows were not begun")
    print("\nagainst the compiled peer, each over its own unlimited run:")
    if options.tiny:
        print("(plans on a CPU run under the ledger: their overheads mean nothing)")
    for line in verdict(bench.rows):
        print(line)
    print(f"\n{len(bench.rows)} rows are in {options.out}")


if __name__ == "__main__":
    main()
