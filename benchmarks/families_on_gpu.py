"""Mid-size shapes of many families through `holdall.fit` with default options, beside plain training and checkpointing.

python benchmarks/families_on_gpu.py [--only llama-3.2-3b,t5-large] [--recipes bf16,autocast]
                                     [--budgets half,checkpointed,tight] [--out DIR] [--minutes 9] [--smoke] [--untimed 6]

Recipes: `bf16`, the model on the CPU and `fit(..., precision="bf16")`, against bf16 working copies and fp32 masters on the GPU
without a budget; `autocast`, the fp32 model on the GPU with `torch.autocast` around the forward, against the same without
`fit`. Budgets: `half` of the peak that the driver saw in plain training, `checkpointed`, what it saw with gradient
checkpointing, and a `tight` one (a share that the shape names; if that is refused, a hair above the least that the refusal
names). One batch is learnt by heart over 12 steps, so that a weight that is old or wrong shows in the next loss. Losses
may differ from plain's by 5 % of the loss plus 1 % of the first one, the norm of the first gradient by 0.5 %: a wrong gradient
shows there before it shows in a loss.

Every row is a process of its own with a time limit, and goes to DIR/families_on_gpu.csv at once; rows that are there are not
run again, so a second call goes on. Peaks are what the driver saw, polled by the parent, less what was in use before.
`--smoke`: tiny twins on the CPU, the same code; `peak` is then what `holdall` measured.
`--untimed N`: N rows side by side, each where the GPU and the host have room for it. Losses and peaks count, seconds do not
and are left out; peaks are then what the allocator of the process reserved (plus, for ours, what `holdall` counts outside).
"""

from __future__ import annotations

import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the parent must not start CUDA: its children are forked

import argparse
import contextlib
import csv
import gc
import json
import math
import random
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # a bare checkout is enough

from families_shapes import SHAPES, Shape

import holdall

STEPS = 12
FIRST_NORM = 0.005  # a share
RECIPES = ("bf16", "autocast")
BUDGETS = ("half", "checkpointed", "tight")
NOT_BY_DEFAULT = ("llama-3.1-8b",)
FIELDS = (
    "shape", "recipe", "method", "result", "parameters", "max_norm", "budget_gib", "predicted_gib", "peak_gib",
    "reserved_gib", "host_gib", "predicted_s", "predicted_at_fit_s", "step_s", "step_error", "longest_after_third",
    "of_plain", "of_checkpointing", "checkpointing_gib", "losses_differ_by", "first_norm_off", "fit_s", "first_step_s",
    "refused_gib", "row_s", "actions", "losses", "norms", "steps", "notes", "message", "hardware", "torch", "transformers",
    "commit",
)  # fmt: skip
GIB = 2**30


# -- one row, in a process of its own ----------------------------------------------------------------------------------------


class Cell:
    """What a row needs: the shape on a device, seeded, and a way to tell the parent where it is."""

    def __init__(self, asked: dict[str, Any], tell: Callable[[str], None]) -> None:
        self.shape: Shape = SHAPES[asked["shape"]]
        self.recipe, self.smoke, self.tell = asked["recipe"], bool(asked["smoke"]), tell
        self.untimed = bool(asked.get("untimed"))
        self.rows, self.tokens = asked.get("rows"), asked.get("tokens")  # of the shape's batch; None: all
        self.norm = asked.get("norm") or self.shape.norm  # to which gradients are clipped
        self.device = "cpu" if self.smoke else "cuda"

    def build(self) -> tuple[torch.nn.Module, dict[str, Any]]:
        seed(0)
        with torch.device(self.device):
            model = self.shape.build(self.smoke).train().to(self.device)  # `torch.Tensor(n)` in a model ignores the device
            batch = self.shape.batch(self.smoke, getattr(model, "config", None))
        if self.rows or self.tokens:
            batch = {name: t[: self.rows, : self.tokens].contiguous() for name, t in batch.items()}
        return model, batch

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.shape.rate, fused=True)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        is_on = self.recipe == "autocast"
        return torch.autocast(self.device, torch.bfloat16) if is_on else contextlib.nullcontext()


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    import numpy as np

    np.random.seed(number)


