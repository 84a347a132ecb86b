"""Checkpoints of sharded runs: a killed rank, other numbers of ranks, other ways to shard, one process, and plain torch."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import holdall
from holdall.testing.ranks import RanksFailed, on_ranks
from holdall.testing.worlds import machine

STEPS, KILLED = 5, 3


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = torch.nn.Linear(15, 30), torch.nn.Linear(30, 15), torch.nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(x))))


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def made():
    torch.manual_seed(0)
    model = Stack()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(rank, step=0):
    return torch.randn(10, 15, generator=torch.Generator().manual_seed(100 * step + rank))


def fitted(ranks, way):
    model, optimizer = made()
    asked = {"budget": "1GiB", "hardware": machine(), "mesh": {"dp": ranks}, "shard": way}
    return model, optimizer, holdall.fit(model, optimizer, (batch(dist.get_rank()),), **asked)


def states(model, optimizer):
    """By name, whole: weights and the optimizer's first moments."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    for p, state in optimizer.state.items():
        name = names[id(getattr(p, "holdall_whole", p))]
        found[f"{name}.exp_avg"] = state["exp_avg"].full_tensor().reshape(found[name].shape)
    return found


def run(folder, way="fsdp", killed=None):
    rank = dist.get_rank()
    model, optimizer, harness = fitted(2, way)
    torch.manual_seed(7 + rank)
    found = holdall.load_checkpoint(folder, model, optimizer)
    losses = {}
    for step in range(found.step if found else 0, STEPS):
        if step == killed and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(batch(rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        with torch.no_grad():
            model(batch(rank, step))  # leaves parameters gathered
        holdall.save_checkpoint(folder, model, optimizer, step=step + 1, keep=2)
    harness.close()
    return losses, states(model, optimizer)


def run_all(folder):
    return {way: run(f"{folder}/{way}", way) for way in ("fsdp", "zero1")}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return folder, on_ranks(2, run_all, str(folder))


def test_a_killed_rank_resumes_with_equal_losses(ran, tmp_path):
    _, (uninterrupted, _) = ran
    losses, expected = uninterrupted["fsdp"]
    began = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 of 2: died of SIGKILL"):
        on_ranks(2, run, str(tmp_path), "fsdp", KILLED, timeout=120)
    assert time.monotonic() - began < 60  # the other rank does not wait for the timeout
    (again, found), _ = on_ranks(2, run, str(tmp_path))
    assert again == {step: loss for step, loss in losses.items() if step >= KILLED}
    assert all(torch.equal(found[name], t) for name, t in expected.items())
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000004", "step-000005"]


def loaded(folder):
    """On a rank: what is there after loading the runs of both ways, each by the other way."""
    out = {}
    for saved, way in (("fsdp", "zero1"), ("zero1", "zero3")):
        model, optimizer, harness = fitted(4, way)
        found = holdall.load_checkpoint(f"{folder}/{saved}", model, optimizer)
        assert found.step == STEPS
        out[saved] = states(model, optimizer), optimizer.param_groups[0]["lr"]
        loss = model(batch(dist.get_rank()))  # and goes on
        loss.backward()
        optimizer.step()
        harness.close()
    return out


def test_four_ranks_load_what_two_saved_and_shard_it_otherwise(ran):
    folder, (first, _) = ran
    for rank in on_ranks(4, loaded, str(folder)):
        for way, (found, rate) in rank.items():
            assert rate == 0.01
            assert found.keys() == first[way][1].keys()
            assert all(torch.equal(found[name], t) for name, t in first[way][1].items())


@pytest.mark.parametrize("way", ["fsdp", "zero1"])
def test_one_process_loads_it_and_so_does_torch(ran, way):
    folder, (first, _) = ran
    expected = first[way][1]
    model, optimizer = made()
    assert holdall.load_checkpoint(folder / way, model, optimizer, rng=False).step == STEPS
    for name, p in model.named_parameters():
        assert torch.equal(p, expected[name])
        assert torch.equal(optimizer.state[p]["exp_avg"], expected[f"{name}.exp_avg"])
        assert optimizer.state[p]["step"].item() == STEPS
    model(batch(0)).backward()
    optimizer.step()
    plain, _ = made()
    state = {f"model.{name}": t for name, t in plain.state_dict().items()}
    dcp.load(state, checkpoint_id=str(folder / way / "latest" / "sharded"))
    assert all(torch.equal(p, expected[name]) for name, p in plain.named_parameters())


def test_what_was_not_finished_is_not_loaded(ran, tmp_path):
    folder, _ = ran
    (last,) = {p.resolve() for p in [folder / "fsdp" / "latest"]}
    half = tmp_path / "checkpoints" / last.name
    (half / "sharded").mkdir(parents=True)
    for file in (f for f in last.rglob("*") if f.is_file() and f.name != "complete.json"):
        (half / file.relative_to(last)).write_bytes(file.read_bytes())
    model, _ = made()
    assert holdall.load_checkpoint(tmp_path, model) is None
    marker = json.loads((last / "complete.json").read_text())
    assert any(name.startswith("sharded/") for name in marker["files"])
    assert not list(Path(folder).rglob("*.tmp"))


def test_another_model_is_refused(ran):
    folder, _ = ran
    with pytest.raises(holdall.HoldallError, match="is a checkpoint of another model: `weight`"):
        holdall.load_checkpoint(folder / "fsdp", torch.nn.Linear(3, 3), rng=False)
