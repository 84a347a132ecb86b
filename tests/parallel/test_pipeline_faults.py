"""A rank that dies or hangs inside a step, and runs that go on from a checkpoint."""

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdall
import holdall.pipelines
from holdall.errors import Unsupported
from holdall.testing.ranks import RanksFailed, on_ranks

WIDTH, N, STEPS, KILLED = 8, 4, 4, 2
CASES = {
    "alone": {"mesh": {"pp": 4}},
    "replicas": {"mesh": {"pp": 2, "dp": 2}},
    "shards": {"mesh": {"pp": 2, "dp": 2}, "shard": "zero2"},
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.norm(self.a(x))))


class Trap(nn.Module):
    """Does something in the `at`-th forward of this process."""

    def __init__(self, at, does):
        super().__init__()
        self.at, self.does, self.calls = at, does, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            self.does()
        return x


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def build(trap=None):
    torch.manual_seed(0)
    layers = [Block() for _ in range(8)]
    return nn.Sequential(*layers[:-1], trap or nn.Identity(), layers[-1])


def batch(replica, step):
    made = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(8, WIDTH, generator=made), torch.randn(8, WIDTH, generator=made)


def loss(output, target):
    return ((output - target) ** 2).mean()


def run(folder, case, trap=None):
    """Losses by step, and the parameters and buffers at the end; goes on from the checkpoint that is there."""
    pipe = holdall.pipelines.start(build(trap), micro_batches=N, loss=loss, **CASES[case])
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    torch.manual_seed(7 + dist.get_rank())
    found = holdall.load_checkpoint(folder, pipe, optimizer)
    losses = {}
    for step in range(found.step if found else 0, STEPS):
        losses[step] = pipe.step(*batch(pipe.replica, step)).item()
        optimizer.step()
        optimizer.zero_grad()
        holdall.save_checkpoint(folder, pipe, optimizer, step=step + 1, keep=2)
    return losses, {name: (t.full_tensor() if hasattr(t, "full_tensor") else t) for name, t in pipe.state_dict().items()}


def killed(folder):
    """The last rank dies inside step KILLED, in the forward of its second micro-batch; the first forward finds shapes."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    run(folder, "replicas", Trap(1 + KILLED * N + 2, kill) if is_last else None)


def uninterrupted(folder):
    return {case: run(f"{folder}/{case}", case) for case in ("alone", "replicas")}


def go_on(folder, before):
    """After a restart; and a run that loads what another mesh has saved."""
    other = holdall.pipelines.start(build(), micro_batches=N, loss=loss, **CASES["shards"])
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    holdall.load_checkpoint(f"{before}/alone", other, optimizer, rng=False)
    same = {name: (t.full_tensor() if hasattr(t, "full_tensor") else t) for name, t in other.state_dict().items()}
    moments = {id(p): name for name, p in other.named_parameters()}
    first = {moments[id(p)]: state["exp_avg"].full_tensor() for p, state in optimizer.state.items()}
    twin = holdall.pipelines.start(build(), schedule="chimera", micro_batches=N, loss=loss)
    with pytest.raises(Unsupported) as error:
        holdall.save_checkpoint(folder, twin, step=1)
    return run(folder, "replicas"), same, first, str(error.value)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return folder, on_ranks(4, uninterrupted, str(folder))


@pytest.fixture(scope="module")
def restarted(ran, tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    began = time.monotonic()
    with pytest.raises(RanksFailed) as error:
        on_ranks(4, killed, str(folder), timeout=120)
    assert time.monotonic() - began < 60  # the others do not wait for the timeout
    return str(error.value), on_ranks(4, go_on, str(folder), str(ran[0]))


def test_a_killed_rank_ends_the_others_with_one_line(restarted):
    said, _ = restarted
    assert "rank 3 of 4: died of SIGKILL" in said
    lines = re.findall(
        r"^holdall\.errors\.Unsupported: (rank \d lost another rank of the pipeline inside a step.*)$", said, re.M
    )
    assert len(lines) == 3 and "caught exception at step" not in said
    assert all("before the group's timeout (120 s)" in line and line.endswith("so it does not go on") for line in lines)


def test_a_restart_goes_on_with_equal_losses(ran, restarted):
    for (found, *_), expected in zip(restarted[1], ran[1], strict=True):
        losses, states = expected["replicas"]
        assert found[0] == {step: value for step, value in losses.items() if step >= KILLED}
        assert found[1].keys() == states.keys()
        assert all(torch.equal(found[1][name], t) for name, t in states.items())


def test_a_checkpoint_of_one_mesh_is_loaded_by_another(ran, restarted):
    whole = {name: t for found in ran[1] for name, t in found["alone"][1].items()}
    assert whole.keys() == build().state_dict().keys()
    for _, same, first, refused in restarted[1]:
        assert all(torch.equal(t, whole[name]) for name, t in same.items())
        assert len(first) == 16 and all(t.abs().max() > 0 for t in first.values())
        assert "two copies of every stage, which checkpoints do not hold" in refused


def hang():
    group = dist.new_group(timeout=timedelta(seconds=2))
    trap = Trap(4, lambda: time.sleep(8)) if dist.get_rank() == 1 else None
    pipe = holdall.pipelines.start(build(trap), micro_batches=N, loss=loss, group=group)
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(Unsupported) as error:
        pipe.step(*batch(0, 0))
    return str(error.value)


def test_a_rank_that_does_not_come_is_given_up_after_the_timeout():
    said, _ = on_ranks(2, hang)
    assert "rank 0 waited 2 s for the others of the pipeline inside a step, as long as the group's timeout (2 s)" in said
