"""Tensor parallelism through `fit`: gradients, peaks and bytes of two ranks against one process and against the prediction."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import holdall
from holdall.parallel.tensor import divide
from holdall.testing.ranks import by_default, on_ranks
from holdall.testing.worlds import machine

WORDS, WIDTH, LENGTH, ROWS = 64, 32, 16, 2
SIZES = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
BUFFER = ROWS * LENGTH * WORDS * 8 + 1024  # the largest that a collective has: logits
STEPS = 4


class Attention(nn.Module):
    """Sizes come from attributes, as in much hand-written code."""

    def __init__(self):
        super().__init__()
        self.n_head, self.inner_dim = 4, WIDTH
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).split(self.inner_dim, dim=-1)
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.one(x))
        return x + self.down(F.gelu(self.up(self.two(x))))


class ByHeads(Attention):
    """Each head has its queries, keys and values side by side (as in GPT-NeoX)."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, 24)).transpose(1, 2).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Loose(Attention):
    """Leaves the number of positions to a view (as OPT), which half of the features would make half as many."""

    def forward(self, x):
        q, k, v = (t.reshape(len(x), -1, self.n_head, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(*x.shape[:-1], -1))


class Wide(Attention):
    """Leaves the size of a head to a view (as DeBERTa-v2), which half of the features would make half as large."""

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        found = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v
        return self.out(found.transpose(1, 2).flatten(2))


class Viewed(Layer):
    """With a parameter of a module inside that it reads itself, too."""

    def __init__(self):
        super().__init__()
        self.attention, self.other, self.third = ByHeads(), Loose(), Wide()

    def forward(self, x):
        x = x * self.two.weight
        return super().forward(x + self.other(x) + self.third(x))


class Latent(Layer):
    """Heads share a part of their keys, from the layer that makes what the others are computed from (as in DeepSeek-V2):
    on a rank it has the gradient of that rank's heads, and the rest of that layer's result has the whole."""

    def __init__(self):
        super().__init__()
        self.low, self.norm = nn.Linear(WIDTH, 2 * 8), nn.LayerNorm(8)
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(8, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        del self.attention

    def forward(self, x):
        y = self.one(x)
        q = self.q(y).unflatten(-1, (-1, 8)).transpose(1, 2)
        low, shared = self.low(y).chunk(2, -1)
        k, v = self.kv(self.norm(low)).unflatten(-1, (-1, 16)).transpose(1, 2).chunk(2, -1)
        found = F.scaled_dot_product_attention(q, k + shared.unsqueeze(1), v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.two(x))))


class Own(nn.Module):
    """A projection before the layers, whose result flows through all of them; no head."""

    def __init__(self, layer=Layer):
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Words(nn.Module):
    """A linear layer directly before the head, which only the head reads: as a region, the two would be divided twice."""

    def __init__(self, layers):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers, self.last = nn.ModuleList(Layer() for _ in range(layers)), nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids, labels):
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.last(x)).flatten(0, 1), labels.flatten())


OWN = {"own": Layer, "latent": Latent, "viewed": Viewed}


def build(name, dtype=torch.float64):
    torch.manual_seed(0)
    if name.startswith("words"):
        return Words(layers=1 if name == "words" else 0).to(dtype)
    if name in OWN:
        return Own(OWN[name]).to(dtype)
    if name == "gpt2":
        config = GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=32, attn_pdrop=0, resid_pdrop=0)
        config.embd_pdrop, config.bos_token_id, config.eos_token_id = 0, 0, 0
        return GPT2LMHeadModel(config).to(dtype)
    kind, config = (Qwen3ForCausalLM, Qwen3Config) if name == "qwen3" else (LlamaForCausalLM, LlamaConfig)
    tied = name == "qwen3"
    return kind(config(vocab_size=WORDS, num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied, **SIZES)).to(dtype)


