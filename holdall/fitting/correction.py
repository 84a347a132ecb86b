"""Makes a plan again from measured times, in another process, so that training does not wait.

`fit` has written the trace and the plan to a folder, so a request only adds a small file with the measurements. A second Python
process, which sees no GPU and runs at low priority, plans and writes its answer. A thread waits for it. If it fails, a note
says so and the run continues with its plan.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import holdall
from holdall.cost.roofline import cost_trace
from holdall.errors import HoldallError, Unsupported
from holdall.registry import build_member
from holdall.simulator import simulate
from holdall.types import Action, Hardware, Plan, Problem, Trace, _json

MOST = 2.0  # limits of the correction factor for the time of ops
_PATIENCE = 900.0  # seconds after which the answer is given up
_TRACE, _PLAN, _ASKED, _ANSWER, _SAID = "trace.json", "plan.json", "asked.json", "answer.json", "said.txt"


def corrected(
    problem: Problem, actions: tuple[Action, ...], *, seconds: float, rate: float | None, options: Mapping[str, Any]
) -> Plan:
    """The plan with the host's measured update rate, and with op times scaled by the rest of the measured step."""
    if rate is not None:
        problem = replace(problem, hardware=replace(problem.hardware, updates=rate))
    again = simulate(problem, actions)
    waits = again.stall_seconds or 0.0
    slower = (seconds - waits) / max(again.seconds - waits, 1e-9)
    slower = min(max(slower, 1 / MOST), MOST)
    ops = tuple(replace(op, seconds=op.seconds * slower) for op in problem.trace.ops)
    problem = replace(problem, trace=replace(problem.trace, ops=ops))
    made: Plan = build_member("planners", "auto", dict(options), "planner auto")(problem)
    return made


class Corrector:
    """Holds a step's trace and plan ready for a correction."""

    def __init__(self, plan: Plan, trace: Trace) -> None:
        self.plan = plan
        self._folder = tempfile.TemporaryDirectory(prefix="holdall-", ignore_cleanup_errors=True)
        trace.save(self.path / _TRACE)
        plan.save(self.path / _PLAN)

    @property
    def path(self) -> Path:
        return Path(self._folder.name)

    def ask(
        self, problem: Problem, *, seconds: float, rate: float | None, options: Mapping[str, Any], then: Callable[[Plan], Plan]
    ) -> Correction:
        """Start a correction of `problem`, whose trace is taken from the folder. `then`: applied to the new plan."""
        asked = {
            "hardware": _json.pack(problem.hardware),
            "budget": dict(problem.budget),
            "allow": sorted(problem.allow),
            "reads_gradients": problem.reads_gradients,
            "accumulate": problem.accumulate,
            "layout": problem.layout,
            "clipped": problem.clipped,
            "seconds": seconds,
            "rate": rate,
            "options": _json.pack(options),
        }
        (self.path / _ASKED).write_text(json.dumps(asked), encoding="utf-8")
        return Correction(self, then)


class Correction:
    """A plan that is being made."""

    def __init__(self, corrector: Corrector, then: Callable[[Plan], Plan]) -> None:
        self._corrector = corrector  # keeps the folder alive
        self._then = then
        self._plan: Plan | None = None
        self._error: str | None = None
        self._process = _start(corrector.path)
        self._stop = weakref.finalize(self, _end, self._process)
        self._thread = threading.Thread(target=self._wait, name="holdall-correction", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Plan | None:
        """The plan; None: nothing fits, or it was given up. `Unsupported` if the process failed."""
        self._thread.join(timeout)
        if self._error is not None:
            raise Unsupported(self._error, hint="the run continues with its plan")
        return self._then(self._plan) if self._plan is not None else None

    def close(self) -> None:
        """Give up the answer."""
        self._stop()

    def _wait(self) -> None:
        try:
            code = self._process.wait(_PATIENCE)
            if code == 0:
                answer = json.loads((self._corrector.path / _ANSWER).read_text(encoding="utf-8"))
                self._plan = Plan.from_json(answer["plan"], "the answer") if answer["plan"] is not None else None
            elif code > 0:  # below zero: it was killed
                said = (self._corrector.path / _SAID).read_text(encoding="utf-8", errors="replace").strip().splitlines()
                self._error = f"the plan could not be corrected ({said[-1] if said else f'exit code {code}'})"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._error = "the plan could not be corrected (it took too long)"
        except (OSError, ValueError, KeyError, HoldallError) as error:
            self._error = f"the plan could not be corrected ({error})"


def _start(folder: Path) -> subprocess.Popen[bytes]:
    root = str(Path(holdall.__file__).parent.parent)
    others = os.environ.get("PYTHONPATH")
    env = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([root, others] if others else [root]),
        "HOLDALL_CACHE": "off",  # a plan made from one run's measurements is useless to others
    }
    command = [sys.executable, "-m", "holdall.fitting.correction", str(folder), str(os.getpid())]
    try:
        with open(folder / _SAID, "wb") as said:
            return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    except OSError as error:
        raise Unsupported(f"no second process could be started ({error})", hint="the run continues with its plan") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()


def main(folder: Path, parent: int) -> None:
    """The second process: plan, and write the answer."""
    with suppress(OSError, AttributeError):
        os.nice(19)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    gc.disable()
    asked = json.loads((folder / _ASKED).read_text(encoding="utf-8"))
    hardware: Hardware = _json.unpack(Hardware, asked["hardware"], _ASKED)
    problem = Problem(
        trace=cost_trace(Trace.load(folder / _TRACE), hardware),
        hardware=hardware,
        budget=asked["budget"],
        allow=frozenset(asked["allow"]),
        reads_gradients=asked["reads_gradients"],
        accumulate=asked["accumulate"],
        layout=asked["layout"],
        clipped=asked["clipped"],
    )
    actions = Plan.load(folder / _PLAN).actions
    try:
        made = corrected(problem, actions, seconds=asked["seconds"], rate=asked["rate"], options=asked["options"])
        answer: Any = {"plan": made.to_json()}
    except HoldallError as error:  # nothing fits
        answer = {"plan": None, "why": str(error)}
    _json.write(folder / _ANSWER, answer)


def _leave_with(parent: int) -> None:
    """Exit when the parent process is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
