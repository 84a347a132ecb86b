"""Smart-Infinity (HPCA 2024): updates by processes that own the files, the bytes that pass, and SmartComp's exact sum."""

import copy
import gc
from contextlib import nullcontext

import pytest
import torch

import holdall
from holdall.errors import HoldallError, InvalidInput, Unsupported
from holdall.planners.smart_infinity import bus_bytes, seconds, seconds_by_host
from holdall.runtime.near_storage import drives_of
from holdall.testing.chaos import chaos
from holdall.testing.placed import adamw, check_fit, check_under, place_of, trace_of, train
from holdall.testing.stand_ins import planned_for
from holdall.testing.worlds import family, machine
from holdall.updates.drive import Drive, Files, LargestEntries


def planned(name, tmp_path, **options):
    given = {"drives": 2, "folders": str(tmp_path), **options}
    return holdall.plan(trace_of(name), planner="smart_infinity", hardware=machine(overlap=True), **given)


def test_two_drives_train_to_the_bits_of_one_adamw(tmp_path):
    """Check (1), clipped; bytes between device and host are as predicted; the files go with the drives."""
    plan = planned("tiny-gpt2", tmp_path)
    assert place_of(plan).when == "step" and all(a.exact for a in plan.actions)
    check_under(plan, "tiny-gpt2")
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_host_and_drives_exchange_gradients_and_masters_and_nothing_else(tmp_path):
    """Check (2), under chaos: 4 bytes out and 4 back for each parameter and step, over all drives, each with its share; the
    bits are those of plain training also where the loop has written into a parameter in between."""
    plan = planned("convnet", tmp_path, streamed=False)
    results = []
    for is_planned in (False, True):
        model, batch = family("convnet")
        optimizer = adamw(model)
        count = sum(p.numel() for p in model.parameters())
        with chaos(seed=3), holdall.apply(plan, model, optimizer, enforce=False) if is_planned else nullcontext() as harness:
            for step in (1, 2, 3):
                train(model, batch, optimizer, steps=1)
                if is_planned:
                    drives = drives_of(harness)
                    assert sum(d.sent for d in drives) == sum(d.received for d in drives) == 4 * count * step
                    assert all(d.sent > 0.4 * 4 * count * step for d in drives)
                    assert len(list(tmp_path.iterdir())) == 2 and not any(optimizer.state.values())  # no moment is here
                with torch.no_grad():
                    model.head.weight.mul_(0.5)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))
    assert bus_bytes(count) == 8 * count


def test_states_are_those_of_adamw_when_they_are_saved_loaded_and_brought_back(tmp_path):
    """`state_dict` in mid-run, and going on from it; after closing the optimizer has the states."""
    plan = planned("convnet", tmp_path, drives=1)
    model, batch = family("convnet")
    optimizer, plain = adamw(model), family("convnet")[0]
    theirs = adamw(plain)
    train(plain, batch, theirs, steps=2)
    with holdall.apply(plan, model, optimizer, enforce=False):
        train(model, batch, optimizer, steps=2)
        saved = copy.deepcopy(optimizer.state_dict())
        expected = copy.deepcopy(theirs.state_dict()["state"])
        assert saved["state"].keys() == expected.keys()
        assert all(torch.equal(saved["state"][n][k], expected[n][k]) for n in expected for k in expected[n])
        weights = {n: v.clone() for n, v in model.state_dict().items()}
        train(model, batch, optimizer, steps=1)
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)  # back to step 2
        train(model, batch, optimizer, steps=2)
    train(plain, batch, theirs, steps=2)
    expected, found = theirs.state_dict()["state"], optimizer.state_dict()["state"]
    assert all(torch.equal(found[n][k], expected[n][k]) for n in expected for k in expected[n])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_what_smartcomp_sends_and_keeps_is_the_sum_of_gradients_exactly():
    """Check (4): gradients are whole numbers, so sums are exact; what is sent are the largest entries."""
    drawn, largest = torch.Generator().manual_seed(4), LargestEntries(0.1)
    sent, total = torch.zeros(60), torch.zeros(6, 10)
    for _ in range(7):
        grad = torch.randint(-9, 9, (6, 10), generator=drawn).float()
        total += grad
        positions, values = largest.message("a", grad)
        assert len(positions) == 6 and values.abs().min() >= largest.rest["a"].abs().max()
        sent.index_add_(0, positions.long(), values)
    assert torch.equal(sent.view(6, 10) + largest.rest["a"], total)
    assert largest.rest["a"].any()


def test_smartcomp_sends_so_many_entries_and_trains(tmp_path):
    """Positions and values, 8 bytes an entry; not exact, and said so. The loss falls."""
    plan = planned("convnet", tmp_path, keep=0.2, drives=1)
    assert not all(a.exact for a in plan.actions)
    model, batch = family("convnet")
    optimizer = adamw(model)
    entries = sum(max(1, round(0.2 * p.numel())) for p in model.parameters())
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        losses = train(model, batch, optimizer, steps=4)
        (drive,) = drives_of(harness)
        assert drive.sent == 4 * 8 * entries and drive.received == 4 * 4 * sum(p.numel() for p in model.parameters())
    assert losses[-1] < losses[0]


