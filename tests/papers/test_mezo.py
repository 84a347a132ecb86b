"""Malladi et al., MeZO (NeurIPS 2023, arXiv 2305.17333): what the paper says, and that parameters keep their bits."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from holdall.errors import InvalidInput
from holdall.optim._math.rng import mix
from holdall.optim.mezo import Mezo, MezoProbe
from holdall.runtime.budget.ledger import Ledger
from holdall.testing.stand_ins import pieces_of


@pytest.mark.parametrize("numbers", [(0,), (5,), (-1,), (3, 2**64 - 1, 7)])
def test_seeds_are_mixed_by_splitmix64(numbers):
    """Its second number from seed 0 is known; each further number is a multiple of an odd constant, added to the state."""
    golden, wrap = 0x9E3779B97F4A7C15, 2**64
    state = golden
    for number in numbers:
        state = (state + golden + (number % wrap) * 0xD1B54A32D192ED03) % wrap
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            state = (state ^ (state // 2**shift)) * factor % wrap
    assert mix(*numbers) == state // 2
    assert mix(0) == 0x6E789E6AA1B965F4 // 2


class Tiny(nn.Module):
    """Tied embedding, attention with packed weights, a norm, dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.1)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.drop(self.attention(self.norm(x), x, x, need_weights=False)[0])
        return F.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), tokens.flatten())


def make(dtype=torch.float32):
    torch.manual_seed(0)
    return Tiny().to(dtype), torch.randint(0, 20, (2, 5))


def bits(model):
    return [p.detach().clone() for p in model.parameters()]


def same(before, after):
    return all(torch.equal(p, q) for p, q in zip(before, after, strict=True))


def move(params, seed, by):
    """All parameters moved along the direction of a seed, as a replayed step with this slope moves them."""
    Mezo(params, lr=1.0).replay([MezoProbe(seed=seed, slope=-by)])


def direction(p, seed):
    moved = nn.Parameter(torch.zeros_like(p))
    move([moved], seed, 1.0)
    return moved.detach()


