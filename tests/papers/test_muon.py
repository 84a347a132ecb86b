"""Jordan et al., "Muon" (2024), and Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982): what they say."""

import math

import pytest
import torch
from torch import nn

from holdall.optim.muon import Muon, factor, orthogonalised
from holdall.testing.optimizers import allocated, refusal
from holdall.testing.stand_ins import pieces_of


def parameter(*shape, seed=0, dtype=torch.float32):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def gradients(shape, n, seed=7, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    for _ in range(n):
        yield torch.randn(shape, generator=random, dtype=dtype)


def run(optimizer, p, grads):
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    return p.detach().clone()


def with_singular_values(values, n, m, dtype=torch.float32):
    random = torch.Generator().manual_seed(1)
    u, v = (torch.linalg.qr(torch.randn(k, len(values), generator=random, dtype=torch.float64))[0] for k in (n, m))
    return (u @ torch.diag(torch.as_tensor(values, dtype=torch.float64)) @ v.T).to(dtype)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_the_updates_singular_values_are_near_one(shape):
    """Claim: for a well-conditioned matrix they end between 0.5 and 1.5; the published steps reach 0.68 to 1.13 by design."""
    values = torch.logspace(0, -1, min(shape))
    for matrix in (with_singular_values(values, *shape), 1e4 * with_singular_values(values, *shape)):
        found = torch.linalg.svdvals(orthogonalised(matrix, 5).float())
        assert found.min() > 0.6 and found.max() < 1.3
    exact = with_singular_values(values, *shape, dtype=torch.float64)
    assert torch.allclose(orthogonalised(1e-6 * exact, 5), orthogonalised(exact, 5), atol=1e-12)  # its size means nothing
    tiny = with_singular_values(torch.logspace(0, -6, min(shape)), *shape)
    assert torch.linalg.svdvals(orthogonalised(tiny, 5).float()).min() < 0.1  # what is almost nothing is not blown up
    assert torch.equal(orthogonalised(torch.zeros(shape), 5).float(), torch.zeros(shape))


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_the_steps_act_on_singular_values_alone(shape, steps):
    """Against an SVD in 64 bits: the same singular vectors, and a s + b s^3 + c s^5 for each value, `steps` times."""
    matrix = next(gradients(shape, 1, dtype=torch.float64))
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    exact = u @ torch.diag(s) @ vh
    assert torch.allclose(orthogonalised(matrix, steps), exact, rtol=0, atol=1e-12)
    assert (orthogonalised(matrix.float(), steps).double() - exact).norm() < 0.03 * exact.norm()  # in bf16


def oracle(x, grads, *, lr, momentum=0.95, nesterov=True, weight_decay=0.0, adjust):
    """The algorithm in 64 bits with an SVD in place of matrix products."""
    mean = torch.zeros_like(x)
    n, m = x.shape
    rate = lr * (math.sqrt(max(1, n / m)) if adjust == "original" else 0.2 * math.sqrt(max(n, m)))
    for g in grads:
        mean = momentum * mean + (1 - momentum) * g
        u, s, vh = torch.linalg.svd((1 - momentum) * g + momentum * mean if nesterov else mean, full_matrices=False)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        x = x - lr * weight_decay * x - rate * (u @ torch.diag(s) @ vh)
    return x


@pytest.mark.parametrize(
    "options",
    [
        {"adjust": "original"},
        {"adjust": "match_rms_adamw", "weight_decay": 0.1},
        {"adjust": "original", "nesterov": False, "weight_decay": 0.3},
        {"adjust": "original", "momentum": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_it_follows_the_equations(shape, options):
    p = parameter(*shape, dtype=torch.float64)
    start = p.detach().clone()
    grads = list(gradients(shape, 12, dtype=torch.float64))
    got = run(Muon([p], lr=0.02, **options), p, grads)
    assert torch.allclose(got, oracle(start, grads, lr=0.02, **options), rtol=0, atol=1e-11)
    assert (got - start).norm() > 0.01 * start.norm()


def test_the_published_scale_factors():
    """Claims: sqrt(max(1, n / m)) in the post; 0.2 sqrt(max(n, m)) in the paper, an update of AdamW's usual size of 0.2."""
    assert factor(torch.Size((64, 16)), "original") == 2.0 and factor(torch.Size((16, 64)), "original") == 1.0
    for shape in ((64, 256), (256, 64), (128, 128)):
        assert factor(torch.Size(shape), "match_rms_adamw") == pytest.approx(0.2 * max(shape) ** 0.5)
        values = torch.ones(min(shape))
        update = with_singular_values(values, *shape) * factor(torch.Size(shape), "match_rms_adamw")
        assert update.square().mean().sqrt() == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_it_is_torchs_bit_for_bit(shape, adjust):
    theirs = getattr(torch.optim, "Muon", None)
    if theirs is None:
        pytest.skip("this torch has no Muon")
    for nesterov in (True, False):
        p, q = parameter(*shape), parameter(*shape)
        options = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov}
        a, b = Muon([p], adjust=adjust, **options), theirs([q], adjust_lr_fn=adjust, **options)
        assert torch.equal(run(a, p, gradients(shape, 10)), run(b, q, gradients(shape, 10)))


def test_everything_else_is_adamw_bit_for_bit():
    for shape in [(7,), (6, 4), ()]:
        p, q = parameter(*shape), parameter(*shape)
        options = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
        ours, theirs = Muon([p], orthogonalise=False, **options), torch.optim.AdamW([q], foreach=False, **options)
        assert torch.equal(run(ours, p, gradients(shape, 20)), run(theirs, q, gradients(shape, 20)))


def test_a_stretch_at_a_time_gives_the_bits_of_the_whole():
    results = []
    for piece in (1 << 20, 64):
        p = parameter(20, 30)
        with pieces_of(piece):
            results.append(run(Muon([p], orthogonalise=False, weight_decay=0.1), p, gradients((20, 30), 5)))
    assert torch.equal(*results)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(2))
        self.head = nn.Linear(24, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), (3 * tokens + 1).remainder(16).flatten())


def test_groups_are_inner_matrices_and_the_rest():
    """Claim: hidden matrices alone are orthogonalised; embedding, head and vectors are AdamW's."""
    model = Tiny()
    inner, rest = Muon.groups(model, lr=0.02, adamw_lr=1e-3, weight_decay=0.1, adjust="original")
    assert {id(p) for p in inner["params"]} == {id(m.weight) for b in model.blocks for m in b if isinstance(m, nn.Linear)}
    assert {id(model.embed.weight), id(model.head.weight)} <= {id(p) for p in rest["params"]}
    optimizer = Muon([inner, rest])
    assert [(g["lr"], g["orthogonalise"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0.02, True, 0.1),
        (1e-3, False, 0.1),
    ]


def test_the_state_is_one_number_an_element_of_a_matrix_and_two_of_the_rest():
    """Claim: 4 bytes a parameter where AdamW has 8. (What a plan says of it: `test_optimizers_in_the_engine`.)"""
    model = Tiny()
    optimizer = Muon(Muon.groups(model))
    model(torch.arange(16).view(2, 8)).backward()
    optimizer.step()
    for p in model.parameters():
        inner = any(p is q for q in optimizer.param_groups[0]["params"])
        assert allocated(optimizer.state[p]) == optimizer.state_bytes(p) == (4 if inner else 8) * p.numel()


@pytest.mark.parametrize("alone", [False, True])
def test_it_trains_a_tiny_model(alone):
    """Forty steps; `alone`: by its orthogonalised matrices, with everything else frozen.

    No comparison with AdamW: the papers' claims (half of its training cost) are of long runs of language models.
    """
    torch.manual_seed(0)
    model, tokens = Tiny(), torch.randint(0, 16, (8, 8))
    optimizer = Muon(Muon.groups(model), lr=1e-2)
    for p in optimizer.param_groups[1]["params"]:
        p.requires_grad_(not alone)
    before = model(tokens).item()
    for _ in range(40):
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < (0.5 if alone else 0.01) * before


def test_wrong_use_is_refused_in_a_line():
    matrix, vector, stack = parameter(4, 4), parameter(4), parameter(2, 4, 4)
    for p in (vector, stack):
        assert str(tuple(p.shape)) in refusal(lambda p=p: Muon([p])).fact
    for options, word in [({"momentum": 1.0}, "momentum"), ({"ns_steps": 0}, "ns_steps"), ({"adjust": "spectral"}, "adjust")]:
        assert word in refusal(lambda options=options: Muon([matrix], **options)).fact
