"""The host's Adam step: Gparam/s and GB/s of torch's fused kernel and of both back ends of `holdall.updates.host_adam`.

python benchmarks/host_update.py [--threads 1,4,8,12,16] [--worlds block,one,small] [--slices 1,2,4] [--out host_update.csv]

GB/s counts what must cross memory: 24 bytes per parameter for the fp32 weight and its moments, read and written (12 where the
new weight alone is asked for), and the gradient's and the low-precision weight's own. A scratch that stays in cache is not
counted.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

from holdall.updates import host_adam

Shapes = list[tuple[int, ...]]
WORLDS: dict[str, Shapes] = {
    "block": [(3072, 3072), (1024, 3072), (1024, 3072), (3072, 3072), *[(8192, 3072)] * 3, (3072,), (3072,)],  # Llama-3.2-3B's
    "one": [(32, 1024, 3072)],
    "small": [(768, 768)] * 16 + [(768,)] * 32,
}
BF16_BYTES = 24 + 2 + 2
PEEK_BYTES = 12 + 2 + 2
FP32_BYTES = 24 + 4


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default=",".join(str(t) for t in (1, 2, 4, 8, 12, 16) if t <= cores))
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--slices", default="1,2,4", help="Mi elements a call of the torch back end; where gradients are bf16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default="host_update.csv")
    options = parser.parse_args()
    began = time.perf_counter()
    print(f"{host_adam.backend()} (ready in {time.perf_counter() - began:.2f} s)")
    native = host_adam._choose().step if host_adam.backend().startswith("native") else None
    rows = []
    print(f"{'world':8}{'path':22}{'threads':>8}{'ms':>10}{'Gparam/s':>10}{'GB/s':>8}{'best ms':>10}")
    for name in options.worlds.split(","):
        world = World(WORLDS[name])
        for threads in map(int, options.threads.split(",")):
            paths: dict[str, tuple[Callable[[], None], int]] = {"torch fused, fp32": (world.plain(threads), FP32_BYTES)}
            for mi in options.slices.split(","):
                paths[f"torch bf16, {mi} Mi"] = (world.ours(host_adam._step_torch, threads, int(mi) << 20), BF16_BYTES)
            if native:
                paths["native bf16"] = (world.ours(native, threads), BF16_BYTES)
                paths["native, weights only"] = (world.ours(native, threads, peek=True), PEEK_BYTES)
                paths["native bf16, beside"] = (world.ours(native, threads, beside=True), BF16_BYTES)
            for path, (run, nbytes) in paths.items():
                seconds, best = median_and_best(run, options.repeats)
                rate = world.size / seconds / 1e9
                row = {"world": name, "path": path, "threads": threads, "params": world.size, "tensors": len(world.shapes)}
                rows.append(row | {"seconds": seconds, "best_s": best, "gparam_s": rate, "gb_s": rate * nbytes})
                print(
                    f"{name:8}{path:22}{threads:8}{seconds * 1e3:10.2f}{rate:10.3f}{rate * nbytes:8.1f}{best * 1e3:10.2f}",
                    flush=True,
                )
    about = {"cpu": cpu_name(), "cores": cores, "torch": torch.__version__, "python": platform.python_version()}
    about["backend"] = host_adam.backend()
    with open(options.out, "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *about])
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)
    print(f"{len(rows)} rows in {options.out}, {time.perf_counter() - began:.0f} s")


class World:
    """Tensors of these shapes with all that an update touches. The low-precision weight has the gradient's memory."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.params = [torch.full(s, 0.02) for s in shapes]
        self.size = sum(p.numel() for p in self.params)
        self.exp_avg = [torch.full(s, 1e-3) for s in shapes]
        self.exp_avg_sq = [torch.full(s, 1e-4) for s in shapes]
        self.steps = [torch.tensor(10.0) for _ in shapes]
        self.grads = [torch.full(s, 1e-3, dtype=torch.bfloat16) for s in shapes]
        self.full_grads = [torch.full(s, 1e-3) for s in shapes]
        self.new = [tuple(torch.full(s, 0.0) for _ in range(3)) for s in shapes]  # for values that go beside the old ones

    def plain(self, threads: int) -> Callable[[], None]:
        def run() -> None:
            with host_adam._torch_threads(threads):
                torch._fused_adamw_(
                    self.params,
                    self.full_grads,
                    self.exp_avg,
                    self.exp_avg_sq,
                    [],
                    self.steps,
                    amsgrad=False,
                    lr=1e-4,
                    beta1=0.9,
                    beta2=0.95,
                    weight_decay=0.1,
                    eps=1e-8,
                    maximize=False,
                )

        return run

    def ours(
        self, step: host_adam.Step, threads: int, length: int = host_adam.SLICE, *, beside: bool = False, peek: bool = False
    ):
        rule = host_adam.Rule(1e-4, 0.9, 0.95, 1e-8, 0.1, decoupled=True, maximize=False, scale=0.5)

        def run() -> None:
            host_adam.SLICE = length
            arrays = host_adam._gather(self.params, self.exp_avg, self.exp_avg_sq, self.steps, self.grads, self.grads)
            if beside or peek:
                arrays = [a._replace(new=n if beside else None, is_peek=peek) for a, n in zip(arrays, self.new, strict=True)]
            step(arrays, rule, threads)

        return run


def median_and_best(run: Callable[[], None], repeats: int) -> tuple[float, float]:
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times), min(times)


def cpu_name() -> str:
    with open("/proc/cpuinfo") as file:
        return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
