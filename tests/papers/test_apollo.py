"""Zhu et al., "APOLLO" (arXiv 2412.05270): what the paper says."""

from itertools import pairwise

import pytest
import torch

from holdall.optim.apollo import Apollo
from holdall.testing.optimizers import allocated, refusal, seed_after, sketch


def parameter(*shape, seed=0, dtype=torch.float64):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def gradients(shape, n, seed=7, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    for _ in range(n):
        yield torch.randn(shape, generator=random, dtype=dtype) * torch.rand(shape[-1:], generator=random, dtype=dtype)


def run(optimizer, p, grads):
    for g in grads:
        p.grad = g
        optimizer.step()
    return p.detach().clone()


def naive(x, grads, *, rank, gap, lr=0.01, scale=1.0, front=False, tensor=False, seed=1, weight_decay=0.0):
    """The algorithm channel by channel, with the same random matrices."""
    left = x.shape[0] < x.shape[1]
    m = v = 0.0
    before = None
    for t, g in enumerate(grads):
        if t and t % gap == 0:
            seed = seed_after(seed)
        a = sketch(seed, rank, min(x.shape), g)
        low = a @ g if left else (a @ g.T)  # (rank, long), one channel a column
        m, v = 0.9 * m + 0.1 * low, 0.999 * v + 0.001 * low**2
        n = m / (v.sqrt() + 1e-6)
        u = g.clone() if left else g.T.clone()
        for j in range(u.shape[1]):
            u[:, j] *= n.norm() / (low.norm() + 1e-8) if tensor else n[:, j].norm() / (low[:, j].norm() + 1e-8)
        if front:
            u *= scale**0.5
        if before is not None and u.norm() > 1.01 * before:
            u *= 1.01 * before / u.norm()
        before = u.norm()
        if not front:
            u *= scale**0.5
        step = lr * (1 - 0.999 ** (t + 1)) ** 0.5 / (1 - 0.9 ** (t + 1))
        x = x - step * (u if left else u.T)
        x = x - lr * weight_decay * x
    return x


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale_type": "tensor", "rank": 1, "scale": 128.0},
        {"scale": 4.0, "scale_front": True, "weight_decay": 0.1},
        {"scale": 4.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_it_follows_the_algorithm_channel_by_channel(shape, options):
    """30 steps with three re-drawn projections, in double precision, to 1e-9."""
    p = parameter(*shape)
    start = p.detach().clone()
    got = run(Apollo([p], **{"rank": 3, "update_proj_gap": 8, **options}), p, gradients(shape, 30))
    told = {"scale": 1.0, "rank": 3, **{k: v for k, v in options.items() if k in ("scale", "rank", "weight_decay")}}
    told |= {"front": options.get("scale_front", False), "tensor": options.get("scale_type") == "tensor"}
    expected = naive(start, gradients(shape, 30), gap=8, **told)
    assert torch.allclose(got, expected, rtol=1e-9, atol=1e-9)
    assert (got - start).norm() > 1e-2 * start.norm()


def test_state_bytes_are_two_low_moments_and_a_norm():
    """Claim: 8 r long bytes; the projection is not stored."""
    for shape in [(24, 40), (40, 24)]:
        p = parameter(*shape, dtype=torch.float32)
        optimizer = Apollo([p], rank=6)
        run(optimizer, p, gradients(shape, 3, dtype=torch.float32))
        assert allocated(optimizer.state[p]) == optimizer.state_bytes(p) == 8 * 6 * 40 + 4
    large = torch.nn.Parameter(torch.empty(4096, 11008, device="meta"))
    assert Apollo([large], rank=1, scale_type="tensor").state_bytes(large) == 8 * 11008 + 4  # Mini: 88 KB for 361 MB


@pytest.mark.parametrize("front", [False, True])
def test_an_updates_norm_never_grows_by_more_than_a_hundredth(front):
    """Claim: the limiter's ratio is at most 1.01, and a smaller norm passes as it is."""
    p = parameter(12, 20)
    optimizer = Apollo([p], rank=4, lr=1.0, betas=(0.0, 0.999), scale_front=front)
    norms, before = [], p.detach().clone()
    sizes = [1, 5, 100, 1e4, 1, 1e-3, 10]
    for size, g in zip(sizes * 5, gradients((12, 20), 35), strict=True):
        p.grad = size * g
        optimizer.step()
        moved = (p.detach() - before).norm() / (1 - 0.999 ** (len(norms) + 1)) ** 0.5
        norms.append(moved.item())
        before = p.detach().clone()
    ratios = [b / a for a, b in pairwise(norms)]
    assert max(ratios) <= 1.01 * (1 + 1e-6)
    assert sum(r > 1.0099 for r in ratios) > 5 and min(ratios) < 0.9  # both happened


def test_a_first_gradient_of_zero_does_not_hold_the_norm_at_zero():
    p = parameter(12, 20)
    optimizer = Apollo([p], rank=4)
    start = run(optimizer, p, [torch.zeros(12, 20, dtype=torch.float64)])
    assert not torch.equal(run(optimizer, p, gradients((12, 20), 1)), start)


def adams_ratios(grads):
    """||Adam's direction|| / ||gradient|| of each column after the last gradient."""
    m = v = 0.0
    for g in grads:
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    return (m / (v.sqrt() + 1e-6)).norm(dim=0) / g.norm(dim=0)


@pytest.mark.parametrize("steps", [1, 10])
def test_a_full_basis_gives_adams_own_ratios(steps, monkeypatch):
    """Claim: with nothing projected away, the factors are those of Adam's channels.

    A permutation with signs is the orthonormal basis for which that is so at every step: Adam's division is element by element
    and does not commute with other rotations.
    """
    signs = torch.tensor([1.0, -1.0] * 6, dtype=torch.float64)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    found = shares_in_a_basis(torch.diag(signs)[order], steps, monkeypatch)
    assert torch.allclose(found, shares(adams_ratios(gradients((12, 20), steps))), rtol=1e-6)


def shares(ratios):
    return ratios / ratios.norm()


def shares_in_a_basis(basis, steps, monkeypatch, **options):
    """How much longer than the gradient the last update is, channel by channel, where this is drawn as the sketch; up to a
    common factor, since the norm of all may be limited."""
    grads, p = list(gradients((12, 20), steps)), parameter(12, 20)
    optimizer = Apollo([p], rank=12, **options)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", lambda *_, **__: basis * 12**0.5)
        run(optimizer, p, grads[:-1])
        before = p.detach().clone()
        run(optimizer, p, grads[-1:])
    return shares(((before - p.detach()) / grads[-1]).mean(0))


def test_any_orthonormal_basis_gives_adams_ratios_at_the_first_step(monkeypatch):
    """There Adam's direction has entries of one size, in every basis."""
    basis = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    found = shares_in_a_basis(basis, 1, monkeypatch, eps=1e-12)
    assert torch.allclose(found, shares(adams_ratios(gradients((12, 20), 1))), rtol=1e-2)


def test_the_ratio_of_a_sketch_comes_near_the_true_one():
    """Claim: s of a rank-r sketch is within the sketch's own noise of the full one; more rank, less noise."""
    g = next(gradients((64, 400), 1))
    full = adams_ratios([g])
    errors = []
    for rank in (4, 16, 64):
        low = sketch(3, rank, 64, g) @ g
        n = 0.1 * low / ((0.001 * low**2).sqrt() + 1e-6)
        s = n.norm(dim=0) / low.norm(dim=0) * (rank / 64) ** -0.5  # fewer entries of one size: the known factor sqrt(n / r)
        errors.append(((s / full).log().square().mean().sqrt()).item())
    assert errors[0] > 1.5 * errors[1] > 2 * errors[2]


def test_seeds_are_the_same_on_every_rank_and_differ_between_parameters():
    """Claim: ranks that agree on one number draw the same projections, whatever else they have drawn."""
    ranks = []
    for rank in range(2):
        torch.manual_seed(rank)
        torch.randn(rank)
        p, q = parameter(12, 20), parameter(12, 20)
        optimizer = Apollo([p, q], rank=4, update_proj_gap=2, seed=5)
        seeds = []
        for g in gradients((12, 20), 5):
            p.grad, q.grad = g, g.clone()
            optimizer.step()
            seeds.append((optimizer.state[p]["seed"], optimizer.state[q]["seed"]))
        ranks.append((seeds, p.detach(), q.detach()))
    assert ranks[0][0] == ranks[1][0]
    assert torch.equal(ranks[0][1], ranks[1][1]) and torch.equal(ranks[0][2], ranks[1][2])
    assert [len(set(pair)) for pair in ranks[0][0]] == [2] * 5
    assert len({pair[0] for pair in ranks[0][0]}) == 3  # steps 0-1, 2-3, 4
    assert not torch.equal(ranks[0][1], ranks[0][2])


def test_wrong_use_is_refused_in_a_line():
    matrix, vector = parameter(8, 12), parameter(8)
    assert "(8,)" in refusal(lambda: Apollo([vector], rank=2)).fact
    assert "rank 9" in refusal(lambda: Apollo([matrix], rank=9)).fact
    assert "scale_type" in refusal(lambda: Apollo([matrix], rank=2, scale_type="row")).fact
