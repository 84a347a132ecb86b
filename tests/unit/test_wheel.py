"""The wheel: what is in it, what it asks for, and what it says where a package that it does not ask for is missing.

It is built here from a copy of the sources, without a network, and what is run below is what was unpacked from it.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOML = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
REQUIRED = {"torch", "numpy", "rich", "typer", "psutil", "safetensors"}
EXTRAS = {
    "hf": {"transformers", "accelerate"},
    "solvers": {"scipy", "ortools"},
    "viz": {"matplotlib"},
    "lightning": {"lightning"},
    "lora": {"peft"},
    "docs": {"sphinx", "myst-parser", "furo"},
}
# Asked for by name alone where they are needed, or done without: no extra of their own.
OTHERS = {
    "torchao",
    "triton",
    "highspy",
    "pytorch_lightning",
    "rockmate",
    "tqdm",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "pynvml",
}
OPTIONAL = sorted(set().union(*EXTRAS.values()) | OTHERS)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip(f"setuptools {version('setuptools')} cannot build it, and fetching another needs a network")
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "holdall", folder / "source/holdall", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    run = subprocess.run([sys.executable, "-c", build], cwd=folder / "source", capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (n for n in opened.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(opened.read(name).decode())


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as opened:
        held = {n for n in opened.namelist() if not n.partition("/")[0].endswith(".dist-info")}
    ours = {
        p.relative_to(ROOT).as_posix() for p in (ROOT / "holdall").rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    assert held == ours
    sources = {"holdall/updates/host_adam.cpp", "holdall/runtime/arena/arena.cpp"}
    assert {"holdall/data/models.json", "holdall/data/corpus.txt", "holdall/py.typed", *sources} <= held
    assert wheel.name.endswith("-py3-none-any.whl"), "it is for every platform: the kernel is compiled where it is used"


def test_the_metadata_says_what_is_needed_and_for_what(metadata):
    asked = [line.partition(";") for line in metadata.get_all("Requires-Dist")]
    assert {_name(need) for need, _, why in asked if not why} == REQUIRED
    for extra, packages in EXTRAS.items():
        assert {_name(need) for need, _, why in asked if f'"{extra}"' in why} == packages, extra
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.10"
    assert "holdall" in metadata.get_payload().splitlines()[0]


def _name(need: str) -> str:
    return need.strip().split("[")[0].split(">")[0].split("=")[0].strip()


def test_what_is_imported_at_once_is_required_and_what_is_not_is_known():
    """An import at the top of a file must be a requirement; one inside a function may be of an extra."""
    eager, lazy = set(), set()
    for path in (ROOT / "holdall").rglob("*.py"):
        if path.stem.endswith(("kernel", "kernels")):  # imported from one place each, where there is triton
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            (eager if node in tree.body else lazy).update(n.split(".")[0] for n in names)
    foreign = (eager | lazy) - set(sys.stdlib_module_names) - {"holdall"}
    assert foreign & eager <= REQUIRED
    assert foreign <= REQUIRED | set(OPTIONAL)


# One process: importing torch takes longer than all the rest. It prints a JSON object: what was tried -> what was said.
ALONE = """
import contextlib, io, json, sys

class Without:
    # a finder that has never heard of some packages
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in OPTIONAL else self.finder.find_spec(name, path, target)

    def find_distributions(self, context):
        find = getattr(self.finder, "find_distributions", lambda _: ())
        return () if context.name in OPTIONAL else find(context)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
import torch, holdall
from holdall.testing.worlds import family

said = {"where": holdall.__file__}

def attempt(what, act):
    try:
        said[what] = act()
    except holdall.HoldallError as error:
        said[what] = {"error": type(error).__name__, "fact": error.fact, "hint": error.hint}
    except Exception as error:
        said[what] = {"error": repr(error), "fact": "", "hint": ""}

def command(line):
    out, err = io.StringIO(), io.StringIO()
    from holdall.cli import app
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(line.split(), prog_name="holdall")
        except SystemExit as end:
            return {"code": end.code or 0, "out": out.getvalue(), "err": err.getvalue()}

