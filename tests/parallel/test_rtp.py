"""RTP on four real ranks: shards of linear layers that rotate, against one process; messages, bytes and memory."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import holdall
from holdall.parallel.sharding.rtp import RotatedLinear, rotate_linears
from holdall.runtime.budget.ledger import Ledger
from holdall.testing.ranks import on_ranks

RANKS, WIDTH = 4, 512


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8, bias=False))


def batch(rank):
    return torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(rank))


class Sends(TorchDispatchMode):
    """The bytes of every message that this rank sends."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::send":
            self.sizes += [t.numel() * t.element_size() for t in args[0]]
        return func(*args, **(kwargs or {}))


def rotated(in_place):
    rank, model = dist.get_rank(), build()
    names = rotate_linears(model, in_place=in_place)
    x = batch(rank).requires_grad_()
    out = model(x)
    with Sends() as forward, torch.no_grad():
        first = RotatedLinear(build()[0], in_place=in_place)
        again = first(batch(rank))
    home = torch.equal(first.shard, RotatedLinear(build()[0]).shard)
    out.square().mean().backward()
    grads, to_input = [p.grad.clone() for p in model.parameters()], x.grad.clone()
    with Sends() as both:
        y = model[0](batch(rank).requires_grad_())
        there = len(both.sizes)
        y.sum().backward()
    return {
        "names": names,
        "out": out.detach(),
        "evaluated": again,
        "home": home,
        "gradients": grads,
        "input": to_input,
        "no grad": forward.sizes,
        "forward": both.sizes[:there],
        "backward": both.sizes[there:],
        "shards": [p.detach() for p in model.parameters()],
    }


def called_twice():
    layer = RotatedLinear(build()[0])
    out = layer(batch(0))
    with pytest.raises(holdall.HoldallError, match="again before its backward"):
        layer(batch(0))
    out.sum().backward(retain_graph=True)
    with pytest.raises(holdall.HoldallError, match="a second backward"):
        out.sum().backward()
    with pytest.raises(holdall.HoldallError, match="no equal parts on 4 ranks"):
        RotatedLinear(torch.nn.Linear(4, 6))
    return True


def peak(layer, forward_only):
    """Bytes at the peak of a step of one wide layer, without the input."""
    x = torch.ones(1, WIDTH)
    with Ledger(seed=layer.parameters()) as ledger:
        out = layer(x)
        if not forward_only:
            out.sum().backward()
    return ledger.peak - 4 * WIDTH


def peaks():
    def wide():
        torch.manual_seed(0)
        return torch.nn.Linear(WIDTH, WIDTH, bias=False)

    found = {}
    for forward_only in (True, False):
        layers = {
            "in place": RotatedLinear(wide(), in_place=True),
            "rotated": RotatedLinear(wide()),
            "fsdp": fully_shard(wide(), mesh=init_device_mesh("cpu", (RANKS,))),
        }
        found[forward_only] = {name: peak(layer, forward_only) for name, layer in layers.items()}
    return found


def run_all():
    return {"out of place": rotated(False), "in place": rotated(True), "refused": called_twice(), "peaks": peaks()}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(RANKS, run_all, timeout=120)


ways = pytest.mark.parametrize("way", ["out of place", "in place"])


@ways
def test_outputs_and_gradients_are_those_of_one_process(ran, way):
    model, total = build(), None
    for rank, found in enumerate(ran):
        model.zero_grad()
        x = batch(rank).requires_grad_()
        out = model(x)
        out.square().mean().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        torch.testing.assert_close(found[way]["out"], out.detach(), rtol=0, atol=1e-6)
        torch.testing.assert_close(found[way]["input"], x.grad, rtol=0, atol=1e-6)
        torch.testing.assert_close(found[way]["evaluated"], model[0](batch(rank)).detach(), rtol=0, atol=1e-6)
    first, bias, second = (g / RANKS for g in total)
    joined = torch.cat([r[way]["gradients"][0] for r in ran])
    torch.testing.assert_close(joined, torch.cat([first, bias[:, None]], dim=1), rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.cat([r[way]["gradients"][1] for r in ran]), second, rtol=0, atol=1e-6)


@ways
def test_shards_come_home(ran, way):
    model = build()
    whole = [torch.cat([model[0].weight, model[0].bias[:, None]], dim=1), model[2].weight]
    for n in range(2):
        assert torch.equal(torch.cat([r[way]["shards"][n] for r in ran]), whole[n].detach())
    assert all(r[way]["home"] and r[way]["names"] == ["0", "2"] for r in ran)


@ways
def test_messages_and_their_bytes(ran, way):
    """d - 1 shards in forward; as many in backward, and as many gradients: three times (d - 1) / d of the weight."""
    shard = 4 * 32 // RANKS * (12 + 1)
    for rank in ran:
        assert rank[way]["forward"] == [shard] * (RANKS - 1)
        assert rank[way]["backward"] == [shard] * 2 * (RANKS - 1)
        assert rank[way]["no grad"] == [shard] * RANKS  # and home again


def test_a_rank_never_has_the_whole_weight(ran):
    """Two shards out of place, one in place but for a piece that is on its way, and the row of outputs."""
    shard, row = 4 * WIDTH * WIDTH // RANKS, 4 * WIDTH
    for rank in ran:
        forward = rank["peaks"][True]
        assert forward["rotated"] == 2 * shard + row
        assert shard < forward["in place"] <= shard + row + 4 * (1 << 14)
        assert forward["fsdp"] > RANKS * shard


def test_the_order_of_peaks(ran):
    for rank in ran:
        for found in rank["peaks"].values():
            assert found["in place"] < found["rotated"] < found["fsdp"]


def test_what_cannot_rotate_is_refused(ran):
    assert all(rank["refused"] for rank in ran)
