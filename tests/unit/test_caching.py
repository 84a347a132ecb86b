"""What is kept on disk: found again, never mistaken for something else, and never an error."""

import json
import os
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from typer.testing import CliRunner

import holdall
from holdall.caching import Cache, cache_folder, key_of, open_cache
from holdall.cli import app
from holdall.fitting import remembering
from holdall.fitting.plan_book import PlanBook
from holdall.machine.probe import probed
from holdall.pace import judge
from holdall.problem import make_problem
from holdall.testing.stand_ins import everything_cached, forget_machine
from holdall.testing.worlds import machine
from holdall.tracing.identity import identity_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDALL_CACHE", str(tmp_path))
    with everything_cached():
        yield tmp_path


# the folder


def test_a_value_is_found_again_by_whoever_looks(tmp_path):
    Cache(tmp_path).put("plan", "a", {"x": [1, 2.5, None]})
    assert Cache(tmp_path).get("plan", "a") == {"x": [1, 2.5, None]}
    assert Cache(tmp_path).get("plan", "b") is None and Cache(tmp_path).get("trace", "a") is None


@pytest.mark.parametrize("spoil", ["cut", "changed", "empty", "another's", "no JSON"])
def test_a_spoiled_entry_is_a_miss_and_goes(tmp_path, spoil):
    kept = Cache(tmp_path)
    kept.put("plan", "a", {"x": 12345})
    path = tmp_path / "plan" / "a.json"
    text = path.read_text()
    if spoil == "another's":
        kept.put("plan", "b", {"x": 12345})
        text = (tmp_path / "plan" / "b.json").read_text()
    path.write_text(
        {"cut": text[:-3], "changed": text.replace("12345", "12346"), "empty": "", "no JSON": "\x00{"}.get(spoil, text)
    )
    assert kept.get("plan", "a") is None
    assert not path.exists()
    kept.put("plan", "a", 1)
    assert kept.get("plan", "a") == 1


def test_readers_beside_writers_see_whole_values(tmp_path):
    kept, wrong = Cache(tmp_path), []
    values = [[n] * 5000 for n in range(4)]
    kept.put("plan", "a", values[0])

    def write():
        for n in range(40):
            kept.put("plan", "a", values[n % 4])

    threads = [threading.Thread(target=write) for _ in range(3)]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        if kept.get("plan", "a") not in values:
            wrong.append(1)
    assert not wrong
    assert [f.name for f in (tmp_path / "plan").iterdir()] == ["a.json"]  # no half-written neighbour


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    kept = Cache(tmp_path, most=3000)
    for n, key in enumerate("abc"):
        kept.put("plan", key, "x" * 800)
        os.utime(tmp_path / "plan" / f"{key}.json", (n, n))
    assert kept.get("plan", "a")  # used just now
    kept.put("plan", "d", "x" * 800)
    assert {e.path.stem for e in kept.entries()} == {"a", "c", "d"}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    kept = Cache(tmp_path / "file")
    kept.put("plan", "a", 1)
    assert kept.get("plan", "a") is None and kept.entries() == [] and kept.clear() == 0


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"HOLDALL_CACHE": "/x/y"}, "/x/y"),
        ({"HOLDALL_CACHE": "off"}, None),
        ({"HOLDALL_CACHE": "", "XDG_CACHE_HOME": "/c"}, "/c/holdall"),
        ({"HOLDALL_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/holdall"),
    ],
)
def test_the_environment_names_the_folder(monkeypatch, env, expected):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = cache_folder()
    assert (str(found) if found is not None else None) == expected


def test_the_command_shows_and_clears(folder):
    open_cache().put("plan", "a", 1)
    run = partial(CliRunner().invoke, app)
    assert len(json.loads(run(["cache", "--json"]).stdout)["entries"]) == 1
    assert "plans" in run(["cache"]).stdout and str(folder) in run(["cache"]).stdout.replace("\n", "")
    assert json.loads(run(["cache", "clear", "--json"]).stdout)["removed"] == 1
    assert open_cache().entries() == []


# which steps are the same


class Net(torch.nn.Module):
    def __init__(self, p=0.0, width=8):
        super().__init__()
        self.first, self.drop, self.second = torch.nn.Linear(8, width), torch.nn.Dropout(p), torch.nn.Linear(width, 1)
        self.flag = False
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x, mask=None):
        y = self.drop(torch.relu(self.first(x)))
        if mask is not None and not bool(mask.all()):
            y = y * mask[:, None]
        return (self.second(y) ** 2).mean() if not self.flag else self.second(y).mean()


SCALE = 2.0


def scaled(model, batch):
    return model(*batch) * SCALE


