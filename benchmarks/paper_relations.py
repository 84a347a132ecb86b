"""The relations that papers on swapping publish (who beats whom, in which memory, by how much), on the simulator.

Every figure is simulated: op times follow from datasheets (`holdall/machine/presets.py`), memory from a traced step. A row has
two planners, or one planner and plain training, in the same memory. A relation's verdict is one of

    holds       the order is the paper's in every row, and the factor is reached
    order only  the order is the paper's in every row, the factor is smaller
    in part     the order is the paper's in some rows
    no          in none

python benchmarks/paper_relations.py [--only vdnn,capuchin] [--out FILE] [--commit C]
python benchmarks/paper_relations.py --markdown    # the table of docs/swap.md, from the kept rows
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import holdall
from holdall.api import environment
from holdall.experiments.request import budget_leaving, plain_outcome
from holdall.experiments.workload import describe_workload
from holdall.machine.presets import gpu
from holdall.types import Hardware, Link, Outcome, Tier, Trace
from holdall.units import TiB, format_bytes

KEPT = Path("benchmarks/results/paper_relations.csv")
SAME = 0.999  # a ratio from here on is no loss
REACHED = 0.9  # of the published factor
NEAR = 0.05  # of a figure that is published for one setting
SHARES = (0.8, 0.6, 0.4)  # of plain training's activations
MOMENTUM = "sgd:momentum=0.9"


@dataclass(frozen=True, kw_only=True)
class Setting:
    model: str
    batch: int
    card: str
    seq: int = 1
    optimizer: str = MOMENTUM
    dtype: str = "float32"
    disk: float = 0.0  # bytes/s of a disk beside the host; 0: none


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison: `ratio` is how many times better `better` is."""

    setting: Setting
    better: str
    worse: str
    unit: str
    of_better: float
    of_worse: float
    ratio: float
    budget: int | None = None


@dataclass(frozen=True, kw_only=True)
class Relation:
    name: str
    system: str
    claim: str
    rows: Callable[[], list[Row]]
    factor: float | None = None  # published; None: the order alone
    exactly: bool = False  # the factor is for this very setting: it must be met, not only reached
    each: bool = False  # the factor is a mean, so it must be reached in every row
    why: str = ""  # why it does not hold, where it does not


