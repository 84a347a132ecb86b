"""A limit that is enforced below PyTorch: a C++ allocator counts every byte of real steps and refuses to pass it.

The ledger and the simulator are ours; this one knows neither. It runs in a process of its own, since an allocator cannot be
taken out again.
"""

import ctypes
import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map

SOURCE = Path(__file__).with_name("counting_allocator.cpp")
COMPILER = shutil.which("g++") or shutil.which("c++")
FAMILIES = ("tied", "tiny-llama")
ROWS = 16  # times the families' own batch of two, so that activations and not weights decide the peak

pytestmark = pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs g++ on Linux to build an allocator")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The allocator, compiled against the torch that runs."""
    root = Path(torch.__file__).parent
    built = tmp_path_factory.mktemp("allocator") / "libcounting.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    files = [f"-I{root / 'include'}", str(SOURCE), "-o", str(built), f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    for standard in ("-std=c++17", "-std=c++20"):  # newer headers ask for the later one
        done = subprocess.run([*command, standard, *files], capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            return built
    pytest.skip(f"the allocator does not compile here: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def seen(library):
    """What the other process saw, by family."""
    command = [sys.executable, __file__, str(library), *FAMILIES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("run", ["plain", "planned"])
def test_the_allocator_sees_the_predicted_peak(seen, name, run):
    got = seen[name][run]
    assert got["peak"] == pytest.approx(got["predicted"], rel=0.02)


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_training_does_not_pass_a_limit_below_its_peak(seen, name):
    assert seen[name]["plain under a limit"] in ("OutOfMemoryError", "RuntimeError")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_planned_run_passes_under_its_budget(seen, name):
    assert seen[name]["planned"]["budget"] < 0.95 * seen[name]["plain"]["predicted"]
    assert seen[name]["planned under its budget"] == "passed"


# the other process


class Counting:
    """The compiled allocator. Bytes are above `base`: what lay there before the model does not count."""

    def __init__(self, path):
        self._library = ctypes.CDLL(path)
        for name in ("counting_live", "counting_peak"):
            getattr(self._library, name).restype = ctypes.c_int64
        self._library.counting_set_limit.argtypes = [ctypes.c_int64]
        self._library.counting_install()
        self.base = 0

    def settle(self):
        """From here on a new peak, above what lies there now."""
        gc.collect()
        self.base = self._library.counting_live()
        self._library.counting_reset_peak()

    def restart_peak(self):
        self._library.counting_reset_peak()

    def peak(self):
        return self._library.counting_peak() - self.base

    def limit(self, above_base):
        self._library.counting_set_limit(-1 if above_base is None else self.base + above_base)


def watch(counting, name):
    """Plain and planned runs of one family, without and with a limit."""
    import holdall
    from holdall.testing.contracts import train
    from holdall.testing.worlds import family, machine

    def fresh():
        counting.settle()
        model, batch = family(name)
        batch = tree_map(lambda ids: ids.repeat(ROWS, 1), batch)
        return model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, batch, optimizer = fresh()
    trace = holdall.trace(model, batch, optimizer=optimizer)
    plain = holdall.plan(trace, planner="nop", hardware=machine())
    budget = int(plain.predicted.peak["cpu"] * 0.7)
    # activations alone: what lies on the host is ordinary memory too, and this allocator cannot tell whose it is
    planned = holdall.plan(trace, budget=budget, hardware=machine(), allow=("recompute", "offload"))
    del model, batch, optimizer

    def run(plan, *, limit=None):
        """Peak of the steps after the first, in which the optimizer makes its state."""
        model, batch, optimizer = fresh()
        counting.limit(limit)
        try:
            with holdall.apply(plan, model, optimizer, enforce=False):
                train(model, batch, optimizer, 1)
                counting.restart_peak()
                train(model, batch, optimizer, 2)
            return counting.peak()
        finally:
            counting.limit(None)

    def ends(plan, limit):
        try:
            run(plan, limit=limit)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            return type(error).__name__
        return "passed"

    plain_peak = run(plain)
    return {
        "plain": {"predicted": plain.predicted.peak["cpu"], "peak": plain_peak},
        "planned": {"predicted": planned.predicted.peak["cpu"], "peak": run(planned), "budget": budget},
        "plain under a limit": ends(plain, int(plain_peak * 0.95)),
        "planned under its budget": ends(planned, int(budget * 1.02)),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    allocator = Counting(sys.argv[1])
    print(json.dumps({name: watch(allocator, name) for name in sys.argv[2:]}))
