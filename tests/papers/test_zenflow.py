"""ZenFlow (arXiv 2505.12242): large columns at once, the others late, each gradient once."""

import copy

import pytest
import torch
from torch import nn

import holdall
from holdall.errors import InvalidInput
from holdall.optim.zenflow import ZenFlow, by_importance
from holdall.testing.placed import place_of
from holdall.testing.worlds import family, machine
from holdall.tracing.step import default_loss


def weight(rows=6, columns=10, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(rows, columns, dtype=dtype))


def gradients(count, like, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(like.shape, generator=generator, dtype=like.dtype) for _ in range(count)]


def run(optimizer, p, grads):
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach().clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {"topk": 1.0},
        {"update_interval": 1, "overlap": False},
        {"topk": 0.5, "warmup": 99},
        {"topk": 0.0, "update_interval": 1, "overlap": False},
    ],
    ids=str,
)
def test_with_every_column_or_in_every_step_it_is_adamw(options, dtype):
    """Check (1), also through new selections."""
    p, q = weight(dtype=dtype), weight(dtype=dtype)
    grads = gradients(9, p)
    mine = run(ZenFlow([p], lr=1e-2, weight_decay=0.1, select_interval=4, **options), p, grads)
    theirs = run(torch.optim.AdamW([q], lr=1e-2, weight_decay=0.1), q, grads)
    close = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(mine, theirs, rtol=close, atol=close)


def test_selected_columns_are_those_with_the_largest_sums():
    grad = torch.tensor([[1.0, -5.0, 0.0, 2.0], [1.0, 0.0, -3.0, -2.0]])
    assert by_importance(grad).tolist() == [1, 3, 2, 0]
    p = weight()
    optimizer = ZenFlow([p], topk=0.3)
    (grad,) = gradients(1, p)
    run(optimizer, p, [grad])
    state = optimizer.state[p]
    assert state["count"] == 3 and torch.equal(state["order"], by_importance(grad))
    assert not state["held"][:, state["order"][:3]].any() and state["held"][:, state["order"][3:]].all()


class Counting(ZenFlow):
    """Adds up every gradient that an update uses."""

    def __init__(self, params, shape, **options):
        super().__init__(params, **options)
        self.used = torch.zeros(shape, dtype=torch.float64)

    def _moved(self, value, grad, which, state, group, steps):
        self.used[:, which] += grad.double() * steps
        return super()._moved(value, grad, which, state, group, steps)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("interval", "select", "steps"), [(3, 100, 11), (4, 6, 23), (5, 3, 17)])
def test_every_gradient_is_applied_exactly_once(overlap, interval, select, steps):
    """Check (2), after `drain`; selections fall on and between the boundaries of intervals."""
    p = weight(dtype=torch.float64)
    grads = gradients(steps, p)
    optimizer = Counting([p], p.shape, topk=0.3, update_interval=interval, select_interval=select, overlap=overlap)
    run(optimizer, p, grads)
    optimizer.drain()
    torch.testing.assert_close(optimizer.used, sum(grads), rtol=1e-12, atol=1e-12)
    optimizer.drain()  # nothing is left
    torch.testing.assert_close(optimizer.used, sum(grads), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("overlap", "most"), [(False, 1), (True, 2)])
def test_a_gradient_takes_effect_within_two_intervals(overlap, most):
    """Check (3): one column has a gradient in one step only; when its weights change, for every such step."""
    interval, delays = 4, []
    for at in range(1, 9):
        p = weight()
        before = p.detach()[:, -1].clone()
        optimizer = ZenFlow([p], topk=0.5, update_interval=interval, overlap=overlap, weight_decay=0.0)
        for step in range(20):
            grad = torch.zeros_like(p)
            grad[:, :5] = 10.0
            grad[:, -1] = 1.0 if step == at else 0.0
            run(optimizer, p, [grad])
            if not torch.equal(p.detach()[:, -1], before):
                delays.append(step - at)
                break
    assert len(delays) == 8 and max(delays) <= most * interval and min(delays) < max(delays)
    assert not overlap or max(delays) > interval  # it is late indeed


