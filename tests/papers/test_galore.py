"""Zhao et al., "GaLore" (arXiv 2403.03507), 8-bit GaLore and Q-GaLore (arXiv 2407.08296): what the papers say."""

import warnings

import pytest
import torch
from torch import nn

from holdall.codecs import levels
from holdall.errors import InvalidInput
from holdall.optim._math import quantise, subspace
from holdall.optim._math.moments import LEAST, read_moment
from holdall.optim.flora import Flora
from holdall.optim.galore import GaLore
from holdall.testing.optimizers import allocated, refusal
from holdall.testing.stand_ins import pieces_of


def parameter(*shape, seed=0):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def gradients(shape, n, seed=7):
    random = torch.Generator().manual_seed(seed)
    for _ in range(n):
        yield torch.randn(shape, generator=random)


def run(optimizer, p, grads):
    for g in grads:
        p.grad = g
        optimizer.step()
    return p.detach().clone()


@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "left", "right", "full"])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_trajectories_are_the_authors_bit_for_bit(proj_type, shape):
    """Claim: full SVD on a CPU, refreshes and weight decay included, 30 steps of galore-torch give the same bits."""
    package = pytest.importorskip("galore_torch")
    p, q = parameter(*shape), parameter(*shape)
    options = {"rank": 6, "update_proj_gap": 7, "scale": 0.25, "proj_type": proj_type}
    ours = GaLore([{"params": [p], **options}], lr=0.01, weight_decay=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs announces its own end
        theirs = package.GaLoreAdamW([{"params": [q], **options}], lr=0.01, weight_decay=0.1)
    assert torch.equal(run(ours, p, gradients(shape, 30)), run(theirs, q, gradients(shape, 30)))


def test_a_group_without_a_rank_is_the_authors_adamw():
    package = pytest.importorskip("galore_torch")
    p, q = parameter(17), parameter(17)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = package.GaLoreAdamW([q], lr=0.01, weight_decay=0.1)
    assert torch.equal(
        run(GaLore([p], lr=0.01, weight_decay=0.1), p, gradients((17,), 20)), run(theirs, q, gradients((17,), 20))
    )


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_full_rank_is_adamw_in_the_rotated_basis(shape):
    """Claim: with r the shorter side and alpha 1 nothing is lost: up(down(G)) = G; the run is AdamW's on rotated weights."""
    p = parameter(*shape)
    start = p.detach().clone()
    options = {"lr": 0.01, "eps": 1e-12}
    optimizer = GaLore([p], rank=12, scale=1.0, update_proj_gap=10**9, **options)
    got = run(optimizer, p, gradients(shape, 40))
    left = shape[0] < shape[1]
    basis = optimizer.state[p]["projector_left" if left else "projector_right"].double()
    g = next(gradients(shape, 1)).double()
    there, back = (lambda x: basis @ x, lambda x: basis.T @ x) if left else (lambda x: x @ basis.T, lambda x: x @ basis)
    assert torch.allclose(back(there(g)), g, rtol=0, atol=1e-5)
    q = nn.Parameter(there(start.double()))
    adam = torch.optim.AdamW([q], weight_decay=0.0, **options)
    rotated = run(adam, q, (there(g.double()) for g in gradients(shape, 40)))
    assert torch.allclose(got.double(), back(rotated), rtol=0, atol=1e-5)
    assert (got - start).norm() > 0.05 * start.norm()


def test_a_fixed_subspace_is_enough_where_the_gradient_has_its_rank():
    """Claim: on a quadratic of rank r one basis, never refreshed, reaches the optimum that Adam reaches."""
    random = torch.Generator().manual_seed(3)
    u = torch.linalg.qr(torch.randn(16, 3, generator=random))[0]
    target = torch.randn(16, 24, generator=random)
    reached = []
    for make in (
        lambda p: GaLore([p], rank=3, scale=1.0, update_proj_gap=10**9, lr=0.1, betas=(0.9, 0.99)),
        lambda p: torch.optim.AdamW([p], weight_decay=0.0, lr=0.1, betas=(0.9, 0.99)),
    ):
        p = parameter(16, 24)
        optimizer = make(p)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        for _ in range(700):
            p.grad = u @ (u.T @ (p.detach() - target))
            optimizer.step()
            schedule.step()
        reached.append(u.T @ p.detach())
    assert torch.allclose(reached[0], u.T @ target, atol=1e-3)
    assert torch.allclose(reached[0], reached[1], atol=1e-3)


@pytest.mark.parametrize("gap", [1, 3, 200])
def test_the_basis_is_refreshed_at_steps_0_T_2T(gap):
    refreshed, before = [], None
    p = parameter(8, 12)
    optimizer = GaLore([p], rank=2, update_proj_gap=gap)
    for step, g in enumerate(gradients((8, 12), 10)):
        p.grad = g
        optimizer.step()
        basis = optimizer.state[p]["projector_left"].clone()
        if before is None or not torch.equal(basis, before):
            refreshed.append(step)
        before = basis
    assert refreshed == list(range(0, 10, gap))


def test_moments_are_left_as_they_are_by_a_refresh_and_carried_over_if_asked():
    """The authors read old moments in the new basis; `rotate` puts the first one into it."""
    found = {}
    for rotate in (False, True):
        p = parameter(8, 12)
        optimizer = GaLore([p], rank=8, update_proj_gap=5, rotate=rotate, betas=(0.9, 0.999))
        run(optimizer, p, gradients((8, 12), 5))
        state = optimizer.state[p]
        whole = state["projector_left"].T @ state["exp_avg"]
        before = state["exp_avg"].clone()
        run(optimizer, p, [torch.zeros(8, 12) + torch.eye(8, 12) * torch.arange(1.0, 9)[:, None]])
        g = state["projector_left"] @ p.grad
        kept = (state["exp_avg"] - 0.1 * g) / 0.9
        found[rotate] = (kept, state["projector_left"].T @ kept, before, whole)
    kept, _, before, _ = found[False]
    assert torch.allclose(kept, before, atol=1e-5)
    _, seen, _, whole = found[True]
    assert torch.allclose(seen, whole, atol=1e-5)


def test_a_steady_basis_is_refreshed_half_as_often():
    """Claim (Q-GaLore): once five refreshes in a row found the same first direction, T doubles, for that matrix alone."""
    steady, restless = parameter(8, 12), parameter(8, 12, seed=1)
    optimizer = GaLore([steady, restless], rank=2, update_proj_gap=3, lazy=True)
    frozen = next(gradients((8, 12), 1))
    random = torch.Generator().manual_seed(5)
    gaps = []
    for _ in range(3 * 5 + 1):
        steady.grad, restless.grad = frozen, torch.randn(8, 12, generator=random)
        optimizer.step()
        gaps.append(optimizer.state[steady].get("gap", 3))
    assert gaps == [3] * 15 + [6]  # the first basis, at step 0, is compared with none
    assert all(abs(c - 1) < 1e-5 for c in optimizer.state[steady]["cosines"])
    cosines = optimizer.state[restless]["cosines"]
    assert len(cosines) == 5
    assert optimizer.state[restless].get("gap", 3) == (6 if sum(cosines) / 5 >= 0.4 else 3)


@pytest.mark.parametrize(("cosine", "gap"), [(0.45, 2), (0.35, 1), (-0.45, 2)])
def test_a_basis_counts_as_steady_from_a_mean_cosine_of_four_tenths(cosine, gap):
    """Claim (Q-GaLore): 0.4 is the threshold. The first direction turns by the same angle at each of five refreshes."""
    p = parameter(8, 12)
    optimizer = GaLore([p], rank=2, update_proj_gap=1, lazy=True)
    angle = torch.arccos(torch.tensor(cosine))
    for k in range(6):
        first = torch.zeros(8)
        first[0], first[1] = torch.cos(k * angle), torch.sin(k * angle)
        p.grad = torch.outer(first, torch.ones(12)) + 0.01 * next(gradients((8, 12), 1))
        optimizer.step()
        assert optimizer.state[p].get("gap", 1) == (gap if k == 5 else 1)
    assert all(abs(c - abs(cosine)) < 0.02 for c in optimizer.state[p]["cosines"])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_projector_is_the_singular_vectors_within_its_levels(bits):
    """Claim (Q-GaLore): 16 (or 256) even levels over each 256 elements' range; an error as of rounding to one of them."""
    p = parameter(64, 96)
    (g,) = gradients((64, 96), 1)
    optimizer = GaLore([p], rank=16, projector_bits=bits)
    run(optimizer, p, [g])
    exact = torch.linalg.svd(g)[0].T[:16].reshape(-1, 256)
    kept = subspace.read_projector(optimizer.state[p], "projector_left", 16, 64, g, bits=bits).reshape(-1, 256)
    kept = kept * torch.sign((kept.view(16, 64) * exact.view(16, 64)).sum(1)).repeat_interleave(64).view(-1, 256)
    level = (exact.amax(1, keepdim=True) - exact.amin(1, keepdim=True)) / (2**bits - 1)
    error = (kept - exact) / level
    assert error.abs().max() < 1.02
    assert error.square().mean().sqrt() < 1.15 / 12**0.5


def naive(x, grads, *, rank, gap, lr, scale, weight_decay):
    """Adam on what an SVD of the gradient leaves, with moments that a new basis finds as they are; from the formulae."""
    left = x.shape[0] < x.shape[1]
    m = v = 0.0
    for t, g in enumerate(grads):
        if t % gap == 0:
            u, _, vh = torch.linalg.svd(g, full_matrices=False)
            basis = u.T[:rank] if left else vh[:rank]
        low = basis @ g if left else g @ basis.T
        m, v = 0.9 * m + 0.1 * low, 0.999 * v + 0.001 * low**2
        n = m / (v.sqrt() + 1e-6)
        step = lr * (1 - 0.999 ** (t + 1)) ** 0.5 / (1 - 0.9 ** (t + 1))
        x = x - step * scale * (basis.T @ n if left else n @ basis)
        x = x - lr * weight_decay * x
    return x


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
def test_it_follows_the_algorithm(shape, weight_decay):
    """20 steps with seven bases, in double precision, to 1e-9; without the authors' package."""
    start = parameter(*shape).detach().double()
    grads = [g.double() for g in gradients(shape, 20)]
    p = nn.Parameter(start.clone())
    got = run(GaLore([p], rank=3, update_proj_gap=3, scale=0.5, lr=0.01, weight_decay=weight_decay), p, grads)
    expected = naive(start, grads, rank=3, gap=3, lr=0.01, scale=0.5, weight_decay=weight_decay)
    assert torch.allclose(got, expected, rtol=0, atol=1e-9)


def test_an_unsteady_basis_keeps_its_gap():
    p = parameter(40, 40)
    optimizer = GaLore([p], rank=2, update_proj_gap=1, lazy=True)
    run(optimizer, p, gradients((40, 40), 12))
    assert sum(optimizer.state[p]["cosines"]) / 5 < 0.4
    assert "gap" not in optimizer.state[p]


def test_state_bytes_are_the_projector_and_two_low_moments():
    """Claim: 4 r short + 8 r long; for 4096 x 11008 and rank 1024, 106,954,752 bytes where Adam has 360,710,144."""
    large = nn.Parameter(torch.empty(4096, 11008, device="meta"))
    assert GaLore([large], rank=1024).state_bytes(large) == 106_954_752
    assert GaLore([large]).state_bytes(large) == 360_710_144
    for shape in [(24, 40), (40, 24)]:
        p = parameter(*shape)
        optimizer = GaLore([p], rank=6)
        run(optimizer, p, gradients(shape, 2))
        assert allocated(optimizer.state[p]) == optimizer.state_bytes(p) == 4 * 6 * 24 + 8 * 6 * 40


@pytest.mark.parametrize("projector_bits", [4, 8, 32])
def test_bytes_of_the_quantised_forms(projector_bits):
    """8-bit moments: 1 + 4/256 bytes an element; a projector of b bits: b/8 + 5/256."""
    p = parameter(96, 300)
    optimizer = GaLore([p], rank=32, bits=8, projector_bits=projector_bits, update_proj_gap=2)
    run(optimizer, p, gradients((96, 300), 3))
    low, side = 32 * 300, 32 * 96
    assert low >= LEAST
    moments = 2 * (low + 4 * -(-low // 256))
    projector = 4 * side if projector_bits == 32 else side * projector_bits // 8 + 5 * (side // 256)
    assert allocated(optimizer.state[p]) == optimizer.state_bytes(p) == moments + projector
    assert optimizer.state[p]["exp_avg"].dtype == torch.uint8


def fit(**options):
    """Loss after fitting a matrix by noisy gradients of falling size."""
    target, p = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)), parameter(64, 128)
    optimizer = GaLore([p], rank=48, scale=1.0, lr=0.05, update_proj_gap=20, **options)
    random = torch.Generator().manual_seed(2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=200)
    for _ in range(200):
        p.grad = p.detach() - target + 0.1 * torch.randn(64, 128, generator=random)
        optimizer.step()
        schedule.step()
    return (p.detach() - target).square().mean().item(), (parameter(64, 128).detach() - target).square().mean().item()


def test_quantised_states_and_the_cheap_basis_learn_as_well():
    """Claim: 8-bit moments, a 4-bit projector and iteration for SVD cost little quality; all far below the start."""
    plain, start = fit()
    assert plain < 0.05 * start
    for options in ({"bits": 8}, {"projector_bits": 8}, {"bits": 8, "projector_bits": 4, "lazy": True}, {"basis": "iteration"}):
        reached, _ = fit(**options)
        assert reached < plain + 0.02 * start, options


def test_iteration_finds_the_space_that_svd_finds():
    """On a matrix whose spectrum falls, the angle between both spaces is small, and the first direction leads."""
    random = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, 30, generator=random))[0] for n in (40, 60))
    matrix = u @ torch.diag(0.7 ** torch.arange(30.0)) @ v.T
    exact, _ = subspace.leading(matrix, 6)
    cold = subspace.leading_left(matrix, 6, begin=None, seed=1)
    warm = subspace.leading_left(matrix + 0.001 * torch.randn(40, 60, generator=random), 6, begin=cold, seed=1)
    for found in (cold, warm):
        assert torch.allclose(found @ found.T, torch.eye(6), atol=1e-5)
        assert torch.linalg.svdvals(found @ exact.T).min() > 0.99
        assert abs(found[0] @ exact[0]) > 0.999