def loss_of(output: Any) -> torch.Tensor:
    return output.loss if hasattr(output, "loss") else output


def reference(cell: Cell, *, method: str, steps: int) -> dict[str, Any]:
    """The recipe without a budget. `bf16`: working copies in bf16, masters, gradients and states in fp32.

    `method`: "plain", "checkpointing", or "save_on_cpu" (torch's own: every saved tensor waits in pinned host memory).
    """
    model, batch = cell.build()
    if method == "checkpointing":
        enable_checkpointing(model, cell.shape.block)
    parameters = list(model.parameters())
    masters: list[torch.Tensor] = parameters  # type: ignore[assignment]
    if cell.recipe == "bf16":
        masters = [p.detach().clone() for p in parameters]
        norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
        wide = {id(p) for norm in norms for p in norm.parameters()}  # as wide as the statistics, or kernels refuse them
        for parameter in parameters:  # one by one: buffers (rotary frequencies, statistics) keep their width
            if id(parameter) not in wide:
                parameter.data = parameter.data.to(torch.bfloat16)
        batch = {k: v.bfloat16() if is_floating(v) else v for k, v in batch.items()}
    optimizer = cell.optimizer(masters)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        saving = torch.autograd.graph.save_on_cpu(pin_memory=True) if method == "save_on_cpu" else contextlib.nullcontext()
        with cell.autocast(), saving:
            loss = loss_of(model(**batch))
        loss.backward()
        if masters is not parameters:
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(masters, cell.norm)
        optimizer.step()
        optimizer.zero_grad()
        if masters is not parameters:
            with torch.no_grad():
                for master, parameter in zip(masters, parameters, strict=True):
                    parameter.copy_(master)
        return loss.detach(), norm

    cell.tell(method)
    return {"result": "ran", **timed(cell, step, steps)}


def is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def enable_checkpointing(model: torch.nn.Module, block: str) -> None:
    """Hugging Face's own switch, or `torch.utils.checkpoint` around each module of the class `block`."""
    if not block:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        return
    from torch.utils.checkpoint import checkpoint

    for module in model.modules():
        if type(module).__name__ == block:
            module.forward = _checkpointed(module.forward, checkpoint)  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., Any], checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def ours(cell: Cell, budget: int, *, steps: int = STEPS, **kwargs: Any) -> dict[str, Any]:
    """`fit` with default options (`kwargs`: or with others), and the user's own loop."""
    model, batch = cell.build()
    if cell.recipe == "bf16":
        kwargs["precision"] = "bf16"
        model.cpu()
        empty(cell)
    optimizer = cell.optimizer(model.parameters())
    refused = None
    began = time.perf_counter()
    try:
        harness = holdall.fit(model, optimizer, batch, budget=budget, **kwargs)
    except holdall.Infeasible as error:
        if error.smallest is None or error.smallest > 4 * budget:
            return {"result": "refused", "message": one_line(error), "refused_gib": budget / GIB}
        refused, budget = budget, int(error.smallest * 1.02)
        began = time.perf_counter()
        harness = holdall.fit(model, optimizer, batch, budget=budget, **kwargs)
    row: dict[str, Any] = {"fit_s": time.perf_counter() - began, "budget_gib": budget / GIB}
    row["refused_gib"] = None if refused is None else refused / GIB
    row["predicted_at_fit_s"] = harness.plan.predicted.seconds
    empty(cell)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        with cell.autocast():
            loss = loss_of(model(**batch))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cell.norm)
        optimizer.step()
        optimizer.zero_grad()
        if "predicted_s" not in row:  # what is in force after the first step: autocast may have had it traced anew
            row["predicted_s"] = harness.expected.seconds
        return loss.detach(), norm

    cell.tell("ours")
    row |= timed(cell, step, steps)
    cell.tell("over")
    predicted, measured = harness.plan.predicted, harness.measured()
    home = next(iter(predicted.peak))
    row |= {"predicted_gib": predicted.peak[home] / GIB, "actions": actions_of(harness.plan)}
    if cell.smoke or cell.untimed:
        row["peak_gib"] = measured.peak[home] / GIB if measured else None
    row["notes"] = " | ".join(one_line(n) for n in harness.notes)[:600]
    harness.close()
    return {"result": "ran", **row}


