"""Batches of other sizes than the sample: each step runs under a plan that was made for at least its size."""

import copy
from functools import lru_cache

import pytest
import torch

import holdall
from holdall.errors import Infeasible, InvalidInput, OverBudget, Unsupported
from holdall.runtime.switching.buckets import find_axes, resize, round_up
from holdall.testing.worlds import family, machine

LONG = 5  # times the sample's length
STEPS = 4


def batches(steps=STEPS, long_at=(2,), rows=2, length=16):
    """Made as they are read, as by a loader: no list holds them."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        yield torch.randint(0, 64, (rows, LONG * length if step in long_at else length), generator=generator)


def train(model, optimizer, data, *, clip=True):
    losses = []
    torch.manual_seed(0)
    for ids in data:
        loss = model(ids)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def same(model, reference):
    state, other = model.state_dict(), reference.state_dict()
    return all(torch.equal(state[name], other[name]) for name in other)


@lru_cache
def a_tight_budget(*, allow=None, share=0.5):
    """Bytes between the least that the long batch can do with and what it takes under the sample's plan."""
    model, (ids,) = family("tied")
    trace = holdall.trace(model, ids.repeat(1, LONG), optimizer=adam(model))
    whole = holdall.plan(trace, planner="nop", hardware=machine()).predicted.peak["cpu"]
    with pytest.raises(Infeasible) as refused:
        holdall.plan(trace, budget=1, hardware=machine(), allow=allow)
    return int(refused.value.smallest + share * (whole - refused.value.smallest))


@pytest.mark.parametrize("lengths", ["auto", [24, (2, 80)], "batches"])
def test_one_batch_five_times_longer_ends_no_run(lengths):
    model, (ids,) = family("tied")
    reference = copy.deepcopy(model)
    expected = train(reference, adam(reference), batches())
    budget = a_tight_budget(allow="recompute")
    given = {"budget": budget, "hardware": machine(), "allow": ["recompute"], "repeat": False}
    optimizer = adam(model)
    lengths = [(ids.repeat(1, LONG),)] if lengths == "batches" else lengths
    with holdall.fit(model, optimizer, (ids,), lengths=lengths, **given) as harness:
        losses = train(model, optimizer, batches())
    assert losses == expected
    assert same(model, reference)
    assert len(harness.all_peaks) == STEPS
    assert max(harness.all_peaks) <= budget
    assert "forward" not in model.__dict__
    assert not model._forward_pre_hooks


def test_the_samples_plan_alone_would_not_do():
    """The same loop under the same budget, without `lengths`."""
    model, (ids,) = family("tied")
    optimizer = adam(model)
    given = {"budget": a_tight_budget(allow="recompute"), "hardware": machine(), "allow": ["recompute"], "repeat": False}
    with pytest.raises(OverBudget), holdall.fit(model, optimizer, (ids,), **given):
        train(model, optimizer, batches())


def test_plans_of_a_run_share_one_placement():
    """With states beyond the device: no weight moves from one step to the next because of a longer batch."""
    model, (ids,) = family("tied")
    reference = copy.deepcopy(model)
    expected = train(reference, adam(reference), batches(long_at=(1, 3)))
    budget = a_tight_budget(share=0.15)
    optimizer = adam(model)
    with holdall.fit(model, optimizer, (ids,), lengths=[80], budget=budget, hardware=machine(), repeat=False) as harness:
        assert "place" in harness.plan.count()
        engine, plans = harness.engine, set()
        model.register_forward_hook(lambda *_: plans.add(harness.plan.summary()))
        losses = train(model, optimizer, batches(long_at=(1, 3)))
        assert harness.engine is engine
        with pytest.raises(Unsupported, match="by the size of the batch"):
            harness.switch(harness.plan)
    assert len(plans) == 2
    assert losses == expected
    assert same(model, reference)
    assert max(harness.all_peaks) <= budget


def test_a_placement_that_is_too_small_for_a_longer_batch_says_what_to_do():
    model, (ids,) = family("tied")
    trace = holdall.trace(model, ids, optimizer=adam(model))
    with pytest.raises(Infeasible) as refused:
        holdall.plan(trace, budget=1, hardware=machine())
    optimizer = adam(model)
    before = copy.deepcopy(model.state_dict())
    budget = int(refused.value.smallest * 1.05)
    with holdall.fit(model, optimizer, (ids,), lengths="auto", budget=budget, hardware=machine()) as harness:
        with pytest.raises(Infeasible, match=r"for a batch of \[2, 80\]") as caught:
            model(ids.repeat(1, LONG))
        assert "up front" in caught.value.hint
        del caught  # its frames hold the long batch
        with harness.ledger.paused():
            assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
        train(model, optimizer, batches(2, long_at=()))  # what fits goes on
    with pytest.raises(Infeasible, match=r"for a batch of \[2, 80\]"):
        holdall.fit(model, optimizer, (ids,), lengths=[80], budget=budget, hardware=machine())
    train(model, optimizer, batches(1))


