"""FlashNeuron (Bae et al., FAST 2021): its scheduler, the packing of sparse tensors, and activations on a disk."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import holdall
from holdall.codecs.csr import csr_bytes, decode_csr, encode_csr
from holdall.errors import InvalidInput
from holdall.planners.flashneuron import SavedTensor, is_sparse, least_size, linear, select
from holdall.runtime.activations import layer_swap
from holdall.testing.planned_runs import (
    FAMILIES,
    check_fit,
    check_plan,
    enlarged,
    enlarged_trace,
    planned,
    share_of,
)
from holdall.testing.stand_ins import replaced
from holdall.testing.worlds import chain, machine
from holdall.types import Link, Tier
from holdall.units import MiB

# the scheduler


def test_a_thousandth_of_all_bytes_is_too_small_to_leave_and_so_is_a_mib():
    assert [least_size(sizes) for sizes in ([], [999], [400, 9600], [10_999], [2**40])] == [0, 0, 10, 10, MiB]


def test_the_shortest_prefix_that_covers_the_shortage_and_its_carried_delays():
    """Check (1): tensors saved at 0, 1, 2, ..; copies of 2 seconds each."""
    tensors = [SavedTensor(size=10, saved=float(n), copy=2.0) for n in range(5)]
    assert linear(tensors, 25, 10.0) == ((0, 1, 2), (2.0, 4.0, 6.0), False)
    assert linear(tensors, 30, 10.0).chosen == (0, 1, 2) and linear(tensors, 31, 10.0).chosen == (0, 1, 2, 3)
    assert linear(tensors, 0, 10.0).chosen == ()
    assert linear(tensors, 25, 5.0).is_late and not linear(tensors, 25, 6.0).is_late


@pytest.mark.parametrize("seed", range(5))
def test_it_is_late_exactly_if_the_last_copy_passes_the_end_of_the_forward(seed):
    rng = random.Random(seed)
    for _ in range(40):
        saved = sorted(rng.uniform(0, 10) for _ in range(rng.randint(1, 9)))
        tensors = [SavedTensor(rng.randint(1, 20), at, rng.uniform(0.1, 3)) for at in saved]
        shortage = rng.randint(1, sum(t.size for t in tensors))
        found = linear(tensors, shortage, 10.0)
        prefix = tensors[: len(found.chosen)]
        assert sum(t.size for t in prefix) >= shortage > sum(t.size for t in prefix[:-1])
        delay, before = 0.0, None
        for tensor in prefix:  # the paper's recursion
            if before is not None:
                delay = max(0.0, before.saved + before.copy + delay - tensor.saved)
            before = tensor
        assert found.ends[-1] == pytest.approx(before.saved + delay + before.copy)
        assert found.is_late == (found.ends[-1] > 10.0)


def test_where_copies_are_late_tensors_that_can_be_packed_take_the_place_of_others():
    tensors = [
        SavedTensor(10, 0.0, 4.0),
        SavedTensor(10, 1.0, 4.0),
        SavedTensor(10, 2.0, 1.0, csr=True),
        SavedTensor(10, 3.0, 1.0, csr=True),
    ]
    assert select(tensors, 20, 9.0).chosen == (0, 1)
    found = select(tensors, 20, 7.0)  # the second tensor would end at 8
    assert found.chosen == (0, 2) and found.ends == (4.0, 5.0) and not found.is_late
    assert select(tensors, 20, 4.0).chosen == (2, 3)
    assert select(tensors, 40, 4.0).chosen == (0, 1, 2, 3), "memory comes first"


# packing


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
def test_packing_is_lossless_at_any_density_and_has_the_bytes_of_its_formula(width, density):
    """Check (2); also for sizes that are no multiple of a word or of the mask."""
    torch.manual_seed(0)
    for count in (0, 1, 63, 64, 1000):
        words = torch.randint(1, 255, (count, width), dtype=torch.uint8) * (torch.rand(count, 1) < density)
        for rest in range(width):
            data = torch.cat([words.view(-1), torch.arange(rest, dtype=torch.uint8)])
            codes = encode_csr(data, width)
            assert torch.equal(decode_csr(codes, data.numel(), width), data)
            nonzero = int((words != 0).any(1).sum())
            mask = -(-count // 64) * 8
            assert codes.numel() == csr_bytes(count, nonzero, width) + rest == mask + nonzero * width + rest


def test_negative_zeros_and_nans_come_back_as_they_were():
    values = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45, 0.0])
    codes = encode_csr(values.view(torch.uint8), 4)
    assert codes.numel() == csr_bytes(6, 4, 4)
    assert torch.equal(decode_csr(codes, 24, 4), values.view(torch.uint8))


# plans


def with_disk(rate=1e8, *, overlap=True):
    """A machine with a disk behind the device's memory."""
    there = machine(overlap=overlap)
    links = (Link(source="cpu", destination="nvme", rate=rate), Link(source="nvme", destination="cpu", rate=rate))
    return replace(there, tiers=(*there.tiers, Tier(name="nvme", capacity=2**50, read=rate, write=rate)), links=links)


