"""Shazeer and Stern, "Adafactor" (arXiv 1804.04235): what the paper says, and torch's version of it bit for bit."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from holdall.errors import InvalidInput
from holdall.optim.adafactor import Adafactor
from holdall.registry import member_class


def parameter(*shape, seed=0, scale=1.0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter((scale * torch.randn(shape, generator=random)).to(dtype))


def gradients(shape, n, seed=7):
    random = torch.Generator().manual_seed(seed)
    for _ in range(n):
        yield torch.randn(shape, generator=random) * torch.rand(shape[-1:], generator=random)


@pytest.mark.parametrize("variant", ["paper", "torch"])
def test_the_state_of_a_matrix_is_a_counter_a_column_and_a_row(variant):
    """Claim: n + m numbers for an n x m matrix."""
    p = parameter(64, 32)
    optimizer = Adafactor([p], variant=variant)
    p.grad = torch.randn(64, 32)
    optimizer.step()
    shapes = {key: tuple(value.shape) for key, value in optimizer.state[p].items()}
    assert shapes == {"step": (), "row_var": (64, 1), "col_var": (1, 32)}
    assert optimizer.state_bytes(p) == 4 * (64 + 32) + 4


def test_a_large_matrix_takes_sixty_kilobytes():
    """Claim: 60 KB for 4096 x 11008 where Adam needs 361 MB."""
    p = torch.nn.Parameter(torch.empty(4096, 11008, device="meta"))
    assert Adafactor([p]).state_bytes(p) == 4 * (4096 + 11008) + 4 == 60420
    assert 8 * p.numel() == 360_710_144


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_signs_move_every_entry_by_the_relative_step(scale):
    """Claim: at t = 1 a gradient of +-1 has V = 1 and RMS(U) = 1, so each entry moves by 0.01 max(1e-3, RMS(X))."""
    p = parameter(64, 32, scale=scale, dtype=torch.float64)
    before = p.detach().clone()
    p.grad = torch.sign(parameter(64, 32, seed=1, dtype=torch.float64)).detach()
    Adafactor([p]).step()
    size = 0.01 * max(1e-3, before.square().mean().sqrt().item())
    assert torch.allclose(before - p.detach(), size * p.grad, rtol=1e-9, atol=0)


def dense(x, grads, *, lr=1e-2, d=1.0, decay=0.8, beta1=None, weight_decay=0.0, warmup=False, relative=True):
    """The algorithm from its formulae, in float64, with sums and the whole of V."""
    x = x.double()
    rows = cols = momentum = 0.0
    for t, g in enumerate(grads, 1):
        square = g.double() ** 2 + 1e-30
        beta = 1 - t**-decay
        if x.dim() == 1:
            rows = beta * rows + (1 - beta) * square
            v = rows
        else:
            rows = beta * rows + (1 - beta) * square.sum(-1)
            cols = beta * cols + (1 - beta) * square.sum(-2)
            v = rows[..., :, None] * cols[..., None, :] / rows.sum(-1)[..., None, None]
        u = g.double() / v.sqrt()
        u = u / max(1.0, u.square().mean().sqrt().item() / d)
        if beta1:
            u = momentum = beta1 * momentum + (1 - beta1) * u
        rho = min(1e-6 * t if warmup else lr, t**-0.5) if relative else lr
        alpha = max(1e-3, x.square().mean().sqrt().item()) * rho
        x = x * (1 - lr * weight_decay) - alpha * u
    return x


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.5},
        {"beta1": 0.9, "weight_decay": 0.1},
        {"warmup_init": True},
        {"relative_step": False, "lr": 0.2},  # above 1/sqrt(t) from step 25 on
        {"d": 0.5, "beta2_decay": -0.6},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(24, 40), (17,), (3, 8, 5)])
def test_a_hundred_steps_agree_with_the_formulae_in_double_precision(options, shape):
    """Claim: our 32-bit computation follows the algorithm to 1e-5 of the parameters' size."""
    p = parameter(*shape)
    start = p.detach().clone()
    optimizer = Adafactor([p], **options)
    for g in gradients(shape, 100):
        p.grad = g
        optimizer.step()
    named = {"warmup_init": "warmup", "relative_step": "relative"}
    told = {named.get(k, k): v for k, v in options.items() if k != "beta2_decay"}
    expected = dense(start, gradients(shape, 100), **told, decay=-options.get("beta2_decay", -0.8))
    moved = (expected - start).norm()
    assert (p.detach() - expected).norm() < 1e-5 * (expected.norm() + moved)
    if not options.get("warmup_init"):
        assert moved > 1e-3 * start.norm()  # else the comparison would say nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.3, "weight_decay": 0.1}, {"d": 2.0, "beta2_decay": -0.5, "eps": (1e-6, 1e-2)}], ids=str
)
def test_the_torch_variant_is_torchs_bit_for_bit(options, dtype):
    for shape in [(24, 40), (17,), (3, 8, 5), ()]:
        p, q = parameter(*shape, dtype=dtype), parameter(*shape, dtype=dtype)
        ours, theirs = Adafactor([p], variant="torch", **options), torch.optim.Adafactor([q], foreach=False, **options)
        for n in range(30):
            p.grad = (torch.randn(shape, generator=torch.Generator().manual_seed(n))).to(dtype)
            q.grad = p.grad.clone()
            ours.step()
            theirs.step()
        assert torch.equal(p, q)
        for key, value in theirs.state[q].items():
            assert torch.equal(value, ours.state[p][key])


