"""ZeRO-Infinity (SC 2021): the paper's bandwidth model, its knobs, and training with weights and masters in files."""

import copy
import os

import pytest
import torch
from torch import nn

import holdall
from holdall.errors import InvalidInput
from holdall.planners import zero_infinity as paper
from holdall.planners.zero_infinity import fetched_ahead
from holdall.testing.chaos import chaos
from holdall.testing.placed import FAMILIES, adamw, check_fit, check_under, place_of, rows_of, trace_of, with_disk
from holdall.testing.stand_ins import planned_for
from holdall.types import Kind

TFLOPS = 70e12
GB = 1e9
pytestmark = pytest.mark.usefixtures("disk")
needs_disk = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="about systems with `posix_fallocate`")


def planned(name, *, overlap=True, **options):
    given = {"persistence_threshold": 0, **options}
    return holdall.plan(trace_of(name), planner="zero_infinity", hardware=with_disk(overlap=overlap), **given)


# the model of the paper


def test_efficiencies_are_the_papers():
    """Check (1): weights at 70 GB/s and 1K tokens, states at 1.5 TB/s and 2K, checkpoints at 2 GB/s and 2K wide."""
    found = [
        paper.efficiency(paper.intensity_of_weights(1024), 70 * GB, TFLOPS),
        paper.efficiency(paper.intensity_of_states(2048), 1500 * GB, TFLOPS),
        paper.efficiency(paper.intensity_of_checkpoints(2048), 2 * GB, TFLOPS),
    ]
    assert found == pytest.approx([0.506, 0.916, 0.584], abs=0.001)


def test_requirements_are_the_papers():
    """A model of a trillion parameters: 128 layers, 25,600 wide, 160 heads of 1,024 tokens, 32 sequences."""
    parameters = 12 * 128 * 25600**2
    assert parameters == pytest.approx(1e12, rel=0.01)
    assert paper.model_state_bytes(128, 25600) == 20 * parameters
    assert paper.checkpoint_bytes(128, 25600, 32 * 1024) == pytest.approx(0.2e12, rel=0.1)
    assert paper.working_bytes(25600) == 16 * 25600**2
    assert paper.activation_working_bytes(25600, 160, 32 * 1024, 1024) == 32 * 1024 * (16 * 25600 + 2 * 160 * 1024)
    more = paper.efficiency(paper.intensity_of_weights(2048), 70 * GB, TFLOPS)
    assert more > paper.efficiency(paper.intensity_of_weights(1024), 70 * GB, TFLOPS)


# its knobs


@pytest.mark.parametrize("seed", range(3))
def test_what_is_live_never_exceeds_what_the_knobs_say(seed):
    """Check (4), by a walk over forward and backward; and one more unit ahead would exceed it."""
    drawn = torch.Generator().manual_seed(seed)
    for _ in range(100):
        sizes = torch.randint(1, 20, (int(torch.randint(2, 9, (), generator=drawn)),), generator=drawn).tolist()
        bucket, live = (int(torch.randint(0, 60, (), generator=drawn)) for _ in range(2))
        ahead = fetched_ahead(sizes, bucket, live)

        def holds(count, sizes=sizes, bucket=bucket, live=live):
            order = [*sizes, *sizes[::-1]]
            halves = (order[: len(sizes)], order[len(sizes) :])
            full = [half[i : i + count + 1] for half in halves for i in range(len(sizes) - count)]
            return all(sum(w) <= live and sum(w[1:]) <= bucket for w in full)

        assert ahead == 0 or holds(ahead)
        assert ahead == len(sizes) - 1 or not holds(ahead + 1)


