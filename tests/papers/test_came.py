"""Luo et al., "CAME" (arXiv 2307.02047): the update of the authors' code, against formulae and against that code."""

import pytest
import torch

from holdall.optim.came import CAME


def parameter(*shape, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype))


def gradients(shape, n):
    random = torch.Generator().manual_seed(7)
    for _ in range(n):
        yield torch.randn(shape, generator=random) * torch.rand(shape[-1:], generator=random)


@pytest.mark.parametrize(("shape", "factor"), [((64, 32), 11.11), ((40,), 0.1), ((2, 8, 6), 11.11)])
def test_the_first_step_of_signs(shape, factor):
    """Claim: with constant betas and no correction the first step is 11.1 lr for matrices, 0.1 lr for vectors.

    A second moment that starts at zero makes u = g / sqrt(1 - b2), which the clipping brings to +-1.
    """
    p = parameter(*shape, dtype=torch.float64)
    before = p.detach().clone()
    p.grad = torch.sign(parameter(*shape, seed=1, dtype=torch.float64)).detach()
    CAME([p], lr=1e-3).step()
    moved = (before - p.detach()) / (1e-3 * p.grad)
    assert torch.allclose(moved, torch.full_like(moved, factor), rtol=1e-3)


def oracle(x, grads, *, lr, betas=(0.9, 0.999, 0.9999), d=1.0, weight_decay=0.0):
    """The update with the whole of both moments, in float64."""
    x = x.double()
    b1, b2, b3 = betas
    m = torch.zeros_like(x)
    r = c = rr = cc = 0.0
    for g in grads:
        square = g.double() ** 2 + 1e-30
        if x.dim() == 1:
            r = b2 * r + (1 - b2) * square
            u = g.double() / r.sqrt()
        else:
            r, c = b2 * r + (1 - b2) * square.mean(-1), b2 * c + (1 - b2) * square.mean(-2)
            u = g.double() / (r[..., :, None] * c[..., None, :] / r.mean(-1)[..., None, None]).sqrt()
        u = u / max(1.0, u.square().mean().sqrt().item() / d)
        m = b1 * m + (1 - b1) * u
        step = m
        if x.dim() > 1:
            s = (u - m) ** 2 + 1e-16
            rr, cc = b3 * rr + (1 - b3) * s.mean(-1), b3 * cc + (1 - b3) * s.mean(-2)
            step = m / (rr[..., :, None] * cc[..., None, :] / rr.mean(-1)[..., None, None]).sqrt()
        x = x * (1 - lr * weight_decay) - lr * step
    return x


@pytest.mark.parametrize("options", [{"lr": 1e-3}, {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.8, 0.95, 0.99)}], ids=str)
@pytest.mark.parametrize(("shape", "size"), [((24, 40), 1.0), ((24, 40), 1e-10), ((17,), 1.0), ((3, 8, 5), 1.0)])
def test_two_hundred_steps_agree_with_the_formulae_in_double_precision(options, shape, size):
    """Claim: the 32-bit computation follows the algorithm to 1e-4, for gradients of any size."""
    p = parameter(*shape)
    start = p.detach().clone()
    optimizer = CAME([p], **options)
    for g in gradients(shape, 200):
        p.grad = size * g
        optimizer.step()
    expected = oracle(start, (size * g for g in gradients(shape, 200)), **options)
    moved = (expected - start).norm()
    assert moved > 1e-3 * start.norm()
    assert (p.detach() - expected).norm() < 1e-4 * moved


@pytest.mark.parametrize("options", [{"lr": 1e-3}, {"lr": 1e-3, "weight_decay": 0.1, "clip_threshold": 0.5}], ids=str)
def test_it_follows_the_authors_package(options):
    """50 steps of came-pytorch, bit for bit."""
    package = pytest.importorskip("came_pytorch")
    for shape in [(24, 40), (17,), (3, 8, 5)]:
        p, q = parameter(*shape), parameter(*shape)
        ours, theirs = CAME([p], **options), package.CAME([q], **options)
        for g in gradients(shape, 50):
            p.grad, q.grad = g, g.clone()
            ours.step()
            with torch.no_grad():
                theirs.step()
        assert torch.equal(p, q)


def test_the_state_is_the_momentum_and_four_lines():
    """Claim: 4nm + 8(n + m) bytes, about half of Adam's."""
    p = parameter(64, 32)
    optimizer = CAME([p])
    p.grad = torch.randn(64, 32)
    optimizer.step()
    assert optimizer.state_bytes(p) == 4 * 64 * 32 + 8 * (64 + 32)
    held = {v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in optimizer.state[p].values()}
    assert sum(held.values()) == optimizer.state_bytes(p)
