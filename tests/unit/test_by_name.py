"""Optimizers and precision recipes by name: in `trace`, `fit` and the command line."""

import copy
import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

import holdall
from holdall import compatibility, optim, precision
from holdall.cli import app
from holdall.optim.galore import GaLore
from holdall.registry import member_names
from holdall.testing.contracts import train
from holdall.testing.worlds import family, machine


def says(*words):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_names_are_the_folder_and_torch():
    assert set(optim.names()) == {*member_names("optim"), *optim.TORCH}
    assert optim.find("sgd") is torch.optim.SGD and optim.find("galore") is GaLore


@pytest.mark.parametrize("name", optim.names())
def test_every_optimizer_can_be_made_from_its_name_alone(name):
    model, _ = family("tied")
    made = optim.make(name, model)
    try:
        assert type(made) is optim.find(name)
        held = {id(p) for group in made.param_groups for p in group["params"]}
        assert held == {id(p) for p in model.parameters() if p.requires_grad}
    finally:
        getattr(made, "close", lambda: None)()


def test_a_rule_with_a_rank_gets_one_that_suits_the_model():
    model, _ = family("tied")
    ranks = [group["rank"] for group in optim.make("galore", model).param_groups]
    assert ranks[0] >= 1 and ranks[1] is None  # what is no inner matrix has none
    assert optim.make("galore:rank=3:lr=0.5", model).param_groups[0]["rank"] == 3
    assert {group["lr"] for group in optim.make("galore:rank=3:lr=0.5", model).param_groups} == {0.5}
    assert optim.make("adamw:betas=[0.8,0.9]", model).defaults["betas"] == (0.8, 0.9)


def test_vectors_may_be_spared_from_weight_decay():
    model, _ = family("tied")
    for name in ("adamw", "galore", "adam_mini"):
        groups = optim.make(name, model, decay_vectors=False, weight_decay=0.1).param_groups
        assert all((p.dim() > 1) == (group["weight_decay"] > 0) for group in groups for p in group["params"]), name


def test_fit_takes_a_name_and_trains_as_the_optimizer_does_alone():
    model, batch = family("tied")
    reference = copy.deepcopy(model)
    expected = train(reference, batch, optim.make("adam_mini", reference))
    with holdall.fit(model, "adam_mini", batch, hardware=machine()) as harness:
        assert train(model, batch, harness.optimizer) == expected
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


@pytest.mark.parametrize("name", ["galrore", "galore:rang=4"])
def test_fit_refuses_a_wrong_name_before_anything_slow(name):
    model, batch = family("tied")
    with pytest.raises(holdall.InvalidInput, match="unknown") as refused:
        holdall.fit(model, name, batch, hardware=machine())
    assert "did you mean" in refused.value.hint


def test_the_command_line_lists_them():
    rows = {row["name"]: row for row in json.loads(says("optimizers", "--json"))}
    assert set(rows) == set(optim.names()) and not any(row["error"] for row in rows.values())
    assert rows["galore"]["options"]["update_proj_gap"] == 200 and "2403.03507" in rows["galore"]["paper"]
    assert not rows["mezo"]["planned"] and not rows["lomo"]["planned"] and rows["sgd"]["planned"]
    assert "galore" in says("optimizers")


def test_states_in_an_estimate_are_those_of_the_rule():
    words = ["estimate", "tiny-llama", "--batch", "1", "--seq", "16", "--json", "--optimizer"]
    states = [json.loads(says(*words, name))["kinds"].get("optimizer state", 0) for name in ("sgd", "galore:rank=4", "adamw")]
    assert 0 == states[0] < states[1] < states[2]


# in plans, as `holdall compatible` says

PLANNED = [name for name in member_names("optim") if compatibility.verdict(name).level == "exact"]


def planned_as_plain(make, batch, model, plain, undo=lambda: None, **given):
    """Trains under a tight plan of `auto`, and without; the same bits are expected. Returns the harness."""
    expected = train(plain, batch, make(plain))
    undo()
    optimizer = make(model)
    whole = holdall.trace(model, batch, optimizer=optimizer, **given)
    budget = holdall.plan(whole, hardware=machine(), planner="nop").predicted.peak["cpu"] * 9 // 10
    with holdall.fit(model, optimizer, batch, hardware=machine(), budget=budget, **given) as harness:
        assert train(model, batch, optimizer) == expected
    assert harness.plan.actions and harness.notes == []
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert harness.measured().peak["cpu"] <= budget
    return harness


@pytest.mark.parametrize("name", PLANNED)
def test_an_optimizer_trains_under_a_plan_as_it_does_alone(name):
    model, batch = family("tied")
    planned_as_plain(lambda m: optim.make(name, m), batch, model, copy.deepcopy(model))