def test_the_mean_over_seeds_is_the_gradient_of_a_quadratic():
    """Claim: E[g z] is the gradient; 20,000 seeds in fp64, every coordinate within 3 standard errors."""
    torch.manual_seed(0)
    n, draws = 6, 20_000
    matrix = torch.randn(n, n, dtype=torch.float64)
    matrix = matrix @ matrix.t() / n
    p = nn.Parameter(torch.randn(n, dtype=torch.float64))
    optimizer = Mezo([p], lr=0.0, eps=1e-3, samples=50)
    # the losses of all draws at once, with the optimizer's directions; below, its own slopes are compared with these
    z = torch.stack([direction(p, 10**6 + k) for k in range(draws)])  # (draws, n)
    loss = lambda x: 0.5 * ((x @ matrix) * x).sum(-1)  # noqa: E731
    slope = (loss(p + 1e-3 * z) - loss(p - 1e-3 * z)) / 2e-3
    estimate = slope[:, None] * z
    error = estimate.mean(0) - matrix @ p
    assert (error.abs() <= 3 * estimate.std(0) / draws**0.5).all()
    optimizer.step(lambda: loss(p))
    along = torch.stack([direction(p, probe.seed) for probe in optimizer.last])
    slope = (loss(p + 1e-3 * along) - loss(p - 1e-3 * along)) / 2e-3
    mine = torch.tensor([probe.slope for probe in optimizer.last], dtype=torch.float64)
    torch.testing.assert_close(mine, slope.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_have_their_bits_after_the_losses_were_taken(dtype):
    model, tokens = make(dtype)
    before = bits(model)
    seen = []
    optimizer = Mezo(model.parameters(), lr=0.0)
    for _ in range(3):
        optimizer.step(lambda: seen.append(model(tokens)) or seen[-1])
    assert same(before, bits(model))
    assert len(seen) == 6
    assert all(probe.slope != 0 for probe in optimizer.last)

    def fails():
        model(tokens)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(fails)
    assert same(before, bits(model))


def test_the_losses_are_those_of_parameters_that_were_really_moved():
    """What every op is given instead of its parameter is what moving all parameters gives; tied and packed weights included."""
    model, tokens = make()
    optimizer = Mezo(model.parameters(), lr=0.0, eps=1e-2)
    model.eval()
    optimizer.step(lambda: model(tokens))
    (probe,) = optimizer.last
    moved = []
    for sign in (1, -1):
        other = copy.deepcopy(model)
        move(other.parameters(), probe.seed, sign * 1e-2)
        moved.append(other(tokens).item())
    assert probe.slope == (moved[0] - moved[1]) / 2e-2


def test_dropout_draws_the_same_masks_for_both_losses():
    x = torch.ones(64)
    p = nn.Parameter(torch.zeros(1))
    masks = []
    torch.manual_seed(3)
    Mezo([p]).step(lambda: masks.append(F.dropout(x, 0.5)) or (masks[-1] + p).sum())
    assert torch.equal(masks[0], masks[1])
    after = torch.rand(1)
    torch.manual_seed(3)
    F.dropout(x, 0.5)
    assert torch.equal(after, torch.rand(1))  # the global stream went on by one forward, and by nothing of ours


@pytest.mark.parametrize("samples", [1, 3])
def test_an_update_is_the_mean_slope_along_the_directions_and_decoupled_decay(samples):
    """Claim: p <- p - lr (mean of g z + wd p), with the directions that the losses were taken along."""
    torch.manual_seed(0)
    p, target = nn.Parameter(torch.randn(7, 3, dtype=torch.float64)), torch.randn(7, 3, dtype=torch.float64)
    start, decay = p.detach().clone(), {"lr": 0.05, "weight_decay": 0.4}
    optimizer = Mezo([p], samples=samples, seed=9, **decay)
    optimizer.step(lambda: (p - target).square().sum())
    slopes = torch.zeros_like(start)
    seeds = [probe.seed for probe in optimizer.last]
    for probe in optimizer.last:
        z = direction(p, probe.seed)
        assert probe.slope == pytest.approx((2 * (start - target) * z).sum().item(), rel=1e-6)
        slopes += probe.slope * z / samples
    torch.testing.assert_close(p.detach(), start - 0.05 * (slopes + 0.4 * start), rtol=1e-12, atol=1e-12)
    optimizer.step(lambda: p.sum())
    seeds += [probe.seed for probe in optimizer.last]
    assert len(set(seeds)) == 2 * samples  # another direction for every sample of every step


@pytest.mark.parametrize("samples", [1, 3])
def test_a_run_can_be_replayed_from_seeds_and_slopes(samples):
    model, tokens = make(torch.bfloat16)
    start = copy.deepcopy(model)
    optimizer = Mezo(model.parameters(), lr=1e-2, samples=samples, weight_decay=0.1, seed=5)
    log = []
    for _ in range(4):
        optimizer.step(lambda: model(tokens))
        log.append([(probe.seed, probe.slope) for probe in optimizer.last])
    assert not same(bits(model), bits(start))
    again = Mezo(start.parameters(), lr=1e-2, weight_decay=0.1)
    for step in log:
        again.replay([MezoProbe(seed=seed, slope=slope) for seed, slope in step])
    assert same(bits(model), bits(start))


@pytest.mark.parametrize(
    ("bias", "dtype", "piece"),
    [(False, torch.float32, 1 << 20), (True, torch.float32, 1 << 20), (False, torch.float32, 64), (False, torch.bfloat16, 64)],
)
def test_the_peak_is_that_of_inference_and_one_parameter(bias, dtype, piece):
    """Claim: inference memory. One op's parameters more: the largest, and its bias where there is one.

    Sixteen bits are computed in thirty-two a stretch at a time; it is made small here, as it is
    beside a weight of more than a million elements."""
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64, bias=bias), nn.ReLU())]).to(dtype)
    x = torch.randn(32, 64).to(dtype)

    def peak(run):
        with Ledger(seed=[*model.parameters(), x]) as ledger:
            before = ledger.live
            run()
        return ledger.peak - before

    def inference():
        with torch.no_grad():
            model(x).float().pow(2).mean()

    optimizer = Mezo(model.parameters(), lr=1e-4)
    once = peak(inference)
    with pieces_of(piece):
        whole = peak(lambda: optimizer.step(lambda: model(x).float().pow(2).mean()))
    largest = max(p.nbytes for p in model.parameters())
    stretch = 2 * 64 * 4 if dtype == torch.bfloat16 else 0  # 32 bits are drawn where they go
    assert whole <= once + largest + (64 * dtype.itemsize if bias else 0) + stretch
    assert sum(p.nbytes for p in model.parameters()) > 5 * largest  # a copy of the model would be seen