def batch(name):
    generator = torch.Generator().manual_seed(1)
    if name in OWN:
        return {"x": torch.randn(ROWS, LENGTH, 8, generator=generator, dtype=torch.float64)}
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def loss_of(model, given):
    out = model(**given)
    return out if isinstance(out, torch.Tensor) else out.loss


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


CASES = [(name, way) for name in ("llama", "own") for way in ("tensor", "sequence")] + [
    ("gpt2", "tensor"),
    ("qwen3", "sequence"),
    ("latent", "tensor"),
    ("viewed", "tensor"),
    ("words", "tensor"),
    ("words and head", "tensor"),
]
CASES = [*by_default(dict.fromkeys(CASES), ("qwen3", "sequence"), ("latent", "tensor"), ("words", "tensor"))]


def fitted(name, way):
    model, given = build(name), batch(name)
    optimizer = momentum(model)
    with holdall.fit(model, optimizer, given, budget="1GiB", hardware=machine(), mesh={"tp": 2}, shard=way) as harness:
        for step in range(STEPS):
            loss = loss_of(model, given)
            loss.backward()
            if step == 0:
                grads = [p.grad.full_tensor().tolist() for p in model.parameters()]  # no tensors, which would count
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor().item()
            optimizer.step()
            optimizer.zero_grad()
        traffic = harness.measured().traffic
        state = {name: p.full_tensor().detach() for name, p in model.state_dict().items() if hasattr(p, "full_tensor")}
    return {
        "gradients": grads,
        "norm": norm,
        "state": state,
        "peaks": harness.step_peaks[1:],
        "predicted": harness.plan.predicted,
        "traffic": traffic,
        "actions": harness.plan.count(),
        "local": sum(p.to_local().numel() for p in model.parameters()),
    }


def fitted_all():
    return {case: fitted(*case) for case in CASES} | {"refused": refused(), "drops": masks()}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, fitted_all, timeout=300)


@pytest.fixture(scope="module")
def alone():
    """Gradients, their norm and the weights after the steps, of one process."""
    found = {}
    for name in {name for name, _ in CASES}:
        model, given = build(name), batch(name)
        optimizer = momentum(model)
        for step in range(STEPS):
            loss_of(model, given).backward()
            if step == 0:
                grads = [p.grad.clone() for p in model.parameters()]
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = grads, norm, model.state_dict()
    return found


each_case = pytest.mark.parametrize("case", CASES, ids="-".join)


@each_case
def test_gradients_are_those_of_one_process(ran, alone, case):
    grads, norm, weights = alone[case[0]]
    for rank in ran:
        found = rank[case]
        assert all(
            torch.allclose(torch.tensor(a, dtype=b.dtype), b, rtol=0, atol=1e-14)
            for a, b in zip(found["gradients"], grads, strict=True)
        )
        assert found["norm"] == pytest.approx(norm, rel=1e-12)
        assert found["state"]
        assert all(torch.allclose(value, weights[key], rtol=0, atol=1e-12) for key, value in found["state"].items())


@each_case
def test_the_peak_of_a_rank_is_the_predicted_one(ran, case):
    """To the byte; but a thread of gloo may hold a buffer for a moment after its collective is over."""
    for rank in ran:
        predicted = rank[case]["predicted"].peak["cpu"]
        assert predicted <= min(rank[case]["peaks"]) <= predicted + BUFFER


@each_case
def test_collectives_send_the_predicted_bytes(ran, case):
    for rank in ran:
        predicted = {link: size for link, size in rank[case]["predicted"].traffic.items() if link.startswith("tp ")}
        assert {link: size for link, size in rank[case]["traffic"].items() if size} == predicted
        assert rank[case]["actions"] == {"tensor": 1}