def test_states_are_exchanged_with_torch():
    """A run that began with torch's class goes on with ours, bit for bit."""
    p, q = parameter(24, 40), parameter(24, 40)
    theirs, ours = torch.optim.Adafactor([q]), Adafactor([p], variant="torch")
    for g in gradients((24, 40), 5):
        q.grad = g
        theirs.step()
    p.data.copy_(q.data)
    saved = copy.deepcopy(theirs.state_dict())
    ours.load_state_dict({"state": saved["state"], "param_groups": ours.state_dict()["param_groups"]})
    for g in gradients((24, 40), 5, seed=9):
        p.grad, q.grad = g, g.clone()
        ours.step()
        theirs.step()
    assert torch.equal(p, q)


SHARDED = [
    ("adafactor", {}),
    ("adafactor", {"beta1": 0.9, "weight_decay": 0.1}),
    ("came", {"lr": 1e-3}),
    ("adam_mini", {"block": 4}),
    ("muon", {}),
    ("apollo", {"rank": 4}),
    ("flora", {"rank": 4, "kappa": 3}),
    ("galore", {"rank": 4, "update_proj_gap": 3}),
]


def _rank(rank, folder, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, options in SHARDED:
        torch.manual_seed(0)
        whole = torch.nn.Parameter(torch.randn(16, 24))
        sharded = torch.nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, [Shard(0)]))
        alone, together = (member_class("optim", name)([p], **options) for p in (whole, sharded))
        for _ in range(5):
            whole.grad = torch.randn(16, 24)
            sharded.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
            alone.step()
            together.step()
        out.put((name, (sharded.full_tensor() - whole).abs().max().item()))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_row_shards_on_two_ranks_equal_one_process(tmp_path):
    """Claim: sharded by rows (DTensors over gloo), five steps are those of the whole to 1e-6; and so for the others."""
    out = mp.get_context("fork").SimpleQueue()
    context = mp.start_processes(_rank, args=(tmp_path, out), nprocs=2, join=False, start_method="fork")
    while not context.join():
        pass
    for _ in range(2 * len(SHARDED)):
        assert not out.empty()
        name, error = out.get()
        assert error < 1e-6, name


def test_wrong_use_is_refused_in_a_line():
    p = parameter(4, 4)
    for options, word in [
        ({"variant": "tensorflow"}, "variant"),
        ({"variant": "torch", "beta1": 0.9}, "beta1"),
        ({"lr": -1}, "lr"),
    ]:
        with pytest.raises(InvalidInput, match=word):
            Adafactor([p], **options)