model, batch = family("tied")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
trace = holdall.trace(model, batch, optimizer=optimizer)
attempt("chen", lambda: holdall.plan(trace, budget="700KiB", planner="chen").summary())
for planner in ("checkmate", "moccasin", "rockmate"):
    attempt(planner, lambda: holdall.plan(trace, budget="660KiB", planner=planner).summary())

def fit():
    with holdall.fit(model, optimizer, batch, budget="700KiB", planner="chen") as harness:
        model(*batch).backward(); optimizer.step(); optimizer.zero_grad()
    return str(harness.report())

attempt("fit", fit)
attempt("trainer", lambda: holdall.integrations.HoldallCallback(budget="1MiB"))
attempt("accelerate", lambda: holdall.integrations.accelerate.fit)
attempt("lightning", lambda: holdall.integrations.lightning.HoldallCallback)
from holdall.precision import float8_training, prepare_qat
attempt("float8", lambda: float8_training(model))
attempt("qat", lambda: prepare_qat(model))
from holdall.models import describe
attempt("preset", lambda: describe("gpt2"))
from holdall.experiments.sweep_files import _figure
attempt("plot", _figure)
for line in LINES:
    attempt(line, lambda: command(line))
print("SAID" + json.dumps(said))
"""
FINE = ["--help", "--version", "planners", "systems"]
NEED_MODELS = [
    "estimate tiny-llama",
    "trace tiny-llama",
    "plan tiny-llama --gpu rtx-4090",
    "explain tiny-llama --gpu rtx-4090",
    "compare tiny-llama --gpu rtx-4090",
    "ladder tiny-llama",
    "train tiny-llama --data DATA --out OUT",
]


@pytest.fixture(scope="module")
def alone(wheel, tmp_path_factory):
    """What the unpacked wheel says in a process where nothing but its requirements can be imported."""
    folder = tmp_path_factory.mktemp("alone")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    (folder / "data.txt").write_text("words " * 5000)
    lines = [line.replace("DATA", str(folder / "data.txt")).replace("OUT", str(folder / "out")) for line in FINE + NEED_MODELS]
    code = f"OPTIONAL = set({OPTIONAL!r})\nLINES = {lines!r}\n{ALONE}"
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout.rpartition("SAID")[2])
    assert said["where"].startswith(str(folder))
    return {
        key.replace(str(folder / "data.txt"), "DATA").replace(str(folder / "out"), "OUT"): value for key, value in said.items()
    }


def test_a_model_of_ones_own_is_planned_and_trained_with_torch_alone(alone):
    assert "chen" in alone["chen"]
    assert "peak CPU" in alone["fit"]


@pytest.mark.parametrize("line", FINE)
def test_commands_that_need_no_model_answer(alone, line):
    assert alone[line]["code"] == 0 and alone[line]["out"].strip()


@pytest.mark.parametrize("line", NEED_MODELS)
def test_a_command_without_its_packages_ends_in_two_lines(alone, line):
    assert alone[line]["code"] == 2, alone[line]
    words = [row for row in alone[line]["err"].splitlines() if row]
    assert len(words) == 2 and words[0].startswith("error: ") and "`transformers`" in words[0], words
    assert words[1].startswith("hint: pip install") and "[hf]" in words[1]


@pytest.mark.parametrize(
    ("what", "package", "install"),
    [
        ("checkmate", "scipy", 'pip install "holdall[solvers]"'),
        ("moccasin", "ortools", 'pip install "holdall[solvers]"'),
        ("rockmate", "scipy", 'pip install "holdall[solvers]"'),
        ("trainer", "transformers", 'pip install "holdall[hf]"'),
        ("accelerate", "accelerate", 'pip install "holdall[hf]"'),
        ("lightning", "lightning", 'pip install "holdall[lightning]"'),
        ("float8", "torchao", "pip install torchao"),
        ("qat", "torchao", "pip install torchao"),
        ("plot", "matplotlib", 'pip install "holdall[viz]"'),
        ("preset", "transformers", "[hf]"),
    ],
)
def test_what_is_missing_is_answered_with_its_install_command(alone, what, package, install):
    said = alone[what]
    assert said["error"] in ("MissingExtra", "Unsupported"), said
    assert package in said["fact"] and "\n" not in said["fact"]
    assert install in said["hint"]
    assert not install.startswith("pip") or f"{install.split('[')[-1].split(']')[0]} = [" in TOML or "torchao" in install