def test_bytes_by_megatrons_rule(ran):
    """Two all-reduces of the activations a layer in forward, two in backward; embedding and head one each, and the logits."""
    activations, logits = ROWS * LENGTH * WIDTH * 8, ROWS * LENGTH * WORDS * 8
    sent = {way: ran[0]["llama", way]["predicted"].traffic for way in ("tensor", "sequence")}
    assert sent["tensor"]["tp all_reduce"] == (2 * 4 + 2) * 2 * activations // 2
    assert sent["tensor"]["tp all_gather"] == logits // 2
    # a gather and a scatter in the place of each sum; in backward the columns' input is gathered again
    assert sent["sequence"]["tp reduce_scatter"] == 2 * 4 * activations // 2
    assert sent["sequence"]["tp all_gather"] == (2 * 6 + 2) * activations // 2 + logits // 2


def test_memory_is_saved(ran, alone):
    whole = {}
    for name in ("llama", "gpt2", "own"):
        model = build(name)
        trace = holdall.trace(model, batch(name), optimizer=momentum(model))
        whole[name] = holdall.plan(trace, planner="nop", budget="1GiB", hardware=machine()).predicted.peak["cpu"]
        total = sum(p.numel() for p in model.parameters())
        assert ran[0][name, "tensor"]["local"] == ran[1][name, "tensor"]["local"] < 0.56 * total
    for name, peak in whole.items():
        assert ran[0][name, "tensor"]["predicted"].peak["cpu"] < 0.8 * peak
    for name in ("llama", "own"):
        assert ran[0][name, "sequence"]["predicted"].peak["cpu"] < ran[0][name, "tensor"]["predicted"].peak["cpu"]


def divided(shards):
    """On a rank: the gradients of a model that is divided by hand."""
    model = build("own")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    divide(model, shards.regions, shards.vocabulary, mesh, stack=shards.groups)
    loss_of(model, batch("own")).backward()
    return [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("way", ["tensor", "sequence"])
def test_four_ranks_have_the_gradients_of_one_process(alone, way):
    for rank in on_ranks(4, divided, traced("own", 4, way).about.shards):
        assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(rank, alone["own"][0], strict=True))


# what cannot be divided


