"""Ranks in others' loops, and ranks that do not come: accelerate on two processes, and the timeout of an exchange."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import holdall
from holdall.testing.ranks import on_ranks
from holdall.testing.worlds import machine

pytest.importorskip("accelerate")
STEPS, WAIT = 3, 2


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def made():
    torch.manual_seed(0)
    model = Stack()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def rows():
    return torch.randn(STEPS * 2 * 8, 16, generator=torch.Generator().manual_seed(5))


def by_hand():
    """One process; the two ranks take every other batch of eight rows."""
    model, optimizer = made()
    batches = rows().split(8)
    for step in range(STEPS):
        grads = []
        for part in batches[2 * step : 2 * step + 2]:
            model.zero_grad()
            model(part).backward()
            grads.append([p.grad for p in model.parameters()])
        for p, a, b in zip(model.parameters(), *grads, strict=True):
            p.grad = (a + b) / 2
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def accelerated():
    os.environ.update(MASTER_ADDR="localhost", LOCAL_WORLD_SIZE="2")  # as torchrun has them
    from accelerate import Accelerator

    from holdall.integrations import accelerate as integration

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model, optimizer = made()
    refused = []
    for given, batch in ((accelerator.prepare(made()[0]), rows()[:8]), (model, None)):
        try:
            integration.fit(accelerator, given, optimizer, batch, budget="1GiB", hardware=machine())
        except holdall.HoldallError as error:
            refused.append(error.fact)
    loader = torch.utils.data.DataLoader(rows(), batch_size=8)
    with integration.fit(
        accelerator, model, optimizer, (rows()[:8],), budget="1GiB", hardware=machine(), shard="zero3"
    ) as fitting:
        own, loader = accelerator.prepare(optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss)
                own.step()
                own.zero_grad()
        peak, predicted = fitting.harness.step_peaks[-1], fitting.harness.plan.predicted.peak["cpu"]
    return [p.full_tensor().detach().clone() for p in model.parameters()], refused, peak, predicted


def resumed(folder):
    """Four steps, and the last two once more, from what accelerate has saved between them."""
    os.environ.update(MASTER_ADDR="localhost", LOCAL_WORLD_SIZE="2")
    from accelerate import Accelerator

    from holdall.integrations import accelerate as integration

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mine = rows().split(8)[dist.get_rank() :: 2]
    fitting = integration.fit(accelerator, model, optimizer, (mine[0],), budget="1GiB", hardware=machine(), shard="zero2")
    own = accelerator.prepare(optimizer)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))

    def run():
        losses = []
        for batch in mine[:2]:
            loss = model(batch)
            accelerator.backward(loss)
            own.step()
            schedule.step()
            own.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            model(mine[2])  # an evaluation
        return losses, [p.full_tensor().detach().clone() for p in model.state_dict().values()]

    run()
    accelerator.save_state(f"{folder}/state")
    first = run()
    accelerator.save_model(model, f"{folder}/model")
    accelerator.load_state(f"{folder}/state")
    again = run()
    fitting.close()
    return first, again


def late():
    """On rank 0: what is said when rank 1 does not come."""
    group = dist.distributed_c10d._get_default_group()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=WAIT), group)
    if dist.get_rank() == 1:
        time.sleep(3 * WAIT)
        return "", 0.0
    model, optimizer = made()
    began = time.monotonic()
    try:
        holdall.fit(model, optimizer, (rows()[:8],), budget="1GiB", hardware=machine(), mesh={"dp": 2})
    except holdall.HoldallError as error:
        return error.fact, time.monotonic() - began
    return "nothing", 0.0


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, accelerated)


def test_accelerate_trains_like_one_process(ran):
    for weights, _, peak, predicted in ran:
        assert all(torch.equal(a, b) for a, b in zip(weights, by_hand(), strict=True))
        assert predicted <= peak <= predicted + rows().nbytes + 8  # the loop's data set and a loss are on the CPU, too


def test_accelerate_leaves_the_model_to_holdall(ran):
    for _, refused, _, _ in ran:
        first, second = refused
        assert "the accelerator has prepared the model for 2 processes" in first
        assert "so a batch is needed" in second


def test_a_state_of_accelerate_is_gone_on_from(tmp_path):
    ranks = on_ranks(2, resumed, str(tmp_path))
    for (losses, weights), (again, found) in ranks:
        assert again == losses
        assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))
    whole = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(t, w) for t, w in zip((whole[name] for name in Stack().state_dict()), ranks[0][0][1], strict=True))
    model = Stack()
    assert holdall.load_checkpoint(tmp_path / "state" / "holdall", model, torch.optim.AdamW(model.parameters()), rng=False)


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_the_timeout():
    (fact, seconds), _ = on_ranks(2, late)
    assert f"the group's timeout ({WAIT} s)" in fact, fact
    assert seconds < 20
