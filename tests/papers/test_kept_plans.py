"""Plans that are kept: what every planner answers to small fixed problems must change only if someone means it.

`kept/*.json.gz` are traces of four small models as they were once made, so that no version of torch matters here; machines have
rates of no machine in particular, or a datasheet's. `kept/plans.json` has, for every problem, the bytes and seconds that the
plan predicts, a digest of its actions and one of the figures in its reasons, or how it was refused. Nothing is measured. Of
planners that ask a solver only the seconds are kept, for problems that are solved to the optimum long before their limit.

A change that is meant is accepted by `python tests/papers/test_kept_plans.py [PLANNER ...]`, which writes the file again; its
difference shows which plans are others now.
"""

import gzip
import hashlib
import json
import os
import re
import sys
import tempfile
import time
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdall.cost.roofline import cost_trace
from holdall.errors import HoldallError, Infeasible
from holdall.machine.presets import gpu
from holdall.planning.finish import outcome_of
from holdall.registry import allowed_by_default, member_class, member_names
from holdall.testing.oracles import differences
from holdall.testing.placed import with_disk
from holdall.testing.worlds import chain, machine
from holdall.types import Hardware, Problem, Trace

KEPT = Path(__file__).parent / "kept"
SIZES, SECONDS = [10, 80, 20, 60, 30], [0.7, 1.9, 1.1, 2.3, 0.4]
SEVEN = [30, 12, 45, 8, 70, 25, 51], [1.3, 0.6, 2.1, 0.9, 1.7, 0.8, 1.1]
WORLDS: dict[str, Any] = {  # name -> (trace, machine)
    "chain": lambda: (chain(SIZES, SECONDS), machine(overlap=True, read=40.0, write=35.0)),
    "chain, copies wait": lambda: (chain(*SEVEN), machine(read=90.0, write=70.0)),
    "tied": lambda: (saved("tied"), machine(read=1e8, write=9e7)),
    "convnet": lambda: (saved("convnet"), machine(overlap=True, read=2e8, write=1.1e8)),
    "llama": lambda: (saved("llama"), replace(machine(overlap=True, read=5e8, write=3e8), updates=3e8)),
    "llama, disk": lambda: (saved("llama"), replace(with_disk(overlap=True, read=3e8, write=2e8), updates=1e9)),
    "gpt2": lambda: (saved("gpt2-bf16"), gpu("rtx-4090")),
    "gpt2, slow link": lambda: (saved("gpt2-bf16"), slower(gpu("rtx-4090"), 40)),
}


class Case(NamedTuple):
    world: str
    share: int  # of what plain training takes, in percent
    far: int = 0  # likewise of the nearest farther tier; 0: as much as there is
    more: str = ""  # "accumulate", "unread" (the loop reads no gradients), "unclipped", or what is missing (WITHOUT)


def slower(hardware: Hardware, times: int) -> Hardware:
    """The machine with a slower link to the host."""
    home, host = hardware.tiers
    return replace(hardware, tiers=(home, replace(host, read=host.read / times, write=host.write / (times + 7))), updates=2e7)