def test_small_parameters_persist_and_the_bucket_says_how_many_are_ahead():
    trace = trace_of("tiny-llama")
    numel = {u.name: [trace.tensors[x].nbytes // 4 for x in u.weights] for u in trace.units}
    edge = min(max(sizes) for sizes in numel.values())  # of the unit that persists first, only if it is smaller than that
    for threshold in (0, edge, edge + 1, 200, 10**9):
        rows = rows_of(planned("tiny-llama", persistence_threshold=threshold))
        persistent = {unit for unit, (weights, _) in rows.items() if weights == "resident"}
        assert persistent == {unit for unit, sizes in numel.items() if all(n < threshold for n in sizes)}
    layer = max(sum(sizes) for sizes in numel.values())
    peaks = []
    for bucket, ahead in ((0, 0), (layer, 1), (2 * layer, 2)):
        place = place_of(plan := planned("tiny-llama", prefetch_bucket=bucket))
        assert (place.prefetch if place.overlap else 0) == ahead
        peaks.append(plan.predicted.peak_kinds[Kind.PARAM])
    assert not place_of(planned("tiny-llama", max_live=layer)).overlap
    assert peaks == sorted(peaks)


# training


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tier", ["host", pytest.param("nvme", marks=needs_disk)])
def test_steps_are_those_of_plain_training_with_the_predicted_bytes(name, tier):
    """Check (2) on one rank: weights and masters in files; every byte on every link is counted."""
    plan = planned(name, tier=tier)
    assert place_of(plan).when == "step"
    measured = check_under(plan, name)
    assert any("nvme" in link for link in measured.traffic) == (tier == "nvme")


@needs_disk
@pytest.mark.parametrize(("read", "write", "buffers"), [(False, False, 1), (True, False, 2), (True, True, 3)])
def test_states_on_a_disk_are_updated_in_sub_groups(read, write, buffers):
    """Every state is read and written once in a step; a pipeline costs a buffer for each direction, and is never slower."""
    options = {"tier": "nvme", "persistence_threshold": 0, "sub_group": 1024}
    plan = planned("tiny-gpt2", **options, pipeline_read=read, pipeline_write=write)
    place = place_of(plan)
    assert place.buffers == buffers and place.stretch == 4096
    assert dict(place.states).keys() == {unit for unit, _, _ in place.units}
    check_under(plan, "tiny-gpt2")
    alone = planned("tiny-gpt2", **options, pipeline_read=False, pipeline_write=False)
    assert plan.predicted.seconds <= alone.predicted.seconds


@needs_disk
@pytest.mark.parametrize("name", ["tiny-gpt2", "convnet"])
def test_late_copies_change_nothing(name):
    check_under(planned(name, tier="nvme", offload_checkpoints=True), name, around=chaos(seed=2))


def test_checkpoints_may_wait_on_the_host():
    here, there = planned("tiny-gpt2"), planned("tiny-gpt2", offload_checkpoints=True)
    assert there.predicted.peak["cpu"] < here.predicted.peak["cpu"]
    check_under(there, "tiny-gpt2")


class Ordered(nn.Module):
    """Layers in an order that the loop may change."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x):
        for n in self.order:
            x = x + self.layers[n](x)
        return x.square().mean()


def test_a_step_in_another_order_is_right_and_so_are_those_after_it():
    """Check (3): what was fetched ahead is then not what is needed."""
    torch.manual_seed(0)
    model, batch = Ordered(), (torch.randn(4, 16),)
    plain = copy.deepcopy(model)
    optimizer, theirs = adamw(model), adamw(plain)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    plan = holdall.plan(trace, planner="zero_infinity", hardware=with_disk(overlap=True), persistence_threshold=0)
    with holdall.apply(plan, model, optimizer, enforce=False):
        for order in ([0, 1, 2, 3], [2, 0, 3, 1], [0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3]):
            for net, rule in ((model, optimizer), (plain, theirs)):
                net.order = order
                net(*batch).backward()
                rule.step()
                rule.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@needs_disk
def test_fit_takes_it_by_name_and_wrong_options_are_refused():
    budget = {"cpu": "1GiB", "far": "1GiB", "nvme": "1GiB"}
    with planned_for(with_disk()):
        plan = check_fit("tiny-gpt2", budget, "zero_infinity", tier="nvme", persistence_threshold=0)
    assert plan.predicted.peak["nvme"] > 0
    for options, what in (({"max_live": -1}, "max_live"), ({"recompute": False, "offload_checkpoints": True}, "checkpoints")):
        with pytest.raises(InvalidInput, match=what):
            planned("convnet", **options)
    with pytest.raises(InvalidInput, match="unknown tier `attic`"):
        planned("convnet", tier="attic")
    with pytest.raises(holdall.Infeasible):
        planned("convnet", budget=1000)