def identify(model=None, batch=None, optimizer=torch.optim.AdamW, **options):
    model = model if model is not None else Net()
    made = optimizer(model.parameters(), lr=1e-3) if optimizer is not None else None
    return identity_of(model, batch if batch is not None else (torch.ones(4, 8),), made, options)


def hooked(model):
    model.first.register_forward_hook(lambda *_: None)
    return model


def having(model, **attributes):
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def test_the_same_step_is_known_whatever_the_values_of_weights_and_batch():
    assert identify() is not None
    assert identify() == identify() == identify(batch=(torch.zeros(4, 8),))


@pytest.mark.parametrize(
    "other",
    [
        lambda: identify(Net(p=0.1)),
        lambda: identify(Net(width=16)),
        lambda: identify(Net().eval()),
        lambda: identify(having(Net(), flag=True)),
        lambda: identify(having(Net(), drop=torch.nn.Identity())),
        lambda: identify(having(Net(), first=Net().first.requires_grad_(False))),
        lambda: identify(Net().double()),
        lambda: identify(batch=(torch.ones(5, 8),)),
        lambda: identify(batch=(torch.ones(4, 8), torch.ones(4))),
        lambda: identify(optimizer=torch.optim.SGD),
        lambda: identify(optimizer=partial(torch.optim.AdamW, fused=True)),
        lambda: identify(optimizer=None),
        lambda: identify(precision="bf16"),
        lambda: identify(loss=scaled),
    ],
)
def test_another_step_has_another_identity(other):
    assert other() is not None and other() != identify()


def test_what_a_loss_function_reads_is_part_of_it(monkeypatch):
    before = identify(loss=scaled)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert None not in (before, identify(loss=scaled)) and identify(loss=scaled) != before


def test_autocast_is_part_of_it():
    before = identify()
    with torch.autocast("cpu", torch.bfloat16):
        assert identify() != before


@pytest.mark.parametrize(
    "model",
    [
        lambda: hooked(Net()),
        lambda: having(Net(), lock=threading.Lock()),
        lambda: having(Net(), generator=torch.Generator()),
        lambda: having(Net(), table=torch.ones(10_000)),
    ],
    ids=["a hook", "a lock", "a generator", "a large constant"],
)
def test_what_cannot_be_seen_through_is_not_kept(model):
    assert identify(model()) is None


IN_ANOTHER = {
    "torch alone": (
        "import torch\nfrom holdall.tracing.identity import identity_of\n"
        "class Net(torch.nn.Linear):\n"
        "    names, sizes = {'up', 'down', 'gate', 'norm'}, {'up': {1, 2}, 'down': frozenset('abcde')}\n"
        "    def forward(self, x):\n        return super().forward(x).sum()\n"
        "m = Net(8, 8)\nm.words = {'mean', 'sum', 'none'}\n"
        "print(identity_of(m, (torch.ones(2, 8),), None, {}))"
    ),
    "tiny-llama": (
        "import torch\nfrom holdall import models\nfrom holdall.tracing.identity import identity_of\n"
        "s = models.describe('tiny-llama')\nm = models.build(s, device='cpu', seed=0)\n"
        "print(identity_of(m, models.sample_batch(s, batch=2, seq=16), None, {}))"
    ),
}


