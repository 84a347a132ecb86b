"""Optimizers by name: in `trace`, `fit` and the command line, those of the folder and torch's own."""

import copy
import json

import pytest
import torch
from typer.testing import CliRunner

import holdall
from holdall import optim
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