def actions_of(plan: Any) -> str:
    return " ".join(f"{n}x{k}" for k, n in sorted(plan.count().items())) or "none"


def empty(cell: Cell) -> None:
    gc.collect()
    if cell.device == "cuda":
        torch.cuda.empty_cache()


def one_line(said: object) -> str:
    return " ".join(str(said).split())


def timed(cell: Cell, step: Callable[[], tuple[torch.Tensor, torch.Tensor]], steps: int) -> dict[str, Any]:
    """`steps` steps, each waited for: losses, norms, the median after the third step, the longest of those over it."""
    import psutil

    seed(1)
    if cell.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, losses, norms = [], [], []
    for _ in range(steps):
        cell.wait()
        began = time.perf_counter()
        loss, norm = step()
        cell.wait()
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss))
        norms.append(float(norm))
    later = seconds[3:] or seconds
    median = statistics.median(later)
    row = {
        "first_step_s": seconds[0],
        "step_s": median,
        "longest_after_third": max(later) / median,
        "losses": losses,
        "norms": norms,
        "steps": [round(s, 4) for s in seconds],
        "host_gib": psutil.Process().memory_info().rss / GIB,
    }
    if cell.device == "cuda":
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return row


def child(asked: dict[str, Any], tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows of one process: both references, or one budget of ours."""
    cell = Cell(asked, tell)
    head = {"shape": cell.shape.name, "recipe": cell.recipe, "max_norm": cell.norm}
    if asked["what"] == "save_on_cpu":
        made = guarded(lambda: reference(cell, method="save_on_cpu", steps=asked.get("steps", STEPS)))
        return [{**head, "method": "save_on_cpu", **made}]
    if asked["what"] != "reference":
        options = {"steps": asked.get("steps", STEPS), **asked.get("fit", {})}
        return [{**head, "method": asked["what"], **guarded(lambda: ours(cell, asked["budget"], **options))}]
    if not cell.smoke:
        with contextlib.suppress(Exception):
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    parameters = size_of(cell.shape.name, cell.smoke)
    rows = []
    for method, steps in (("plain", asked.get("steps", STEPS)), ("checkpointing", 2 if cell.untimed else 6)):
        made = guarded(lambda m=method, n=steps: reference(cell, method=m, steps=n))  # type: ignore[misc]
        rows.append({**head, "method": method, "parameters": parameters, **made})
        cell.tell("over")
        empty(cell)
    if cell.smoke:
        for row in rows:
            row["peak_gib"] = predicted_peak(cell) / GIB
    return rows


def guarded(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return run()
    except torch.cuda.OutOfMemoryError as error:
        return {"result": "out of memory", "message": one_line(error)[:300]}
    except Exception as error:
        traceback.print_exc()
        where = " ".join(f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-4:])
        return {"result": "failed", "message": f"{type(error).__name__}: {one_line(error)[:300]} at {where}"}


def predicted_peak(cell: Cell) -> int:
    """For the smoke mode, where no driver tells."""
    model, batch = cell.build()
    trace = holdall.trace(model, batch, optimizer=cell.optimizer(model.parameters()))
    return int(next(iter(holdall.plan(trace, planner="nop").predicted.peak.values())))


# -- the parent ------------------------------------------------------------------------------------------------------------


class Driver:
    """What the driver says is in use on the first GPU."""

    def __init__(self, smoke: bool) -> None:
        self.handle = None
        if not smoke:
            import pynvml

            pynvml.nvmlInit()
            self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)

    def used(self) -> int:
        return int(self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used) if self.handle is not None else 0

    def name(self) -> str:
        if self.handle is None:
            import platform

            return platform.processor() or platform.machine()
        name = self.nvml.nvmlDeviceGetName(self.handle)
        return name.decode() if isinstance(name, bytes) else str(name)


STARTING = threading.Lock()  # a process that another thread starts must not inherit this one's pipe


def run_child(asked: dict[str, Any], *, driver: Driver, log: Path, limit: float, forks: bool) -> list[dict[str, Any]]:
    """Start a process for `asked`, poll the driver while it trains, and return its rows (or why there are none)."""
    began, idle = time.monotonic(), driver.used()
    with STARTING:
        reading, writing = os.pipe()
        if forks:
            process = os.fork()
            if process == 0:
                os.close(reading)
                in_child(asked, writing, log)
        else:
            os.set_inheritable(writing, True)
            command = [sys.executable, __file__, "--child", json.dumps(asked), str(writing), str(log)]
            started = subprocess.Popen(command, pass_fds=(writing,))
            process = started.pid
        os.close(writing)
    peaks: dict[str, int] = {}
    now, text, rows, why = "", "", [], ""
    while True:
        is_there, _, _ = select.select([reading], [], [], 0.01)
        if now and not asked["untimed"]:  # the driver sees the others too
            peaks[now] = max(peaks.get(now, 0), driver.used() - idle)
        if is_there:
            piece = os.read(reading, 1 << 16).decode()
            text += piece
            *lines, text = text.split("\n")
            for line in lines:
                kind, _, value = line.partition(" ")
                if kind == "now":
                    now = "" if value == "over" else value
                elif kind == "rows":
                    rows = json.loads(value)
            if not piece:
                break
        if time.monotonic() - began > limit:
            why = f"took longer than {limit:.0f} s"
            os.kill(process, signal.SIGKILL)
            break
    os.close(reading)
    _, status = os.waitpid(process, 0)
    if not rows:
        tail = one_line(log.read_text(errors="replace")[-400:]) if log.exists() else ""
        methods = ("plain", "checkpointing") if asked["what"] == "reference" else (asked["what"],)
        message = why or f"the process ended with status {status}: {tail}"
        rows = [
            {"shape": asked["shape"], "recipe": asked["recipe"], "method": m, "result": "failed", "message": message}
            for m in methods
        ]
    for row in rows:
        seen = peaks.get(row["method"] if asked["what"] in ("reference", "save_on_cpu") else "ours")
        row["row_s"] = time.monotonic() - began
        if asked["untimed"]:
            row.setdefault("peak_gib", row.get("reserved_gib"))
        elif seen:
            row["peak_gib"] = seen / GIB
    return rows


class Room:
    """What rows side by side may take: each waits until the GPU and the host have room for what it may need."""

    def __init__(self, gpu: float = 132.0, host: float = 105.0) -> None:
        self.free = [gpu, host]  # GiB
        self.free_at_most = [gpu, host]
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, gpu: float, host: float) -> Iterator[None]:
        need = [min(gpu, self.free_at_most[0]), min(host, self.free_at_most[1])]
        with self.changed:
            self.changed.wait_for(lambda: all(f >= n for f, n in zip(self.free, need, strict=True)))
            self.free = [f - n for f, n in zip(self.free, need, strict=True)]
        try:
            yield
        finally:
            with self.changed:
                self.free = [f + n for f, n in zip(self.free, need, strict=True)]
                self.changed.notify_all()


SECONDS = ("predicted_s", "predicted_at_fit_s", "step_s", "longest_after_third", "fit_s", "first_step_s", "row_s", "steps")


def without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k not in SECONDS}


def in_child(asked: dict[str, Any], writing: int, log: Path) -> None:
    """Never returns."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)

    def tell(what: str) -> None:
        os.write(writing, f"now {what}\n".encode())

    code = 0
    try:
        import transformers

        transformers.logging.set_verbosity_error()
        if asked["smoke"]:
            torch.set_num_threads(1)
        rows = child(asked, tell)
        data = ("rows " + json.dumps(rows) + "\n").encode()
        while data:
            data = data[os.write(writing, data) :]
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def can_fork(smoke: bool) -> bool:
    """Whether CUDA starts in a forked child; it does not where something started the driver here."""
    process = os.fork()
    if process == 0:
        code = 1
        with contextlib.suppress(BaseException):
            torch.zeros(1, device="cpu" if smoke else "cuda")
            code = 0 if smoke or torch.cuda.is_available() else 1
        os._exit(code)
    return os.waitpid(process, 0)[1] == 0


def warm_imports(names: list[str]) -> None:
    """Import what the children need, once; nothing is computed here."""
    with torch.device("meta"):
        for name in names:
            with contextlib.suppress(Exception):
                SHAPES[name].build(True)


def jobs(names: list[str], recipes: list[str], budgets: list[str]) -> Iterator[tuple[str, str, str]]:
    """(shape, recipe, what), widest coverage first: every shape once, then with the other recipe, then tighter."""
    for budget in budgets:
        for turn in range(len(recipes)):
            for i, name in enumerate(names):
                recipe = recipes[(i + turn) % len(recipes)]
                yield name, recipe, "reference"
                yield name, recipe, budget


def differ(got: list[float], expected: list[float]) -> float:
    """The largest difference as a share of what is allowed: at most 1 is fine."""
    allowed = [0.05 * abs(e) + 0.01 * abs(expected[0]) for e in expected]
    worst = [abs(g - e) / a if math.isfinite(g) else math.inf for g, e, a in zip(got, expected, allowed, strict=False)]
    return max(worst)


def compare(row: dict[str, Any], plain: dict[str, Any] | None, checkpointed: dict[str, Any] | None) -> None:
    """Put plain's figures and checkpointing's beside a row of ours, and judge it."""
    if row["result"] != "ran":
        return
    if plain and plain.get("result") == "ran":
        row["losses_differ_by"] = differ(row["losses"], plain["losses"])
        row["first_norm_off"] = row["norms"][0] / plain["norms"][0] - 1
        if row.get("step_s") and plain.get("step_s"):
            row["of_plain"] = plain["step_s"] / row["step_s"]
    if checkpointed and checkpointed.get("result") == "ran":
        row["checkpointing_gib"] = checkpointed.get("peak_gib")
        if row.get("step_s") and checkpointed.get("step_s"):
            row["of_checkpointing"] = checkpointed["step_s"] / row["step_s"]
    if row.get("predicted_s"):
        row["step_error"] = row["predicted_s"] / row["step_s"] - 1
    if row.get("losses_differ_by", 0) > 1:
        row["result"] = "losses differ"
    elif abs(row.get("first_norm_off", 0)) > FIRST_NORM:
        row["result"] = "gradients differ"
    elif row.get("peak_gib") and row["peak_gib"] > row["budget_gib"]:
        row["result"] = "over budget"


def budget_for(what: str, name: str, known: list[dict[str, Any]], plain: dict[str, Any] | None, *, smoke: bool) -> int:
    """Bytes. `known`: plain training and checkpointing, those of them that ran."""
    if what == "checkpointed" and not smoke:
        return int(known[-1]["peak_gib"] * GIB)
    share = 0.5 if what == "half" else max(SHAPES[name].tight, 0.4 if smoke else 0.0)
    whole = known[0]["peak_gib"] if known[0] is plain else 2 * known[0]["peak_gib"]
    return int((0.7 if smoke and what != "tight" else share) * whole * GIB)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of shapes, separated by commas")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--minutes", type=float, default=9.0, help="no row is begun after so many")
    parser.add_argument("--row-seconds", type=float, default=100.0)
    parser.add_argument("--smoke", action="store_true", help="tiny twins on the CPU")
    parser.add_argument("--untimed", type=int, default=0, metavar="N", help="N rows side by side, without their seconds")
    parser.add_argument("--spawn", action="store_true", help="start processes anew instead of forking")
    options = parser.parse_args()
    began = time.monotonic()
    names = options.only.split(",") if options.only else [n for n in SHAPES if n not in NOT_BY_DEFAULT]
    unknown = [n for n in names if n not in SHAPES]
    if unknown:
        raise SystemExit(f"unknown shape `{unknown[0]}`\nhint: known: {', '.join(SHAPES)}")
    folder = Path(options.out)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    file = "families_smoke.csv" if options.smoke else "families_untimed.csv" if options.untimed else "families_on_gpu.csv"
    table = Table(folder / file, options.smoke)
    warm_imports(names)
    forks = not options.spawn and can_fork(options.smoke)
    print(f"{'forked' if forks else 'new'} processes; imports took {time.monotonic() - began:.0f} s", flush=True)
    run = Run(options, table, forks, began)
    todo = list(jobs(names, options.recipes.split(","), options.budgets.split(",")))
    if options.untimed:
        run.side_by_side(todo)
    elif not all(run.row(*job) for job in todo):
        print("no time is left; a second call goes on from here")
    table.summary()
    print(f"{time.monotonic() - began:.0f} s in all")