class Study:
    """One model on one card with all the memory it may want; budgets limit it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.card = gpu(setting.card)
        self.machine = _roomy(self.card, setting.disk)

    @cached_property
    def trace(self) -> Trace:
        s = self.setting
        made = describe_workload(s.model, batch=s.batch, seq=s.seq, dtype=s.dtype, optimizer=s.optimizer)
        return made.trace("cuda")

    @cached_property
    def plain(self) -> Outcome:
        return plain_outcome(self.trace, self.machine)

    def share(self, share: float) -> int:
        return budget_leaving(self.plain, share)

    def run(self, planner: str, budget: int | None = None, **options: Any) -> Outcome | None:
        """The simulated step; None: it does not fit."""
        began = time.perf_counter()
        try:
            made = holdall.plan(self.trace, planner=planner, hardware=self.machine, budget=budget or "auto", **options)
        except holdall.Infeasible:
            return None
        said = made.predicted
        where = f"{self.setting.model} on {self.setting.card} in {format_bytes(budget) if budget else 'any memory'}"
        print(f"  {planner} {options or ''}: {said.seconds:.4g} s, {where}; {time.perf_counter() - began:.1f} s", flush=True)
        return said

    @cache  # noqa: B019 - studies live as long as the script
    def least(self, planner: str, **options: Any) -> int:
        """The smallest budget with a plan."""
        if planner == "plain":
            return self.plain.peak[self.machine.home.name]
        try:
            made = holdall.plan(self.trace, planner=planner, hardware=self.machine, budget=1, **options)
        except holdall.Infeasible as refused:
            assert refused.smallest is not None
            return refused.smallest
        raise AssertionError(made)


@cache
def study(setting: Setting) -> Study:
    return Study(setting)


def _roomy(card: Hardware, disk: float) -> Hardware:
    home, host = replace(card.home, capacity=TiB), replace(card.others[0], capacity=4 * TiB)
    if not disk:
        return replace(card, tiers=(home, host))
    far = Tier(name="nvme", capacity=16 * TiB, read=disk, write=disk)
    links = (Link(source="gpu", destination="nvme", rate=disk), Link(source="nvme", destination="gpu", rate=disk))
    return replace(card, tiers=(home, host, far), links=links)


# the kinds of rows


def faster(
    better: str, worse: str, settings: Sequence[Setting], *, least: bool = False, of_worse: Mapping[str, Any] | None = None
) -> list[Row]:
    """Seconds of two planners in shares of plain training's activations, or in the least memory of the worse, and with 20 %
    more; without a row where either does not fit."""
    found = []
    for setting in settings:
        here = study(setting)
        floor = here.least(worse, **(of_worse or {}))
        budgets = [floor, int(1.2 * floor)] if least else [b for s in SHARES if (b := here.share(s)) >= floor] or [floor]
        for budget in budgets:
            slow, fast = here.run(worse, budget, **(of_worse or {})), here.run(better, budget)
            if slow is not None and fast is not None:
                found.append(_seconds(setting, better, worse, fast, slow, budget))
    return found


def _seconds(setting: Setting, better: str, worse: str, fast: Outcome, slow: Outcome, budget: int | None = None) -> Row:
    return Row(
        setting=setting,
        better=better,
        worse=worse,
        unit="s",
        of_better=fast.seconds,
        of_worse=slow.seconds,
        ratio=slow.seconds / fast.seconds,
        budget=budget,
    )


def larger(better: str, worse: str, settings: Sequence[Setting], *, of_worse: Mapping[str, Any] | None = None) -> list[Row]:
    """The largest batches in the memory of the card, by the line through the least memory of two batches."""
    found = []
    for setting in settings:
        sizes = [_largest_batch(setting, better, {}), _largest_batch(setting, worse, of_worse or {})]
        found.append(
            Row(
                setting=setting,
                better=better,
                worse=worse,
                unit="samples",
                of_better=sizes[0],
                of_worse=sizes[1],
                ratio=sizes[0] / max(sizes[1], 1e-9),
                budget=gpu(setting.card).home.capacity,
            )
        )
    return found


def _largest_batch(setting: Setting, planner: str, options: Mapping[str, Any]) -> float:
    twice = replace(setting, batch=2 * setting.batch)
    some, more = (study(s).least(planner, **options) for s in (setting, twice))
    each = (more - some) / setting.batch
    found = setting.batch + (gpu(setting.card).home.capacity - some) / each
    print(f"  {planner}: {found:.1f} samples of {setting.model} on {setting.card}", flush=True)
    return max(found, 0.0)


# the relations


def _cnns(card: str, batch: int = 64) -> list[Setting]:
    return [Setting(model=m, batch=batch, card=card) for m in ("vgg-16", "resnet-50", "inception-v3")]


def _bert(card: str, batch: int = 16) -> list[Setting]:
    return [Setting(model="bert-base-plain", batch=batch, seq=128, card=card, optimizer="adamw")]


def _vdnn_18() -> list[Row]:
    here = Setting(model="vgg-16", batch=256, card="titan-x")
    none, every = (study(here).run("vdnn", policy=p) for p in ("none", "all"))
    assert none and every
    return [_seconds(here, "vdnn:policy=none", "vdnn:policy=all", none, every)]


def _deeper() -> list[Row]:
    """How many times as deep a net of equal blocks may be: the bytes that one more block costs."""
    import torch

    from holdall.models.resnet import ResNetConfig

    card, sizes = gpu("k40c"), (12, 24)
    room, found = card.home.capacity, []
    for planner in ("superneurons", "plain"):
        least = []
        for blocks in sizes:
            model = ResNetConfig(depths=[3, 4, blocks, 3], width=64, num_labels=1000, image_size=224).make()
            batch = {"pixel_values": torch.zeros(16, 3, 224, 224), "labels": torch.zeros(16, dtype=torch.int64)}
            here = Study(Setting(model=f"resnet of {blocks + 10} blocks", batch=16, card="k40c"))
            here.__dict__["trace"] = holdall.trace(model, batch, device="cuda")
            least.append(here.least(planner))
        each = (least[1] - least[0]) / (sizes[1] - sizes[0])
        found.append(10 + sizes[0] + (room - least[0]) / each)
        print(f"  {planner}: {found[-1]:.0f} blocks", flush=True)
    return [
        Row(
            setting=Setting(model="resnet, deeper", batch=16, card="k40c", optimizer="none"),
            better="superneurons",
            worse="plain",
            unit="blocks",
            of_better=found[0],
            of_worse=found[1],
            ratio=found[0] / found[1],
            budget=room,
        )
    ]


def _run_again() -> list[Row]:
    """Ops that the strategies of SuperNeurons run again in one step of ResNet-50."""
    from holdall.planners.superneurons import programs
    from holdall.planners.superneurons.liveness import largest_working_set
    from holdall.planners.superneurons.recomputation import limit_of

    setting = Setting(model="resnet-50", batch=16, card="k40c")
    trace, counts = study(setting).trace, {}
    for way in ("speed", "cost-aware", "memory"):
        made: list[Any] = list(programs(trace, limit_of(way, largest_working_set(trace))))
        counts[way] = sum(len([op for op in p.backward if op < len(p.forward)]) for p in made)
    print(f"  ops that run again: {counts}", flush=True)
    return [
        Row(
            setting=setting,
            better=f"superneurons:recompute={few}",
            worse=f"superneurons:recompute={many}",
            unit="ops",
            of_better=counts[few],
            of_worse=counts[many],
            ratio=counts[many] / counts[few],
        )
        for few, many in (("speed", "cost-aware"), ("cost-aware", "memory"))
    ]


def _swapadvisor() -> list[Row]:
    found = []
    for setting in (replace(s, batch=32) for s in _cnns("v100-16gb")[:2]):
        here = study(setting)
        for share in SHARES:
            if (said := here.run("swapadvisor", here.share(share))) is not None:
                found.append(_seconds(setting, "swapadvisor", "plain", said, here.plain, here.share(share)))
    return found


def _pofo_third() -> list[Row]:
    """The part of rotor's overhead that pofo avoids, as rotor's over pofo's."""
    found = []
    for setting in _POFO:
        here = study(setting)
        for share in SHARES:
            budget = here.share(share)
            both, one = here.run("pofo", budget), here.run("rotor", budget)
            if both is not None and one is not None and one.seconds > 1.005 * here.plain.seconds:
                over = [o.seconds / here.plain.seconds - 1 for o in (both, one)]
                found.append(
                    Row(
                        setting=setting,
                        better="pofo",
                        worse="rotor",
                        unit="overhead",
                        of_better=over[0],
                        of_worse=over[1],
                        ratio=over[1] / max(over[0], 1e-6),
                        budget=budget,
                    )
                )
    return found


