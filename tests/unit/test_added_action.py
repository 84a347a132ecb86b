"""An action that is dropped in as one file: planners choose it, it runs, and every list, table and report has it."""

import copy
import json

import pytest
import torch
from typer.testing import CliRunner

import holdall
from holdall import compatibility
from holdall.cli import app
from holdall.errors import InvalidInput
from holdall.registry import add_folder, member_class, member_names
from holdall.reporting.text import blocks_text
from holdall.simulator import simulate
from holdall.testing.contracts import ActionContract, problem_for, train
from holdall.testing.worlds import family, machine
from holdall.types import Hardware

NAP = '''"""Nap: a block sleeps until backward wants something of it, and is run then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from holdall.actions.recompute import Recompute, obstacle
from holdall.types import Block, Choice, Facts, Trace


@dataclass(frozen=True, kw_only=True)
class Nap(Facts):
    block: str
    state: tuple[str, ...] = ()

    name: ClassVar[str] = "nap"
    exact: ClassVar[bool] = True
    rank: ClassVar[int] = 12
    alone: ClassVar[bool] = True
    spares_activations: ClassVar[bool] = True
    what: ClassVar[str] = "blocks sleep until backward"

    @staticmethod
    def of(trace: Trace, block: Block) -> Nap:
        return Nap(block=block.name, state=Recompute.of(trace, [block]).state)

    @staticmethod
    def samples(trace: Trace) -> list[Nap]:
        return [Nap.of(trace, b) for b in trace.blocks if b.saves and not obstacle(trace, [b])][:1]

    @classmethod
    def choices(cls, problem, block):
        if not obstacle(problem.trace, [block]):
            yield Choice(label="send to sleep", make=sleeping, recomputes=True, for_all=True, lean=True)

    def _same(self) -> Recompute:
        return Recompute(blocks=(self.block,), state=self.state)

    def rewrite(self, schedule, problem):
        return self._same().rewrite(schedule, problem)

    def install(self, harness: Any) -> None:
        self._same().install(harness)


def sleeping(trace: Trace, block: Block) -> list[Nap]:
    return [Nap.of(trace, block)]
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of members with one action in it."""
    monkeypatch.setenv("HOLDALL_MEMBERS", "")  # put back afterwards
    (tmp_path / "actions").mkdir()
    (tmp_path / "actions" / "nap.py").write_text(NAP)
    add_folder(tmp_path)
    return tmp_path


@pytest.fixture
def step():
    """(model, batch, optimizer, trace, a budget that is too small for plain training)"""
    model, batch = family("tied")
    batch = tuple(t.repeat(16, *[1] * (t.dim() - 1)) for t in batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    plain = simulate(problem_for(trace), []).peak["cpu"]
    fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    return model, batch, optimizer, trace, fixed + (plain - fixed) * 6 // 10


def says(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_auto_chooses_it_where_it_is_the_best(folder, step):
    *_, trace, budget = step
    slow, fast = (machine(read=rate, write=rate) for rate in (1e6, 1e11))
    allow = ["offload", "nap"]
    chosen = holdall.plan(trace, budget=budget, hardware=slow, allow=allow)
    without = holdall.plan(trace, budget=budget, hardware=slow, allow=["offload"])
    assert chosen.count().get("nap", 0) > 0 and chosen.predicted.seconds < without.predicted.seconds
    assert "nap" not in holdall.plan(trace, budget=budget, hardware=fast, allow=allow).count()  # copies cost next to nothing


def test_it_runs_to_the_same_bits_from_a_plan_file_and_through_fit(folder, step):
    model, batch, optimizer, trace, budget = step
    start = copy.deepcopy(model.state_dict())
    reference = copy.deepcopy(model)
    expected = train(reference, batch, torch.optim.SGD(reference.parameters(), lr=1e-3), 2)
    slow = machine(read=1e6, write=1e6)
    holdall.plan(trace, budget=budget, hardware=slow, allow=["nap"]).save(folder / "plan.json")
    with holdall.apply(folder / "plan.json", model, optimizer) as harness:
        assert train(model, batch, optimizer, 2) == expected
    assert max(harness.step_peaks) == harness.plan.predicted.peak["cpu"] and harness.notes == []
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    report = harness.report()
    report.save(folder / "report.html")
    assert "nap" in blocks_text(report.blocks)
    assert '<span class="pill d-other">nap</span>' in (folder / "report.html").read_text()
    model.load_state_dict(start)
    with holdall.fit(model, optimizer, batch, budget=budget, hardware=slow, allow=["nap"]) as harness:
        assert train(model, batch, optimizer, 2) == expected
    assert harness.plan.count().get("nap", 0) > 0


def test_the_command_line_has_it(folder, step):
    *_, trace, budget = step
    trace.save(folder / "trace.json")
    machine(read=1e6, write=1e6).save(folder / "machine.json")
    asked = ("--hardware", folder / "machine.json", "--budget", budget, "--allow", "offload,nap")
    plan = folder / "plan.json"
    said = says("plan", "--trace", folder / "trace.json", *asked, "--out", plan, "--no-phases")
    assert "x nap" in said
    assert Hardware.load(folder / "machine.json").name in said
    assert "nap" in says("actions") and "(added)" in says("actions")
    explain = ("explain", plan, "--trace", folder / "trace.json", "--hardware", folder / "machine.json")
    assert "send to" in says(*explain)  # a narrow terminal breaks the line
    told = json.loads(says(*explain, "--json"))
    assert {row["decision"] for row in told["blocks"]} >= {"nap"}
    assert {row["what"] for row in told["alternatives"]} >= {"send to sleep", "offload"}
    refused = CliRunner().invoke(app, ["plan", "tiny-gpt2", "--allow", "napp"])
    assert refused.exit_code == 2 and "nap" in refused.output


def test_the_table_of_what_works_with_what_has_it(folder):
    assert "nap" in compatibility.names() and "| `nap` | plan | blocks sleep until backward |" in compatibility.page()
    assert compatibility.verdict("nap", "lora").level == compatibility.EXACT
    assert "one block is refused" in compatibility.verdict("nap", "offload").why
    assert compatibility.verdict("nap", "compress").level == compatibility.CLOSE
    assert "exact" in says("compatible", "nap", "lora")


def test_it_keeps_the_contract_of_actions(folder):
    contract = type("Contract", (ActionContract,), {"action": member_class("actions", "nap"), "families": ("tied",)})()
    for name in dir(contract):
        if name.startswith("test_"):
            getattr(contract, name)()


def test_an_action_by_default_is_used_without_being_named(folder):
    (folder / "actions" / "nap.py").write_text(NAP.replace('"nap"\n', '"nap"\n    by_default: ClassVar[bool] = True\n', 1))
    assert "nap" in holdall.problem.resolve_allow(None)


def test_it_is_gone_when_its_folder_is(folder, monkeypatch):
    assert "nap" in member_names("actions")
    monkeypatch.setenv("HOLDALL_MEMBERS", "")
    assert "nap" not in member_names("actions") and "nap" not in compatibility.names()


def test_a_folder_that_is_not_there_and_a_file_that_is_broken_are_refused(folder):
    with pytest.raises(InvalidInput, match="no folder"):
        add_folder(folder / "nowhere")
    (folder / "actions" / "torn.py").write_text("import no_such_package\n")
    with pytest.raises(InvalidInput, match=r"torn\.py` cannot be imported \(ModuleNotFoundError"):
        member_class("actions", "torn")
    (folder / "actions" / "torn.py").write_text("\n")
    with pytest.raises(InvalidInput, match="defines no class named 'torn'"):
        member_class("actions", "torn")
