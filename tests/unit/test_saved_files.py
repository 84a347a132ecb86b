"""Files that an earlier version saved, when `about` was a dictionary, in `saved/`: trace and plan of a small model in
bfloat16 with a chunked head, one block recomputed and one streamed; a measured machine, and one by its datasheet."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import holdall
from holdall.errors import InvalidInput
from holdall.fitting.request import FitRequest
from holdall.runtime.switching.recast import Casting
from holdall.testing.worlds import chain, machine
from holdall.types import ChunkedHead, Hardware, HardwareInfo, HostLink, Plan, PlanInfo, QueueRate, StepInfo, Trace, TraceInfo

SAVED = Path(__file__).parent / "saved"


@pytest.mark.parametrize(("name", "kind"), [("trace", Trace), ("plan", Plan)])
def test_everything_in_an_older_file_is_kept(name, kind, tmp_path):
    read = kind.load(SAVED / f"{name}.json")
    read.save(tmp_path / "again.json")
    before, after = (json.loads(path.read_text()) for path in (SAVED / f"{name}.json", tmp_path / "again.json"))
    added = after["about"].keys() - before["about"].keys()
    assert added <= {"alters", "once"} | ({"context", "pieces", "shards"} if kind is Trace else {"rates", "layout"})
    after["about"] = {k: v for k, v in after["about"].items() if k not in added}
    for block in (*after.get("blocks", []), *([after["whole"]] if after.get("whole") else [])):
        assert (block.pop("alters"), block.pop("once")) == ([], "")  # newer than the file
    for new, old in zip(after.get("actions", []), before.get("actions", []), strict=True):  # with fields that are newer
        renamed = {"when": "overlap_forward"} if old.get("when") == "spill" else {}
        assert new.items() >= {**old, **renamed}.items()
    assert {**after, "actions": None} == {**before, "actions": None}
    assert kind.load(tmp_path / "again.json") == read


def test_an_older_trace_says_what_it_was_traced_for():
    about = Trace.load(SAVED / "trace.json").about
    assert (about.model, about.optimizer, about.batch) == ("Tiny", "SGD", ((2, 3), (2, 3)))
    assert (about.device, about.precision, about.recipe, about.autocast) == ("cuda", "bfloat16", "bf16-master", None)
    assert about.head == ChunkedHead(module="lm_head", rows=4)
    assert (about.source, about.looked_at, about.calls) == ("fake", (0,), 1)


def test_an_older_plan_says_what_the_harness_needs():
    about = Plan.load(SAVED / "plan.json").about
    assert about.blocks == (("embed", ((2, 3),)), ("blocks.0", ((2, 3, 4),)), ("blocks.1", ((2, 3, 4),)))
    assert dict(about.units)["blocks.0"] == ("blocks.0.weight", "blocks.0.bias")
    assert [(row.module, row.decision) for row in about.rows][2] == ("blocks.1", "recompute")
    assert about.seconds_if_not_clipped == pytest.approx(0.000659)


def test_an_older_machine_says_where_its_figures_are_from():
    about = Hardware.load(SAVED / "machine.json").about
    assert (about.threads, about.python, about.notes) == (2, "3.11.4", ("memory could not be pinned",))
    assert about.queue == (
        QueueRate(tier="nvme", depth=1, read=1.5e9, write=1e9, duplex=0.7),
        QueueRate(tier="nvme", depth=16, read=3e9, write=2e9, duplex=0.6),
    )
    assert (about.link, about.tfloat32) == (None, None)
    about = Hardware.load(SAVED / "gh200.json").about
    assert about == HardwareInfo(link=HostLink(kind="nvlink-c2c", bytes_per_second=450e9), tfloat32=494.7e12)


@pytest.mark.parametrize("name", ["machine", "gh200"])
def test_a_machine_of_an_older_file_is_the_same_when_saved_again(name, tmp_path):
    read = Hardware.load(SAVED / f"{name}.json")
    read.save(tmp_path / "again.json")
    before, after = (json.loads(path.read_text()) for path in (SAVED / f"{name}.json", tmp_path / "again.json"))
    assert before.keys() - after.keys() == {"world_size", "link"}  # nothing read them
    assert {**before, **after, "about": None} == {**before, "about": None}
    assert Hardware.load(tmp_path / "again.json") == read


def test_a_machine_with_an_unknown_remark_is_refused(tmp_path):
    data = json.loads((SAVED / "machine.json").read_text())
    (tmp_path / "machine.json").write_text(json.dumps({**data, "about": {"colour": "green"}}))
    with pytest.raises(InvalidInput, match="HardwareInfo has no field `colour`"):
        Hardware.load(tmp_path / "machine.json")


def test_a_plan_that_says_that_it_was_remembered_loads(tmp_path):
    data = json.loads((SAVED / "plan.json").read_text())
    data["about"]["remembered"] = True
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert Plan.load(tmp_path / "plan.json") == Plan.load(SAVED / "plan.json")


def test_a_file_without_about_has_the_defaults(tmp_path):
    kinds = (("trace", Trace, TraceInfo()), ("plan", Plan, PlanInfo()), ("machine", Hardware, HardwareInfo()))
    for name, kind, expected in kinds:
        data = json.loads((SAVED / f"{name}.json").read_text())
        (tmp_path / name).write_text(json.dumps({**data, "about": {}}))
        assert kind.load(tmp_path / name).about == expected


@pytest.mark.parametrize(("planned", "notes"), [("", 0), (None, 1), ("float16", 1), ("bfloat16", 0)])
def test_a_plan_that_does_not_record_autocast_runs_under_any(planned, notes):
    found = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = SimpleNamespace(about=PlanInfo(autocast=planned))
        Casting(torch.device("cpu"), None, found.append).look(plan, lambda make: None)
    assert len(found) == notes


def test_a_plan_takes_over_what_both_know_of_the_step():
    values = {f.name: f"a value of {f.name}" for f in dataclasses.fields(StepInfo)}
    made = PlanInfo.of(TraceInfo(**values))
    assert {name: getattr(made, name) for name in values} == values


def test_an_older_plan_of_placements_has_todays_words(tmp_path):
    data = json.loads((SAVED / "plan.json").read_text())
    place = next(a for a in data["actions"] if a["action"] == "place")
    place["when"] = "spill"
    place["units"] = [[unit, weights, "through"] for unit, weights, _ in place["units"]]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    read = next(a for a in Plan.load(tmp_path / "plan.json").actions if a.name == "place")
    assert read.when == "overlap_forward" and {update for _, _, update in read.units} == {"via_device"}


def test_the_older_names_of_arguments_are_accepted():
    trace, hardware = chain([100, 100]), machine()
    for clips in (True, False):
        old, new = (holdall.plan(trace, hardware=hardware, **{name: clips}) for name in ("clips", "reads_gradients"))
        assert old.actions == new.actions
    assert FitRequest.of(clips=False).reads_gradients is False
    assert (
        holdall.plan(trace, hardware=hardware, through=False).actions
        == holdall.plan(trace, hardware=hardware, via_device=False).actions
    )