def _pofo_memory() -> list[Row]:
    """The smallest share of the activations in which pofo costs less than 20 %."""
    found = []
    for setting in _POFO:
        here, smallest = study(setting), 1.0
        for share in (0.5, 0.4, 0.3, 0.25, 0.2, 1 / 6):
            said = here.run("pofo", here.share(share))
            if said is None or said.seconds > 1.2 * here.plain.seconds:
                break
            smallest = share
        found.append(
            Row(
                setting=setting,
                better="pofo",
                worse="plain",
                unit="share of activations",
                of_better=smallest,
                of_worse=1.0,
                ratio=1 / smallest,
                budget=here.share(smallest),
            )
        )
    return found


_POFO = [
    Setting(model="resnet-50", batch=32, card="v100-16gb"),
    Setting(model="gpt2", batch=8, seq=512, card="v100-16gb", optimizer="adamw"),
]
_LONG = Setting(model="llama-2-7b", batch=1, seq=65536, card="a100-80gb", optimizer="none", dtype="bfloat16")
_TWELVE = replace(_LONG, seq=12288)
ALL_AGAIN = {"variant": "all"}


def _anyhow(better: str, worse: str, setting: Setting, of_better: Mapping[str, Any], of_worse: Mapping[str, Any]) -> list[Row]:
    """Two planners in as much memory as each takes."""
    here = study(setting)
    fast, slow = here.run(better, **of_better), here.run(worse, **of_worse)
    assert fast and slow
    return [_seconds(setting, better, worse, fast, slow, fast.peak[here.machine.home.name])]


