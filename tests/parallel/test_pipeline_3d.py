"""Tensor ranks inside stages, on 8 ranks: 2 x 2 x 2 of pipelines, replicas and tensor ranks, and 4 x 2 without replicas. And
context ranks instead of tensor ranks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import holdall
import holdall.pipelines
from holdall.catalog import state, system
from holdall.errors import InvalidInput, Unsupported
from holdall.testing.ranks import on_ranks

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, WORDS, LENGTH, ROWS, N = 16, 64, 6, 4, 2
CASES = {
    "own 3d": ("own", {"pp": 2, "dp": 2, "tp": 2}, {"shard": "ddp"}),
    "llama 3d sharded": ("llama", {"pp": 2, "dp": 2, "tp": 2}, {"shard": "zero2"}),
    "llama context": ("llama", {"pp": 2, "dp": 2, "cp": 2}, {"shard": "zero3+ring"}),
    "own 2d": ("own", {"pp": 4, "tp": 2}, {"schedule": "zb_h1", "recompute": [1, 3], "offload": [4]}),
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_head, self.inner_dim = 4, WIDTH
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).split(self.inner_dim, dim=-1)
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Reads a weight of its second norm itself, too."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.one(x)) * self.two.weight
        return x + self.down(F.gelu(self.up(self.two(x))))


def build(name):
    torch.manual_seed(0)
    if name == "own":
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Layer() for _ in range(4)), nn.Linear(WIDTH, WORDS)).double()
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    return LlamaForCausalLM(config).double()


def batch(replica):
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1 + replica))
    return ids, ids


def loss(logits, target):
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_saved(pipe, folder):
    """Do all parameters come back from a checkpoint? A layer of several matrices side by side is refused."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    optimizer.step()
    try:
        holdall.save_checkpoint(folder, pipe, optimizer, step=1)
    except Unsupported as error:
        return str(error)
    before = [p.to_local().clone() for p in pipe.parameters()]
    moments = [optimizer.state[p]["exp_avg"].to_local().clone() for p in pipe.parameters()]
    optimizer.step()
    changed = all(not torch.equal(p.to_local(), old) for p, old in zip(pipe.parameters(), before, strict=True))
    holdall.load_checkpoint(folder, pipe, optimizer)
    after = [optimizer.state[p]["exp_avg"].to_local() for p in pipe.parameters()]
    same = all(torch.equal(p.to_local(), old) for p, old in zip(pipe.parameters(), before, strict=True))
    return changed and same and all(torch.equal(a, b) for a, b in zip(after, moments, strict=True))


def step(name, mesh, asked, folder):
    given = {"micro_batches": N, "loss": loss, "mesh": mesh, "sample": batch(0)}
    pipe = holdall.pipelines.start(build(name), **given, **asked)
    mean = pipe.step(*batch(pipe.replica)).item()
    assert pipe.saving is None or pipe.saving.predicted == pipe.saving.held.most
    local = sum(p.to_local().nbytes for p in pipe.parameters())
    gradients = {key: whole(p.grad).clone() for key, p in pipe.named_parameters()}
    norm = pipe.clip_grad_norm_(1e9).item()
    return mean, gradients, local, is_saved(pipe, folder), norm


def refusals():
    numbers = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
    own = {"model": build("own"), "sample": batch(0), "loss": loss, "mesh": {"pp": 2, "dp": 2, "tp": 2}}
    said = []
    for given in (
        own | {"sample": None},
        own | {"model": plain, "sample": (numbers, numbers), "loss": F.mse_loss},
        own | {"shard": "zero2"},
    ):
        with pytest.raises((InvalidInput, Unsupported)) as error:
            holdall.pipelines.start(**given, micro_batches=N)
        said.append(str(error.value))
    return said


def everything(folder):
    return {case: step(*asked, f"{folder}/{case}") for case, asked in CASES.items()}, refusals()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return on_ranks(8, everything, str(tmp_path_factory.mktemp("saved")))


def expected(name, replicas):
    model, values = build(name), []
    for replica in range(replicas):
        for ids in batch(replica)[0].chunk(N):
            value = loss(model(ids), ids)
            (value / (N * replicas)).backward()
            values.append(value.item())
    return sum(values) / len(values), {key: p.grad for key, p in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(ran, case):
    name, mesh, _ = CASES[case]
    mean, gradients = expected(name, mesh.get("dp", 1))
    seen = set()
    for found, _ in ran:
        loss_here, own, _, is_same, norm = found[case]
        assert norm == pytest.approx(torch.cat([g.flatten() for g in gradients.values()]).norm().item(), rel=1e-6)
        assert is_same is True if name == "llama" else "`1.attention.qkv` is several matrices side by side" in is_same
        assert loss_here == pytest.approx(mean, rel=1e-6)  # a float32
        for key, gradient in own.items():
            seen.add(key)
            assert torch.allclose(gradient, gradients[key], rtol=0, atol=1e-14)
    assert seen == set(gradients)
    assert max(g.abs().max().item() for g in gradients.values()) > 1e-2


def test_a_rank_has_its_part_of_a_stage(ran):
    """Norms and the biases of rows are whole on tensor ranks; all else is divided by all three sizes."""
    for case, (name, mesh, asked) in CASES.items():
        total = sum(p.nbytes for p in build(name).parameters())
        shards = mesh.get("dp", 1) if asked.get("shard", "ddp") != "ddp" else 1
        replicas = mesh.get("dp", 1) * mesh.get("cp", 1) // shards
        held = sum(found[case][2] for found, _ in ran)
        assert replicas * total <= held < 1.15 * replicas * total


def test_what_does_not_work_is_refused_in_one_line(ran):
    for _, (sample, layers, fused) in ran:
        assert "need a batch to look at" in sample.splitlines()[0]
        assert "linear layers that can be divided over 2 ranks" in layers.splitlines()[0]
        assert "`1.attention.qkv` is several matrices side by side" in fused.splitlines()[0]


def test_the_catalogue_says_that_3d_is_run():
    assert "holdall/pipelines/running/mesh.py" in state(system("mesh-parallel"))
