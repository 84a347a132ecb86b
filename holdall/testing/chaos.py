"""Chaos: delays, poison and late copies in everything that moves, to find who relies on what is not promised.

    with chaos(seed=7):
        train()

or `HOLDALL_DEBUG=chaos:7` in the environment. What it does is in `holdall/tiers/_chaos.py`. Whatever is trained must come out
as it does without it; a weight that is read too early is NaN, or raises.

As a command, it trains random small models under random plans and holds them against plain training:

    python -m holdall.testing.chaos --draws 200 --seed 0
    python -m holdall.testing.chaos --draws 200 --device cuda
    python -m holdall.testing.chaos --only 0/17        # one of them again

On a CPU everything is compared bit for bit: losses, norms, weights, optimizer states. On a GPU losses and norms are, within
5e-3 where the model computes in float32 and 3e-2 in bfloat16: its kernels add up in no fixed order, and the host's Adam rounds
as a host does. Where they differ by more, plain training is repeated from weights that are a ten-millionth off; in bfloat16 the
norm after six steps of such a run may be three times the other, and what plain training does to itself is no difference.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdall.errors import Unsupported
from holdall.testing import draws
from holdall.tiers._chaos import Chaos, current, switch

__all__ = ["Chaos", "chaos", "current", "main", "run_draw"]

TOLERANCE = {False: 5e-3, True: 3e-2}  # on a GPU, by whether the model computes in bfloat16


@contextmanager
def chaos(seed: int = 0, *, longest: float = 0.004) -> Iterator[Chaos]:
    """On inside of it. `longest`: seconds of a delay."""
    now = Chaos(seed, longest=longest)
    before = switch(now)
    try:
        yield now
    finally:
        switch(before)


def run_draw(d: draws.Draw, device: str = "cpu", *, longest: float = 0.004) -> list[str]:
    """Train as drawn, under chaos; where that differs from plain training."""
    draws.prepare(d, device)  # as it is without chaos
    number = int(d.number.partition("/")[2])
    tolerance = TOLERANCE[d.narrow] if device != "cpu" else 0.0
    with chaos(number, longest=longest):
        return draws.run(d, device, tolerance=tolerance)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 1 if anything differed."""
    parser = argparse.ArgumentParser(prog="python -m holdall.testing.chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other after so many")
    parser.add_argument("--longest", type=float, default=0.002, help="seconds of a delay")
    parser.add_argument("--families", default="", help="names with commas between; all if left out")
    parser.add_argument("--disk", action="store_true", help="with masters and states on a disk, in the folder of HOLDALL_NVME")
    parser.add_argument("--only", default="", help="one draw, as SEED/NUMBER")
    asked = parser.parse_args(arguments)
    families = [f for f in asked.families.split(",") if f] or draws.FAMILIES
    chosen = [(asked.seed, asked.first + n) for n in range(asked.draws)]
    if asked.only:
        seed, _, number = asked.only.partition("/")
        chosen = [(int(seed), int(number))]
    began, made, wrong, refused = time.monotonic(), 0, 0, 0
    for seed, number in chosen:
        if time.monotonic() - began > asked.seconds:
            break
        d = draws.draw(seed, number, families, disk=asked.disk)
        made += 1
        try:
            found = run_draw(d, asked.device, longest=asked.longest)
        except Unsupported as error:
            refused += 1
            _say(f"refused  {d}\n         {error.fact}")
            continue
        except Exception:  # whatever it is, it is a finding
            found = traceback.format_exc(limit=-6).strip().splitlines()
        if found:
            wrong += 1
            shown = "\n         ".join(found[:4] if not asked.only and len(found) < 8 else found[-16:])
            _say(f"DIFFERS  {d}\n         {shown}")
        elif made % 50 == 0:
            _say(f"{made} draws, {wrong} differ, {refused} refused, {time.monotonic() - began:.0f} s")
    _say(f"{made} draws on {asked.device}: {wrong} differ from plain training, {refused} refused")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
