"""Pipelines whose stages all lie on one GPU: the bits of micro-batches one after the other, and the bytes predicted."""

import tempfile
from itertools import pairwise

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import torch.distributed as dist

import holdall.pipelines
from holdall.errors import InvalidInput, Unsupported
from holdall.pipelines import pipeline

DEVICE, BACKEND = "cuda", "nccl"
LAYERS, WIDTH, ROWS, LENGTH, N, STEPS = 8, 128, 16, 32, 4, 3
CASES = {
    "gpipe": ("gpipe", {"recompute": False, "offload": [0]}),
    "recomputed": ("interleaved:chunks=2", {"recompute": True}),
    "offloaded": ("gpipe", {"offload": True}),
    "some": ("interleaved:chunks=4", {"recompute": [1, 5], "offload": [2, 6]}),
    "split": ("zb_v", {"recompute": [0, 7]}),
}


@pytest.fixture(scope="module", autouse=True)
def group():
    if not dist.is_nccl_available() and BACKEND == "nccl":
        pytest.skip("this torch has no NCCL")
    try:
        import holdall.pipelines.running.torch_names  # noqa: F401
    except Unsupported as error:
        pytest.skip(str(error))
    torch.use_deterministic_algorithms(True, warn_only=True)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(BACKEND, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        yield
        dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)


class Layer(nn.Module):
    """Attention whose backward is deterministic, and a buffer that forward changes."""

    def __init__(self, dropout):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop, self.average = nn.Dropout(dropout), nn.BatchNorm1d(LENGTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) / WIDTH**0.5).softmax(-1)
        x = x + (self.drop(weights) @ v).transpose(1, 2).flatten(2)
        return x + self.drop(self.down(torch.relu(self.up(self.average(x)))))


def build(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(dropout) for _ in range(LAYERS))).to(DEVICE)


def batch(step):
    made = torch.Generator().manual_seed(step)
    return [torch.randn(ROWS, LENGTH, WIDTH, generator=made).to(DEVICE) for _ in range(2)]


