"""Chen et al., DeepZero (ICLR 2024, arXiv 2310.02025): coordinate-wise estimates, pruning, feature reuse, shared work."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from holdall.errors import InvalidInput, Unsupported
from holdall.optim._math.zeroth_order import random_gradient, share
from holdall.optim.deepzero import ChainLoss, DeepZero


def make(dtype=torch.float64, batchnorm=False):
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(5)] if batchnorm else []
    model = nn.Sequential(nn.Linear(4, 5), *middle, nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    return model, torch.randn(8, 4, dtype=dtype), torch.randn(8, 2, dtype=dtype)


def squares(y):
    return lambda out: (out - y).pow(2).mean()


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def test_the_estimate_is_autograds_gradient_and_its_error_halves_with_mu():
    model, x, y = make()
    loss = lambda: squares(y)(model(x))  # noqa: E731
    loss().backward()
    true = flat([p.grad for p in model.parameters()])
    errors = []
    for mu in (1e-3, 5e-4, 2.5e-4):
        found = flat(DeepZero(model.parameters(), mu=mu).slopes(loss))
        errors.append((found - true).norm().item())
    assert errors[0] < 1e-2 * true.norm()
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.02)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("batchnorm", [False, True])
def test_taking_the_loss_up_in_the_middle_gives_the_bits_of_the_whole(batchnorm):
    model, x, y = make(torch.float32, batchnorm)
    chain = ChainLoss(model, x, squares(y))
    with torch.no_grad():
        chain()
        buffers = [b.clone() for b in model.buffers()]
        for p in model.parameters():
            before = p.view(-1)[0].clone()
            p.view(-1)[0] += 0.1
            whole = squares(y)(copy.deepcopy(model)(x))
            assert torch.equal(chain.restart(p), whole)
            p.view(-1)[0] = before
    assert all(torch.equal(b, c) for b, c in zip(buffers, model.buffers(), strict=True))


def test_reuse_changes_no_gradient_and_runs_fewer_modules():
    model, x, y = make(torch.float32)
    chain = ChainLoss(model, x, squares(y))
    optimizer = DeepZero(model.parameters())
    with_reuse = optimizer.slopes(chain)
    without = optimizer.slopes(lambda: squares(y)(model(x)))
    assert torch.equal(flat(with_reuse), flat(without))
    modules = 5 + 25 * 5 + 30 * 3 + 12 * 1  # whole once; then from each linear layer to the end, for each of its coordinates
    assert chain.modules_run == modules < 5 * (1 + 67)


def test_parameters_have_their_bits_after_the_estimate_even_if_the_loss_fails():
    model, x, y = make(torch.bfloat16)
    before = [p.detach().clone() for p in model.parameters()]
    DeepZero(model.parameters(), mu=1e-1).slopes(ChainLoss(model, x, squares(y)))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    calls = []

    def fails():
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return squares(y)(model(x))

    with pytest.raises(KeyboardInterrupt):
        DeepZero(model.parameters()).slopes(fails)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_one_and_four_workers_find_the_same_gradient():
    model, x, y = make(torch.float32)
    whole = DeepZero(model.parameters(), keep=0.6, seed=3).slopes(ChainLoss(model, x, squares(y)))
    total = [torch.zeros_like(part) for part in whole]
    for worker in range(4):
        other = copy.deepcopy(model)  # each has its own copy, as in another process
        loss = lambda other=other: squares(y)(other(x))  # noqa: E731
        found = DeepZero(other.parameters(), keep=0.6, seed=3).slopes(loss, worker=worker, workers=4)
        for part, mine in zip(total, found, strict=True):
            assert ((part == 0) | (mine == 0)).all()  # nobody's work is done twice
            part += mine
    assert torch.equal(flat(total), flat(whole))
    assert (flat(whole) != 0).all()


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 50])
def test_work_is_shared_by_its_cost_and_covered_once(workers):
    counts, costs = [7, 0, 30, 2], [10.0, 5.0, 1.0, 3.0]
    done, loads = [[0] * c for c in counts], []
    for worker in range(workers):
        spans = share(counts, costs, worker, workers)
        for span in spans:
            for k in range(span.begin, span.end):
                done[span.param][k] += 1
        loads.append(sum((s.end - s.begin) * costs[s.param] for s in spans))
    assert all(n == 1 for row in done for n in row)
    assert max(loads) <= 106 / workers + max(costs)  # within one coordinate of equal


def _rank(rank, folder, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model, x, y = make(torch.float32)
    optimizer = DeepZero(model.parameters(), keep=0.5, shuffle_every=2, process_group=dist.group.WORLD)
    chain = ChainLoss(model, x, squares(y))
    for _ in range(3):
        optimizer.step(chain)
    out.put((flat(model.parameters()).numpy(), chain.modules_run))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_two_ranks_train_to_the_bits_of_one(tmp_path):
    model, x, y = make(torch.float32)
    optimizer = DeepZero(model.parameters(), keep=0.5, shuffle_every=2)
    chain = ChainLoss(model, x, squares(y))
    for _ in range(3):
        optimizer.step(chain)
    out = mp.get_context("fork").SimpleQueue()
    context = mp.start_processes(_rank, args=(tmp_path, out), nprocs=2, join=False, start_method="fork")
    found = [out.get(), out.get()]
    while not context.join():
        pass
    for values, modules_run in found:
        assert torch.equal(torch.from_numpy(values), flat(model.parameters()))
        assert modules_run < chain.modules_run


def test_random_directions_come_to_point_where_coordinates_do():
    """Claim: RGE with many queries converges to CGE's direction; cosine above 0.99 in 50 dimensions."""
    torch.manual_seed(0)
    p, target = nn.Parameter(torch.randn(50, dtype=torch.float64)), torch.randn(50, dtype=torch.float64)
    scale = torch.rand(50, dtype=torch.float64) + 0.5
    loss = lambda: (scale * (p - target) ** 2).sum()  # noqa: E731
    (exact,) = DeepZero([p], mu=1e-5).slopes(loss)
    cosines = {}
    for queries in (50, 3500):
        (found,) = random_gradient([p], loss, queries=queries, mu=1e-5, seed=0)
        cosines[queries] = torch.cosine_similarity(found, exact, dim=0).item()
    assert cosines[3500] > 0.99 > cosines[50]
    assert found.norm() / exact.norm() == pytest.approx(1, abs=0.05)  # unbiased, not only in direction