def _yuan() -> list[Row]:
    """In the memory of the card, less the states that three more cards would share, yuan's setting of 4."""
    here = study(_TWELVE)
    budget = here.card.home.capacity
    fast, slow = here.run("yuan", budget), here.run("chen", budget, **ALL_AGAIN)
    assert fast and slow
    return [_seconds(_TWELVE, "yuan", "chen:variant=all", fast, slow, budget)]


def _flashneuron_batch() -> list[Row]:
    return larger("flashneuron", "plain", [replace(s, disk=3e9) for s in _bert("v100-16gb")])


def _flashneuron_speed() -> list[Row]:
    """Samples per second at the largest batch of each."""
    setting = replace(_bert("v100-16gb")[0], disk=3e9)
    sizes = {p: int(_largest_batch(setting, p, {})) for p in ("flashneuron", "plain")}
    rates = {}
    for planner, batch in sizes.items():
        here = study(replace(setting, batch=batch))
        said = here.plain if planner == "plain" else here.run(planner, int(1.02 * here.least(planner)))
        assert said is not None
        rates[planner] = batch / said.seconds
    return [
        Row(
            setting=setting,
            better="flashneuron",
            worse="plain",
            unit="samples/s",
            of_better=rates["flashneuron"],
            of_worse=rates["plain"],
            ratio=rates["flashneuron"] / rates["plain"],
        )
    ]