def test_more_drives_help_until_the_bus_is_the_limit():
    """Check (3): the speed-up over updates by the host grows with the drives and then stays."""
    times = [seconds(1e9, n, internal=3e9, bus=16e9) for n in range(1, 41)]
    assert times == sorted(times, reverse=True)
    limit = bus_bytes(1e9) / 16e9
    for n, now in enumerate(times, 1):
        assert (now == limit) == (n * 3e9 * bus_bytes(1e9) >= 24e9 * 16e9)
    assert times[-1] == times[-5] == limit
    gains = [seconds_by_host(1e9, n, internal=3e9, bus=16e9) / t for n, t in enumerate(times, 1)]
    assert gains[0] < 1.2 and gains[-1] == pytest.approx(28 / 8)
    assert seconds(1e9, 40, internal=3e9, bus=16e9, keep=0.01) < times[-1]


def test_what_is_asked_for_is_in_the_plan_and_the_model_counts_positions_and_values(tmp_path):
    trace = trace_of("tiny-gpt2")
    plan = planned("tiny-gpt2", tmp_path, drives=3, keep=0.25, streamed=False, recompute=False)
    (near,) = (a for a in plan.actions if a.name == "near_storage_compressed")
    assert (near.drives, near.keep) == (3, 0.25) and plan.count() == {"place": 1, "near_storage_compressed": 1}
    assert {weights for _, weights, _ in place_of(plan).units} == {"resident"}
    plan = planned("tiny-gpt2", tmp_path, drives=3)
    assert [a.drives for a in plan.actions if a.name == "near_storage"] == [3]
    assert any(weights == "streamed" for _, weights, _ in place_of(plan).units)
    assert {b for a in plan.actions if a.name == "recompute" for b in a.blocks} >= {b.name for b in trace.blocks[1:-1]}
    assert bus_bytes(100, 0.25) == 100 * 4 + 25 * 8


def test_a_drive_that_is_gone_is_one_clear_line(tmp_path):
    drive = Drive(tmp_path)
    drive.set("0", torch.ones(4))
    drive.process.kill()
    drive.process.wait()
    with pytest.raises(HoldallError, match="has ended"):
        drive.update("0", "AdamW", {"lr": 0.1}, [torch.ones(4)])
    drive.close()


def test_the_drives_rule_is_torchs(tmp_path):
    """Without a process: dense and by entries."""
    files = Files(tmp_path)
    p = torch.nn.Parameter(torch.randn(7))
    files.answer({"do": "set", "key": "a"}, [p.detach().clone()])
    plain = torch.optim.AdamW([p], lr=0.1)
    options = {"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    for grad in (torch.randn(7), torch.tensor([0.0, 2.0, 0.0, 0.0, -1.0, 0.0, 0.0])):
        p.grad = grad
        plain.step()
        at = grad.nonzero().flatten().int()
        payload = [grad] if len(at) == 7 else [at, grad[at.long()]]
        _, (new,) = files.answer({"do": "update", "key": "a", "rule": "AdamW", "options": options}, payload)
        assert torch.equal(new, p.detach())
    assert files.answer({"do": "dance", "key": "a"}, [])[0]["error"]


def test_fit_takes_it_by_name_and_what_drives_cannot_do_is_refused(tmp_path):
    with planned_for(machine()):
        check_fit("tiny-llama", "1GiB", "smart_infinity", folders=str(tmp_path))
    for options in ({"drives": 0}, {"keep": 0.0}):
        with pytest.raises(InvalidInput, match="drives"):
            planned("convnet", tmp_path, **options)
    model, batch = family("convnet")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    plan = holdall.plan(trace, planner="smart_infinity", hardware=machine())
    with holdall.apply(plan, model, optimizer, enforce=False), pytest.raises(Unsupported, match="AdamW"):
        train(model, batch, optimizer, steps=1)


def test_a_loop_that_writes_to_a_master_is_noticed(tmp_path):
    """Even where it only moves elements: what the drive has is then old."""
    plan = planned("convnet", tmp_path)
    model, batch = family("convnet")
    plain, _ = family("convnet")
    seen = []
    for net, context in ((plain, nullcontext()), (model, None)):
        optimizer = adamw(net)
        with context or holdall.apply(plan, net, optimizer, enforce=False):
            train(net, batch, optimizer, steps=1)
            with torch.no_grad():
                net.stages[1].conv1.weight.copy_(net.stages[1].conv1.weight.roll(7, 0).flip(1))
            seen.append(train(net, batch, optimizer, steps=2))
    assert seen[0] == seen[1]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
