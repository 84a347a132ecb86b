"""Small changes to the code that some test should notice: which ones none does.

python benchmarks/mutants.py [--files planners/,simulator/] [--count 40] [--seed 0] [--minutes 15] [--jobs 1] [--out FILE]

Each mutant is one change to one file: a comparison turned round, + for - and * for /, a constant changed, `min` for `max`,
`and` for `or`, a call dropped, a function that returns early. It is written into a copy of the tree, and the tests that cover
the file (TESTS) are run there until the first one fails. A mutant that no test fails for has survived: it is a line of the
table, to be killed by a test or to be explained (most often it changes no answer). One that takes longer than `--timeout`
is neither killed nor alive: it may be endless, or the machine busy; nor is one whose failing test fails without it, too. Each
run is a fork of this process, which has imported torch and nothing of the package; `--jobs` of them run at once, each in a copy
of the tree. Survivors are written as they are found.
"""

from __future__ import annotations

import argparse
import ast
import csv
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]

ON_A_GPU = ("holdall/optim/_math/kernels.py",)  # Triton's kernels: no test of a CPU can notice a change
TESTS = {  # a part of the tree -> the tests that cover it; the longest prefix counts
    "planners/rotor/table.py": [  # Rockmate takes its menus
        "tests/papers/test_kept_plans.py::test_plans_are_those_that_were_kept[rockmate]",
        "tests/papers/test_rotor.py",
        "tests/papers/test_rockmate.py",
    ],
    "planners/rotor/__init__.py": ["tests/papers/test_rotor.py"],
    "planners/checkmate/": ["tests/papers/test_checkmate.py", "tests/unit/test_recompute_family.py"],
    "planners/moccasin/": ["tests/papers/test_moccasin.py", "tests/unit/test_recompute_family.py"],
    "planners/auto/": [
        "tests/unit/test_planning.py",
        "tests/unit/test_fewer_simulations.py",
        "tests/unit/test_lending.py",
        "tests/unit/test_dropped_candidates.py",
        "tests/unit/test_short_host.py",
        "tests/unit/test_third_tier.py",
        "tests/unit/test_auto_against_simple.py",
        "tests/unit/test_auto_on_gpu.py",
    ],
    "optim/_math/": ["tests/papers/test_adafactor.py", "tests/papers/test_muon.py", "tests/papers/test_galore.py"],
    "optim/_math/adam8bit_fused.py": ["tests/papers/test_adam8bit.py"],
    "optim/_math/factored.py": ["tests/papers/test_adafactor.py", "tests/papers/test_came.py"],
    "optim/_math/moments.py": ["tests/papers/test_adam8bit.py", "tests/papers/test_galore.py"],
    "optim/_math/perturbed.py": ["tests/papers/test_mezo.py"],
    "optim/_math/projection.py": ["tests/papers/test_flora.py", "tests/papers/test_galore.py", "tests/papers/test_apollo.py"],
    "optim/_math/quantise.py": ["tests/papers/test_adam8bit.py"],
    "optim/_math/rng.py": ["tests/papers/test_mezo.py", "tests/papers/test_deepzero.py"],
    "optim/_math/zeroth_order.py": ["tests/papers/test_deepzero.py"],
    "optim/_in_backward/": [
        "tests/papers/test_lomo.py",
        "tests/unit/test_in_backward.py",
        "tests/unit/test_in_backward_clipping.py",
    ],
    "simulator/": ["tests/unit/test_simulator.py", "tests/unit/test_allocators.py", "tests/unit/test_reserved.py"],
    "simulator/clock.py": [
        "tests/unit/test_simulator.py",
        "tests/unit/test_launching.py",
        "tests/unit/test_cost.py",
        "tests/unit/test_order_of_copies.py",
        "tests/unit/test_third_tier.py",
    ],
    "simulator/lifetimes.py": ["tests/unit/test_lifetimes.py"],
    "simulator/lower.py": ["tests/unit/test_simulator.py", "tests/unit/test_order_of_copies.py", "tests/papers/test_pofo.py"],
    "simulator/curve.py": ["tests/unit/test_simulator.py", "tests/papers/test_chen.py", "tests/papers/test_pofo.py"],
    "simulator/pages.py": ["tests/unit/test_moving_pages.py", "tests/unit/test_pages.py", "tests/unit/test_reserved.py"],
}
KEPT = "tests/papers/test_kept_plans.py::test_plans_are_those_that_were_kept"  # of one planner
OPTIONS = "tests/papers/test_planner_options.py::test_options_are_accepted_to_their_limits_and_refused_beyond"
DEFAULTS = {"optim/": "optimizer", "planners/": "planner"}
_FLIPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_SWAPS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}


