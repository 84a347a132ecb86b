"""Published set-ups of many GPUs: the papers' own meshes and what the searches of holdall find, by the same simulator.

Megatron-LM    SC 2021, table 1: GPT of 7.5, 18.4 and 39.1 billion parameters on 128, 256 and 512 A100; mesh sizes
               are the paper's, the micro-batch is the best of all here, with and without recomputation
Alpa           solutions for GPT of its repository for AWS p3.16xlarge (benchmark/alpa/suite_auto_gpt.py, perf_test_suite):
               stages, sub-meshes and micro-batches are theirs; layers are recomputed, as there
Galvatron      VLDB 2023: BERT-Huge-32 on 8 Titan RTX of 8 and 16 GB, float32. The paper's plans are not known here: the best
               plans of one kind (ddp, zero3, tensor, pipeline), which it compares with, stand beside

Everything is simulated, from closed forms of a decoder (`holdall/pipelines/hybrid/decoders.py`), datasheet rates and assumed
latencies. Searches: `auto` with everything; `auto` without ZeRO ("replicated states"), as Megatron-LM had it.

python benchmarks/published_meshes.py [--only megatron] [--out FILE]
"""

from __future__ import annotations

import argparse
import csv
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from holdall.errors import Infeasible
from holdall.machine.networks import network
from holdall.machine.presets import gpu as preset
from holdall.pipelines.cuts.balanced import even_cut
from holdall.pipelines.hybrid.decoders import decoder_model
from holdall.pipelines.hybrid.layers import HybridModel, StateBytes
from holdall.pipelines.hybrid.plans import HybridPlan, judged
from holdall.pipelines.hybrid.strategies import Pricing, SearchSpace, Strategy, divisors
from holdall.pipelines.meshes import Cluster, DecoderShape
from holdall.pipelines.searches import search
from holdall.types.mesh import Network

GIB = 2**30
NVLINK_2 = Network(name="nvlink-2", rate=0.8 * 150e9, latency=5e-6)
P3_NETWORK = Network(name="25 Gbit/s of a node of 8", rate=0.8 * 25e9 / 8 / 8, latency=50e-6)
SINGLE = Network(name="none", rate=1e9, latency=1e-5)
REPLICATED = SearchSpace(ways=("ddp",))


@dataclass(frozen=True, kw_only=True)
class SetUp:
    paper: str
    case: str
    gpu: str
    model: HybridModel
    cluster: Cluster
    theirs: tuple[tuple[str, tuple[HybridPlan, ...]], ...]  # (name, plans of which the best is meant)


def device(gpu: str, dtype: str = "float16") -> tuple[float, float, int]:
    """Operations and bytes a second that the preset reaches, and its memory."""
    machine = preset(gpu)
    return machine.flops[dtype] * machine.efficiency, machine.bandwidth, machine.home.capacity