RELATIONS = [
    Relation(
        name="vdnn-18",
        system="vDNN",
        claim="VGG-16, batch 256, Titan X: 18 % slower than with enough memory",
        rows=_vdnn_18,
        factor=1.18,
        exactly=True,
    ),
    Relation(
        name="superneurons-vdnn",
        system="SuperNeurons",
        claim="faster than vDNN (implied)",
        rows=lambda: faster("superneurons", "vdnn", _cnns("k40c", 32)),
    ),
    Relation(
        name="superneurons-deep",
        system="SuperNeurons",
        claim="networks at least 3.24 times as deep on a K40c",
        rows=_deeper,
        factor=3.2432,
    ),
    Relation(
        name="superneurons-again",
        system="SuperNeurons",
        claim="ResNet-50 recomputes 84 layers for speed, 85 by cost, 118 for memory",
        rows=_run_again,
    ),
    Relation(
        name="swapadvisor-half",
        system="SwapAdvisor",
        claim="53 to 99 % of the speed with enough memory",
        rows=_swapadvisor,
        factor=0.53,
        why="40 % of ResNet-50's activations keep 32 %: ops change places within their block only",
    ),
    Relation(
        name="capuchin-vdnn",
        system="Capuchin",
        claim="up to 3.86 times as fast as vDNN (286 % faster)",
        rows=lambda: faster("capuchin", "vdnn", _cnns("p100-16gb", 32)),
        factor=3.86,
        why="a fetch begins with a block's backward here, not at any access, and budgets end at vDNN's least memory",
    ),
    Relation(
        name="capuchin-checkpointing",
        system="Capuchin",
        claim="up to 1.55 times as fast as gradient checkpointing",
        rows=lambda: faster("capuchin", "chen", [*_cnns("p100-16gb", 32)[1:], *_bert("p100-16gb")]),
        factor=1.55,
        why="in 40 % of Inception-v3's activations the link is busy with swaps that were planned as hidden",
    ),
    Relation(
        name="capuchin-batch",
        system="Capuchin",
        claim="BERT: 7 times the batch of plain training",
        rows=lambda: larger("capuchin", "plain", _bert("p100-16gb")),
        factor=7.0,
        why="our head computes logits of all positions: three copies, 47 MB a sample",
    ),
    Relation(
        name="capuchin-batch-checkpointing",
        system="Capuchin",
        claim="BERT: 2.1 times the batch of gradient checkpointing",
        rows=lambda: larger("capuchin", "chen", _bert("p100-16gb")),
        factor=2.1,
        why="the logits bound the batch, as above",
    ),
    Relation(
        name="flashneuron-batch",
        system="FlashNeuron",
        claim="12.4 to 14.0 times the batch of a V100 with 16 GB",
        rows=_flashneuron_batch,
        factor=12.4,
        why="the logits bound the batch, as above, and tensors are not cast to FP16",
    ),
    Relation(
        name="flashneuron-speed",
        system="FlashNeuron",
        claim="up to 1.38 times the samples per second, by the larger batch",
        rows=_flashneuron_speed,
        factor=1.378,
        why="its largest batch waits for the disk, and a simulated op is no faster per sample in a large batch",
    ),
    Relation(
        name="pofo-rotor",
        system="pofo",
        claim="offloading avoids a third of rotor's overhead",
        rows=_pofo_third,
        factor=1.5,
        each=True,
        why="nothing is gained on ResNet-50, whose blocks differ in size: each copy is hidden by one block only",
    ),
    Relation(
        name="pofo-memory",
        system="pofo",
        claim="activations in 4 to 6 times less memory for less than 20 %",
        rows=_pofo_memory,
        factor=4.0,
        why="blocks are kept, offloaded or recomputed whole, and the largest block alone needs a third of the memory",
    ),
    Relation(
        name="tsplit-vdnn",
        system="TSPLIT",
        claim="up to 4.7 times as fast as vDNN",
        rows=lambda: faster("tsplit", "vdnn", _cnns("titan-rtx", 32)),
        factor=4.7,
        why="pieces are recomputed, not swapped while the next is computed",
    ),
    Relation(
        name="tsplit-superneurons",
        system="TSPLIT",
        claim="up to 2.7 times as fast as SuperNeurons",
        rows=lambda: faster("tsplit", "superneurons", _cnns("titan-rtx", 32)),
        factor=2.7,
        why="pieces are recomputed, not swapped while the next is computed",
    ),
    Relation(
        name="tsplit-scale-vdnn",
        system="TSPLIT",
        claim="models up to 10.5 times as large as with vDNN",
        rows=lambda: larger("tsplit", "vdnn", _cnns("gtx-1080-ti", 16)),
        factor=10.5,
        why="the largest layer bounds both: a batch norm cannot be split by samples, and pieces are not swapped",
    ),
    Relation(
        name="tsplit-scale-superneurons",
        system="TSPLIT",
        claim="models up to 3.1 times as large as with SuperNeurons",
        rows=lambda: larger("tsplit", "superneurons", _cnns("gtx-1080-ti", 16)),
        factor=3.1,
        why="the largest layer bounds both, as above",
    ),
    Relation(
        name="str-hybrid",
        system="STR",
        claim="ResNets: up to 28.1 % faster than the best hybrid (taken to be Capuchin)",
        rows=lambda: faster("str", "capuchin", _cnns("v100-16gb", 32)[1:2]),
        factor=1.281,
    ),
    Relation(
        name="memo-megatron",
        system="Memo",
        claim="7B, long context: 1.97 times Megatron-LM, which recomputes every layer",
        rows=lambda: _anyhow("memo", "chen", _LONG, {}, ALL_AGAIN),
        factor=1.97,
        why="full recomputation costs a third at most on one device; the paper's rest is parallelism and fragmentation",
    ),
    Relation(
        name="yuan-full",
        system="Yuan et al.",
        claim="7B, 12K tokens, A800: 1.26 times full recomputation",
        rows=_yuan,
        factor=1.26,
        why="one device: the gap of a pipeline between forward and backward is not there",
    ),
]


