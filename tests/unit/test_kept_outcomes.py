"""What the simulator says about fixed programs must change only if someone means it; and random programs of every primitive
count what the naive checker counts, and take the time that lanes and links need.

`kept/outcomes.json` has peaks, seconds, stalls, bytes, curves and lanes of programs that are drawn from seeds, on machines with
rates of no machine in particular. A change that is meant is accepted by `python tests/unit/test_kept_outcomes.py`, which writes
the file again.
"""

import json
import random
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from holdall.errors import HoldallError
from holdall.registry import member_class, member_names
from holdall.simulator import check, close, lower, replay, simulate
from holdall.simulator.allocators import Caching, OverBudget, make_allocator, usable_by
from holdall.simulator.curve import memory_curve
from holdall.simulator.lifetimes import PlannedStep
from holdall.simulator.pages import churn
from holdall.testing.oracles import differences
from holdall.testing.worlds import chain, machine
from holdall.types import Collect, Copy, Drop, Kind, Link, Problem, Run, Schedule, TensorInfo, Tier, Trace, Wait
from holdall.units import MiB

HERE = Path(__file__).parent
KEPT = HERE / "kept" / "outcomes.json"
ALLOCATORS = ("ideal", "caching", "expandable", "arena", "host_arena")


def machines():
    """Copies that wait; that overlap and hinder each other and the host; a disk behind the host; two tiers on one wire."""
    beside = replace(
        machine(overlap=True, read=70.0, write=50.0), duplex=0.8, updates=10.0, updates_beside=6.0, read_beside=0.7
    )
    near, far = beside.tiers
    late = replace(beside, tiers=(near, replace(far, latency=0.25)))
    disk = Tier(name="disk", capacity=2**50, read=30.0, write=20.0, latency=0.1)
    behind = (Link(source="far", destination="disk", rate=20.0, duplex=0.6), Link(source="disk", destination="far", rate=90.0))
    bus = {"duplex": 0.75, "wire": "bus"}
    shared = (
        Link(source="cpu", destination="far", rate=50.0, **bus),
        Link(source="far", destination="cpu", rate=70.0, **bus),
        Link(source="cpu", destination="disk", rate=20.0, **bus),
        Link(source="disk", destination="cpu", rate=30.0, **bus),
    )
    return {
        "copies wait": replace(machine(read=70.0, write=50.0), tiers=(*machine(read=70.0, write=50.0).tiers, disk)),
        "copies overlap": replace(late, tiers=(*late.tiers, disk)),
        "a disk behind the host": replace(late, tiers=(*late.tiers, disk), links=behind),
        "one wire": replace(late, tiers=(*late.tiers, disk), links=shared),
        "launches take time": replace(late, tiers=(*late.tiers, disk), device="cuda", overhead=0.11),
    }


