"""SIGKILL at any moment of training and saving loses nothing that was saved; more of it in `benchmarks/kill_and_resume.py`."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

import holdall
from holdall.checkpoints import folders, states

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork") or torch.cuda.is_initialized(), reason="children are forked, which CUDA does not allow"
)


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[2] / "benchmarks" / "kill_and_resume.py"
    spec = importlib.util.spec_from_file_location("kill_and_resume", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(autouse=True)
def my_numbers():
    with torch.random.fork_rng():
        yield


def test_every_restart_ends_as_the_run_that_was_left_alone(tmp_path, script):
    lines = []
    assert script.trial(6, 0, tmp_path, lines.append) == 0
    assert sum("killed" in line for line in lines) == 6
    assert "at call" in lines[1] and "in saving" in lines[1]  # where the timed ones fall depends on the machine


def test_the_trial_notices_what_is_not_brought_back(tmp_path, script, monkeypatch):
    """Without the random numbers, dropout differs, and so do the bits."""
    alone = script.run_child(lambda say: script.train(tmp_path / "alone", None, say)).last("done")
    moment = script.count_calls(tmp_path / "counted") // 2

    def killed(say):
        script.watch_calls(script.killed_at_call(moment))
        return script.train(tmp_path / "run", None, say)

    assert script.run_child(killed).killed
    monkeypatch.setattr(states, "read_random", lambda *_: None)
    again = script.run_child(lambda say: script.train(tmp_path / "run", None, say))
    assert again.last("from") != "from 0" and again.last("done") not in ("-", alone)


@pytest.mark.parametrize("what", ["the next", "the same"])
def test_no_moment_of_a_save_loses_the_one_before(tmp_path, script, what):
    """Before and after every call that gives something its name, for the save of a next step and for one that takes the place
    of the only one there is."""
    model, optimizer, _ = script.make()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    step = 1 if what == "the same" else 2
    new = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.embed.weight.zero_()
    old = {name: value.clone() for name, value in model.state_dict().items()}

    def save(at, weights, out):
        model.load_state_dict(weights)
        return holdall.save_checkpoint(out, model, optimizer, step=at, keep=1)

    def killed(say, moment, out):
        script.watch_calls(script.killed_at_call(moment), ["rename", "replace", "symlink"])
        return str(save(step, new, out))

    seen, moment = [], 0
    while True:
        out = tmp_path / str(moment)
        save(1, old, out)
        child = script.run_child(lambda say, m=moment, o=out: killed(say, m, o))
        if not child.killed:
            break
        found = holdall.load_checkpoint(out, model, optimizer)
        is_new = torch.equal(model.embed.weight, new["embed.weight"])
        assert is_new or torch.equal(model.embed.weight, old["embed.weight"])
        assert found.step == (step if is_new else 1)
        seen.append((is_new, any(path.name.endswith(".old") for path in (out / "checkpoints").iterdir())))
        moment += 1
    assert folders.latest(out)[1] == step and os.listdir(out / "checkpoints") == [f"step-{step:06d}"]
    assert {is_new for is_new, _ in seen} == {True, False}
    if what == "the same":
        assert (False, True) in seen  # the one that was set aside was used: the moment in which there is no other