def test_a_slice_of_the_svd_does_not_keep_the_rest_alive():
    left, right = subspace.leading(torch.randn(20, 30), 3)
    assert left.untyped_storage().nbytes() == 4 * 3 * 20
    assert right.untyped_storage().nbytes() == 4 * 3 * 30


# -- block-wise quantisation (Dettmers et al. 2022)


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_has_256_rising_levels(signed):
    table = quantise.dynamic_table(signed=signed)
    assert len(set(table)) == 256 and list(table) == sorted(table)
    assert table[-1] == 1.0 and 0.0 in table
    assert (min(table) < -0.99) == signed
    smallest = min(abs(x) for x in table if x)
    assert smallest < 1e-6  # seven decades


def test_normal_numbers_come_back_within_three_percent():
    x = torch.randn(64 * 256, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise.encode(x, signed=True)
    back = quantise.decode(codes, scales, signed=True)
    assert codes.nbytes + scales.nbytes == x.numel() * (1 + 4 / 256)
    assert (back - x).norm() / x.norm() < 0.03
    codes, scales = quantise.encode(x.square(), signed=False)
    assert (quantise.decode(codes, scales, signed=False) - x.square()).norm() / x.square().norm() < 0.03


@pytest.mark.parametrize("numel", [1, 255, 256, 1000])
def test_a_constant_survives_many_rounds(numel):
    x = torch.full((numel,), 0.37)
    for signed in (True, False):
        value = x
        for _ in range(10):  # a thousand, through a state: `test_adam8bit`
            value = quantise.decode(*quantise.encode(value, signed=signed), signed=signed)
        assert torch.equal(value, x)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("make", ["galore", "flora"])
def test_first_moments_of_8_bits_keep_their_size_whatever_their_sign(make, negative):
    """A table with a 1 and no -1 would let a negative largest element shrink by 0.7 % a step, to 94 % in the end."""
    p = nn.Parameter(torch.zeros(LEAST))
    optimizer = GaLore([p], bits=8) if make == "galore" else Flora([p], bits=8, clip_threshold=1e9)
    gradient = torch.full((LEAST,), -1.0 if negative else 1.0)
    run(optimizer, p, [gradient] * 60)
    moment = read_moment(optimizer.state[p], "exp_avg", p, signed=True)
    assert optimizer.state[p]["exp_avg"].dtype == torch.uint8
    assert torch.allclose(moment, gradient * (1 - 0.9**60), rtol=1e-4)


def test_codes_are_the_nearest_levels():
    """Against the plain search over all 256."""
    x = torch.randn(512, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise.encode(x, signed=True)
    table = torch.tensor(quantise.dynamic_table(signed=True))
    largest = x.view(2, 256).gather(1, x.view(2, 256).abs().argmax(1, keepdim=True))
    assert torch.equal(scales[:, None], largest)  # with its sign: the table has no -1
    unit = x.view(2, 256) / largest
    error = (table[codes.long()].view(2, 256) - unit).abs()
    best = (table[None, None] - unit[..., None]).abs().amin(-1)
    assert torch.allclose(error, best, atol=1e-7)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_made_in_pieces_are_those_of_the_whole(signed):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))  # the last block is not full
    x = x if signed else x.square()
    whole = quantise.encode(x, signed=signed)
    back = quantise.decode(*whole, signed=signed)
    with pieces_of(512):
        parts = quantise.encode(x, signed=signed)
        assert torch.equal(quantise.decode(*parts, signed=signed), back)
    assert all(map(torch.equal, whole, parts))