class Program:
    """A legal list of steps, drawn from a seed; `scale`: bytes of a unit of size."""

    def __init__(self, seed, *, count=60, scale=1):
        self.rng = rng = random.Random(seed)
        base = chain([rng.randint(1, 60) for _ in range(4)])
        info = {x: replace(t, nbytes=t.nbytes * scale) for x, t in base.tensors.items()}
        self.trace = replace(base, tensors=info)
        self.added = {
            100 + n: TensorInfo(
                id=100 + n,
                name=f"n{n}",
                kind=list(Kind)[n % len(Kind)],
                shape=(),
                dtype="uint8",
                nbytes=scale * rng.randint(1, 90),
                born=-1 if n < 6 else 0,
                freed=None,
            )
            for n in range(40)
        }
        self.start = {101: "far", 103: "disk"}
        self.info = {**info, **self.added}
        self.there = {"cpu": set(), "far": set(), "disk": set()}
        for x, t in self.info.items():
            if t.born < 0:
                self.there[self.start.get(x, "cpu")].add(x)
        self.new = [x for x, t in self.info.items() if t.born >= 0]
        self.flying = {}
        self.steps = []
        moves = [self.run, self.run, self.run, self.host, self.copy, self.copy, self.over, self.aside, self.collect, self.drop]
        while len(self.steps) < count:
            if self.rng.random() < 0.2:
                self.wait()
            rng.choice(moves)()
        for step in self.steps:
            if isinstance(step, Run) and step.op >= 0 and not step.again:
                assert step.op < len(self.trace.ops)

    @property
    def schedule(self):
        return Schedule(trace=self.trace, home="cpu", added=self.added, start=self.start, placed=self.rng.choice([0, 2]))

    def some(self, of, most):
        found = sorted(of)
        return tuple(self.rng.sample(found, min(len(found), self.rng.randint(0, most))))

    def usable(self):
        return {x for x in self.there["cpu"] if self.flying.get(x) != "cpu"}

    def run(self):
        rng = self.rng
        made = tuple(self.new.pop(0) for _ in range(rng.randint(0, 2)) if self.new)
        op = rng.choice([-1, -1, rng.randrange(len(self.trace.ops))])
        self.there["cpu"].update(made)
        step = Run(
            op=op,
            reads=self.some(self.usable() - set(made), 3),
            writes=made,
            mutates=self.some(self.usable() - set(made), 1),
            seconds=rng.choice([0.0, 0.3, 0.7, 1.9]),
            workspace=rng.choice([0, 0, 35 * self.info[0].nbytes // 100]),
            again=rng.choice([0, 0, 1]),
            name=rng.choice(["work", "more work"]),
        )
        self.steps.append(step)

    def host(self):
        anywhere = set().union(*self.there.values())
        stream = self.rng.choice(["host", "host", "side"])
        more = {"seconds": self.rng.choice([0.2, 1.3]), "name": "update", "stream": stream}
        self.steps.append(Run(op=-1, reads=self.some(anywhere, 2), writes=(), mutates=self.some(anywhere, 2), **more))

    def copy(self):
        src, dst = self.rng.choice([("cpu", "far"), ("far", "cpu"), ("far", "disk"), ("disk", "cpu"), ("cpu", "disk")])
        can = {x for x in self.there[src] if x not in self.there[dst] and x not in self.flying}
        moved = self.some(can, 2)
        if moved:
            lane, more = self.rng.choice(["", "", "other"]), self.rng.choice([0, 0, 17 * self.info[0].nbytes // 100])
            uses = self.some(self.there["cpu"], 1) if lane else ()
            self.steps.append(Copy(tensors=moved, src=src, dst=dst, name="move", lane=lane, nbytes=more, uses=uses))
            self.there[dst].update(moved)
            self.flying.update(dict.fromkeys(moved, dst))

    def over(self):
        """A copy over what is there already."""
        src, dst = self.rng.choice([("cpu", "far"), ("far", "cpu")])
        both = {x for x in self.there["cpu"] & self.there["far"] if x not in self.flying}
        moved = self.some(both, 1)
        if moved:
            self.steps.append(Copy(tensors=moved, src=src, dst=dst, name="over", lands=False))
            if dst == "cpu":
                self.flying.update(dict.fromkeys(moved, dst))

    def aside(self):
        """A copy of a part of some room at home, for a tensor that may be anywhere."""
        room = self.some(self.usable(), 2)
        can = {x for x in self.info if x not in self.there["far"] and x not in self.flying and x in self.there["cpu"]}
        moved = self.some(can, 1)
        if room and moved:
            self.steps.append(Copy(tensors=moved, src="cpu", dst="far", name="aside", uses=room, aside=True))
            self.there["far"].update(moved)
            self.flying.update(dict.fromkeys(moved, "far"))

    def collect(self):
        taken = self.some({x for x in self.usable() if x not in self.flying}, 2)
        if taken:
            lane = self.rng.choice(["", "ring"])
            self.steps.append(Collect(tensors=taken, kind="all_gather", dim="data", nbytes=40, seconds=0.9, lane=lane))
            self.flying.update(dict.fromkeys(taken, "cpu"))

    def wait(self):
        ended = self.some(self.flying, 3)
        if ended:
            self.steps.append(Wait(tensors=ended))
            for x in ended:
                del self.flying[x]

    def drop(self):
        tier = self.rng.choice(["cpu", "cpu", "far", "disk"])
        gone = self.some({x for x in self.there[tier] if x not in self.flying}, 2)
        for x in gone:
            self.steps.append(Drop(tensor=x, tier=tier))
            self.there[tier].remove(x)


# against naive counts


@pytest.mark.parametrize("seed", range(40))
def test_a_program_of_every_primitive_counts_what_the_checker_counts(seed):
    program = Program(seed, count=120)
    naive = check(program.steps, program.info, "cpu", program.start)
    for hardware in machines().values():
        got = replay(program.steps, program.schedule, hardware, full=True)
        assert {tier: peak for tier, peak in got.peak.items() if peak} == {tier: peak for tier, peak in naive.items() if peak}
        runs = [s for s in program.steps if isinstance(s, Run)]
        beside = [s for s in runs if s.stream != "compute"] if hardware.overlap else []
        work = sum(s.seconds for s in runs if s not in beside)
        assert got.recompute_seconds == pytest.approx(sum(s.seconds for s in runs if s.again and s.stream == "compute"))
        assert got.stall_seconds == pytest.approx(max(0.0, got.seconds - work))
        assert got.traffic == traffic_of(program)
        assert max(m.total for m in got.timeline) <= got.peak["cpu"]
        if got.peak["cpu"] == max(m.total for m in got.timeline):
            assert sum(got.peak_kinds.values()) + 35 >= got.peak["cpu"]


def test_a_copy_over_what_is_elsewhere_takes_no_room_in_an_empty_tier():
    trace = chain([30])
    steps = [Copy(tensors=(0,), src="cpu", dst="far", lands=False)]
    check(steps, trace.tensors, "cpu")
    got = replay(steps, Schedule(trace=trace, home="cpu"), machines()["copies overlap"])
    assert got.peak["far"] == 0
    assert got.traffic == {"cpu->far": 100}


def traffic_of(program):
    found = defaultdict(int)
    for step in program.steps:
        if isinstance(step, Copy):
            found[f"{step.src}->{step.dst}"] += step.nbytes + sum(program.info[x].nbytes for x in step.tensors)
        elif isinstance(step, Collect):
            found["data all_gather"] += step.nbytes
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", [name for name, hardware in machines().items() if hardware.overlap])
def test_lanes_serve_one_task_at_a_time_and_links_carry_no_more_than_they_can(name, seed):
    hardware, program = machines()[name], Program(seed, count=100)
    got = replay(program.steps, program.schedule, hardware, full=True)
    by_lane = defaultdict(list)
    for span in (s for s in got.lanes if s.end > s.start):
        by_lane["compute" if span.lane == "recompute" else span.lane].append(span)
    for lane, spans in by_lane.items():
        for before, after in pairwise(sorted(spans, key=lambda s: (s.start, s.end))):
            assert before.end <= after.start + 1e-9, lane
    least = defaultdict(float)  # seconds that each link takes for its bytes alone
    for step in program.steps:
        if isinstance(step, Copy):
            nbytes = step.nbytes + sum(program.info[x].nbytes for x in step.tensors)
            for link in hardware.path(step.src, step.dst):
                least[link.source, link.destination] += nbytes / link.rate
    assert got.seconds >= max(least.values(), default=0.0) - 1e-9
    assert got.seconds >= sum(s.seconds for s in program.steps if isinstance(s, Run) and s.stream == "compute") - 1e-9


# against what was kept


def weighed(values):
    """One figure that changes with each of them, and with their order."""
    return float(sum((n % 97 + 1) * value for n, value in enumerate(values)))


def summary(got):
    """What is kept of an outcome."""
    lanes = defaultdict(list)
    for span in got.lanes:
        lanes[span.lane] += [span.start, span.end, float(len(span.name))]
    return {
        "peak": dict(got.peak),
        "seconds": got.seconds,
        "again": got.recompute_seconds,
        "stalls": got.stall_seconds,
        "churn": got.churn,
        "cramped": got.cramped,
        "reserved": got.reserved,
        "bytes": dict(got.traffic),
        "where": got.peak_where,
        "largest": [f"{h.name} {h.kind.value} {h.nbytes}" for h in got.at_peak],
        "kinds": {kind.value: size for kind, size in got.peak_kinds.items()},
        "times": weighed(m.at for m in got.timeline),
        "totals": weighed(m.total for m in got.timeline),
        "by kind": weighed(size for m in got.timeline for size in m.kinds.values()),
        "lanes": {lane: weighed(times) for lane, times in sorted(lanes.items())},
    }


def outcomes_of_programs():
    for n, (name, hardware) in enumerate(machines().items()):
        for seed in range(3):
            program = Program(100 * n + seed, scale=[1, MiB // 40, MiB][seed])
            allocator = make_allocator(ALLOCATORS[(n + seed) % len(ALLOCATORS)])
            hardware_ = hardware if seed == 0 else replace(hardware, tiers=tuple(faster(t, seed) for t in hardware.tiers))
            got = replay(program.steps, program.schedule, hardware_, allocator=allocator, full=True)
            yield f"program {seed}, {name}", summary(got)


def faster(tier, seed):
    scale = [1, MiB // 40, MiB][seed]
    return replace(tier, read=tier.read * scale, write=tier.write * scale)


def outcomes_of_actions():
    """Every action's samples, on a small model's trace and on a chain."""
    saved = Trace.load(HERE / "saved" / "trace.json")
    for trace, hardware in ((saved, machines()["launches take time"]), (chain([30, 12, 45, 8]), machines()["copies overlap"])):
        for accumulate in (1, 3):
            problem = Problem(trace=trace, hardware=hardware, budget={}, accumulate=accumulate)
            for name in member_names("actions"):
                for n, sample in enumerate(member_class("actions", name).samples(trace)):
                    yield f"{name} {n}, {trace.about.model}, {accumulate} backwards", outcome_of(problem, sample)


def outcome_of(problem, action):
    try:
        got = summary(simulate(problem, [action], full=True, checked=True, allocator="expandable"))
        curve = memory_curve(problem, [action])
        life, _ = PlannedStep.of(problem, [action]).run()
    except HoldallError as refused:
        return {"refused": type(refused).__name__}
    kept = {field: weighed(getattr(curve, field)) for field in curve.__slots__}
    kept |= {"lives": weighed(v for t in life.tensors for v in (t.begin, t.end, t.size)), "phases": list(life.phases)}
    steps = close(lower(problem, [action]))
    return {**got, **kept, "drops": weighed(n for n, step in enumerate(steps) if isinstance(step, Drop))}


def requests(seed, *, most):
    """(key, size) of allocations, size -1 for frees; the first twelve stay."""
    rng, live, found = random.Random(seed), [], []
    for key in range(260):
        size = rng.choice(
            [rng.randint(0, 3000), rng.randint(1, MiB), MiB, MiB + 1, rng.randint(MiB, 9 * MiB), rng.randint(1, most)]
        )
        found.append((key, size))
        if key >= 12:
            live.append(key)
        while live and rng.random() < 0.48:
            found.append((live.pop(rng.randrange(len(live))), -1))
    return found


def allocations():
    """What the models of allocators reserve, with and without a limit."""
    for seed in range(3):
        order = requests(seed, most=40 * MiB)
        for name in ALLOCATORS:
            allocator, path = make_allocator(name), []
            for key, size in order:
                allocator.free(key) if size < 0 else allocator.alloc(key, size)
                path += [allocator.allocated, allocator.reserved]
            yield f"{name} {seed}", {"path": weighed(path), "peaks": [allocator.peak_allocated, allocator.peak_reserved]}
        peak = live_peak(order)
        for percent in (170, 130, 115, 104, 98):
            found = churn(order, 12, peak * percent // 100)
            kept = {"halts": found.halts, "remapped": found.remapped, "missing": found.missing, "seconds": found.seconds}
            yield f"pages {seed}, {percent} %", {**kept, **limited(order, peak * percent // 100)}


def live_peak(order):
    live, most = {}, 0
    for key, size in order:
        if size < 0:
            del live[key]
        else:
            live[key] = size
        most = max(most, sum(live.values()))
    return most


def limited(order, limit):
    """The caching allocator under a limit: what it releases, and when it gives up."""
    allocator = Caching(limit=limit)
    for n, (key, size) in enumerate(order):
        try:
            allocator.free(key) if size < 0 else allocator.alloc(key, size)
        except OverBudget:
            return {"given up": n, "retries": allocator.retries, "reserved": allocator.reserved}
    blocks = [b.size for segment in allocator.segments() for b in segment]
    return {"retries": allocator.retries, "reserved": allocator.reserved, "blocks": weighed(blocks)}


def usable():
    for name in (None, *ALLOCATORS):
        yield (
            f"usable by {name}",
            {str(limit): usable_by(name, limit) for limit in (0, 1, 999, 700 * MiB, 800 * MiB, 9000 * MiB)},
        )


PARTS = {"programs": outcomes_of_programs, "actions": outcomes_of_actions, "allocators": allocations, "limits": usable}


@cache
def kept():
    return json.loads(KEPT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("part", PARTS)
def test_outcomes_are_those_that_were_kept(part):
    found = dict(PARTS[part]())
    for name, answer in found.items():
        lines = differences(kept()[part].get(name), json.loads(json.dumps(answer)))
        assert not lines, "\n  ".join([f"{name}:", *lines, "if that is meant: python tests/unit/test_kept_outcomes.py"])
    assert kept()[part].keys() == found.keys()


if __name__ == "__main__":
    KEPT.write_text(json.dumps({part: dict(make()) for part, make in PARTS.items()}, indent=1) + "\n", encoding="utf-8")