class Twisted(nn.Module):
    """Features of all heads are mixed by a function that has no weights and keeps the shape."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(F.normalize(self.up(x), dim=-1)).square().mean()


class Sloped(Attention):
    """A small bias depends on the number of the head; a loss does not show it."""

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        far = torch.arange(x.shape[1]) - torch.arange(x.shape[1]).unsqueeze(1)
        slopes = 1e-3 * torch.arange(q.shape[1]).view(-1, 1, 1)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=-slopes * far.abs())
        return self.out(found.transpose(1, 2).flatten(2))


def sloped():
    torch.manual_seed(0)
    model = Own()
    for layer in model.layers:
        layer.attention = Sloped()
    return model


class Hidden(Own):
    def __init__(self):
        super().__init__(Latent)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x.square().mean()


def refused():
    said = {}
    given = {"x": torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))}
    torch.manual_seed(0)
    cases = {
        "nothing": (nn.Linear(8, 1), given["x"], lambda m, b: m(b).mean()),
        "mixed": (Twisted(), given, None),
        "numbered": (sloped(), {"x": torch.cat([given["x"]] * 4, 1)}, None),
        "hidden": (Hidden().double(), batch("own"), None),
        "batch": (build("llama"), batch("llama"), None),
        "sequence": (build("own"), batch("own"), lambda m, b: m(**b) + 1e-9 * m.layers[0].two.last.square().mean()),
    }
    cases["sequence"][0].layers[0].two.register_forward_hook(lambda module, _, out: module.__dict__.update(last=out))
    if dist.get_rank() == 1:
        cases["batch"][1]["input_ids"][0, 0] += 1
    for name, (model, some, loss) in cases.items():
        with pytest.raises(holdall.HoldallError) as error:
            way = "sequence" if name == "sequence" else "tensor"
            holdall.fit(model, momentum(model), some, loss=loss, budget="1GiB", hardware=machine(), mesh={"tp": 2}, shard=way)
        said[name] = str(error.value)
    return said


def test_what_cannot_be_divided_is_refused_in_a_line(ran):
    for rank in ran:
        assert "Linear has no linear layers that can be divided over 2 ranks" in rank["refused"]["nothing"]
        assert "Twisted computes something else when it is divided over ranks" in rank["refused"]["mixed"]
        assert "`layers.0` of Own computes something else when it is divided over ranks" in rank["refused"]["numbered"]
        assert "by a reentrant checkpoint, which hides whether gradients over `tp`" in rank["refused"]["hidden"]
        assert "the batch of rank 1 differs from that of rank 0" in rank["refused"]["batch"]
        assert "whose gradients are not sums over the ranks of `tp`" in rank["refused"]["sequence"]


def traced(name="llama", ranks=2, way="tensor"):
    model = build(name)
    return holdall.trace(model, batch(name), optimizer=momentum(model), mesh={"tp": ranks}, shard=way)


def test_attention_whose_heads_share_a_gradient_is_left_whole():
    assert [region.row for region in traced("latent").about.shards.regions] == [f"layers.{n}.down" for n in (0, 1)]


def test_heads_are_divided_however_they_are_seen():
    regions = traced("viewed").about.shards.regions
    found = {region.row: (region.parts, region.divided) for region in regions if region.row.startswith("layers.0.")}
    assert found.keys() == {f"layers.0.{row}" for row in ("attention.out", "other.out", "third.out", "down")}
    assert found["layers.0.attention.out"] == (1, ())
    assert found["layers.0.other.out"][0] == found["layers.0.third.out"][0] == 3
    assert all("n_head" in found[f"layers.0.{name}.out"][1] for name in ("other", "third"))


def test_heads_that_do_not_divide_are_left_whole():
    """Two heads of keys over four ranks: the perceptrons are divided, attention is not."""
    regions = traced(ranks=4).about.shards.regions
    assert [region.row for region in regions] == [f"model.layers.{n}.mlp.down_proj" for n in (0, 1)]


def test_a_sequence_is_not_divided_where_attention_is_not():
    with pytest.raises(holdall.HoldallError, match=r"`model.layers.0.self_attn` looks at all positions and is not divided"):
        traced(ranks=4, way="sequence")


def test_a_way_that_does_not_exist_is_refused():
    with pytest.raises(holdall.HoldallError, match="unknown way to divide a model over `tp` `zero3`"):
        traced(way="zero3")


def test_traces_and_plans_are_files(tmp_path):
    trace = traced("gpt2", way="sequence")
    plan = holdall.plan(trace, planner="nop", budget="1GiB", hardware=machine())
    trace.save(tmp_path / "trace.json")
    plan.save(tmp_path / "plan.json")
    assert holdall.Trace.load(tmp_path / "trace.json").about.shards == trace.about.shards
    assert holdall.Plan.load(tmp_path / "plan.json").actions == plan.actions
    assert not dist.is_initialized()


# dropout


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.inside, self.down, self.outside = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return self.outside(self.down(self.inside(self.up(x)))).square().mean()


def masks():
    """The masks of the dropouts inside and outside of the region, in two steps."""
    torch.manual_seed(0)
    model, found = Dropping(), []
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    with holdall.fit(model, momentum(model), {"x": x}, budget="1GiB", hardware=machine(), mesh={"tp": 2}):
        for dropout in (model.inside, model.outside):
            dropout.register_forward_hook(lambda m, args, out: found.append((out == 0).tolist()))
        torch.manual_seed(dist.get_rank())  # as loops of many ranks do
        model(x)
        model(x)
    return found


def test_masks_differ_inside_of_regions_and_agree_outside(ran):
    (in_0, out_0, in_0_later, out_0_later), (in_1, out_1, *_) = (rank["drops"] for rank in ran)
    assert in_0 != in_1
    assert out_0 == out_1
    assert in_0 != in_0_later
    assert out_0 != out_0_later
