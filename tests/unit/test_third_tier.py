"""A third tier, dropped in as one file: found by `auto`, the command line and the tables, and run to the bit.

The tier keeps its bytes in files, so nothing of the other tiers' stores is in it.
"""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import holdall
from holdall import compatibility
from holdall.actions.offload import Offload
from holdall.actions.place import Place, streamable
from holdall.cli import app
from holdall.errors import Infeasible, InvalidInput, Unsupported
from holdall.machine.findings import examine
from holdall.machine.more_tiers import with_tiers
from holdall.planners.auto.spill import spill
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.simulator import simulate
from holdall.testing.stand_ins import planned_for
from holdall.testing.worlds import machine
from holdall.types import Hardware, Plan, Problem, Tier

FILE = '''
"""Files in a folder."""

import tempfile
from pathlib import Path

import torch

from holdall.errors import OverBudget
from holdall.tiers import Ticket


def bytes_of(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class Shelf:
    name = "shelf"
    serves = frozenset({"cpu"})

    def __init__(self, *, capacity=None, device="cpu"):
        self.capacity, self.device, self.notes = capacity, torch.device(device), []
        self.used = self.peak = self.sent = self.fetched = 0
        self.folder = tempfile.TemporaryDirectory()
        self.count = 0

    @classmethod
    def room(cls):
        return 2**40

    @property
    def held(self):
        return self.used

    def put(self, source):
        return self.put_all([source])[0]

    def put_all(self, sources):
        size = sum(source.nbytes() for source in sources)
        if self.capacity is not None and self.used + size > self.capacity:
            raise OverBudget("the shelf is full", hint="give it a larger budget")
        return [self._write(source) for source in sources]

    def _write(self, source):
        ticket = Ticket(source.nbytes())
        ticket.buffer = Path(self.folder.name) / str(self.count)
        self.count += 1
        with torch._C._DisableTorchDispatch():
            ticket.buffer.write_bytes(bytes_of(source).numpy().tobytes())
        self.used += ticket.nbytes
        self.sent += ticket.nbytes
        self.peak = max(self.peak, self.used)
        return ticket

    def landed(self, ticket):
        return True

    def wait(self, ticket):
        pass

    def get(self, ticket, device):
        target = torch.UntypedStorage(ticket.nbytes, device=device)
        self.fetched += ticket.nbytes
        if ticket.nbytes:
            with torch._C._DisableTorchDispatch():
                bytes_of(target).copy_(torch.frombuffer(bytearray(ticket.buffer.read_bytes()), dtype=torch.uint8))
        return target

    def get_all(self, tickets, device):
        return [self.get(ticket, device) for ticket in tickets]

    def wait_in(self, ticket):
        pass

    def free(self, ticket):
        assert ticket.is_live
        ticket.is_live = False
        self.used -= ticket.nbytes
        ticket.buffer.unlink(missing_ok=True)

    def begin_anew(self):
        self.used = self.peak = 0

    def close(self):
        self.folder.cleanup()
'''


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """The file, in a folder of members."""
    (tmp_path / "mine" / "tiers").mkdir(parents=True)
    (tmp_path / "mine" / "tiers" / "shelf.py").write_text(FILE)
    monkeypatch.setenv("HOLDALL_MEMBERS", str(tmp_path / "mine"))
    return "shelf"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(6)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def fresh():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


BATCH = (torch.randn(64, 32, generator=torch.Generator().manual_seed(1)),)


def three(*, overlap=False, **rates) -> Hardware:
    """A machine with a shelf, slower than the nearest tier."""
    there = machine(overlap=overlap)
    slow = Tier(name="shelf", capacity=2**50, **{"read": 1e8, "write": 1e8, **rates})
    return replace(there, tiers=(*there.tiers, slow))


def traced():
    model, optimizer = fresh()
    return holdall.trace(model, BATCH, optimizer=optimizer)


def tight(trace, *, far):
    """A budget in which blocks must leave, and the nearest tier has room for `far` of what leaves."""
    plain = holdall.plan(trace, planner="nop", hardware=machine()).predicted.peak["cpu"]
    fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    home = fixed + (plain - fixed) // 2
    alone = holdall.plan(trace, budget=home, hardware=machine(), allow=["offload"])
    return {"cpu": home, "far": int(far * alone.predicted.peak["far"])}


def offloads(plan):
    return {a.tier or "far" for a in plan.actions if isinstance(a, Offload)}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("room", [0.5, 0.0])