def test_pruning_keeps_the_share_it_is_asked_for_and_finds_layers_that_matter():
    torch.manual_seed(0)
    useful, useless = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(12))
    optimizer = DeepZero([useful, useless])
    before = useful.detach().clone()
    keeps = optimizer.prune(lambda: (useful**4).sum() + 1e-4 * (useless**4).sum(), sparsity=0.75, queries=500)
    assert round(keeps[0] * 4) + round(keeps[1] * 12) == 4
    assert keeps[0] >= 0.75 > 0.1 > keeps[1]
    assert torch.equal(before, useful)
    assert [m.numel() for m in optimizer.coordinates()] == [round(keeps[0] * 4), round(keeps[1] * 12)]


def test_pruning_scores_are_weights_times_what_the_curvature_does_to_the_gradient():
    """Claim: score = -theta * Hg. Two layers with one gradient and one curvature: the one with larger weights is kept."""
    large, small = nn.Parameter(torch.full((6,), 3.0)), nn.Parameter(torch.full((6,), 0.01))
    optimizer = DeepZero([large, small])
    loss = lambda: 0.5 * ((large - 2).square().sum() + (small + 0.99).square().sum())  # noqa: E731
    assert optimizer.prune(loss, sparsity=0.5, queries=150) == [1.0, 0.0]
    assert optimizer.prune(loss, sparsity=0.0, queries=2) == [1.0, 1.0]
    with pytest.raises(InvalidInput, match="sparsity"):
        optimizer.prune(loss, sparsity=1.0)


def test_masks_are_drawn_anew_every_so_many_steps_and_weights_stay_dense():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(40))
    start = p.detach().clone()
    optimizer = DeepZero([p], keep=0.25, shuffle_every=3, momentum=0.0)
    masks = []
    for _ in range(7):
        masks.append(optimizer.coordinates()[0])
        before = p.detach().clone()
        optimizer.step(lambda: p.pow(2).sum())
        changed = (p != before).nonzero().flatten()
        assert torch.equal(changed, masks[-1])
        assert masks[-1].numel() == 10
    assert all(torch.equal(masks[k], masks[3 * (k // 3)]) for k in range(7))
    assert not torch.equal(masks[0], masks[3]) and not torch.equal(masks[3], masks[6])
    assert (p != 0).all() and (p != start).sum() > 10


def test_it_trains_a_small_network_nearly_as_sgd_does():
    losses = {}
    for name in ("deepzero", "sgd"):
        model, x, y = make(torch.float32)
        chain = ChainLoss(model, x, squares(y))
        if name == "deepzero":
            optimizer = DeepZero(model.parameters(), lr=0.1, mu=1e-3)
            step = lambda: optimizer.step(chain)  # noqa: B023, E731
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

            def step():
                optimizer.zero_grad()  # noqa: B023
                chain().backward()  # noqa: B023
                optimizer.step()  # noqa: B023

        for _ in range(25):
            step()
        losses[name] = chain().item()
    assert losses["deepzero"] == pytest.approx(losses["sgd"], rel=0.05)


def test_wrong_use_is_told_in_one_line():
    model, x, y = make()
    with pytest.raises(InvalidInput, match="many points"):
        DeepZero(model.parameters()).step()
    for options in ({"keep": 0.0}, {"shuffle_every": 0}, {"mu": 0.0}):
        with pytest.raises(InvalidInput):
            DeepZero(model.parameters(), **options)
    with pytest.raises(Unsupported, match="dropout"):
        ChainLoss(nn.Sequential(model, nn.Dropout(0.5)), x, squares(y))()


@pytest.mark.parametrize(("momentum", "nbytes"), [(0.0, 0), (0.9, 4 * 15)])
def test_momentum_is_the_only_state(momentum, nbytes):
    param = nn.Parameter(torch.randn(3, 5))
    assert DeepZero([param], lr=0.1, momentum=momentum).state_bytes(param) == nbytes
