"""A real allocator that runs out: plans per size, repetition, the recorder's snapshot, and the limit afterwards."""

import copy
import gc

import pytest
import torch

import holdall
from holdall.testing.worlds import Tied

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROWS, LENGTH, LONG = 64, 256, 5


@pytest.fixture(autouse=True)
def same_bits():
    """The backward of an embedding adds in any order otherwise, and plain training differs from itself."""
    gc.collect()  # what tests before this one have left is in the allocator's limit, and in no plan
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make():
    torch.manual_seed(0)
    model = Tied().cuda().train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def ids(step, long_at=(2,)):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 64, (ROWS, LONG * LENGTH if step in long_at else LENGTH), generator=generator).cuda()


def train(model, optimizer, steps=4):
    torch.manual_seed(0)
    losses = []
    for step in range(steps):
        loss = model(ids(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def between(share):
    """A budget between the least for the long batch and what it takes when nothing is done."""
    model, optimizer = make()
    trace = holdall.trace(model, ids(2), optimizer=optimizer)
    whole = holdall.plan(trace, planner="nop").predicted
    with pytest.raises(holdall.Infeasible) as refused:
        holdall.plan(trace, budget=1, allow=["recompute"])
    most = max(whole.peak["gpu"], whole.reserved or 0)
    return int(refused.value.smallest + share * (most - refused.value.smallest))


@pytest.mark.parametrize("options", [{"lengths": "auto"}, {"lengths": [LONG * LENGTH]}, {}], ids=["auto", "given", "repeated"])
def test_one_batch_five_times_longer_ends_no_run(options, tmp_path):
    model, optimizer = make()
    reference = copy.deepcopy(model)
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True))
    before = torch.cuda.get_per_process_memory_fraction()
    given = {"budget": between(0.4), "allow": ["recompute"], "record": tmp_path}
    with holdall.fit(model, optimizer, (ids(0),), **given, **options) as harness:
        losses = train(model, optimizer)
    assert torch.equal(losses, expected)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    was_repeated = any("was retried" in note for note in harness.notes)
    assert was_repeated == (not options), harness.notes
    assert (tmp_path / "oom-0" / "snapshot.pickle").exists() == was_repeated
    assert torch.cuda.get_per_process_memory_fraction() == before


def test_the_limit_goes_with_an_unclosed_harness():
    model, optimizer = make()
    before = torch.cuda.get_per_process_memory_fraction()
    harness = holdall.fit(model, optimizer, (ids(0),), budget="8GiB")
    assert torch.cuda.get_per_process_memory_fraction() < before
    del harness, model, optimizer
    gc.collect()
    assert torch.cuda.get_per_process_memory_fraction() == before