def test_a_background_update_is_the_one_of_a_loop_that_waits():
    """Late by one interval and otherwise the same numbers: by hand, for columns that are never selected."""
    p = weight(dtype=torch.float64)
    optimizer = ZenFlow([p], lr=1e-2, topk=0.0, update_interval=2, weight_decay=0.0)
    q = weight(dtype=torch.float64)
    theirs = torch.optim.AdamW([q], lr=1e-2, weight_decay=0.0)
    grads = gradients(8, p)
    expected = [q.detach().clone()] * 2
    for first, second in zip(grads[::2], grads[1::2], strict=True):
        expected.append(run(theirs, q, [(first + second) / 2]))
    for n, pair in enumerate(zip(grads[::2], grads[1::2], strict=True)):
        torch.testing.assert_close(run(optimizer, p, pair), expected[n + 1], rtol=1e-12, atol=1e-12)
    optimizer.drain()
    torch.testing.assert_close(p.detach(), expected[-1], rtol=1e-12, atol=1e-12)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(32, 24), nn.Linear(48, 64), nn.Linear(64, 32)

    def forward(self, ids):
        pairs = torch.cat([self.embed(ids[:, :-2]), self.embed(ids[:, 1:-1])], -1)
        return nn.functional.cross_entropy(self.head(self.up(pairs).relu()).flatten(0, 1), ids[:, 2:].flatten())


def text(steps):
    """A language of 32 letters in which one nearly determines the next: learned to its noise in 300 steps."""
    generator = torch.Generator().manual_seed(3)
    rule = torch.randint(0, 32, (32,), generator=generator)
    ids = torch.randint(0, 32, (steps, 8, 24), generator=generator)
    for n in range(2, 24):
        odd = torch.rand(steps, 8, generator=generator) < 0.1
        ids[:, :, n] = torch.where(odd, ids[:, :, n], rule[ids[:, :, n - 1]])
    return ids


def trained(make, steps=300):
    torch.manual_seed(0)
    model, losses = Tiny(), []
    optimizer = make(model.parameters())
    for batch in text(steps):
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-30:]) / 30


def test_a_small_language_model_ends_within_two_percent_of_adamw():
    """Check (4): 300 steps; and the loss did fall."""
    exact = trained(lambda params: torch.optim.AdamW(params, lr=1e-2))
    late = trained(lambda params: ZenFlow(params, lr=1e-2, topk=0.3, update_interval=2, select_interval=20, warmup=20))
    assert exact < 1.0  # of 3.5 at the beginning
    assert late <= 1.02 * exact


def test_it_is_saved_and_resumed_in_mid_interval():
    p, q = weight(), weight()
    grads = gradients(14, p)
    options = {"topk": 0.3, "update_interval": 4, "select_interval": 6}
    mine, theirs = ZenFlow([p], **options), ZenFlow([q], **options)
    expected = run(theirs, q, grads)
    run(mine, p, grads[:6])
    saved = copy.deepcopy(mine.state_dict())
    r = nn.Parameter(p.detach().clone())
    again = ZenFlow([r], **options)
    again.load_state_dict(saved)
    assert torch.equal(run(again, r, grads[6:]), expected)
    assert mine.state_bytes(p) == sum(v.nbytes for v in mine.state[p].values() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "convnet"])
def test_under_a_plan_it_does_what_it_does_alone(name):
    """Weights on the host or streamed: losses and weights of the same optimizer without holdall."""
    runs = {}
    for planned in (False, True):
        model, batch = family(name)
        optimizer = ZenFlow(model.parameters(), lr=1e-3, topk=0.3, update_interval=2, select_interval=3)
        harness = None
        if planned:
            trace = holdall.trace(model, batch, optimizer=optimizer)
            plan = holdall.plan(trace, planner="zero_offload", hardware=machine(), recompute=False)
            assert place_of(plan).units
            harness = holdall.apply(plan, model, optimizer, enforce=False)
        torch.manual_seed(1)
        losses = []
        for _ in range(5):
            loss = default_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if harness is not None:
            harness.close()
        runs[planned] = losses, [p.detach().clone() for p in model.parameters()]
    assert runs[True][0] == runs[False][0]
    assert all(torch.equal(p, q) for p, q in zip(runs[True][1], runs[False][1], strict=True))


def test_wrong_options_are_refused():
    for options, what in (({"topk": 1.5}, "topk"), ({"update_interval": 0}, "update_interval"), ({"warmup": -1}, "warmup")):
        with pytest.raises(InvalidInput, match=what):
            ZenFlow([weight()], **options)
    assert not ZenFlow.exact


def test_columns_that_wait_decay_for_each_step_that_they_waited():
    value = torch.nn.Parameter(torch.ones(2, 4))
    optimizer = ZenFlow([value], lr=0.1, topk=0.25, update_interval=3, overlap=False, weight_decay=0.5)
    for _ in range(3):
        value.grad = torch.zeros_like(value)
        optimizer.step()
    assert torch.allclose(value, torch.full((2, 4), 0.95**3))
