"""Kill a training run with SIGKILL at many moments of training and saving; every restart must end with the same bits.

python benchmarks/kill_and_resume.py [--moments 50] [--seed 0] [--out FOLDER]

One line per kill, a summary at the end; exits with 1 if any run ended with other bits than the one that was left alone. Moments
are of two kinds in turn: after a random time, and at a random system call of the saves (opening, writing, syncing, renaming,
linking, removing), before or after it is made. A run is killed one to three times; every time it goes on under a plan drawn
anew, or without any. A kill ends a process, not the machine: what a power cut does to a disk's caches is not tried here.
"""

from __future__ import annotations

import argparse
import builtins
import hashlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import holdall
from holdall.checkpoints import tensors

STEPS, SAVE_EVERY, KEEP = 9, 2, 2
PLANS = ("plain", "recompute", "offloaded")


class Net(torch.nn.Module):
    """Blocks with dropout between a tied embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16))
            for _ in range(3)
        )
        self.head = torch.nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def make() -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def batch(n: int) -> torch.Tensor:
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(n))


def make_plans() -> dict[str, Any]:
    """Made once: a plan is data, and every child applies it to a model of its own."""
    model, optimizer, _ = make()
    trace = holdall.trace(model, batch(0), optimizer=optimizer)
    from holdall.testing.worlds import machine

    given = {"hardware": machine(), "budget": 2**40}
    return {
        "plain": None,
        "recompute": holdall.plan(trace, planner="chen", **given),
        "offloaded": holdall.plan(trace, planner="zero_offload", **given),
    }


def train(out: Path, plan: Any, say: Callable[[str], None]) -> str:
    """One run from its last checkpoint to its end; returns a digest of all that was trained."""
    model, optimizer, scheduler = make()
    torch.manual_seed(1)
    with holdall.apply(plan, model, optimizer) if plan is not None else nullcontext():
        found = holdall.load_checkpoint(out, model, optimizer, scheduler=scheduler)
        start, position = (found.step, found.data) if found else (0, 0)
        say(f"from {start}")
        for step in range(start + 1, STEPS + 1):
            say(f"step {step}")
            model(batch(position)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            position += 1
            if step % SAVE_EVERY == 0 or step == STEPS:
                say(f"saving {step}")
                holdall.save_checkpoint(out, model, optimizer, step=step, scheduler=scheduler, data=position, keep=KEEP)
        return digest(model, optimizer, scheduler)


def digest(model: Net, optimizer: torch.optim.Optimizer, scheduler: Any) -> str:
    optimizer.state_dict()
    known = hashlib.blake2b(digest_size=8)
    for name, value in model.state_dict().items():
        known.update(name.encode() + value.numpy().tobytes())
    for parameter in model.parameters():
        for key, value in sorted(optimizer.state[parameter].items()):
            known.update(key.encode() + value.numpy().tobytes())
    known.update(repr(sorted(scheduler.state_dict().items())).encode() + torch.get_rng_state().numpy().tobytes())
    return known.hexdigest()


# children


@dataclass
class Child:
    """What a child process said until it ended."""

    lines: list[str] = field(default_factory=list)
    killed: bool = False
    seconds: float = 0.0

    def last(self, *kinds: str) -> str:
        return next((line for line in reversed(self.lines) if line.split()[0] in kinds), "-")


def run_child(work: Callable[[Callable[[str], None]], str], *, after: float | None = None) -> Child:
    """Fork, so that torch is imported once; `after`: seconds until it is killed."""
    reading, writing = os.pipe()
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)

            def say(line: str) -> None:
                os.write(writing, f"{line}\n".encode())

            say(f"done {work(say)}")
        except BaseException as error:
            os.write(writing, f"error {type(error).__name__}: {str(error).splitlines()[0]}\n".encode())
        os._exit(0)  # nothing of the parent's is flushed or closed twice
    os.close(writing)
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)  # where it has ended already, its entry is still there
    with os.fdopen(reading) as file:
        lines = file.read().splitlines()
    _, status = os.waitpid(pid, 0)
    return Child(lines, os.WIFSIGNALED(status), time.perf_counter() - began)


CALLS = ("fsync", "rename", "replace", "symlink", "unlink", "rmdir", "mkdir", "open", "write")


def watch_calls(seen: Callable[[], None], names: Sequence[str] = CALLS) -> None:
    """From now on, `seen` is called before and after every system call by which this process changes the disk."""

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*args: Any, **kwargs: Any) -> Any:
            seen()
            result = call(*args, **kwargs)
            seen()
            return result

        return calling

    for name in set(names) - {"open", "write"}:
        setattr(os, name, watched(getattr(os, name)))
    whole = tensors._write

    def halves(file: Any, data: memoryview) -> None:
        seen()
        whole(file, data[: len(data) // 2])
        seen()
        whole(file, data[len(data) // 2 :])

    if "write" in names:
        tensors._write = halves
    if "open" in names:
        builtins.open = watched(builtins.open)


def killed_at_call(moment: int) -> Callable[[], None]:
    """Ends this process at the `moment`-th of the calls."""
    left = [moment]

    def seen() -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return seen


# the trial


def trial(moments: int, seed: int, out: Path, show: Callable[[str], None] = print) -> int:
    """Kill that often; returns how many runs ended otherwise than the one that was left alone."""
    choose = random.Random(seed)
    plans = make_plans()
    alone = run_child(lambda say: train(out / "alone", None, say))
    expected = alone.last("done", "error")
    if not expected.startswith("done"):
        raise SystemExit(f"the run that is left alone does not end: {expected}")
    total = count_calls(out / "counted")
    show(f"left alone: {expected.split()[1]}, {alone.seconds:.2f} s for {STEPS} steps, {total} moments around system calls")
    runs = wrong = kills = 0
    for n in itertools.count():
        if kills == moments:
            break
        folder, before = out / f"run-{n}", kills
        for _ in range(min(choose.randint(1, 3), moments - kills)):
            plan = choose.choice(PLANS)
            child, how = _killed(folder, plans[plan], kills, choose, total, alone.seconds)
            if not child.killed:  # it had ended before its moment came
                break
            kills += 1
            where = child.last("step", "saving", "from")
            left = len(list((folder / "checkpoints").glob("*.tmp"))) + len(list((folder / "checkpoints").glob("*.old")))
            began = child.last("from").replace("-", "before it had begun")
            show(f"{kills:3d}  run {runs:2d}  {plan:10} {began:20} killed {how:20} in {where:10} unfinished folders {left}")
        if kills == before:
            continue
        plan = choose.choice(PLANS)
        last = run_child(lambda say, f=folder, p=plans[plan]: train(f, p, say))
        is_same = last.last("done", "error") == expected
        wrong += not is_same
        verdict = "same bits" if is_same else f"DIFFERENT: {last.last('done', 'error')}"
        show(f"     run {runs:2d}  {plan:10} {last.last('from'):20} to the end: {verdict}")
        runs += 1
    show(f"{kills} kills of {runs} runs; {runs - wrong} ended with the bits of the one that was left alone, {wrong} did not")
    return wrong


def _killed(folder: Path, plan: Any, n: int, choose: random.Random, calls: int, seconds: float) -> tuple[Child, str]:
    if n % 2:
        after = choose.uniform(0.0, seconds)
        return run_child(lambda say: train(folder, plan, say), after=after), f"after {after * 1e3:.0f} ms"
    moment = choose.randrange(calls)

    def work(say: Callable[[str], None]) -> str:
        watch_calls(killed_at_call(moment))
        return train(folder, plan, say)

    return run_child(work), f"at call {moment} of {calls}"


def count_calls(out: Path) -> int:
    """Moments at which `killed_at_call` may end a whole run."""
    count = [0]

    def seen() -> None:
        count[0] += 1

    def work(say: Callable[[str], None]) -> str:
        watch_calls(seen)
        ended = train(out, None, say)
        say(f"calls {count[0]}")
        return ended

    return int(run_child(work).last("calls").split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the runs lie; a temporary folder by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(1 if trial(options.moments, options.seed, options.out or Path(folder)) else 0)


if __name__ == "__main__":
    main()
