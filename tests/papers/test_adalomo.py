"""Lv et al., AdaLomo (Findings of ACL 2024, arXiv 2310.10195): Adafactor's rule with lr as its step, in backward."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from holdall.errors import InvalidInput
from holdall.optim.adafactor import Adafactor
from holdall.optim.adalomo import AdaLomo
from holdall.optim.lomo import Lomo
from holdall.runtime.budget.ledger import Ledger


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.LayerNorm(20), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3))
    return model, torch.randn(6, 10, 12), torch.randn(6, 10, 3)


def train(model, xs, ys, optimizer):
    for x, y in zip(xs, ys, strict=True):
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(model, other):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_it_is_the_papers_adafactor_with_lr_as_its_relative_step_bit_for_bit():
    model, xs, ys = make()
    reference = copy.deepcopy(model)
    with AdaLomo(model.parameters(), lr=1e-2) as optimizer:
        train(model, xs, ys, optimizer)
    train(reference, xs, ys, Adafactor(reference.parameters(), lr=1e-2, relative_step=False, variant="paper"))
    assert same(model, reference)


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_it_is_what_a_dense_computation_in_64_bits_gives(scale):
    """The entry's formulae, written out with the whole second moment; weight decay scales with the step.

    A parameter that is almost nothing counts as having a root mean square of 1e-3."""
    torch.manual_seed(0)
    start, lr, decay = scale * torch.randn(5, 7), 0.1, 0.5
    grads = torch.randn(8, 5, 7)
    p = nn.Parameter(start.clone())
    optimizer = AdaLomo([p], lr=lr, weight_decay=decay)
    x, rows, cols = start.double(), torch.zeros(5, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    for t, grad in enumerate(grads, 1):
        p.grad = grad.clone()
        optimizer.step()
        beta, g = 1 - t**-0.8, grad.double()
        square = g**2 + 1e-30
        rows, cols = beta * rows + (1 - beta) * square.sum(1), beta * cols + (1 - beta) * square.sum(0)
        u = g / (torch.outer(rows, cols) / rows.sum()).sqrt()
        u = u / max(1.0, u.pow(2).mean().sqrt().item())
        size = lr * max(1e-3, x.pow(2).mean().sqrt().item())
        x = x * (1 - size * decay) - size * u
    torch.testing.assert_close(p.detach().double(), x, rtol=1e-5, atol=1e-6 * scale)


def test_its_memory_is_lomos_and_a_row_and_a_column():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(48, 48, bias=False) for _ in range(10)])
    largest, state = 48 * 48 * 4, 10 * (48 + 48) * 4
    peaks = {}
    for cls in (Lomo, AdaLomo):
        x = torch.randn(1, 48)
        with cls(model.parameters(), lr=1e-3) as optimizer, Ledger(seed=[*model.parameters(), x]) as ledger:
            before = ledger.live
            model(x).sum().backward()
            peaks[cls] = ledger.peak - before
            optimizer.step()
    assert sum(optimizer.state_bytes(p) for p in model.parameters()) == state
    # two temporaries for the one parameter that is being updated: its squares, its direction
    assert peaks[AdaLomo] <= peaks[Lomo] + state + 2 * largest
    assert peaks[AdaLomo] < 6 * largest < 10 * largest


def test_a_state_of_32_bits_survives_saving_beside_parameters_of_16():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(4, 6).bfloat16())
    grads = torch.randn(6, 4, 6).bfloat16()

    def run(optimizer, grads):
        for grad in grads:
            optimizer.param_groups[0]["params"][0].grad = grad.clone()
            optimizer.step()

    optimizer = AdaLomo([p], lr=0.1)
    run(optimizer, grads[:3])
    other = nn.Parameter(p.detach().clone())
    again = AdaLomo([other], lr=0.5)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, grads[3:])
    run(again, grads[3:])
    assert torch.equal(p, other)
    assert again.state[other]["row_var"].dtype == torch.float32


def test_it_learns_and_keeps_no_gradient():
    model, xs, ys = make()
    x, y = xs[0], ys[0]
    first = (model(x) - y).pow(2).mean().item()
    with AdaLomo(model.parameters(), lr=2e-2) as optimizer:
        for _ in range(100):
            train(model, x[None], y[None], optimizer)
    assert (model(x) - y).pow(2).mean().item() < 0.1 * first
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(InvalidInput, match="unknown option"):
        AdaLomo(model.parameters(), betas=(0.9, 0.99))


def _rank(rank, folder, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model, xs, ys = make()
    half = slice(5 * rank, 5 * rank + 5)
    with AdaLomo(model.parameters(), lr=1e-2, process_group=dist.group.WORLD) as optimizer:
        train(model, xs[:, half], ys[:, half], optimizer)
    out.put([p.detach().numpy() for p in model.parameters()])
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_two_ranks_with_half_a_batch_each_equal_one_with_the_whole(tmp_path):
    model, xs, ys = make()
    with AdaLomo(model.parameters(), lr=1e-2) as optimizer:
        train(model, xs, ys, optimizer)
    out = mp.get_context("fork").SimpleQueue()
    context = mp.start_processes(_rank, args=(tmp_path, out), nprocs=2, join=False, start_method="fork")
    found = [out.get(), out.get()]
    while not context.join():
        pass
    for values in found:
        for p, value in zip(model.parameters(), values, strict=True):
            torch.testing.assert_close(p.detach(), torch.from_numpy(value), rtol=1e-6, atol=1e-6)


def test_it_agrees_with_the_authors_package(monkeypatch):
    lomo_optim = pytest.importorskip("lomo_optim")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)  # it asks for a GPU, and needs none
    model, xs, ys = make()
    reference = copy.deepcopy(model)
    theirs = lomo_optim.AdaLomo(reference, lr=1e-2)
    with AdaLomo(model.parameters(), lr=1e-2) as optimizer:
        train(model, xs, ys, optimizer)
    for x, y in zip(xs, ys, strict=True):
        theirs.fused_backward((reference(x) - y).pow(2).mean(), 1e-2)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