def test_a_second_moment_never_rounds_to_nothing():
    """Else the next step would be the first moment over epsilon."""
    x = torch.tensor([1.0, 1e-12, 0.0] + [0.5] * 253)
    back = quantise.decode(*quantise.encode(x, signed=False), signed=False)
    assert back[1] > 0 and back[2] == 0
    assert torch.equal(quantise.decode(*quantise.encode(torch.zeros(300), signed=False), signed=False), torch.zeros(300))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("numel", [7, 256, 1001])
@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0])
def test_even_levels_err_by_half_a_level(bits, numel, shift):
    """Also where a block has one sign, as a first singular vector often does."""
    x = torch.rand(numel, generator=torch.Generator().manual_seed(0)) - 0.5 + shift
    codes, scales, zeros = levels.encode_levels(x, bits=bits)
    back = levels.decode_levels(codes, scales, zeros, bits=bits, numel=numel)
    assert codes.nbytes + scales.nbytes + zeros.nbytes == levels.level_bytes(numel, bits)
    level = (abs(shift) + 1.0) / (2**bits - 1)
    assert (back - x).abs().max() <= 1.01 * level  # half for the value, half for the rounded zero


# -- use


def test_wrong_use_is_refused_in_a_line():
    matrix, vector = parameter(8, 12), parameter(8)
    assert "(8,)" in refusal(lambda: GaLore([vector], rank=2)).fact
    assert "rank 9" in refusal(lambda: GaLore([matrix], rank=9)).fact
    assert "proj_type" in refusal(lambda: GaLore([matrix], rank=2, proj_type="both")).fact
    assert "did you mean `rank`" in refusal(lambda: GaLore([matrix], rnak=2)).hint
    assert "bits" in refusal(lambda: GaLore([matrix], rank=2, bits=16)).fact
    assert "rank" in refusal(lambda: GaLore([matrix], rank=2.5)).fact
    optimizer = GaLore([matrix], rank=2)
    with pytest.raises(InvalidInput):
        optimizer.add_param_group({"params": [vector]})
    assert len(optimizer.param_groups) == 1  # what was refused is not there
    optimizer.add_param_group({"params": [vector], "rank": None})


def test_groups_of_a_model_are_its_inner_matrices_and_the_rest():
    """Claim: only the linear layers of attention and MLP are projected; embeddings, head, norms and biases are not."""

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(32, 16)
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True) for _ in range(2))
            self.head = nn.Linear(16, 32)

    model = Small()
    model.layers[0].linear1.weight.requires_grad_(False)
    low, rest = GaLore.groups(model, rank=8, update_proj_gap=5)
    whole = [(48, 16), (16, 16), (24, 16), (16, 24)]
    assert sorted(tuple(p.shape) for p in low["params"]) == sorted([*whole, (48, 16), (16, 16), (16, 24)])
    assert {id(p) for p in (model.embed.weight, model.head.weight)} <= {id(p) for p in rest["params"]}
    assert "rank" not in rest
    optimizer = GaLore([low, rest], lr=0.01)
    loss = model.head(model.layers[1](model.layers[0](model.embed(torch.arange(8).view(1, 8))))).square().mean()
    loss.backward()
    optimizer.step()
    assert "rank 20" in refusal(lambda: GaLore.groups(model, rank=20)).fact  # no matrix is that large
