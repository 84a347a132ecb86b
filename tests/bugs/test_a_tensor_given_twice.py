"""A module that is given one tensor twice may ask whether both are the same (attention asks `k is v`), also in a replay."""

import pytest
import torch
from torch import nn

import holdall
from holdall.actions.offload import Offload
from holdall.actions.recompute import Recompute
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.problem import make_problem


class Pool(nn.Module):
    """Blocks that attend to what they are given, as key and as value."""

    def __init__(self):
        super().__init__()
        self.ask = nn.Parameter(torch.randn(1, 3, 16))
        self.blocks = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))

    def forward(self, x):
        q = self.ask.expand(len(x), -1, -1)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(x)
            q = q + block(q, x, x, need_weights=False)[0]
        return q.square().mean()


@pytest.mark.parametrize("actions", [(Recompute,), (Recompute, Offload)])
def test_keys_and_values_that_are_one_tensor_stay_one(actions):
    torch.manual_seed(0)
    plain, x = Pool(), torch.randn(4, 32, 16)
    model = Pool()
    model.load_state_dict(plain.state_dict())
    trace = holdall.trace(model, (x,))
    problem = make_problem(trace, hardware=holdall.probe("cpu", quick=True))
    names = [b.name for b in trace.blocks if b.kind == "MultiheadAttention"]
    assert len(names) == 3
    made = [a(block=n, inputs=(1,)) if a is Offload else a(blocks=(n,)) for n in names for a in actions]
    with holdall.apply(finish(Nop(), problem, made), model):
        model(x).backward()
        plain(x).backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