def test_what_the_nearest_tier_has_no_room_for_goes_to_the_next(overlap, room):
    trace = traced()
    budget = tight(trace, far=room)
    budget["far"] = max(budget["far"], 1)
    with pytest.raises(Infeasible):
        holdall.plan(trace, budget=budget, hardware=machine(overlap=overlap), allow=["offload"])
    plan = holdall.plan(trace, budget=budget, hardware=three(overlap=overlap), allow=["offload"])
    assert offloads(plan) == {"shelf"} if not room else "shelf" in offloads(plan)
    assert any("offload to shelf" in reason for reason in plan.why) or overlap
    assert "offload to shelf" in {row.decision for row in plan.about.rows}
    assert all(plan.predicted.peak.get(tier, 0) <= size for tier, size in plan.budget.items())


def test_a_tier_with_room_is_used_before_the_next():
    trace = traced()
    plan = holdall.plan(trace, budget=tight(trace, far=1.0), hardware=three(), allow=["offload"])
    assert offloads(plan) == {"far"}


def test_a_plan_without_the_third_tier_is_the_one_of_two_tiers():
    trace = traced()
    budget = tight(trace, far=2.0)
    two = holdall.plan(trace, budget=budget, hardware=machine())
    old = two.to_json()
    for action in old["actions"]:
        action.pop("tier", None)  # as an older version wrote it
    assert Plan.from_json(old, "an old file").actions == two.actions


