"""Small changes to the code that some test should notice: which ones none does.

python benchmarks/mutants.py [--files planners/,simulator/] [--count 40] [--seed 0] [--minutes 15] [--out survivors.csv]

Each mutant is one change to one file: a comparison turned round, + for - and * for /, a constant changed, `min` for `max`,
`and` for `or`, a call dropped, a function that returns early. It is written into a copy of the tree, and the tests that cover
the file (TESTS) are run there until the first one fails. A mutant that no test fails for has survived: it is a line of the
table, to be killed by a test or to be explained (most often it changes no answer). One that takes longer than `--timeout`
counts as killed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import csv
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

TESTS = {  # a part of the tree -> the tests that cover it; the longest prefix counts
    "planners/chen.py": ["tests/papers/test_chen.py"],
    "planners/rotor/table.py": ["tests/papers/test_rotor.py", "-k", "table or revolve or random or memory or inside"],
    "planners/rotor/__init__.py": ["tests/papers/test_rotor.py"],
    "planners/rockmate.py": ["tests/papers/test_rockmate.py"],
    "planners/pofo/": ["tests/papers/test_pofo.py"],
    "planners/protrain/": ["tests/papers/test_protrain.py"],
    "planners/actnn.py": ["tests/papers/test_actnn.py"],
    "planners/dtr.py": ["tests/papers/test_dtr.py"],
    "planners/coop.py": ["tests/papers/test_coop.py"],
    "planners/megtaichi.py": ["tests/papers/test_megtaichi.py"],
    "planners/korthikanti.py": ["tests/papers/test_korthikanti.py"],
    "planners/loongtrain.py": ["tests/papers/test_loongtrain.py"],
    "planners/distflashattn.py": ["tests/papers/test_distflashattn.py"],
    "planners/zero_offload.py": ["tests/papers/test_zero_offload.py"],
    "planners/checkmate/": ["tests/papers/test_checkmate.py", "tests/unit/test_recompute_family.py"],
    "planners/moccasin/": ["tests/papers/test_moccasin.py", "tests/unit/test_recompute_family.py"],
    "planners/auto/": ["tests/unit/test_planning.py", "tests/unit/test_fewer_simulations.py", "tests/unit/test_lending.py"],
    "optim/adafactor.py": ["tests/papers/test_adafactor.py"],
    "optim/adalomo.py": ["tests/papers/test_adalomo.py"],
    "optim/adam8bit.py": ["tests/papers/test_adam8bit.py"],
    "optim/adam_mini.py": ["tests/papers/test_adam_mini.py"],
    "optim/apollo.py": ["tests/papers/test_apollo.py"],
    "optim/came.py": ["tests/papers/test_came.py"],
    "optim/compact.py": ["tests/papers/test_compact.py"],
    "optim/deepzero.py": ["tests/papers/test_deepzero.py"],
    "optim/flora.py": ["tests/papers/test_flora.py"],
    "optim/galore.py": ["tests/papers/test_galore.py"],
    "optim/lomo.py": ["tests/papers/test_lomo.py"],
    "optim/mezo.py": ["tests/papers/test_mezo.py"],
    "optim/muon.py": ["tests/papers/test_muon.py"],
    "simulator/": ["tests/unit/test_simulator.py", "tests/unit/test_allocators.py", "tests/unit/test_reserved.py"],
}
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
    source: str


def mutants_of(path: Path) -> list[Mutant]:
    """Every change of a file that the operators make."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    where = str(path.relative_to(ROOT))
    found = []
    for n, node in enumerate(ast.walk(tree)):
        for change in range(len(list(_changes(node)))):
            changed = copy.deepcopy(tree)
            copied = next(c for m, c in enumerate(ast.walk(changed)) if m == n)
            made = list(_changes(copied))
            text, do = made[change]
            do()
            found.append(Mutant(where, getattr(node, "lineno", 0), text, ast.unparse(ast.fix_missing_locations(changed))))
    return found


def _changes(node: ast.AST) -> Iterator[tuple[str, object]]:
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


def tests_of(path: str) -> list[str] | None:
    """The tests that cover a file of the package."""
    inside = path.removeprefix("holdall/")
    best = max((prefix for prefix in TESTS if inside.startswith(prefix)), key=len, default=None)
    return TESTS[best] if best is not None else None


def survives(mutant: Mutant, folder: Path, timeout: float) -> bool:
    """Whether all tests of its file pass with it."""
    target = folder / mutant.path
    before = target.read_text(encoding="utf-8")
    target.write_text(mutant.source, encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(tests_of(mutant.path) or [])]
        return subprocess.run(command, cwd=folder, capture_output=True, timeout=timeout, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        target.write_text(before, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", default="planners/,optim/,simulator/", help="prefixes inside of the package")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the tests of one mutant")
    parser.add_argument("--out", type=Path, default=Path("survivors.csv"))
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    prefixes = tuple(f"holdall/{p.strip()}" for p in asked.files.split(","))
    paths = [p for p in sorted(ROOT.glob("holdall/**/*.py")) if str(p.relative_to(ROOT)).startswith(prefixes)]
    every = [m for p in paths if tests_of(str(p.relative_to(ROOT))) for m in mutants_of(p)]
    chosen = rng.sample(every, min(asked.count, len(every)))
    until, rows, killed = time.monotonic() + 60 * asked.minutes, [], 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in ("holdall", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        for n, mutant in enumerate(chosen):
            if time.monotonic() > until:
                print(f"{len(chosen) - n} mutants were not run: the time is over")
                break
            if survives(mutant, folder, asked.timeout):
                rows.append((mutant.path, mutant.line, mutant.change))
                print("survived", *rows[-1], flush=True)
            else:
                killed += 1
    with asked.out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("file", "line", "change"), *rows])
    print(f"{len(every)} mutants there are, {killed + len(rows)} run, {len(rows)} survived: {asked.out}")


if __name__ == "__main__":
    main()
