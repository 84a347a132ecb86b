"""Context and expert ranks inside stages, on 2 x 2 ranks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import holdall.pipelines
from holdall.testing.ranks import on_ranks

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

WIDTH, WORDS, LENGTH, ROWS, N, EXPERTS = 16, 32, 8, 4, 2, 4
CONTEXT, BY_EXPERTS = {"pp": 2, "cp": 2}, {"pp": 2, "ep": 2}
BUDGET = {"budget": 101_000, "optimizer": torch.optim.SGD, "accumulate": 2}
CASES = {
    "llama ulysses": ("llama", CONTEXT, {}),
    "llama zigzag": ("llama", CONTEXT, {"shard": "zigzag", "schedule": "zb_h1", "recompute": [1, 4], "offload": [2]}),
    "own ring": ("own", CONTEXT, {"shard": "ring", "schedule": "interleaved", **BUDGET}),
    "own copies": ("own", CONTEXT, {"schedule": "chimera"}),
    "own sharded": ("own", {"pp": 1, "dp": 2, "cp": 2}, {"shard": "zero2+queries"}),
    "mixtral": ("mixtral", BY_EXPERTS, {"schedule": "gpipe"}),
    "experts": ("experts", BY_EXPERTS, {"schedule": "zb_v", "recompute": [1, 3]}),
    "experts sharded": ("experts", {"pp": 1, "dp": 2, "ep": 2}, {"shard": "zero2"}),
}
EXACT = 1e-14  # of the largest gradient


class Words(nn.Module):
    """Embeds words and where they are."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids):
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, tokens, experts, weights):
        chosen = [torch.tanh(tokens.unsqueeze(1) @ self.up[e]) for e in experts.T]
        return sum(y.squeeze(1) * w.unsqueeze(1) for y, w in zip(chosen, weights.T, strict=True))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Stack()

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        return x + self.experts(flat, chosen, weights).view_as(x)


def build(name):
    torch.manual_seed(0)
    if name in ("own", "experts"):
        layers = (Layer() for _ in range(4)) if name == "own" else (Layer(), Mixture(), Layer(), Mixture())
        return nn.Sequential(Words(), *layers, nn.Linear(WIDTH, WORDS)).double()
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"vocab_size": WORDS, "num_key_value_heads": 2, "tie_word_embeddings": False}
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).double()
    config = MixtralConfig(**sizes, num_local_experts=EXPERTS, num_experts_per_tok=2)
    config._experts_implementation = "batched_mm"  # others have no float64
    return MixtralForCausalLM(config).double()


def batch(replica):
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1 + replica))
    return ids, ids


def loss(logits, target):
    """Shifts positions itself, and weighs them."""
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten(), reduction="none")
    return (each * torch.linspace(1, 2, len(each))).mean()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def step(name, mesh, asked):
    pipe = holdall.pipelines.start(build(name), micro_batches=N, loss=loss, mesh=mesh, **{"sample": batch(0), **asked})
    if "optimizer" in asked:
        pipe.optimizer()
    shapes = set()  # of what later stages get
    for stage, module in pipe.modules.items():
        if pipe.pipeline.before(stage) is not None:
            module.register_forward_pre_hook(lambda _, given: shapes.add(tuple(given[0].shape)))
    pipe.step(*batch(pipe.replica))
    mean = pipe.step(*batch(pipe.replica)).item()  # gradients are added up
    assert "budget" not in asked or pipe.report().fits
    saving = pipe.saving and (pipe.saving.predicted, pipe.saving.held.most, sum(pipe.saving.layers.values()))
    gradients = {key: whole(p.grad).clone() for key, p in pipe.named_parameters()}
    norms = [pipe.clip_grad_norm_(0.01).item() for _ in range(2)]
    local = {key: p.to_local().numel() for key, p in pipe.named_parameters() if ".experts." in key}
    return mean, gradients, pipe.replicas, saving, shapes, local, norms


