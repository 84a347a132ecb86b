"""An optimizer and a precision recipe of your own, each one file in a folder: chosen by name like those of the package."""

import copy
import json

import pytest
import torch
from typer.testing import CliRunner

import holdall
from holdall import compatibility, optim, precision
from holdall.cli import app
from holdall.registry import add_folder
from holdall.reporting.html import render_html
from holdall.testing.contracts import train
from holdall.testing.worlds import family, machine

OPTIMIZER = '''
from typing import ClassVar

import torch


class Lion(torch.optim.Optimizer):
    """The sign of a momentum."""

    name: ClassVar[str] = "lion"
    paper: ClassVar[str] = "Chen et al. 2023"

    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if "moment" not in self.state[p]:
                        self.state[p]["moment"] = torch.zeros_like(p)
                    self.state[p]["moment"].lerp_(p.grad, 1 - group["beta"])
                    p.add_(self.state[p]["moment"].sign(), alpha=-group["lr"])
'''

RECIPE = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.precision import Recipe


@dataclass(frozen=True, kw_only=True)
class Coarse(Recipe):
    """Outputs of linear layers are rounded to bfloat16."""

    loudly: bool = False

    name: ClassVar[str] = "coarse_linear"
    what: ClassVar[str] = "outputs of linear layers rounded to bf16"

    def put_on(self, model):
        hooks = [m.register_forward_hook(_rounded) for m in model.modules() if isinstance(m, torch.nn.Linear)]
        return lambda: [hook.remove() for hook in hooks]


def _rounded(module, args, out):
    return out.bfloat16().float()
'''


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    """The two files; what was added is forgotten after the test."""
    monkeypatch.setenv("HOLDALL_MEMBERS", "")
    for folder, name, text in (("optim", "lion", OPTIMIZER), ("precision", "coarse_linear", RECIPE)):
        (tmp_path / "mine" / folder).mkdir(parents=True)
        (tmp_path / "mine" / folder / f"{name}.py").write_text(text)
    add_folder(tmp_path / "mine")


def says(*words):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


def rounding(model):
    """The recipe without a plan."""
    model = copy.deepcopy(model)
    return model, precision.put_on(precision.find("coarse-linear"), model)


def test_auto_plans_with_both_and_the_numbers_are_those_without_a_plan():
    model, batch = family("tied")
    start = copy.deepcopy(model)
    plain, undo = rounding(model)
    expected = train(plain, batch, optim.make("lion:lr=0.01", plain))
    undo()
    traced = holdall.trace(model, batch, optimizer="lion:lr=0.01", precision="coarse-linear")
    assert traced.about.recipe == "coarse-linear" and traced.about.optimizer == "Lion"
    budget = holdall.plan(traced, hardware=machine()).predicted.peak["cpu"] * 8 // 10
    given = {"hardware": machine(), "budget": budget, "precision": "coarse_linear"}
    with holdall.fit(model, "lion:lr=0.01", batch, **given) as harness:
        assert train(model, batch, harness.optimizer) == expected
        assert harness.plan.planner == "auto" and harness.plan.actions
        assert harness.measured().peak["cpu"] <= budget
        assert harness.notes == []
        report = harness.report()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert not any(m._forward_hooks for m in model.modules())  # the recipe is off again
    assert train(start, batch, optim.make("lion:lr=0.01", start)) != expected  # it did something
    assert "Lion" in render_html(report) and "coarse-linear" in render_html(report)


def test_a_plan_file_knows_its_recipe(tmp_path):
    model, batch = family("tied")
    plain, undo = rounding(model)
    expected = train(plain, batch, optim.make("lion", plain))
    undo()
    traced = holdall.trace(model, batch, optimizer="lion", precision="coarse-linear:loudly=true")
    holdall.plan(traced, hardware=machine()).save(tmp_path / "plan.json")
    optimizer = optim.make("lion", model)
    with holdall.apply(tmp_path / "plan.json", model, optimizer) as harness:
        assert harness.plan.about.recipe == "coarse-linear:loudly=true"
        assert train(model, batch, optimizer) == expected


def test_the_command_line_lists_and_plans_with_both(tmp_path):
    assert "Chen et al. 2023" in says("optimizers") and "coarse-linear" in says("precisions")
    words = ["plan", "tiny-llama", "--seq", "16", "--gpu", "rtx-4090", "--no-phases"]
    text = says(*words, "--optimizer", "lion:beta=0.8", "--precision", "coarse-linear")
    assert "Lion" in text and "coarse-linear" in text
    wrong = CliRunner().invoke(app, [*words, "--optimizer", "lino"])
    assert wrong.exit_code == 2 and "did you mean `lion`" in wrong.output


def test_train_trains_with_both(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a text that is long enough to be learned from. " * 40)
    machine().save(tmp_path / "machine.json")
    words = ["train", "tiny-llama", "--data", str(text), "--batch", "2", "--seq", "16", "--steps", "3", "--warmup", "0"]
    words += ["--device", "cpu", "--gpu", str(tmp_path / "machine.json"), "--optimizer", "lion", "--json"]
    found = json.loads(says(*words, "--precision", "coarse-linear", "--out", str(tmp_path / "run")))
    assert found["loss"] < found["first_loss"]
    other = json.loads(says(*words, "--out", str(tmp_path / "other")))
    assert other["loss"] != found["loss"]


def test_the_table_of_what_works_together_has_both():
    table = says("compatible")
    assert "lion" in table and "coarse-linear" in table
    assert json.loads(says("compatible", "lion", "coarse-linear", "offload", "--json"))["level"] == "exact"
    assert compatibility.verdict("lion", "compress").level == "close"
    assert compatibility.verdict("lion", "galore").level == "refused"  # one of a kind
    assert compatibility.verdict("coarse-linear", "bf16").level == "refused"
