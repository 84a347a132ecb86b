"""What is said when memory runs out, and what a harness leaves when it is left in any way."""

import gc
import json
import weakref

import pytest
import torch

import holdall
from holdall.errors import OverBudget
from holdall.runtime import assembly
from holdall.runtime.budget.oom_report import FlightRecorder
from holdall.testing.worlds import family, machine


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def tight(model, ids, optimizer, **options):
    """A harness whose budget is what the sample takes, and no more."""
    trace = holdall.trace(model, ids, optimizer=optimizer)
    plain = holdall.plan(trace, planner="nop", hardware=machine())
    given = {"planner": "nop", "budget": plain.predicted.peak["cpu"], "hardware": machine()}
    return holdall.fit(model, optimizer, (ids,), **given, **options)


def step(model, optimizer, ids):
    loss = model(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_flight_recorder_says_what_was_there(tmp_path):
    model, (ids,) = family("tied")
    optimizer = adam(model)
    weights = sum(p.nbytes for p in model.parameters())
    with tight(model, ids, optimizer, record=tmp_path / "oom", repeat=False) as harness:
        step(model, optimizer, ids)
        step(model, optimizer, ids)
        for number in range(2):
            with pytest.raises(OverBudget) as caught:
                step(model, optimizer, ids.repeat(1, 5))
            optimizer.zero_grad()
            found = json.loads((tmp_path / "oom" / f"oom-{number}" / "oom.json").read_text())
            assert found["step"] == 2
            assert found["phase"] == "forward"
            assert found["budget"] < found["live"]
            assert found["batch"] == [[2, 80]]
            assert found["roles"]["weights"] == weights
            assert 2 * weights <= found["roles"]["optimizer states"] < 2 * weights + 8 * len(list(model.parameters()))
            assert sum(found["roles"].values()) == found["live"]
            assert {"embed", "layers.0", "layers.3"} <= {block["block"] for block in found["blocks"]}
            assert found["expected_at_peak"]
            del caught
            gc.collect()  # its frames hold the step's tensors
    text = (tmp_path / "oom" / "oom-1" / "report.txt").read_text()
    assert "The step was not retried: this harness has no tighter plan" in text
    assert '[[2, 80]] and the plan is for [[2, 16]]: use `holdall.fit(..., lengths="auto")`' in text
    assert holdall.Plan.load(tmp_path / "oom" / "oom-1" / "plan.json").actions == harness.plan.actions
    assert not (tmp_path / "oom" / "oom-1" / "snapshot.pickle").exists()  # the allocator's, on a GPU


def test_a_repeated_step_is_recorded_too(tmp_path):
    model, (ids,) = family("tied")
    optimizer = adam(model)
    with tight(model, ids, optimizer, record=tmp_path) as harness:
        step(model, optimizer, ids)
        step(model, optimizer, ids.repeat(1, 2))
    assert any("out of memory in" in note for note in harness.notes)
    assert "The step is retried under" in json.loads((tmp_path / "oom-0" / "oom.json").read_text())["outcome"]


def test_without_a_folder_the_paragraph_is_with_the_error_alone():
    model, (ids,) = family("tied")
    optimizer = adam(model)
    with tight(model, ids, optimizer) as harness, pytest.raises(OverBudget) as caught:
        step(model, optimizer, ids.repeat(1, 40))
    assert len(caught.value.__notes__) == 1
    assert caught.value.__notes__[0].startswith("holdall: out of memory in forward of step 0.")
    assert "the tighter plan ran out of memory as well" in caught.value.__notes__[0]
    assert len([note for note in harness.notes if "was retried" in note]) == 1


def test_a_folder_that_cannot_be_written_does_not_hide_the_error(tmp_path):
    model, (ids,) = family("tied")
    optimizer = adam(model)
    (tmp_path / "oom").write_text("a file")
    with tight(model, ids, optimizer, record=tmp_path / "oom", repeat=False), pytest.raises(OverBudget) as caught:
        step(model, optimizer, ids.repeat(1, 5))
    assert "could not be written" in caught.value.__notes__[0]


def test_the_allocators_history_is_kept_while_there_is_a_folder(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: calls.append(given))
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    gpu = torch.device("cuda", 0)
    FlightRecorder(None).start(gpu)()
    FlightRecorder(tmp_path).start(torch.device("cpu"))()
    assert calls == []
    stop = FlightRecorder(tmp_path).start(gpu)
    stop()
    assert len(calls) == 2
    assert calls[1] == {"enabled": None}
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)  # the user's own
    FlightRecorder(tmp_path).start(gpu)()
    assert len(calls) == 2


class Limit:
    """A meter that, as a GPU's, only sets a limit."""

    ledger = None
    on = 0

    def __init__(self, *_):
        self.is_on = False

    def start(self, budget):
        assert not self.is_on
        self.is_on = True
        Limit.on += 1

    def stop(self):
        Limit.on -= self.is_on
        self.is_on = False

    def begin(self):
        pass

    def end(self):
        pass

    def peaks(self):
        return []

    seconds = curve = peaks

    def reserved(self):
        return None


@pytest.fixture
def limited(monkeypatch):
    """Makes a small model with a plan, whose harness sets a limit."""
    monkeypatch.setattr(assembly, "CpuMeter", Limit)
    monkeypatch.setattr(Limit, "on", 0)

    def make():
        model, (ids,) = family("tied")
        return model, holdall.plan(holdall.trace(model, ids), planner="nop", hardware=machine()), ids

    return make


def test_the_limit_goes_when_the_harness_is_left(limited):
    model, plan, ids = limited()
    harness = holdall.apply(plan, model)
    assert Limit.on == 1
    model(ids).backward()
    harness.close()
    harness.close()
    assert Limit.on == 0
    for error in (KeyError, KeyboardInterrupt, torch.OutOfMemoryError):
        with pytest.raises(error), holdall.apply(plan, model):
            assert Limit.on == 1
            raise error
        assert Limit.on == 0


def test_the_limit_goes_also_if_leaving_fails(limited):
    model, plan, _ = limited()
    harness = holdall.apply(plan, model)

    def fails():
        raise ValueError("somebody's own")

    undone = []
    harness.on_close(lambda: undone.append(1))
    harness.on_close(fails)
    with pytest.raises(ValueError, match="somebody's own"):
        harness.close()
    assert Limit.on == 0
    assert undone == [1]
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_the_limit_goes_with_a_harness_that_nobody_closes(limited):
    model, plan, ids = limited()
    gone = weakref.ref(holdall.apply(plan, model, tighten=lambda *_: None))
    model(ids).backward()
    gc.collect()
    assert Limit.on == 1  # the model holds it
    assert gone() is not None
    del model
    gc.collect()
    assert gone() is None
    assert Limit.on == 0


def test_a_change_of_plans_has_one_limit_at_a_time(limited):
    model, plan, ids = limited()
    with holdall.apply(plan, model) as harness:
        harness.switch(plan)
        harness._is_stepping = False
        model(ids).backward()
        assert Limit.on == 1
    assert Limit.on == 0