# verdicts


def verdict(relation: Relation, ratios: Sequence[float]) -> str:
    """How a relation stands, by the ratios of its rows."""
    if not ratios:
        return "not tried"
    if relation.exactly:
        assert relation.factor is not None
        return "holds" if all(abs(r / relation.factor - 1) <= NEAR for r in ratios) else "no"
    below_one = relation.factor is not None and relation.factor < 1
    floor = relation.factor if relation.factor is not None and below_one else SAME
    kept = [r >= floor for r in ratios]
    if not any(kept):
        return "no"
    if not all(kept):
        return "in part"
    best = min(ratios) if relation.each else max(ratios)
    reached = relation.factor is None or below_one or best >= REACHED * relation.factor
    return "holds" if reached else "order only"


def table(kept: Sequence[Mapping[str, str]]) -> str:
    """The table of the documentation, in Markdown."""
    lines = ["| paper | published | ours, simulated | verdict |", "|---|---|---|---|"]
    for relation in RELATIONS:
        rows = [r for r in kept if r["relation"] == relation.name]
        ratios = [float(r["ratio"]) for r in rows]
        says = verdict(relation, ratios)
        why = f": {relation.why}" if relation.why and says != "holds" else ""
        lines.append(f"| {relation.system} | {relation.claim} | {_ours(rows, ratios)} | {says}{why} |")
    return "\n".join(lines)


def _ours(rows: Sequence[Mapping[str, str]], ratios: Sequence[float]) -> str:
    if not rows:
        return "--"
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    models = ", ".join(dict.fromkeys(r["model"] for r in rows))
    factor = low if low == high else f"{low} to {high}"
    return f"{factor} ({models}; {rows[0]['hardware']})"


def record(relation: Relation, row: Row) -> dict[str, Any]:
    """A row of the CSV file."""
    s = row.setting
    return {
        "relation": relation.name,
        "system": relation.system,
        "claim": relation.claim,
        "model": s.model,
        "batch": s.batch,
        "seq": s.seq,
        "dtype": s.dtype,
        "optimizer": s.optimizer,
        "hardware": s.card + (f", disk {s.disk / 1e9:g} GB/s" if s.disk else ""),
        "budget_bytes": row.budget or "",
        "better": row.better,
        "worse": row.worse,
        "unit": row.unit,
        "of_better": f"{row.of_better:.6g}",
        "of_worse": f"{row.of_worse:.6g}",
        "ratio": f"{row.ratio:.4f}",
        "kind": "simulated",
    }


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """In the order of the relations."""
    order = [r.name for r in RELATIONS]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda r: order.index(r["relation"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="relations by name, or the first part of their names")
    parser.add_argument("--out", type=Path, default=KEPT)
    parser.add_argument("--commit", default="")
    parser.add_argument("--markdown", action="store_true", help="print the table of the kept rows, and run nothing")
    asked = parser.parse_args()
    if not asked.markdown:
        wanted = tuple(part for part in asked.only.split(",") if part) or ("",)
        about = {**environment(), "commit": asked.commit}
        for relation in (r for r in RELATIONS if r.name.startswith(wanted)):
            print(f"{relation.name}: {relation.claim}", flush=True)
            found = [record(relation, row) | about for row in relation.rows()]
            kept = [r for r in read(asked.out) if r["relation"] != relation.name] + found
            if kept:
                write(asked.out, kept)
            print(f"  {verdict(relation, [float(r['ratio']) for r in found])}", flush=True)
    print(table(read(asked.out)))


if __name__ == "__main__":
    main()