@pytest.mark.parametrize("name", [n for n in member_names("optim") if n not in PLANNED])
def test_an_optimizer_that_no_plan_can_take_is_refused_before_the_first_step(name):
    model, batch = family("tied")
    with pytest.raises(holdall.Unsupported) as refused:
        holdall.fit(model, name, batch, hardware=machine())
    assert refused.value.hint and "\n" not in refused.value.fact


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize("name", ["fp32", "bf16-autocast", "bf16-weights", "fp8-torchao:emulate=true", "qat-int8"])
def test_a_recipe_trains_under_a_plan_as_it_does_alone_and_leaves_nothing_behind(name):
    """`bf16-master` is tests/contracts/test_compatibility.py's."""
    if name.startswith(("fp8", "qat")):
        pytest.importorskip("torchao")
    model, batch = family("tied")
    plain = copy.deepcopy(model)
    kinds = [type(m) for m in model.modules()]
    undo = precision.put_on(precision.find(name), plain)
    harness = planned_as_plain(adamw, batch, model, plain, undo, precision=name)
    assert harness.plan.about.recipe == name
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert [type(m) for m in model.modules()] == kinds
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_names_of_recipes_are_those_of_plans_and_the_old_ones():
    for name, own in {"bf16": "bf16-master", "bfloat16": "bf16-master", "bf16-mixed": "bf16-master", "float32": "fp32"}.items():
        assert str(precision.plannable(name)) == own
    assert str(precision.find("bf16")) == "bf16-weights"  # of `prepare`
    assert [str(precision.find(level)) for level in ("O0", "O1", "O2", "O3")] == [
        "fp32",
        "fp16-autocast",
        "fp16-master",
        "fp16-weights",
    ]
    assert str(precision.find("fp8:scaling=row")) == "fp8:scaling=row"


@pytest.mark.parametrize("name", ["fp16-autocast", "O2", "bf16-stochastic", "fp16"])
def test_a_recipe_that_needs_another_loop_is_refused_with_those_that_do_not(name):
    model, batch = family("tied")
    with pytest.raises(holdall.Unsupported) as refused:
        holdall.fit(model, adamw(model), batch, hardware=machine(), precision=name)
    assert "bf16" in refused.value.hint and "prepare" in refused.value.hint


def test_a_recipe_is_off_again_where_a_plan_cannot_be_applied():
    model, batch = family("tied")
    plan = holdall.plan(holdall.trace(model, batch, precision="bf16-weights"), hardware=machine())
    other = torch.nn.Linear(4, 4)
    before = {p.dtype for p in other.parameters()}
    with pytest.raises(holdall.TraceMismatch):
        holdall.apply(plan, other)
    assert {p.dtype for p in other.parameters()} == before and not other._forward_hooks


def test_precision_on_the_command_line():
    words = ["estimate", "tiny-llama", "--batch", "1", "--seq", "16", "--json"]
    states = {
        name: json.loads(says(*words, "--precision", name))["kinds"]["parameters"]
        for name in ("fp32", "bf16-weights", "autocast")
    }
    assert states["fp32"] == states["autocast"] == pytest.approx(2 * states["bf16-weights"], rel=0.01)  # sizes are rounded up
    assert json.loads(says(*words, "--precision", "bf16")) == json.loads(says(*words, "--dtype", "bf16-mixed"))
    both = CliRunner().invoke(app, [*words, "--precision", "bf16", "--dtype", "bf16"])
    assert both.exit_code == 2 and "leave --dtype out" in both.output
    unknown = CliRunner().invoke(app, [*words, "--precision", "bf61"])
    assert unknown.exit_code == 2 and "did you mean `bf16`" in unknown.output
    rows = {row["name"]: row for row in json.loads(says("precisions", "--json"))}
    assert set(rows) == set(precision.names()) and rows["bf16-weights"]["bytes"] == 8 and not rows["fp16-master"]["planned"]


def test_a_run_with_another_rule_goes_on_as_if_it_had_not_stopped(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a text that is long enough to be learned from. " * 40)
    machine().save(tmp_path / "machine.json")
    words = ["train", "tiny-llama", "--data", str(text), "--batch", "2", "--seq", "16", "--warmup", "0", "--device", "cpu"]
    words += [
        "--gpu",
        str(tmp_path / "machine.json"),
        "--optimizer",
        "galore:update_proj_gap=2",
        "--precision",
        "bf16-autocast",
    ]

    def run(out, steps, *more):
        return json.loads(says(*words, "--out", str(tmp_path / out), "--steps", str(steps), "--json", *more))

    whole = run("whole", 3, "--save-every", "2")
    assert whole["loss"] < whole["first_loss"]
    shutil.rmtree(whole["checkpoint"])  # that of step 2 is left
    again = run("whole", 3)
    assert again["resumed_from"] == 2 and again["loss"] == whole["loss"]
    other = CliRunner().invoke(app, [*words[:-3], "adafactor", *words[-2:], "--out", str(tmp_path / "whole"), "--steps", "4"])
    assert other.exit_code == 2 and "optimizer" in other.output