@pytest.mark.parametrize(
    ("name", "mode"), [*((n, "plain") for n in FAMILIES), ("tiny-resnet", "chaos"), ("tiny-llama", "chaos")]
)
def test_real_models_train_to_the_same_bits_from_a_disk(name, mode, disk):
    """Check (4): peak and bytes of each link as predicted, none in host memory; `disk` sees that no file is left."""
    plan = planned(name, "flashneuron", 0.85, hardware=with_disk(1e9), compress="none")
    assert set(plan.count()) == {"layer_swap"} and {a.tier for a in plan.actions} == {"nvme"}
    assert plan.predicted.peak["nvme"] > 0 == plan.predicted.peak.get("far", 0)
    harness = check_plan(name, plan, mode=mode)
    assert list(harness.stores) == ["nvme"]


@pytest.mark.parametrize("name", ["tiny-vgg", "tiny-resnet"])
def test_packed_tensors_train_to_the_same_bits_with_fewer_bytes(name, disk):
    """Check (3): the bytes that leave are those of the formula, by the values of the run."""
    packed = []

    def noted(data, width):
        packed.append((data.numel(), csr_bytes(data.numel() // width, int((data.view(torch.int32) != 0).sum()), width)))
        return encode_csr(data, width)

    plan = planned(name, "flashneuron", 0.9, hardware=with_disk(2e6))
    sparse = {x for a in plan.actions if a.packed for x in a.tensors(enlarged_trace(name))}
    assert sparse and all(is_sparse(enlarged_trace(name), x) for x in sparse)
    with replaced((layer_swap, "encode_csr", noted)):
        harness = check_plan(name, plan, steps=1, exact=False)
    whole = sum(enlarged_trace(name).tensors[x].nbytes for a in plan.actions for x in a.tensors(enlarged_trace(name)))
    assert sum(size for size, _ in packed) > sum(size for _, size in packed) > 0
    assert harness.stores["nvme"].sent == whole - sum(a - b for a, b in packed) < whole


def test_the_bytes_that_leave_grow_from_nothing_as_the_budget_falls():
    trace, hardware = enlarged_trace("tiny-gpt2"), with_disk(1e9)
    moved = []
    for share in (1.0, 0.95, 0.9, 0.85):
        plan = holdall.plan(trace, planner="flashneuron", hardware=hardware, budget=share_of(trace, share, hardware))
        moved.append(plan.predicted.traffic.get("cpu->nvme", 0))
        blocks = [trace.block(a.block).id for a in plan.actions]
        assert blocks == sorted(blocks) and set(blocks) <= {2, 3, 4, 5} and (not blocks or blocks[0] == 2), "the first layers"
    assert moved[0] == 0 and all(a < b for a, b in pairwise(moved))


def test_a_disk_that_is_too_slow_is_waited_for_and_the_plan_says_so():
    slow, fast = (planned("tiny-gpt2", "flashneuron", 0.85, hardware=with_disk(rate)) for rate in (1e6, 1e9))
    assert slow.predicted.seconds > 1.5 * fast.predicted.seconds
    assert "after the forward" in slow.why[0] and "after the forward" not in fast.why[0]


@pytest.mark.parametrize("name", ["tiny-resnet", "tiny-gpt2"])
def test_it_runs_through_fit(name):
    check_fit(name, planned(name, "flashneuron", 0.85, rate=1e9), "flashneuron", rate=1e9)


def test_fit_uses_the_disk_that_the_budget_names(disk):
    model, batch, optimizer = enlarged("tiny-gpt2")
    reference = enlarged("tiny-gpt2")[0]
    budget = share_of(enlarged_trace("tiny-gpt2"), 0.85, machine())
    with holdall.fit(model, optimizer, batch, budget={"cpu": budget, "nvme": "1GiB"}, planner="flashneuron") as harness:
        torch.manual_seed(0)
        model(**batch).loss.backward()
    torch.manual_seed(0)
    reference(**batch).loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert {a.tier for a in harness.plan.actions} == {"nvme"}


def test_unknown_names_are_refused():
    with pytest.raises(InvalidInput, match="zip"):
        holdall.plan(chain([50] * 4), planner="flashneuron", hardware=machine(), budget=240, compress="zip")
