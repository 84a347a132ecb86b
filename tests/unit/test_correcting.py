"""Plans that are made beside the run: the loop never waits for one, and what it trains stays the same to the bit."""

import copy
import subprocess
import sys
import threading
import time

import pytest
import torch

import holdall
from holdall.actions.recompute import Recompute
from holdall.fitting.correction import Correction, Corrector
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.runtime.switching.trials import LOOK, WARM
from holdall.testing.contracts import problem_for
from holdall.testing.worlds import family


def step(model, batch, optimizer, n):
    torch.manual_seed(n)
    loss = model(*batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


class Later:
    """A plan that is there when the test says so; asked for its result earlier, it would wait for ever."""

    def __init__(self, plan):
        self.plan, self.ready, self.closed, self.thread = plan, threading.Event(), False, None

    def done(self):
        return self.ready.is_set()

    def result(self):
        assert self.ready.is_set(), "the loop waits for a plan"
        self.thread = threading.current_thread()
        return self.plan

    def close(self):
        self.closed = True


@pytest.fixture
def world():
    model, batch = family("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    layers = [b for b in trace.blocks if "layers" in b.name]
    mine = finish(Nop(), problem_for(trace), [])
    other = finish(Nop(), problem_for(trace), [Recompute.of(trace, [b]) for b in layers])
    return model, batch, optimizer, trace, mine, other


def fast(plan):
    """The same, said to take no time, so that it is tried whatever steps take here."""
    from dataclasses import replace

    return replace(plan, predicted=replace(plan.predicted, seconds=1e-9))


def test_the_run_goes_on_and_changes_its_plan_between_two_steps(world):
    model, batch, optimizer, _, mine, other = world
    reference = copy.deepcopy(model)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    later, asked = Later(fast(other)), []
    many, plans, got = WARM + LOOK + 8, [], []
    with holdall.apply(mine, model, optimizer, enforce=False, correct=lambda *_: asked.append(1) or later) as harness:
        for n in range(many):
            if n == WARM + LOOK + 4:
                later.ready.set()
            got.append(step(model, batch, optimizer, n))
            plans.append(harness.plan)
        notes = list(harness.notes)
    assert asked == [1]
    assert plans[: WARM + LOOK + 5] == [mine] * (WARM + LOOK + 5)  # it was not there yet
    assert all(p is later.plan for p in plans[WARM + LOOK + 5 :])
    assert "in the background" in notes[0] and "trying it" in notes[1]
    assert got == [step(reference, batch, plain, n) for n in range(many)]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_leaving_the_harness_ends_what_is_under_way(world):
    model, batch, optimizer, _, mine, other = world
    later = Later(other)
    with holdall.apply(mine, model, optimizer, enforce=False, correct=lambda *_: later):
        for n in range(WARM + LOOK):
            step(model, batch, optimizer, n)
    assert later.closed


def ask(corrector, trace, **changed):
    given = {"seconds": 1.0, "rate": None, "options": {}, "then": lambda plan: plan, **changed}
    return corrector.ask(problem_for(trace), **given)


def test_a_second_process_answers_with_a_plan(world):
    _, _, _, trace, mine, _ = world
    corrector = Corrector(mine, trace)
    correction = ask(corrector, trace)
    found = correction.result()
    assert correction.done() and found is not None and found.planner == "auto" and found.trace == mine.trace


def program(monkeypatch, code):
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **kwargs: popen([sys.executable, "-c", code], **kwargs))


def test_a_slow_planner_holds_nobody_up_and_is_ended(world, monkeypatch):
    _, _, _, trace, mine, _ = world
    program(monkeypatch, "import time; time.sleep(600)")
    began = time.perf_counter()
    correction = ask(Corrector(mine, trace), trace)
    assert not correction.done()
    correction.close()
    assert correction.result(timeout=60) is None and correction.done()
    assert correction._process.poll() is not None
    assert time.perf_counter() - began < 60


def test_a_process_that_fails_is_a_note(world, monkeypatch):
    _, _, _, trace, mine, _ = world
    program(monkeypatch, "raise SystemExit('no memory left')")
    with pytest.raises(holdall.Unsupported, match=r"could not be corrected.*no memory left"):
        ask(Corrector(mine, trace), trace).result()


def test_a_lost_correction_ends_its_process(world, monkeypatch):
    _, _, _, trace, mine, _ = world
    program(monkeypatch, "import time; time.sleep(600)")
    correction: Correction = ask(Corrector(mine, trace), trace)
    process = correction._process
    correction._stop()
    process.wait(60)


def test_the_second_process_sees_no_gpu_and_writes_no_cache(world, monkeypatch, tmp_path):
    _, _, _, trace, mine, _ = world
    seen = {}
    popen = subprocess.Popen

    def spy(command, **kwargs):
        seen.update(kwargs["env"])
        return popen([sys.executable, "-c", ""], **kwargs)

    monkeypatch.setattr(subprocess, "Popen", spy)
    ask(Corrector(mine, trace), trace)
    assert seen["CUDA_VISIBLE_DEVICES"] == "" and seen["HOLDALL_CACHE"] == "off"