@pytest.mark.parametrize("code", IN_ANOTHER.values(), ids=IN_ANOTHER.keys())
def test_identities_are_the_same_in_another_process(tmp_path, code):
    """Sets are in another order there."""
    if "models" in code:
        pytest.importorskip("transformers")
    script = tmp_path / "script.py"
    script.write_text(code)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    found = {
        subprocess.run(
            [sys.executable, str(script)], env={**env, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.split()[-1]
        for seed in "12"
    }
    assert len(found) == 1 and found != {"None"}


# traces and plans


def sizes_for(model, batch, **planning):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return PlanBook(model, batch, tracing={"optimizer": optimizer}, planning={"hardware": machine(), **planning})


def sample(batch, traced, **planning):
    traced.clear()
    return sizes_for(Net(), batch, **planning).sample()


@pytest.fixture
def traced():
    """Forwards of the model: there are some where a step is really traced."""
    seen = []
    hook = register_module_forward_pre_hook(lambda module, _: seen.append(module) if isinstance(module, Net) else None)
    yield seen
    hook.remove()


def test_a_second_time_nothing_is_traced_or_planned(folder, traced):
    first, trace = sample((torch.ones(4, 8),), traced)
    assert traced
    second, again = sample((torch.zeros(4, 8),), traced)
    assert second.solve_seconds == first.solve_seconds  # read, not made again
    assert not traced and again.ops == trace.ops and again.tensors == trace.tensors
    assert second.actions == first.actions and second.predicted == first.predicted
    assert {e.kind for e in open_cache().entries()} == {"trace", "plan"}


def test_another_budget_is_planned_for_anew(folder, traced):
    sample((torch.ones(4, 8),), traced)
    plan, _ = sample((torch.ones(4, 8),), traced, budget=10**8)
    assert not traced and plan.budget["cpu"] == 10**8


def test_values_that_the_step_looks_at_count(folder, traced):
    x, ones, some = torch.ones(4, 8), torch.ones(4), torch.tensor([1.0, 1.0, 0.0, 1.0])
    _, first = sample((x, ones), traced)
    assert first.about.looked_at == (1,)
    _, second = sample((torch.zeros(4, 8), ones.clone()), traced)
    assert not traced and second.ops == first.ops
    _, third = sample((x, some), traced)
    assert traced and len(third.ops) > len(first.ops)


def test_a_fit_from_the_cache_trains_the_same(folder):
    batch = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)

    def run(fitted):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        harness = holdall.fit(model, optimizer, batch, hardware=machine(), budget=10**8) if fitted else None
        losses = []
        for _ in range(4):
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        if harness is not None:
            harness.close()
        return losses, [p.detach().clone() for p in model.parameters()]

    plain, first, second = run(False), run(True), run(True)
    assert plain[0] == first[0] == second[0]
    assert all(torch.equal(p, q) for p, q in zip(plain[1], second[1], strict=True))


def test_a_plan_that_no_longer_fits_beside_the_process_is_made_anew():
    from dataclasses import replace

    from holdall.types import Outcome, Plan, PlanInfo

    problem = make_problem(holdall.trace(Net(), (torch.ones(4, 8),)), hardware=machine(far=1000))
    problem = replace(problem, hardware=replace(problem.hardware, device="cuda"))
    plan = Plan(
        planner="auto",
        options={},
        actions=(),
        predicted=Outcome(source="simulated", seconds=1.0, peak={"cpu": 1, "far": 900}),
        trace="",
        signature="",
        budget={"cpu": 1, "far": 1000},
        hardware="",
        about=PlanInfo(process=100),
    )

    def beside(process):
        about = replace(problem.trace.about, process=process)
        return remembering._read_plan(plan.to_json(), replace(problem, trace=replace(problem.trace, about=about)))

    assert beside(150).predicted.peak["far"] == 950 and beside(150).about.process == 150
    assert beside(250) is None


# the machine


def test_a_machine_is_measured_once_for_all_processes(folder, monkeypatch):
    def fail(*_):
        pytest.fail("measured again")

    forget_machine()
    first = probed("cpu")
    forget_machine()
    assert probed("cpu", progress=fail) == first
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 30 * 86400)
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        probed("cpu", progress=fail)  # a month later


def test_other_code_has_other_keys(monkeypatch):
    before = key_of("plan", 1)
    monkeypatch.setattr("holdall.caching.own_code", lambda: "another version")
    assert key_of("plan", 1) != before


# a device that is busy, or was


def test_what_was_measured_on_a_busy_gpu_is_measured_again():
    pace, record, said = judge(None, [1e-4, 2e-4], 10.0)
    assert (pace.since, pace.is_busy, said) == (10.0, False, "") and record is not None
    pace, again, said = judge(record, [0.5e-4, 1.9e-4], 20.0)
    assert (pace.since, pace.is_busy) == (20.0, False) and again == {"since": 20.0, "seconds": [0.5e-4, 1.9e-4]}
    assert "2.0 x as fast" in said


def test_what_is_measured_on_a_busy_gpu_is_not_kept():
    record = {"since": 10.0, "seconds": [1e-4, 2e-4]}
    pace, again, said = judge(record, [1.1e-4, 5e-4], 20.0)
    assert (pace.since, pace.is_busy, again) == (10.0, True, None) and "2.5 x as long" in said


@pytest.mark.parametrize("now", [[1e-4, 2e-4], [1.2e-4, 2.2e-4], [0.9e-4, 1.8e-4]])
def test_clocks_that_change_a_little_change_nothing(now):
    pace, again, said = judge({"since": 10.0, "seconds": [1e-4, 2e-4]}, now, 20.0)
    assert (pace.since, pace.is_busy, again, said) == (10.0, False, None, "")


@pytest.mark.parametrize("kept", [{}, {"seconds": [1.0]}, {"since": 1.0, "seconds": [0.0, 1.0]}, "text", [1, 2]])
def test_a_record_that_cannot_be_read_is_made_anew(kept):
    pace, again, _ = judge(kept, [1e-4, 2e-4], 20.0)
    assert pace.since == 20.0 and again is not None