def even_plans(model: HybridModel, gpus: int, pipes: int, ways: Iterable[Strategy]) -> tuple[HybridPlan, ...]:
    """Even stages, every number of micro-batches."""
    costs = [sum(layer.seconds(1, 1)) for layer in model.layers]
    cut, count = even_cut(costs, pipes), len(model.layers)
    groups = (gpus // pipes,) * pipes
    return tuple(
        HybridPlan(cut=cut, devices=groups, strategies=(way,) * count, micro_batches=n)
        for way in ways
        for n in divisors(model.batch)
        if n <= 1024 and model.batch // n % way.data == 0
    )


def megatron() -> Iterator[SetUp]:
    rows = {
        "7.5B": (36, 4096, 32, 128, 4, 1, 512),
        "18.4B": (40, 6144, 48, 256, 8, 1, 1024),
        "39.1B": (48, 8192, 64, 512, 8, 2, 1536),
    }
    rate, bandwidth, memory = device("a100-80gb")
    for case, (layers, hidden, heads, gpus, tensor, pipes, batch) in rows.items():
        shape = DecoderShape(layers=layers, hidden=hidden, heads=heads, seq=2048, batch=batch)
        model = decoder_model(shape, rate=rate, bandwidth=bandwidth, vocabulary=51200)
        cluster = Cluster(
            devices=gpus, per_node=8, memory=memory, rate=rate, inside=network("nvlink-3"), between=network("infiniband-hdr")
        )
        ways = [Strategy(tensor, gpus // tensor // pipes, "ddp", again) for again in (False, True)]
        plans = even_plans(model, gpus, pipes, ways)
        yield SetUp(
            paper="Megatron-LM, SC 2021",
            case=f"{case}, {gpus} GPUs",
            gpu="a100-80gb",
            model=model,
            cluster=cluster,
            theirs=(("the paper's mesh", plans),),
        )


def alpa() -> Iterator[SetUp]:
    rows = {  # layers, hidden, heads, GPUs, micro-batches, (share of the layers, devices, data ranks) of each stage
        "2.6B": (32, 2560, 32, 8, 128, ((2, 2, 2), (2, 2, 2), (4, 4, 4))),
        "6.7B": (32, 4096, 32, 16, 64, ((4, 8, 2),) * 2),
        "15B": (48, 5120, 40, 32, 128, ((4, 8, 2),) * 4),
        "39B": (48, 8192, 64, 64, 1024, ((1, 4, 1),) * 16),
    }
    rate, bandwidth, memory = device("v100-16gb")
    for case, (layers, hidden, heads, gpus, count, stages) in rows.items():
        shape = DecoderShape(layers=layers, hidden=hidden, heads=heads, seq=1024, batch=1024)
        model = decoder_model(shape, rate=rate, bandwidth=bandwidth, vocabulary=51200)
        cluster = Cluster(devices=gpus, per_node=8, memory=memory, rate=rate, inside=NVLINK_2, between=P3_NETWORK)
        parts, done = sum(share for share, _, _ in stages), 0
        cut, ways = [0], list[Strategy]()
        for share, devices, data in stages:
            done += share
            cut.append(1 + layers * done // parts if done < parts else layers + 2)
            ways += [Strategy(devices // data, data, "zero2" if data > 1 else "ddp", True)] * (cut[-1] - cut[-2])
        groups = tuple(devices for _, devices, _ in stages)
        theirs = HybridPlan(cut=tuple(cut), devices=groups, strategies=tuple(ways), micro_batches=count)
        yield SetUp(
            paper="Alpa, OSDI 2022",
            case=f"{case}, {gpus} GPUs",
            gpu="v100-16gb",
            model=model,
            cluster=cluster,
            theirs=(("the repository's solution", (theirs,)),),
        )


def galvatron() -> Iterator[SetUp]:
    rate, bandwidth, _ = device("titan-rtx", "float32")
    shape = DecoderShape(layers=32, hidden=1280, heads=16, seq=512, batch=32)
    single = StateBytes(held=12, gradient=4, copy=4)
    model = decoder_model(shape, rate=rate, bandwidth=bandwidth, vocabulary=30528, states=single, width=4)
    for memory in (8, 16):
        cluster = Cluster(devices=8, per_node=8, memory=memory * GIB, rate=rate, inside=network("pcie-3"), between=SINGLE)
        ways = {
            "data parallel": even_plans(model, 8, 1, [Strategy(1, 8, "ddp")]),
            "sharded data": even_plans(model, 8, 1, [Strategy(1, 8, "zero3")]),
            "tensor parallel": even_plans(model, 8, 1, [Strategy(8, 1)]),
            "pipeline": even_plans(model, 8, 8, [Strategy(1, 1)]),
        }
        yield SetUp(
            paper="Galvatron, VLDB 2023",
            case=f"BERT-Huge-32, 8 GPUs, {memory} GiB",
            gpu="titan-rtx",
            model=model,
            cluster=cluster,
            theirs=tuple(ways.items()),
        )


def rows_of(setup: SetUp) -> Iterator[dict[str, Any]]:
    pricing = Pricing(setup.model, setup.cluster)
    for name, plans in setup.theirs:
        tried = [plan for p in plans if (plan := judged(pricing, p)) is not None]
        fitting = [plan for plan in tried if plan.peak <= setup.cluster.memory]
        best = min(fitting or tried, key=lambda p: p.seconds if fitting else p.peak)
        yield row(setup, name, best, 0.0)
    asked = {"auto": ("auto", SearchSpace()), "auto, replicated states": ("auto", REPLICATED)}
    asked |= {name: (name, SearchSpace()) for name in ("alpa", "galvatron", "flexflow")}
    for label, (name, space) in asked.items():
        begun = time.perf_counter()
        try:
            plan = search(name, setup.model, setup.cluster, space=space)
        except Infeasible:
            plan = HybridPlan(cut=(), devices=(), strategies=(), micro_batches=0, seconds=float("nan"))
        yield row(setup, label, plan, time.perf_counter() - begun)


def row(setup: SetUp, name: str, plan: HybridPlan, spent: float) -> dict[str, Any]:
    mesh = plan.mesh
    return {
        "paper": setup.paper,
        "case": setup.case,
        "gpu": setup.gpu,
        "who": name,
        "mesh": " x ".join(f"{k} {v}" for k, v in mesh.items()) if mesh else f"pp {plan.pipes}, mixed",
        "ways": "; ".join(f"{layers}: {way}" for layers, way in plan.described()[:6]),
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "seconds": f"{plan.seconds:.4f}",
        "peak_gib": f"{plan.peak / GIB:.2f}",
        "fits": plan.peak <= setup.cluster.memory and plan.micro_batches > 0,
        "search_seconds": f"{spent:.1f}",
        "source": "simulated",
    }


def environment() -> dict[str, str]:
    said = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return {
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "machine": platform.machine(),
        "commit": said.stdout.strip(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("megatron", "alpa", "galvatron"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "published_meshes.csv")
    given = parser.parse_args()
    papers = {"megatron": megatron, "alpa": alpa, "galvatron": galvatron}
    found, about = [], environment()
    for name, setups in papers.items():
        for setup in setups() if given.only in (None, name) else ():
            for made in rows_of(setup):
                found.append({**made, **about})
                print(
                    *(made[k] for k in ("case", "who", "mesh", "micro_batches", "seconds", "peak_gib", "search_seconds")),
                    flush=True,
                )
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