def test_micro_batches_and_evaluation_each_have_their_own_size():
    model, (ids,) = family("tied")
    reference = copy.deepcopy(model)

    def loop(model, optimizer):
        torch.manual_seed(0)
        seen = []
        for long_at in ((0,), (1,)):
            for part in batches(2, long_at=long_at):
                loss = model(part) / 2
                loss.backward()
                seen.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(float(model(ids.repeat(1, 2 * LONG))))
        return seen

    expected = loop(reference, adam(reference))
    optimizer = adam(model)
    given = {"budget": a_tight_budget(allow="recompute", share=0.9), "hardware": machine(), "accumulate": 2}
    with holdall.fit(model, optimizer, (ids,), lengths=[80], allow=["recompute"], **given) as harness:
        assert loop(model, optimizer) == expected
        assert len(harness.all_peaks) == 2
    assert same(model, reference)


def test_a_plan_with_hooks_of_its_own_is_there_from_its_first_step():
    """Eviction begins in a hook of the model's call: the plan is chosen before those."""
    model, (ids,) = family("tied")
    reference = copy.deepcopy(model)
    expected = train(reference, adam(reference), batches())
    optimizer = adam(model)
    trace = holdall.trace(model, ids.repeat(1, LONG), optimizer=optimizer)
    budget = int(0.9 * holdall.plan(trace, planner="nop", hardware=machine()).predicted.peak["cpu"])
    with holdall.fit(model, optimizer, (ids,), planner="dtr", lengths="auto", budget=budget, hardware=machine()) as harness:
        assert train(model, optimizer, batches()) == expected
    assert same(model, reference)
    assert len(harness.notes) == 1  # the plan for the long batch; nothing was repeated
    assert max(harness.all_peaks) <= budget


def test_few_plans_are_made_for_many_lengths_and_a_loss_of_the_loop_is_traced_too():
    model = torch.nn.Sequential(torch.nn.Embedding(64, 8), *[torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(3)])

    def loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten() % 8)

    batch = {"ids": torch.randint(0, 64, (2, 8)), "labels": torch.randint(0, 8, (2, 8))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdall.fit(model, optimizer, batch, loss=loss, lengths="auto", budget="1GiB", hardware=machine()) as harness:
        for length in range(6, 17):
            ids = torch.randint(0, 64, (2, length))
            loss(model, {"ids": ids, "labels": ids}).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = harness._choosing._buckets.found
    assert [b.shapes for b in found] == [{"['input']": (2, n)} for n in (8, 10, 13, 16)]
    assert [b.plan.about.blocks[0][1] for b in found] == [((2, n),) for n in (8, 10, 13, 16)]


def test_axes_are_known_or_the_user_is_asked():
    ids, mask = torch.randint(0, 9, (2, 6)), torch.ones(2, 1, 6, 6, dtype=torch.bool)
    batch = {"ids": ids, "labels": ids, "mask": mask, "weight": torch.rand(2), "features": torch.rand(2, 6, 3)}
    larger = resize(batch, find_axes(batch), rows=4, length=9)
    assert {k: tuple(t.shape) for k, t in larger.items()} == {
        "ids": (4, 9),
        "labels": (4, 9),
        "mask": (4, 1, 9, 9),
        "weight": (4,),
        "features": (4, 9, 3),
    }
    assert larger["ids"] is larger["labels"]
    positions = torch.arange(6).expand(2, 6)
    assert torch.equal(resize(positions, find_axes(positions), length=9), torch.arange(9).expand(2, 9))
    images = (torch.rand(2, 3, 4, 4), torch.randint(0, 9, (2,)))
    assert [t.shape[0] for t in resize(images, find_axes(images), rows=5)] == [5, 5]
    with pytest.raises(Unsupported, match="is its length cannot be known"):
        resize(images, find_axes(images), length=9)
    unclear = [
        (ids, torch.randint(0, 9, (2, 7))),
        (ids, torch.rand(2, 6, 6)),
        (torch.randint(0, 9, (6, 6)), torch.rand(6)),
        (torch.rand(3), torch.rand(4)),
    ]
    for batch in unclear:
        with pytest.raises(Unsupported, match=r"cannot be known|may have one entry per row or per token") as caught:
            find_axes(batch)
        assert "lengths=[short_batch, long_batch]" in caught.value.hint
    assert [round_up(n, 8) for n in (3, 8, 9, 10, 11, 16, 17)] == [3, 8, 10, 10, 13, 16, 20]


@pytest.mark.parametrize("lengths", ["all", [0], [(1, 0)], [None], 80, {"ids": 1}])
def test_lengths_that_are_none_are_refused(lengths):
    model, (ids,) = family("tied")
    with pytest.raises(InvalidInput, match="lengths"):
        holdall.fit(model, None, (ids,), lengths=lengths, budget="1GiB", hardware=machine())


def test_a_step_that_can_only_be_watched_has_no_other_sizes():
    model, batch = family("branching")
    with pytest.raises(Unsupported, match="only be traced by running it"):
        holdall.fit(model, None, batch, lengths="auto", budget="1GiB", hardware=machine())