def saved(name: str) -> Trace:
    """A trace of the folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_bytes(gzip.decompress((KEPT / f"{name}.json.gz").read_bytes()))
        return Trace.load(path)


@cache
def asked_in(world: str) -> tuple[Problem, int]:
    """(the problem without a limit, bytes of plain training)."""
    trace, hardware = WORLDS[world]()
    problem = Problem(trace=cost_trace(trace, hardware) if trace.about.signature else trace, hardware=hardware, budget={})
    return problem, outcome_of(problem, []).peak[problem.home]


WITHOUT = {
    "no host": set(),
    "nothing leaves": {"offload", "layer_swap", "place"},
    "nothing again": {"recompute", "recompute_rows"},
}


def problem_of(case: Case, allow: tuple[str, ...] = ()) -> Problem:
    problem, plain = asked_in(case.world)
    budget = {problem.home: plain * case.share // 100}
    if case.far:
        budget[problem.other()] = plain * case.far // 100
    changes: dict[str, Any] = {
        "": {},
        "accumulate": {"accumulate": 3},
        "unread": {"reads_gradients": False},
        "unclipped": {"clipped": False},
    }.get(case.more, {})
    if case.more == "no host":
        changes = {"hardware": replace(problem.hardware, tiers=problem.hardware.tiers[:1])}
    allowed = allowed_by_default() | set(allow)
    return replace(problem, budget=budget, allow=allowed - WITHOUT.get(case.more, set()), **changes)


CHAINS = (Case("chain", 80), Case("chain", 65), Case("chain, copies wait", 75), Case("chain, copies wait", 60))
SMALL = (*CHAINS, Case("tied", 75), Case("tied", 55), Case("convnet", 80), Case("convnet", 62))
LARGE = (Case("llama", 75), Case("llama", 45), Case("gpt2", 70), Case("gpt2", 45))
HOSTS = (Case("llama", 60, 25), Case("llama, disk", 40, 20), Case("gpt2", 60, 30))
LOOPS = (Case("llama", 55, more="accumulate"), Case("gpt2", 55, more="unread"), Case("gpt2", 40, more="unclipped"))
SLOW = (Case("llama", 96), Case("gpt2, slow link", 92), Case("gpt2, slow link", 50))
EVERY = (*SMALL, *LARGE, *HOSTS, *LOOPS)
STATES = (
    Case("chain", 65),
    Case("tied", 60),
    Case("tied", 38),
    Case("convnet", 62),
    *LARGE,
    Case("llama", 25),
    *HOSTS,
    *LOOPS,
    *SLOW,
)
FULL = (
    Case("tied", 100),
    Case("convnet", 100),
    Case("llama", 100),
    Case("gpt2", 100),
    Case("gpt2, slow link", 100),
)  # for rules that ignore the budget
FEW = (Case("tied", 60), Case("llama", 50), Case("gpt2", 50))
DISK = (Case("llama, disk", 70), Case("llama, disk", 40))
ONLINE = (Case("chain", 80), Case("chain, copies wait", 75), Case("tied", 80), Case("convnet", 85))  # refusals take them long
SWAPS = (*SMALL, Case("gpt2", 70), Case("gpt2", 45), Case("llama, disk", 85, 30), Case("gpt2, slow link", 75))
PLANNED: dict[str, list[tuple[dict[str, Any], tuple[Case, ...]]]] = {  # planner -> options and their cases; else EVERY
    "actnn": [
        *[({"level": level}, FULL) for level in ("L0", "L1", "L2", "L3", "L4")],
        ({"level": "L2", "bits": 2.5}, FULL),
        ({"bits": 3.0, "sensitivity": {"layers.0:1": 1e9, "layers.2:0": 1e-3}}, FULL[:1]),
        ({"bits": 9.0}, FULL[:1]),
    ],
    "angel_ptm": [({}, STATES), ({"hoist": False}, FEW), ({"page": 3000, "recompute": False}, FEW)],
    "auto": [
        (
            {},
            (
                CHAINS[0],
                CHAINS[3],
                Case("tied", 50),
                Case("convnet", 62),
                Case("llama", 40),
                Case("gpt2", 45),
                *HOSTS,
                *SLOW[:2],
            ),
        ),
        ({}, (Case("llama, disk", 25, 12), *LOOPS[1:])),
        ({"via_device": True}, (Case("gpt2", 50),)),
        ({"ahead": False}, (Case("gpt2", 50),)),
    ],
    "autotm": [
        ({}, (*SMALL, Case("gpt2", 60))),
        *[({"mode": mode}, (Case("chain", 80), Case("gpt2", 60))) for mode in ("static", "synchronous")],
        ({"radius": 1}, (Case("chain", 80), Case("convnet", 80))),
    ],
    "capuchin": [({}, (*SMALL, Case("gpt2", 55))), ({"feedback": 0}, (Case("chain", 65), Case("convnet", 80)))],
    "checkmate": [({"gap": 0.0}, CHAINS[:3]), ({"method": "lp"}, CHAINS), ({"method": "lp", "scope": "blocks"}, CHAINS[2:])],
    "chen": [
        ({}, (Case("chain", 100), Case("chain, copies wait", 90), *FULL)),
        *[({"variant": v}, (Case("chain, copies wait", 100), *FULL)) for v in ("greedy", "recursive", "all")],
        ({"variant": "recursive", "k": 2, "last": True}, (Case("chain, copies wait", 100), *FULL)),
        ({"last": True}, FULL),
    ],
    "coop": [({}, ONLINE), ({"always": True, "small": 40}, ONLINE[:2])],
    "delta": [
        ({}, ONLINE),
        *[({"director": d, "filter": f}, ONLINE[:2]) for d, f in (("swap", "knapsack"), ("rerun", "density"))],
    ],
    "dtr": [({}, ONLINE), *[({"score": s}, ONLINE[:2]) for s in ("dtr", "lru", "size")], ({"sample": True}, ONLINE)],
    "elixir": [({}, STATES), ({"overlap": False, "usable": 0.8}, FEW), ({"chunk": 5000, "recompute": True}, FEW)],
    "flashneuron": [({}, (*SWAPS, *DISK)), ({"compress": "none", "window": 1}, SWAPS), ({"least": 20_000}, SWAPS[4:])],
    "gemini": [
        ({}, STATES),
        ({"gpu_margin_mem_ratio": 0.5, "max_prefetch": 2}, FEW),
        ({"policy": "static"}, (*FEW, Case("tied", 45), Case("gpt2", 65), Case("llama", 30))),
        ({"policy": "static", "offload_optim_frac": 0.4}, FEW),
        ({"policy": "static", "offload_optim_frac": 1.0, "offload_param_frac": 0.5}, FEW),
        ({"min_chunk": 2500, "search_range": 3000, "interval": 100}, FEW),
    ],
    "korthikanti": [({}, (Case("chain", 100), *FULL))],
    "l2l": [
        ({}, (*FULL, Case("llama", 100, more="accumulate"))),
        *[({"stash": stash, "eager": False}, FULL) for stash in ("device", "host")],
    ],
    "megtaichi": [({}, ONLINE), ({"always": True, "least": 15}, ONLINE[:2])],
    "memo": [({}, FULL), ({"alpha": 0.4}, FULL), ({"addresses": True}, FULL[2:])],
    "moccasin": [({}, CHAINS[:3]), ({"scope": "blocks"}, (Case("tied", 80),))],
    "nop": [({}, (Case("tied", 99), *FULL))],
    "patrickstar": [({}, STATES), ({"prefetch": True}, FEW), ({"chunk": 6000, "recompute": True}, FEW)],
    "pofo": [({}, EVERY), ({"slots": 40}, CHAINS)],
    "protrain": [({}, STATES), ({"alpha": 1.4}, FEW), ({"chunk": 9000}, FEW)],
    "ratel": [({}, (*FULL, *DISK)), ({"swap": 100_000}, FULL), ({"tier": "nvme"}, DISK)],
    "rockmate": [
        ({"menus": "cut"}, (*SMALL, Case("gpt2", 60))),
        ({"menus": "cut", "options": 2, "peaks": 1, "slots": 60}, SMALL[2:6]),
    ],
    "rotor": [({}, EVERY), ({"slots": 30}, CHAINS)],
    "smart_infinity": [({}, DISK), ({"drives": 3, "streamed": False}, DISK), ({"keep": 0.25, "recompute": False}, DISK)],
    "str": [({"gap": 0.0}, CHAINS[:2]), ({"gap": 0.0, "parts": 1}, CHAINS[:2]), ({"gap": 0.0, "parts": 1, "nodes": 7}, CHAINS)],
    "stronghold": [({}, STATES), ({"window": 2}, FEW), ({"recompute": True}, FEW)],
    "superneurons": [
        ({}, SWAPS),
        *[({"recompute": r}, SWAPS[2:6]) for r in ("speed", "memory", "none")],
        ({"blocks": 2}, SWAPS[:6]),
    ],
    "superoffload": [({}, STATES), ({"ratio": 0.4}, FEW), ({"recompute": True}, FEW)],
    "swapadvisor": [({"population": 5, "generations": 3}, SMALL), ({"population": 4, "generations": 2, "seed": 7}, SMALL[:3])],
    "te_offload": [({}, SWAPS), ({"elements": 100}, SWAPS), ({"layers": 2, "elements": 5000}, SWAPS[4:])],
    "tsplit": [({}, (*SMALL, Case("gpt2", 60))), ({"pieces": 2}, SMALL[4:])],
    "vdnn": [({}, SWAPS), *[({"policy": policy}, SWAPS[-6:]) for policy in ("conv", "all")]],
    "yuan": [
        ({}, SWAPS),
        ({"grain": 1000}, SWAPS[:8]),
        *[
            ({"checkpoint": c, "alpha": a, "grain": 500}, SWAPS[4:9])
            for c, a in (("balanced", 0.3), ("full", 0.7), ("none", 0.6))
        ],
    ],
    "zero_infinity": [
        ({}, (*FULL, *DISK)),
        ({"persistence_threshold": 3000, "prefetch_bucket": 9000, "max_live": 30_000}, (*FULL, *DISK)),
        ({"tier": "nvme", "sub_group": 20_000, "persistence_threshold": 100}, DISK),
        ({"tier": "nvme", "pipeline_read": False, "pipeline_write": False, "persistence_threshold": 100}, DISK),
        ({"offload_checkpoints": True, "recompute": True, "persistence_threshold": 100}, (*FULL, *DISK)),
    ],
    "zero_offload": [({}, FULL), ({"overlap": True, "recompute": False}, FULL), ({"delayed": True, "warmup": 3}, FULL)],
}
LOOSE = (Case("tied", 100), Case("chain", 99))  # everything fits, and almost everything
EDGES = (*LOOSE, Case("chain", 30), Case("gpt2", 100), Case("tied", 15), Case("gpt2", 15))  # and nothing does
REFUSE_SLOWLY = {"coop", "delta", "dtr", "megtaichi"}
AT_EDGES = {
    "checkmate": {"gap": 0.0},
    "rockmate": {"menus": "cut"},
    "str": {"gap": 0.0},
    "swapadvisor": {"population": 4},
    "te_offload": {"elements": 0},
}
ALLOWED = {"actnn": ("compress",)}  # of actions that are not allowed by default
SOLVERS = {"autotm", "checkmate", "moccasin", "str"}  # one optimum of several is taken


MISSING = tuple(Case(*asked, more=more) for more in WITHOUT for asked in (("chain", 80), ("tied", 60)))

SWEEP = tuple(Case(world, share) for world in ("chain", "chain, copies wait") for share in (94, 88, 71, 57, 50))  # quick ones


def cases_of(planner: str) -> list[tuple[str, dict[str, Any], Case]]:
    """(how the file names it, options, case)."""
    found = []
    edges = LOOSE if planner in REFUSE_SLOWLY else EDGES[:3] if planner in {"auto", *SOLVERS} else EDGES
    missing = [case for case in MISSING if case.world == "chain" or planner not in {*REFUSE_SLOWLY, *SOLVERS}]
    sweep = () if planner in {"auto", *REFUSE_SLOWLY, *SOLVERS} else SWEEP
    for options, cases in [*PLANNED.get(planner, [({}, EVERY)]), (AT_EDGES.get(planner, {}), (*edges, *missing, *sweep))]:
        text = ", ".join(f"{k}={v}" for k, v in options.items())
        found += [("; ".join(filter(None, [_named(case), text])), options, case) for case in cases]
    return found


def _named(case: Case) -> str:
    far = f", {case.far} % of the host" if case.far else ""
    return f"{case.world}, {case.share} %{far}{', ' if case.more else ''}{case.more}"


def answer(planner: str, options: dict[str, Any], case: Case) -> dict[str, Any]:
    """What is kept of a plan."""
    try:
        plan = member_class("planners", planner)(**options)(problem_of(case, ALLOWED.get(planner, ())))
    except HoldallError as refused:
        return {"refused": type(refused).__name__, "smallest": refused.smallest if isinstance(refused, Infeasible) else None}
    got = plan.predicted
    if planner in SOLVERS:
        return {"seconds": got.seconds}
    counted = ", ".join(f"{n} {name}" for name, n in sorted(plan.count().items()))
    return {
        "peak": dict(got.peak),
        "reserved": got.reserved,
        "seconds": got.seconds,
        "again": got.recompute_seconds,
        "stalls": got.stall_seconds,
        "churn": got.churn,
        "bytes": {link: nbytes for link, nbytes in got.traffic.items() if nbytes},
        "actions": f"{digest(sorted(map(str, plan.actions)))} ({counted})",
        "why": digest(re.findall(r"\d[\d.,]*", " ".join(plan.why))),
    }


def digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


@cache
def kept() -> dict[str, Any]:
    return json.loads((KEPT / "plans.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("planner", member_names("planners"))
def test_plans_are_those_that_were_kept(planner, request):
    """One in six of them, always the same ones; `--all`: every one."""
    assert planner in kept(), f"no plan of `{planner}` is kept yet: python tests/papers/test_kept_plans.py {planner}"
    assert list(kept()[planner]) == list(dict.fromkeys(name for name, _, _ in cases_of(planner)))
    every = 1 if request.config.getoption("--all") or os.environ.get("HOLDALL_KEPT") == "all" else 6
    for name, options, case in cases_of(planner):
        if zlib.crc32(f"{planner}, {name}".encode()) % every:
            continue
        lines = differences(kept()[planner][name], answer(planner, options, case))
        assert not lines, "\n  ".join(
            [f"{planner}, {name}:", *lines, f"if that is meant: python tests/papers/test_kept_plans.py {planner}"]
        )


def keep(planners: list[str]) -> None:
    """Write the file again, for these planners."""
    path = KEPT / "plans.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for planner in planners:
        began = time.perf_counter()
        found[planner] = {name: answer(planner, options, case) for name, options, case in cases_of(planner)}
        refused = sum("refused" in plan for plan in found[planner].values())
        print(f"{planner}: {len(found[planner])} plans, {refused} refusals, {time.perf_counter() - began:.1f} s", flush=True)
    ordered = {planner: found[planner] for planner in member_names("planners") if planner in found}
    path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    keep(sys.argv[1:] or list(member_names("planners")))