def dropped():
    """With dropout: gradients of layers that keep and that are computed again, and what a layer dropped of ones."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Words(), Layer(), nn.Dropout(0.5), Layer(), nn.Linear(WIDTH, WORDS)).double()
        given = {"recompute": recompute, "sample": batch(0), "mesh": CONTEXT, "cut": [1]}
        pipe = holdall.pipelines.start(model, micro_batches=N, loss=loss, **given)
        pipe.step(*batch(0))
        torch.manual_seed(3)
        pipe.step(*batch(0))
        found.append([p.grad for p in pipe.parameters()])
    torch.manual_seed(3)
    ones = [layer(torch.ones(64)) for layer in pipe.modules[pipe.rank].children() if isinstance(layer, nn.Dropout)]
    return found, ones, torch.rand(1)


class Mixing(nn.Module):
    """What a position gives depends on those before."""

    def forward(self, x):
        return x + x.cumsum(1)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x):
        return self.norm(x)


def refusals():
    said = []
    own = {"sample": batch(0), "mesh": CONTEXT}

    def with_inner(layer):
        return nn.Sequential(Words(), Layer(), layer, nn.Linear(WIDTH, WORDS))

    for model, given in (
        (build("own"), own | {"sample": None}),
        (with_inner(Mixing()), own),
        (with_inner(Normed()), own),
        (build("own"), own | {"sample": [t[:, :6] for t in batch(0)], "shard": "zigzag"}),
        (build("own"), own | {"sample": [t[:, :2] for t in batch(0)]}),
        (build("own"), own | {"mesh": BY_EXPERTS}),
        (build("experts"), own | {"mesh": BY_EXPERTS, **BUDGET}),
        (build("experts"), own | {"mesh": BY_EXPERTS, "shard": "ring"}),
        (build("own"), own | {"mesh": {"pp": 4}, "shard": "ring"}),
        (build("own"), own | {"mesh": {"pp": 1, "cp": 2, "tp": 2}}),
    ):
        with pytest.raises(holdall.HoldallError) as error:
            holdall.pipelines.start(model, micro_batches=N, loss=loss, **given)
        said.append(str(error.value))
    return said


REFUSALS = (
    "need a batch to look at",
    "compute something else when they are divided",
    "`1.norm` takes averages over all positions",
    "a sequence of 6 positions cannot be divided into 4 pieces",
    "a sequence of 2 positions cannot be divided into 2 pieces",
    "no piece of the model has experts that can be divided over 2 ranks",
    "no budget of it can be kept",
    "`ring`",
    'shard="ring" is for ranks that divide a stage',
    "not pp x cp x tp",
)


def everything():
    return {case: step(*asked) for case, asked in CASES.items()}, refusals(), dropped()


@pytest.fixture(scope="module")
def ran():
    return on_ranks(4, everything)


def expected(name, replicas):
    model, values = build(name), []
    for replica in range(replicas):
        for ids in batch(replica)[0].chunk(N):
            found = model(ids)
            value = loss(getattr(found, "logits", found), ids)
            (2 * value / (N * replicas)).backward()  # two steps
            values.append(value.item())
    return sum(values) / len(values), {key: p.grad for key, p in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(ran, case):
    name, *_ = CASES[case]
    mean, gradients = expected(name, ran[0][0][case][2])
    largest, seen = max(g.abs().max().item() for g in gradients.values()), set()
    for found, *_ in ran:
        loss_here, own, *_ = found[case]
        assert loss_here == pytest.approx(mean, rel=1e-6)  # a float32
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
        assert norm > 0.02 and found[case][6] == pytest.approx([norm, 0.01], rel=1e-3)
        assert found[case][6][0] == pytest.approx(norm, rel=1e-6)
        for key, gradient in own.items():
            seen.add(key)
            error = (gradient - gradients[key]).abs().max().item()
            assert error <= EXACT * largest, (key, error / largest)
    assert seen == set(gradients)


def test_stages_send_each_context_rank_its_part(ran):
    for found, *_ in ran:
        for case, (_, mesh, _) in CASES.items():
            part = LENGTH // mesh.get("cp", 1)
            assert found[case][4] <= {(ROWS // N, part, WIDTH)}
        assert any(found[case][4] for case in CASES)


def test_autograd_holds_the_bytes_that_were_predicted(ran):
    for found, *_ in ran:
        for case, (_, mesh, asked) in CASES.items():
            saving = found[case][3]
            if "ep" in mesh and saving is not None:  # loads of experts differ
                assert saving[0] is None and saving[1] > 0
            elif saving is not None:
                assert saving[0] == saving[1] > 0
            assert (saving is not None) == bool({"budget", "recompute"} & set(asked))
    budgets = [found["own ring"][3] for found, *_ in ran]
    assert any(layers for *_, layers in budgets)


def test_a_rank_has_its_share_of_the_experts(ran):
    for name in ("mixtral", "experts"):
        sizes = {key: p.numel() for key, p in build(name).named_parameters()}
        found = {key: size for ranks, *_ in ran for key, size in ranks[name][5].items()}
        assert found == {key: size // 2 for key, size in sizes.items() if ".experts." in key}


def test_what_does_not_work_is_refused_in_one_line(ran):
    for _, said, _ in ran:
        assert len(said) == len(REFUSALS)
        for found, part in zip(said, REFUSALS, strict=True):
            assert part in found.splitlines()[0]


def test_context_ranks_drop_other_positions_and_the_same_again_in_replays(ran):
    (_, ones_first, after_first), (_, ones_second, after_second) = (found for *_, found in ran[2:])  # of the last stage
    assert not torch.equal(ones_first[0], ones_second[0]) and torch.equal(after_first, after_second)
    for *_, ((kept, again), *_) in ran:
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
