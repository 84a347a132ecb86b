"""Whatever is handed in wrong is answered by one line that states the fact, and a hint."""

import copy
import dataclasses
import json

import pytest
import torch

import holdall
from holdall.actions.recompute import Recompute
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.testing.contracts import problem_for
from holdall.testing.worlds import chain, family, machine
from holdall.types import Hardware, Plan, Trace
from holdall.units import parse_bytes


def refused(call, kind=holdall.InvalidInput):
    """The error of a call: one line, with a hint."""
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert error.fact
    assert "\n" not in error.fact
    assert error.hint
    assert "\n" not in error.hint
    return error


def planned(**arguments):
    return holdall.plan(chain([50] * 4), **{"hardware": machine(), **arguments})


@pytest.fixture(scope="module")
def tied():
    model, batch = family("tied")
    optimizer = torch.optim.AdamW(model.parameters())
    trace = holdall.trace(model, batch, optimizer=optimizer)
    return model, optimizer, finish(Nop(), problem_for(trace), [Recompute.of(trace, [trace.blocks[1]])])


# arguments


@pytest.mark.parametrize(
    "budget",
    [
        "24GX",
        "24 parsecs",
        "-1GiB",
        -1,
        0,
        "0",
        "0GiB",
        0.0,
        "1e30GiB",
        2**70,
        float("nan"),
        float("inf"),
        "",
        "lots",
        True,
        "50%%",
        "NaN",
    ],
)
def test_a_budget_that_is_no_size(budget):
    error = refused(lambda: planned(budget=budget))
    assert "budget" in error.fact
    assert repr(budget) in error.fact or str(budget) in error.fact


@pytest.mark.parametrize("budget", [None, [1], {"cpu": None}, {"cpu": []}])
def test_a_budget_of_another_type(budget):
    refused(lambda: planned(budget=budget))


def test_the_unknown_unit_is_named():
    assert "`GX`" in refused(lambda: planned(budget="24GX")).fact


def test_an_unknown_tier_in_the_budget():
    error = refused(lambda: planned(budget={"gpu": "1GiB"}))
    assert "`gpu`" in error.fact
    assert "cpu" in error.hint


def test_the_closest_planner_is_offered():
    error = refused(lambda: planned(planner="chenn"))
    assert "chenn" in error.fact
    assert "did you mean `chen`" in error.hint


@pytest.mark.parametrize("name", ["_finish", "../planners/auto", "__init__", "", "os"])
def test_only_members_are_planners(name):
    refused(lambda: planned(planner=name))


def test_an_unknown_option_of_a_planner():
    error = refused(lambda: planned(planner="chen", variants="greedy"))
    assert "variants" in error.fact
    assert "did you mean `variant`" in error.hint


def test_a_wrong_value_of_a_planner_option():
    assert "did you mean `greedy`" in refused(lambda: planned(planner="chen", variant="gredy")).hint
    refused(lambda: planned(planner="chen", variant=3))
    refused(lambda: planned(planner="chen", last="yes"))


def test_the_closest_gpu_is_offered():
    assert "did you mean `rtx-4090`" in refused(lambda: planned(hardware="rtx-490")).hint
    assert "did you mean `rtx-4090`" in refused(lambda: planned(hardware="RTX 4090")).hint


def test_an_unknown_action_in_allow():
    error = refused(lambda: planned(allow=["recompute", "ofload"]))
    assert "`ofload`" in error.fact
    assert "did you mean `offload`" in error.hint
    refused(lambda: planned(allow="everything"))


def test_a_trace_for_a_gpu_needs_the_gpu_or_its_name():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU to probe")
    model, batch = family("tied")
    trace = holdall.trace(model, batch, device="cuda")
    error = refused(lambda: holdall.plan(trace, budget="1GiB"))
    assert "GPU" in error.fact
    assert "hardware=" in error.hint
    assert holdall.plan(trace, budget="1GiB", hardware="rtx-4090").actions == ()


def test_a_device_that_is_not_planned_for():
    model, batch = family("tied")
    refused(lambda: holdall.trace(model, batch, device="abacus"))
    refused(lambda: holdall.trace(model, batch, device="meta"))


# files

KINDS = {"plan": Plan, "trace": Trace, "hardware": Hardware}


@pytest.fixture
def good(tmp_path):
    """One good file of each kind."""
    trace = chain([50] * 4)
    trace.save(tmp_path / "trace.json")
    machine().save(tmp_path / "hardware.json")
    finish(Nop(), problem_for(trace), [Recompute.of(trace, [trace.blocks[0]])]).save(tmp_path / "plan.json")
    return tmp_path


def change(path, edit):
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "content", [b"", b"not json", b"\xff\xfe\x00", b"[]", b"null", b"3", b'{"format": "other"}', b'{"a": 1}']
)
def test_a_foreign_file(good, kind, content):
    path = good / f"{kind}.json"
    path.write_bytes(content)
    assert str(path) in refused(lambda: KINDS[kind].load(path)).fact


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file_a_folder_and_a_file_of_another_kind(good, kind):
    refused(lambda: KINDS[kind].load(good / "nowhere.json"))
    refused(lambda: KINDS[kind].load(good))
    for other in KINDS.keys() - {kind}:
        assert kind in refused(lambda other=other: KINDS[kind].load(good / f"{other}.json")).fact


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_truncated_file(good, kind, share):
    path = good / f"{kind}.json"
    text = path.read_text()
    path.write_text(text[: int(len(text) * share)])
    refused(lambda: KINDS[kind].load(path))