class Lora(nn.Module):
    """A frozen linear layer and a product of two small trained matrices beside it."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x):
        return self.linear(x) + F.linear(F.linear(x, self.a), self.b)


def test_frozen_parameters_are_left_alone_beside_lora():
    torch.manual_seed(0)
    model = nn.Sequential(Lora(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 2).requires_grad_(False))
    x = torch.randn(4, 8)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = Mezo(model.parameters(), lr=1e-1)
    optimizer.step(lambda: model(x).pow(2).mean())
    assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == {"0.a", "0.b"}


def test_it_learns_what_has_no_gradient():
    """Claim: objectives such as accuracy can be trained on; the loss is a plain number."""
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    labels = (x @ torch.tensor([1.0, -2.0, 0.5, 1.0]) > 0).long()
    model = nn.Linear(4, 2)

    def error():
        return 1.0 - (model(x).argmax(1) == labels).float().mean().item()

    before = error()
    optimizer = Mezo(model.parameters(), lr=0.05, eps=0.1, samples=4)
    for _ in range(60):
        optimizer.step(error)
    assert error() < before / 2


def test_the_published_way_drifts_in_sixteen_bits_and_ours_does_not():
    drift = {}
    for in_place in (False, True):
        model, tokens = make(torch.bfloat16)
        before = bits(model)
        optimizer = Mezo(model.parameters(), lr=0.0, in_place=in_place)
        for _ in range(5):
            optimizer.step(partial(model, tokens))
        drift[in_place] = sum((p != q).sum().item() for p, q in zip(before, bits(model), strict=True))
    assert drift[False] == 0
    assert drift[True] > 0


def test_the_published_way_finds_the_same_slopes_and_comes_back_within_rounding():
    found = []
    for in_place in (False, True):
        model, tokens = make(torch.float64)
        before = bits(model.eval())
        optimizer = Mezo(model.parameters(), lr=0.0, in_place=in_place, samples=3)
        optimizer.step(partial(model, tokens))
        found.append(torch.tensor([probe.slope for probe in optimizer.last], dtype=torch.float64))
        for p, q in zip(before, bits(model), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


def test_a_view_made_before_is_followed():
    p = nn.Parameter(torch.arange(6.0).view(2, 3))
    view = p.detach().t()[1:]
    seen = []
    optimizer = Mezo([p], lr=0.0, eps=0.5)
    optimizer.step(lambda: seen.append((p * 1.0, view * 1.0)) or p.sum())
    whole, part = seen[0]
    assert torch.equal(part, whole.t()[1:])
    assert not torch.equal(whole, p)


def _rank(rank, folder, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(6, 4)
    optimizer = Mezo(model.parameters(), lr=0.05, process_group=dist.group.WORLD)
    for _ in range(3):
        optimizer.step(lambda: model(x[3 * rank : 3 * rank + 3]).pow(2).mean())
    out.put([p.detach().numpy() for p in model.parameters()])
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_ranks_exchange_two_numbers_and_stay_the_same(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(6, 4)
    optimizer = Mezo(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.step(lambda: model(x).pow(2).mean())
    out = mp.get_context("fork").SimpleQueue()
    context = mp.start_processes(_rank, args=(tmp_path, out), nprocs=2, join=False, start_method="fork")
    first, second = out.get(), out.get()
    while not context.join():
        pass
    for p, a, b in zip(model.parameters(), first, second, strict=True):
        assert (a == b).all()
        torch.testing.assert_close(p.detach(), torch.from_numpy(a), rtol=1e-3, atol=1e-4)  # slopes of 32-bit losses


def test_wrong_use_is_told_in_one_line():
    model, _ = make()
    with pytest.raises(InvalidInput, match="needs a closure"):
        Mezo(model.parameters()).step()
    with pytest.raises(InvalidInput, match="samples"):
        Mezo(model.parameters(), samples=0)
    before = bits(model)
    with pytest.raises(InvalidInput, match="nan"):
        Mezo(model.parameters()).step(lambda: float("nan"))
    assert same(before, bits(model))


def test_a_pickled_optimizer_goes_on():
    param = nn.Parameter(torch.randn(5))
    optimizer = Mezo([param], lr=0.1)
    optimizer.step(lambda: param.detach().square().sum())
    again = pickle.loads(pickle.dumps(optimizer))
    (copied,) = again.param_groups[0]["params"]
    assert len(optimizer.last) == 1 and again.last == ()
    for trained, x in ((optimizer, param), (again, copied)):
        trained.step(lambda x=x: x.detach().square().sum())
    assert torch.equal(param, copied) and again.last == optimizer.last