class Mutant(NamedTuple):
    path: str
    line: int
    change: str
    node: int  # place in a walk of the file's tree
    nth: int  # change of that node

    @property
    def source(self) -> str:
        tree = ast.parse((ROOT / self.path).read_text(encoding="utf-8"))
        node = next(islice(ast.walk(tree), self.node, None))
        list(_changes(node))[self.nth][1]()
        return ast.unparse(ast.fix_missing_locations(tree))


def mutants_of(path: Path) -> list[Mutant]:
    """Every change of a file that the operators make."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    where = str(path.relative_to(ROOT))
    return [
        Mutant(where, getattr(node, "lineno", 0), text, n, nth)
        for n, node in enumerate(ast.walk(tree))
        for nth, (text, _) in enumerate(_changes(node))
    ]


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[], object]]]:
    """(what would be changed, a function that changes it) for one node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _FLIPS:
        yield f"{_short(node)}: turned round", lambda: node.ops.__setitem__(0, _FLIPS[type(node.ops[0])]())
    elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPS and not _is_text(node):
        yield f"{_short(node)}: another operator", lambda: setattr(node, "op", _SWAPS[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"{_short(node)}: and for or", lambda: setattr(node, "op", other)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield f"{node.value}: one more", lambda: setattr(node, "value", node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        other_name = "max" if node.func.id == "min" else "min"
        yield f"{_short(node)}: {other_name}", lambda: setattr(node.func, "id", other_name)
    elif isinstance(node, ast.FunctionDef):
        calls = [n for n, s in enumerate(node.body) if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
        for n in calls:
            yield f"{_short(node.body[n])}: dropped", lambda n=n: node.body.__setitem__(n, ast.Pass())
        if node.returns is not None and ast.unparse(node.returns) == "None":
            yield f"{node.name}: returns at once", lambda: setattr(node, "body", [ast.Return(value=None)])


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(n, ast.JoinedStr | ast.Constant) and not _is_number(n) for n in (node.left, node.right))


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _text(test: str) -> str:
    return (ROOT / test.split("::", maxsplit=1)[0]).read_text(encoding="utf-8")


def tests_of(path: str) -> list[str] | None:
    """The tests that cover a file of the package: those of the table, else those named like the member."""
    inside = path.removeprefix("holdall/")
    best = max((prefix for prefix in TESTS if inside.startswith(prefix)), key=len, default=None)
    general = [f"tests/papers/test_{DEFAULTS[folder]}_defaults.py" for folder in DEFAULTS if inside.startswith(folder)]
    member = Path(inside).parts[1].removesuffix(".py")
    if inside.startswith("planners/"):
        general += [f"{KEPT}[{member}]", *([f"{OPTIONS}[{member}]"] if f'"{member}": ' in _text(OPTIONS) else [])]
    if inside.startswith("simulator/"):
        general.append("tests/unit/test_kept_outcomes.py")
    if best is not None:
        return [*general, *TESTS[best]]
    named = f"tests/papers/test_{member}.py"
    return [*general, named] if (ROOT / named).exists() else general or None


class Trial:
    """Tests under way in a fork, in its own group of processes, which are ended with it."""

    def __init__(self, tests: list[str], folder: Path, timeout: float, mutant: Mutant | None = None) -> None:
        self.folder, self.mutant, self.began = folder, mutant, time.monotonic()
        self.until = self.began + timeout
        self._failure = folder / "failed"
        self._failure.unlink(missing_ok=True)
        if mutant is not None:
            target = folder / mutant.path
            self.before = target.read_text(encoding="utf-8")
            target.write_text(mutant.source, encoding="utf-8")
        self.child = os.fork()
        if self.child == 0:
            os.setpgid(0, 0)
            _run_tests(tests, folder, self._failure)

    def ended(self) -> bool:
        """Whether it is over; then `passed` says whether all tests pass, None: they take too long."""
        ended, status = os.waitpid(self.child, os.WNOHANG)
        if not ended and time.monotonic() < self.until:
            return False
        self.passed = os.waitstatus_to_exitcode(status) == 0 if ended else None
        if not ended:
            os.killpg(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
        if self.mutant is not None:
            (self.folder / self.mutant.path).write_text(self.before, encoding="utf-8")
        return True

    @property
    def failed(self) -> list[str]:
        """The test that failed first, or the file that could not be collected, as arguments for pytest."""
        if not self._failure.exists():
            return []
        name = self._failure.read_text(encoding="utf-8").splitlines()[0]
        return [name] if "::" in name else [name, "--collect-only"]


def passes(tests: list[str], folder: Path, timeout: float) -> bool | None:
    trial = Trial(tests, folder, timeout)
    while not trial.ended():
        time.sleep(0.05)
    return trial.passed


class Failures:
    """For pytest: writes down what fails."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _note(self, report: Any) -> None:
        if report.failed:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")

    pytest_runtest_logreport = pytest_collectreport = _note


def _run_tests(tests: list[str], folder: Path, failure: Path) -> None:
    """Never returns."""
    import pytest

    code = 1
    try:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)  # for processes that tests start
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        os.environ["HOLDALL_KEPT"] = "all"
        code = int(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests], plugins=[Failures(failure)]))
    finally:
        os._exit(code)


def copy_tree(folder: Path) -> Path:
    for name in ("holdall", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def trials(chosen: list[Mutant], folders: list[Path], asked: argparse.Namespace) -> Iterator[Trial]:
    """Each mutant's, when it is over; as many at once as there are folders, until the time is over."""
    until, free, waiting, running = time.monotonic() + 60 * asked.minutes, list(folders), list(chosen), list[Trial]()
    sound: set[str] = set()  # tests that pass without a change: one that fails by itself kills nothing
    try:
        while waiting or running:
            if waiting and time.monotonic() > until:
                print(f"{len(waiting)} mutants were not run: the time is over")
                waiting = []
            while waiting and free:
                mutant = waiting.pop(0)
                running.append(Trial(tests_of(mutant.path) or [], free.pop(), asked.timeout, mutant))
            for trial in [t for t in running if t.ended()]:
                running.remove(trial)
                if trial.passed is False and str(trial.failed) not in sound:
                    if trial.failed and passes(trial.failed, trial.folder, 10 * asked.timeout):
                        sound.add(str(trial.failed))
                    else:
                        print("fails without any change, or does not say what failed:", *trial.failed)
                        trial.passed = None
                free.append(trial.folder)
                yield trial
            time.sleep(0.05)
    finally:
        for trial in running:
            os.killpg(trial.child, signal.SIGKILL)
            os.waitpid(trial.child, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", default="planners/,optim/,simulator/", help="prefixes inside of the package")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the tests of one mutant")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are tried at once")
    parser.add_argument("--out", type=Path, default=Path("survivors.csv"))
    asked = parser.parse_args()
    prefixes = tuple(f"holdall/{p.strip()}" for p in asked.files.split(","))
    paths = [p for p in sorted(ROOT.glob("holdall/**/*.py")) if str(p.relative_to(ROOT)).startswith(prefixes)]
    paths = [p for p in paths if str(p.relative_to(ROOT)) not in ON_A_GPU]
    every = [m for p in paths if tests_of(str(p.relative_to(ROOT))) for m in mutants_of(p)]
    chosen = random.Random(asked.seed).sample(every, min(asked.count, len(every)))
    for name in ("torch", "torch.fx.experimental.proxy_tensor", "torch._dynamo", "transformers", "scipy.optimize", "pytest"):
        importlib.import_module(name)
    counted = Counter[bool | None]()
    with tempfile.TemporaryDirectory() as place, asked.out.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("file", "line", "change", "end"))
        folders = [copy_tree(Path(place) / str(n)) for n in range(asked.jobs)]
        for n, trial in enumerate(trials(chosen, folders, asked)):
            mutant, counted[trial.passed] = trial.mutant, counted[trial.passed] + 1
            assert mutant is not None
            print(f"{n + 1} of {len(chosen)}, {time.monotonic() - trial.began:.0f} s", mutant.path, mutant.line, flush=True)
            if trial.passed is not False:
                end = "survived" if trial.passed else "not decided"
                table.writerow((mutant.path, mutant.line, mutant.change, end))
                file.flush()
                print(end, mutant.path, mutant.line, mutant.change, flush=True)
    print(
        f"{len(every)} mutants there are, {counted[False]} killed, {counted[None]} not decided, "
        f"{counted[True]} survived: {asked.out}"
    )


if __name__ == "__main__":
    main()