WRONG = {
    "plan": ["actions", "predicted", "budget", "trace", "options"],
    "trace": ["ops", "tensors", "blocks", "saves"],
    "hardware": ["name", "tiers", "flops", "bandwidth", "overlap", "table"],
}
ALLOWED = [("trace", "text"), ("name", "text"), ("options", {"a": {}}), ("bandwidth", 3)]
HAVE_DEFAULTS = ("overlap", "table")


@pytest.mark.parametrize(("kind", "field"), [(k, f) for k, fields in WRONG.items() for f in fields])
def test_a_field_of_another_type(good, kind, field):
    path = good / f"{kind}.json"
    text = path.read_text()
    for value in (None, 3, "text", [[1]], {"a": {}}):
        if (field, value) in ALLOWED:
            continue
        path.write_text(text)
        change(path, lambda data, value=value: data.update({field: value}))
        refused(lambda: KINDS[kind].load(path))


@pytest.mark.parametrize(("kind", "field"), [(k, f) for k, fields in WRONG.items() for f in fields if f not in HAVE_DEFAULTS])
def test_a_field_that_is_missing(good, kind, field):
    path = good / f"{kind}.json"
    change(path, lambda data: data.pop(field))
    refused(lambda: KINDS[kind].load(path))


@pytest.mark.parametrize("name", ["recomputed", "os", "__init__", "../actions/keep", "_json", "", 3, None])
def test_a_plan_that_names_an_unknown_action(good, name):
    path = good / "plan.json"
    change(path, lambda data: data["actions"][0].update(action=name))
    error = refused(lambda: Plan.load(path))
    if name == "recomputed":
        assert "did you mean `recompute`" in error.hint


@pytest.mark.parametrize("entry", [3, "recompute", None, [], {}, {"action": "recompute"}, {"action": "recompute", "blocks": 3}])
def test_an_action_that_is_not_whole(good, entry):
    path = good / "plan.json"
    change(path, lambda data: data.update(actions=[entry]))
    refused(lambda: Plan.load(path))


def test_an_action_with_a_field_it_does_not_have(good):
    path = good / "plan.json"
    change(path, lambda data: data["actions"][0].update(command="rm"))
    assert "command" in refused(lambda: Plan.load(path)).fact


@pytest.mark.parametrize("name", ["plan.json", "trace.json"])
@pytest.mark.parametrize(
    ("entry", "named"), [({"__class__": "os"}, "__class__"), ({"device": 3}, "3"), ({"batch": [[2.5]]}, "2.5")]
)
def test_an_entry_of_about_that_does_not_belong_there(good, name, entry, named):
    path, load = good / name, Plan.load if name == "plan.json" else Trace.load
    change(path, lambda data: data["about"].update(entry))
    assert named in refused(lambda: load(path)).fact


def test_code_in_a_file_stays_text(good, tmp_path):
    path, witness = good / "plan.json", tmp_path / "ran"
    code = f"__import__('pathlib').Path({str(witness)!r}).touch()"
    change(path, lambda data: (data["actions"][0].update(blocks=[code]), data.update(planner=code, about={"model": code})))
    plan = Plan.load(path)
    assert plan.actions[0].blocks == (code,)
    assert plan.planner == plan.about.model == code
    assert not witness.exists()


def test_a_path_that_cannot_be_written(tmp_path):
    plan = planned(budget="1GiB")
    refused(lambda: plan.save(tmp_path / "no" / "folder" / "plan.json"))


# applying


def test_a_plan_applied_to_another_model(tied):
    _, _, plan = tied
    other, _ = family("twice")
    refused(lambda: holdall.apply(plan, other), holdall.TraceMismatch)
    wider, _ = family("tied")
    wider.layers.append(copy.deepcopy(wider.layers[0]))
    refused(lambda: holdall.apply(plan, wider), holdall.TraceMismatch)


def test_a_plan_that_names_a_block_the_model_does_not_have(tied):
    model, optimizer, plan = tied
    wrong = dataclasses.replace(plan, actions=(Recompute(blocks=("layers.77",)),))
    refused(lambda: holdall.apply(wrong, model, optimizer), holdall.HoldallError)
    assert "forward" not in model.layers[0].__dict__


def test_an_optimizer_over_other_parameters(tied):
    model, _, plan = tied
    other, batch = family("tied")
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    refused(lambda: holdall.apply(plan, model, foreign))
    refused(lambda: holdall.trace(model, batch, optimizer=foreign))


def test_a_model_without_weights_cannot_be_applied_to(tied):
    _, _, plan = tied
    with torch.device("meta"):
        hollow = family("tied")[0]
    refused(lambda: holdall.apply(plan, hollow), holdall.Unsupported)


@pytest.mark.parametrize("batch", [None, {}, [], "text", {"ids": [1, 2]}, torch.zeros(2, 3, 4, 5, 6)])
def test_a_batch_that_the_model_cannot_take(batch):
    model, _ = family("tied")
    refused(lambda: holdall.trace(model, batch))


def test_a_model_that_returns_no_loss():
    layer = torch.nn.Linear(4, 4)
    assert "scalar" in refused(lambda: holdall.trace(layer, torch.randn(2, 4))).fact
    refused(lambda: holdall.trace(layer, torch.randn(2, 4), loss=lambda model, batch: 3.0))


def test_what_is_no_model():
    refused(lambda: holdall.trace("not a model", torch.randn(2, 4)))


def test_a_bare_number_is_not_taken_for_bytes():
    with pytest.raises(holdall.InvalidInput) as error:
        parse_bytes("24")
    assert 'did you mean "24GiB"?' in error.value.hint
    assert parse_bytes("24b") == 24 and parse_bytes("2048") == 2048