def optimizer_of(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train(schedule, asked, dropout=0.0):
    pipe = holdall.pipelines.start(
        build(dropout), schedule=schedule, micro_batches=N, loss=nn.functional.mse_loss, sample=batch(0), **asked
    )
    optimizer, losses, seen = pipe.optimizer(optimizer_of), [], []
    torch.manual_seed(7)
    for step in range(STEPS):
        losses.append(pipe.step(*batch(step)).item())
        norm = nn.utils.clip_grad_norm_([p for _, p in sorted(pipe.named_parameters())], 0.1, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.saving is not None:
            seen.append((pipe.saving.predicted, pipe.saving.held.most, pipe.saving.held.now))
    states = {key: t.cpu() for key, t in pipe.state_dict().items()}
    return losses, norm.item(), states, seen, pipe


def plain(schedule):
    """Micro-batches one after the other; each stage adds its gradients in the order in which its schedule has them."""
    made = pipeline(schedule, ranks=1, micro_batches=N)
    bounds = range(0, LAYERS + 1, LAYERS // made.chain)
    model, losses = build(), []
    optimizer = optimizer_of(model.parameters())
    names = {id(p): key for key, p in model.named_parameters()}
    for step in range(STEPS):
        each, values = [], []
        for x, y in zip(*(part.chunk(N) for part in batch(step)), strict=True):
            value = nn.functional.mse_loss(model(x), y)
            each.append(dict(zip(names.values(), torch.autograd.grad(value, list(model.parameters())), strict=True)))
            values.append(value.double())
        for stage, (low, high) in enumerate(pairwise(bounds)):
            for p in model[low:high].parameters():
                first, *others = (each[m][names[id(p)]] for m in made.summed(stage))
                p.grad = sum(others, first) / N
        norm = nn.utils.clip_grad_norm_([p for _, p in sorted(model.named_parameters())], 0.1, foreach=False)
        optimizer.step()
        losses.append(torch.stack(values).mean().float().item())
    return losses, norm.item(), {key: t.cpu() for key, t in model.state_dict().items()}


@pytest.mark.parametrize("case", CASES)
def test_stages_on_one_gpu_have_the_bits_of_micro_batches(case):
    schedule, asked = CASES[case]
    losses, norm, states, seen, pipe = train(schedule, asked)
    expected = plain(schedule)
    assert (losses, norm) == expected[:2] and norm > 0.1
    assert states.keys() == expected[2].keys()
    assert all(torch.equal(t, expected[2][key]) for key, t in states.items())
    assert seen and all((most, now) == (predicted, 0) for predicted, most, now in seen)
    assert {p.device.type for p in pipe.parameters()} == {DEVICE}


@pytest.mark.parametrize("schedule", ["gpipe", "zb_v"])
def test_layers_drop_the_same_when_they_are_computed_again_or_offloaded(schedule):
    kept = train(schedule, {}, dropout=0.1)
    for asked in ({"recompute": True}, {"offload": [0, 3, 4]}):
        found = train(schedule, asked, dropout=0.1)
        assert found[:2] == kept[:2]
        assert all(torch.equal(t, kept[2][key]) for key, t in found[2].items())


def test_a_budget_is_kept():
    """Of all that the device holds; driver and kernels are most of it here, so the budgets are near one another."""
    *expected, pipe = train("gpipe", {"budget": "10GiB", "optimizer": optimizer_of})
    budget = pipe.saving.budget_for(max(pipe.saving.parts.values()) - pipe.saving.predicted // 4)
    del pipe
    for asked in ({}, {"offload": True, "place": True}):
        losses, norm, states, seen, pipe = train("gpipe", {"budget": budget, "optimizer": optimizer_of, **asked})
        said = pipe.report()
        assert sum(pipe.saving.layers.values()) > 0 and said.fits
        assert max(said.measured.values()) <= budget
        assert max(said.predicted.values()) == pytest.approx(max(said.measured.values()), rel=0.05)
        assert all(predicted == held for predicted, held, _ in seen)
        assert [losses, norm] == expected[:2]
        assert all(torch.equal(t, expected[2][key]) for key, t in states.items())
        del pipe


def test_offloading_frees_memory_of_the_device():
    if DEVICE != "cuda":
        pytest.skip("counts the GPU's bytes")
    peaks, held = [], []
    for asked in ({"offload": [0]}, {"offload": True}):
        given = {"schedule": "gpipe", "micro_batches": N, "loss": nn.functional.mse_loss, "sample": batch(0)}
        pipe = holdall.pipelines.start(build(), **given, **asked)
        pipe.step(*batch(0))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pipe.step(*batch(1))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        held.append(pipe.saving.held.most)
        del pipe
    assert peaks[0] - peaks[1] > (held[0] - held[1]) / 2 > 0


@pytest.mark.parametrize("schedule", ["gpipe", "zb_v"])
def test_states_at_the_host_change_no_bits(schedule):
    found = []
    for place in (None, [0, 3, 4]):
        given = {"micro_batches": N, "loss": nn.functional.mse_loss, "place": place}
        pipe = holdall.pipelines.start(build(), schedule=schedule, **given)
        optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
        for step in range(STEPS):
            pipe.step(*batch(step))
            optimizer.step()
            optimizer.zero_grad()
        states = [t for p in pipe.parameters() for t in optimizer.state[p].values() if t.dim()]
        found.append(
            ([t.detach().cpu() for t in (*pipe.parameters(), *states)], [t for t in states if t.device.type == DEVICE])
        )
    (plain, there), (placed, left) = found
    assert len(plain) == len(placed) and all(torch.equal(a, b) for a, b in zip(plain, placed, strict=True))
    assert pipe.placed.predicted == pipe.placed.used > 0
    if DEVICE == "cuda":
        assert sum(t.nbytes for t in there) - sum(t.nbytes for t in left) == pipe.placed.used


def test_a_model_on_another_device_than_the_group_is_refused():
    with pytest.raises(InvalidInput, match="the process group is of cuda:nccl"):
        holdall.pipelines.start(build().cpu(), micro_batches=N, loss=nn.functional.mse_loss)