def trained(plan, steps=3):
    model, optimizer = fresh()
    losses = []
    context = holdall.apply(plan, model, optimizer) if plan is not None else None
    torch.manual_seed(3)
    for _ in range(steps):
        loss = model(*BATCH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # the tensor itself would be counted
    report = context.report() if context is not None else None
    if context is not None:
        context.close()
    return losses, [p.detach().clone() for p in model.parameters()], report


def test_a_run_with_the_third_tier_keeps_the_bits_and_every_budget_to_the_byte(shelf):
    trace = traced()
    plan = holdall.plan(trace, budget=tight(trace, far=0.5), hardware=three(), allow=["offload"])
    assert offloads(plan) == {"far", shelf}
    losses, weights, report = trained(plan)
    plain_losses, plain_weights, _ = trained(None)
    assert losses == plain_losses and all(map(torch.equal, weights, plain_weights))
    assert dict(report.measured.peak) == dict(plan.predicted.peak)
    assert set(report.measured.peak) == {"cpu", "far", shelf}
    assert all(size <= plan.budget[tier] for tier, size in report.measured.peak.items())
    assert f"peak {shelf}" in str(report)


@planned_for(machine())
def test_fit_lets_a_tier_join_that_the_budget_names(shelf):
    model, optimizer = fresh()
    budget = {**tight(traced(), far=0.0), "far": 1, shelf: "auto"}
    with holdall.fit(model, optimizer, BATCH, budget=budget, allow=["offload"]) as harness:
        model(*BATCH).backward()
        optimizer.step()
        assert offloads(harness.plan) == {shelf}
        assert harness.plan.budget[shelf] == 2**40
        assert harness.measured().peak[shelf] == harness.plan.predicted.peak[shelf] > 0


def test_a_tier_is_measured_by_its_own_copies(shelf):
    found = with_tiers(machine(), [shelf])
    assert [tier.name for tier in found.tiers] == ["cpu", "far", shelf]
    assert found.direct("cpu", shelf).rate == found.tier(shelf).write > 0
    assert found.path(shelf, "far")[0].source == shelf


def test_the_command_line_knows_the_tier(shelf, tmp_path):
    three().save(tmp_path / "machine.json")
    line = [
        "plan",
        "tiny-gpt2",
        "--batch",
        "2",
        "--seq",
        "64",
        "--hardware",
        str(tmp_path / "machine.json"),
        "--allow",
        "offload",
    ]
    free = json.loads(CliRunner().invoke(app, [*line, "--planner", "nop", "--json"]).stdout)
    home = int(0.9 * free["predicted"]["peak"]["cpu"])
    shown = CliRunner().invoke(app, [*line, "--budget", f"cpu={home},far=2KiB,{shelf}=1GiB"])
    assert shown.exit_code == 0, shown.output
    assert shelf in shown.output
    assert shelf in next(f.found for f in examine() if f.what == "tiers")
    assert compatibility.tiers()[shelf] == "activations, from cpu"
    assert shelf in CliRunner().invoke(app, ["compatible"]).output


def test_a_tier_that_nobody_knows_is_refused_with_what_to_type(shelf):
    trace = traced()
    with pytest.raises(InvalidInput, match="unknown tier `attic`"):
        holdall.plan(trace, budget={"attic": "1GiB"}, hardware=machine())
    with pytest.raises(InvalidInput, match="does not have") as refused:
        holdall.plan(trace, budget={shelf: "1GiB"}, hardware=machine())
    assert f"probe --tiers {shelf}" in refused.value.hint
    with pytest.raises(Unsupported, match="serves cuda"):
        with_tiers(replace(machine(), tiers=machine().tiers[1:]), ["cpu"])


def test_an_offload_to_a_tier_that_is_not_there_is_refused():
    trace = traced()
    action = Offload.of(trace, trace.blocks[0], overlap=False, tier="shelf")
    with pytest.raises(InvalidInput, match="unknown tier `shelf`"):
        simulate(Problem(trace=trace, hardware=machine(), budget={}), [action])


# model states


@pytest.fixture
def attic(tmp_path, monkeypatch):
    """A tier whose memory the host can work on."""
    (tmp_path / "mine" / "tiers").mkdir(parents=True)
    code = "from holdall.tiers.far import Far\n\n\nclass Attic(Far):\n    name = 'attic'\n"
    (tmp_path / "mine" / "tiers" / "attic.py").write_text(code)
    monkeypatch.setenv("HOLDALL_MEMBERS", str(tmp_path / "mine"))
    return "attic"


def with_attic():
    there = machine()
    return replace(there, tiers=(*there.tiers, Tier(name="attic", capacity=2**50, read=1e8, write=1e8)))


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("weights", ["streamed", "resident"])
def test_units_that_live_in_a_third_tier_train_as_ever(attic, precision, weights):
    model, optimizer = fresh()
    trace = holdall.trace(model, BATCH, optimizer=optimizer, precision=precision)
    can = streamable(trace)
    rows = {u.name: (weights if u.name in can else "resident", "host") for u in trace.units}
    near = Place.of(trace, rows)
    some = tuple((u.name, attic) for u in trace.units[1::2])
    problem = Problem(trace=trace, hardware=with_attic(), budget={})
    before, plan = (finish(Nop(), problem, [place]) for place in (near, replace(near, elsewhere=some)))
    assert plan.predicted.peak[attic] > 0 and plan.predicted.peak["cpu"] == before.predicted.peak["cpu"]
    assert plan.predicted.peak["far"] + plan.predicted.peak[attic] == before.predicted.peak["far"]
    assert plan.predicted.seconds > before.predicted.seconds
    losses, values, report = trained(plan)
    others, plain, seen = trained(before)
    assert losses == others and all(map(torch.equal, values, plain))
    measured, said = report.measured.peak, plan.predicted.peak
    assert (measured["cpu"], measured[attic]) == (said["cpu"], said[attic])
    assert measured["far"] + measured[attic] == seen.measured.peak["far"]
    if precision is None:  # else wide parameters lie on a boundary each, where a CPU computes
        assert measured["far"] == said["far"] and losses == trained(None)[0]


def test_states_that_neither_device_nor_host_have_room_for_spill_to_a_third_tier(attic):
    trace = traced()
    fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    small = holdall.plan(trace, budget={"cpu": fixed // 2}, hardware=machine())
    budget = {"cpu": small.predicted.peak["cpu"], "far": int(0.9 * small.predicted.peak["far"])}
    with pytest.raises(Infeasible):
        holdall.plan(trace, budget=budget, hardware=machine())
    plan = holdall.plan(trace, budget=budget, hardware=with_attic())
    assert plan.predicted.peak[attic] > 0
    losses, _, report = trained(plan)
    assert losses == trained(None)[0]
    assert dict(report.measured.peak) == dict(plan.predicted.peak)
    assert all(size <= plan.budget[tier] for tier, size in report.measured.peak.items())


def test_what_has_room_on_the_host_is_left_as_it_is(attic):
    trace = traced()
    problem = Problem(trace=trace, hardware=with_attic(), budget={})
    actions = (replace(Place.all(trace, update="host", when="overlap_forward"), ahead=True),)
    assert spill(problem, actions, lambda given: simulate(problem, given)) == actions


def test_a_unit_passes_through_the_device_from_the_nearest_tier_alone():
    trace = traced()
    place = replace(Place.all(trace, update="via_device"), elsewhere=((trace.units[0].name, "attic"),))
    with pytest.raises(Unsupported, match="via the device"):
        simulate(Problem(trace=trace, hardware=with_attic(), budget={}), [place])
    with pytest.raises(InvalidInput, match="unknown unit"):
        simulate(Problem(trace=trace, hardware=with_attic(), budget={}), [replace(place, elsewhere=(("roof", "attic"),))])


def test_a_tier_without_memory_to_work_on_takes_no_model_states(shelf):
    trace = traced()
    place = replace(Place.all(trace, update="host"), elsewhere=((trace.units[0].name, shelf),))
    plan = finish(Nop(), Problem(trace=trace, hardware=three(), budget={}), [place])
    with pytest.raises(Unsupported, match="the tier `shelf` cannot hold model states"):
        trained(plan)