class Run:
    """Fills a table, row after row or several side by side, until the time is up."""

    def __init__(self, options: argparse.Namespace, table: Table, forks: bool, began: float) -> None:
        self.options, self.table, self.forks, self.began = options, table, forks, began
        self.room = Room()

    def side_by_side(self, todo: list[tuple[str, str, str]]) -> None:
        """One thread takes all rows of a shape and recipe, since they need its reference; the largest models come first."""
        of: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
        for name, recipe, what in dict.fromkeys(todo):
            of.setdefault((name, recipe), []).append((name, recipe, what))
        waiting = sorted(of.values(), key=lambda rows: -size_of(rows[0][0], self.options.smoke))

        def work() -> None:
            with contextlib.suppress(IndexError):
                while True:
                    rows = waiting.pop(0)
                    if not all(self.row(*job) for job in rows):
                        return

        threads = [threading.Thread(target=work) for _ in range(self.options.untimed)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def row(self, name: str, recipe: str, what: str) -> bool:
        """Add the rows of one process to the table; False if there is no time for it."""
        options, table = self.options, self.table
        if table.has(name, recipe, "plain" if what == "reference" else what):
            return True
        asked: dict[str, Any] = {"shape": name, "recipe": recipe, "what": what, "smoke": options.smoke}
        asked["untimed"] = bool(options.untimed)
        plain, checkpointed = table.get(name, recipe, "plain"), table.get(name, recipe, "checkpointing")
        if what != "reference":
            known = [r for r in (plain, checkpointed) if r and r.get("peak_gib")]
            if not known:
                table.add({"shape": name, "recipe": recipe, "method": what, "result": "no reference"})
                return True
            asked["budget"] = budget_for(what, name, known, plain, smoke=options.smoke)
        log = self.table.path.parent / "logs" / f"{name}-{recipe}-{what}.log"
        with self.room.taken(*self.needs(asked)) if options.untimed else contextlib.nullcontext():
            left = options.minutes * 60 - (time.monotonic() - self.began)
            if left < 5:
                return False
            limit = min(options.row_seconds, left)
            made = run_child(asked, driver=table.driver, log=log, limit=limit, forks=self.forks)
        for row in [without_seconds(r) for r in made] if options.untimed else made:
            if what != "reference":
                row.setdefault("budget_gib", asked["budget"] / GIB)
                row["parameters"] = (plain or {}).get("parameters")
                compare(row, plain, checkpointed)
            if limit < options.row_seconds and "took longer" in row.get("message", ""):
                continue  # cut short by the end of the call, not by itself
            table.add(row)
        return True

    def needs(self, asked: dict[str, Any]) -> tuple[float, float]:
        """GiB on the GPU and on the host, roughly: 16 bytes a parameter of a model that is trained from the host."""
        parameters = 16 * size_of(asked["shape"], asked["smoke"]) / GIB
        if asked["what"] == "reference":
            return max(40.0, 2.4 * parameters), 3.0
        return asked["budget"] / GIB + 1, 3 + parameters


@cache
def size_of(name: str, smoke: bool) -> int:
    """The number of parameters."""
    with torch.device("meta"):
        return sum(p.numel() for p in SHAPES[name].build(smoke).parameters())


class Table:
    """The rows so far, in a CSV that grows row by row."""

    def __init__(self, path: Path, smoke: bool) -> None:
        import transformers

        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        self.driver = Driver(smoke)
        self.about = {"hardware": self.driver.name(), "torch": torch.__version__, "transformers": transformers.__version__}
        self.about["commit"] = os.environ.get("HOLDALL_COMMIT") or git.stdout.strip()  # a copy of the tree may have no history
        self.path, self.rows = path, []  # type: ignore[var-annotated]
        if path.exists():
            with path.open(newline="") as file:
                self.rows = [read_row(row) for row in csv.DictReader(file)]
        else:
            with path.open("w", newline="") as file:
                csv.DictWriter(file, FIELDS).writeheader()

    def get(self, shape: str, recipe: str, method: str) -> dict[str, Any] | None:
        found = [r for r in self.rows if (r["shape"], r["recipe"], r["method"]) == (shape, recipe, method)]
        return found[-1] if found else None

    def has(self, shape: str, recipe: str, method: str) -> bool:
        return self.get(shape, recipe, method) is not None

    def add(self, row: dict[str, Any]) -> None:
        row = {**row, **self.about}
        self.rows.append(row)
        with self.path.open("a", newline="") as file:
            shown = {k: json.dumps(rounded(v)) if isinstance(v, list) else rounded(v) for k, v in row.items() if k in FIELDS}
            csv.DictWriter(file, FIELDS).writerow(shown)
        print(line_of(row), flush=True)

    def summary(self) -> None:
        mine = [r for r in self.rows if r["method"] in BUDGETS]
        ran = [r for r in mine if r["result"] == "ran"]
        kinds = {k: sum(r["result"] == k for r in mine) for k in dict.fromkeys(r["result"] for r in mine)}
        print(f"\n{len(mine)} rows of ours: {', '.join(f'{n} {k}' for k, n in kinds.items())}")
        errors = [abs(r["step_error"]) for r in ran if r.get("step_error") is not None]
        if errors:
            print(f"predicted step: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")
        slower = [r for r in ran if slower_than_checkpointing(r)]
        print(f"slower than checkpointing in the memory that it needs: {', '.join(map(name_of, slower)) or 'none'}")
        stalled = [r for r in ran if r.get("longest_after_third", 0) > 2]
        print(f"a step of more than twice the median after the third: {', '.join(map(name_of, stalled)) or 'none'}")


def slower_than_checkpointing(row: dict[str, Any]) -> bool:
    is_enough = row.get("checkpointing_gib") is not None and row["budget_gib"] > 0.999 * row["checkpointing_gib"]
    return bool(is_enough and row.get("of_checkpointing", 1) < 1)


def name_of(row: dict[str, Any]) -> str:
    return f"{row['shape']}/{row['recipe']}/{row['method']}"


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_row(row: dict[str, str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in row.items():
        if value == "" or key in ("message", "notes", "commit", "torch", "transformers", "hardware", "actions"):
            out[key] = value or None
            continue
        try:
            out[key] = json.loads(value)
        except json.JSONDecodeError:
            out[key] = value
    return {k: v for k, v in out.items() if v is not None}


def line_of(row: dict[str, Any]) -> str:
    def show(key: str, form: str) -> str:
        return format(row[key], form) if row.get(key) is not None else "--"

    start = f"{row['shape']:>15} {row['recipe']:>8} {row['method']:>13}"
    if row["result"] in ("failed", "refused", "out of memory", "no reference"):
        return f"{start}  {row['result'].upper()}: {row.get('message', '')[:260]}"
    peaks = f"{show('budget_gib', '.2f')} GiB said {show('predicted_gib', '.2f')} seen {show('peak_gib', '.2f')}"
    times = f"said {show('predicted_s', '.3f')} took {show('step_s', '.3f')} s (longest x{show('longest_after_third', '.1f')})"
    ratios = f"of plain {show('of_plain', '.2f')}, of checkpointing {show('of_checkpointing', '.2f')}"
    waits = f"fit {show('fit_s', '.1f')} s, first {show('first_step_s', '.1f')} s, row {show('row_s', '.0f')} s"
    losses = " ".join(f"{x:.3g}" for x in row.get("losses", [])[::3])
    kind = "" if row["result"] == "ran" else row["result"].upper() + " "
    apart = f"losses {losses} ({show('losses_differ_by', '.2f')} of the tolerance)"
    return f"{start}  {kind}{peaks}; {times}; {ratios}; {waits}; {apart}"


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--child":
        in_child(json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    main()
