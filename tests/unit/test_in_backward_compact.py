"""CompAct in backward: its sketched gradients go autograd's way, and the bits are those of the ordinary step."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from holdall.errors import Unsupported
from holdall.optim import in_backward
from holdall.optim.compact import Compact
from holdall.runtime.budget.ledger import Ledger


class Net(nn.Module):
    """Two layers with one input, and one that is used twice; with checkpoints where asked."""

    def __init__(self, checkpoints=False, *, again=True):
        super().__init__()
        self.q, self.k, self.last = (nn.Linear(24, 24) for _ in range(3))
        self.checkpoints, self.again = checkpoints, again

    def block(self, x):
        return torch.sigmoid(self.q(x)) * self.k(x)

    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpoints else self.block(x)
        x = self.last(x)
        return (self.last(torch.tanh(x)) if self.again else x).pow(2).sum()


def train(model, optimizer, *, accumulate=1, limit=None, steps=5):
    """(losses, norms); clips by the optimizer's own method, if at all."""
    torch.manual_seed(1)
    losses, norms = [], []
    for n in range(steps * accumulate):
        loss = model(torch.randn(5, 24))
        loss.backward()
        losses.append(loss.item())
        if (n + 1) % accumulate == 0:
            if limit is not None:
                norms.append(optimizer.clip_grad_norm_(limit))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def make(checkpoints=False, **options):
    torch.manual_seed(0)
    model = Net(checkpoints, **options)
    groups = [{"params": [p for p in model.parameters() if (p.dim() == 2) == ranked]} for ranked in (True, False)]
    groups[0]["rank"] = 6
    return model, Compact(groups, lr=1e-2, update_proj_gap=2)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_bits_are_those_of_the_ordinary_step(accumulate, checkpoints):
    """Several backwards: with layers that are used once, as the step adds up uses in turn, and autograd those of a backward."""
    results = []
    for context in (lambda o: nullcontext(), lambda o: in_backward(o, accumulate=accumulate)):
        model, optimizer = make(checkpoints, again=accumulate == 1)
        with optimizer.sketching(model), context(optimizer):
            losses, _ = train(model, optimizer, accumulate=accumulate)
        results.append((losses, [*model.parameters()], [s["exp_avg"] for s in optimizer.state.values()]))
        assert "sketches_are_gradients" not in vars(optimizer)
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for one in (1, 2) for a, b in zip(results[0][one], results[1][one], strict=True))


@pytest.mark.parametrize("clip", ["hold", "twice"])
def test_clipping_is_by_the_norm_that_the_optimizer_itself_takes(clip):
    """To rounding: it adds up the sketches after all other gradients, and backward in the order of the parameters."""
    model, optimizer = make()
    with optimizer.sketching(model):
        _, norms = train(model, optimizer, limit=0.5)
    other, again = make()
    found = []
    with again.sketching(other), in_backward(again, max_norm=0.5, clip=clip) as made:
        again.register_step_post_hook(lambda *_: found.append(made.norm))
        train(other, again)
    torch.testing.assert_close(found, norms, rtol=1e-5, atol=0)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_sketches_live_for_a_moment():
    """Twelve layers: in backward one sketch of a gradient at a time, else all of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(12)])
    x, peaks = torch.randn(1, 64), {}
    for name, context in {"step": lambda o: nullcontext(), "backward": in_backward}.items():
        copied = copy.deepcopy(model)
        optimizer = Compact(copied.parameters(), rank=16, lr=1e-3)
        with optimizer.sketching(copied), context(optimizer):
            for _ in range(2):  # moments are there after the first
                loss = copied(x).sum()
                moments = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
                with Ledger(seed=[*copied.parameters(), *moments, x]) as ledger:
                    loss.backward()
                    peaks[name] = ledger.live
                optimizer.step()
                optimizer.zero_grad()
    sketch = 64 * 16 * 4
    assert peaks["step"] - peaks["backward"] >= 11 * sketch


def test_a_weight_that_is_used_in_other_ways_too_is_refused():
    model, optimizer = make()
    loss = F.linear(torch.randn(5, 24), model.q.weight).sum()
    with optimizer.sketching(model), in_backward(optimizer), pytest.raises(Unsupported, match="sketched gradient") as refused:
        (loss + model(torch.randn(5, 24))).backward()
    assert "without `rank`" in refused.value.hint
