"""A sequence divided over ranks: attention by itself on four ranks, and models through `fit` on two."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import holdall
from holdall.parallel.attention.balanced import BalancedAttention, schedule
from holdall.parallel.attention.queries import QueryAttention
from holdall.parallel.attention.rings import Ring, RingAttention
from holdall.parallel.context import attend_by_heads_and_context
from holdall.parallel.counting import CollectiveBytes
from holdall.parallel.exchanges import Exchanged
from holdall.testing.ranks import on_ranks
from holdall.testing.worlds import machine

# attention alone

BATCH, HEADS, KEY_HEADS, LONG, SIZE = 2, 4, 2, 32, 8
SCALE = SIZE**-0.5


def tensors():
    generator = torch.Generator().manual_seed(0)

    def some(heads):
        return torch.randn(BATCH, heads, LONG, SIZE, generator=generator, dtype=torch.float64)

    return some(HEADS), some(KEY_HEADS), some(KEY_HEADS), some(HEADS)


def whole(causal):
    """Attention of one process, and the gradients of queries, keys and values."""
    *given, weights = tensors()
    given = [t.requires_grad_() for t in given]
    out = F.scaled_dot_product_attention(*given, is_causal=causal, enable_gqa=True)
    (out * weights).sum().backward()
    return [out.detach(), *(t.grad for t in given)]


def own(t, ring, share=(0, 1)):
    pieces = t.chunk(ring.ranks * (2 if ring.zigzag else 1), 2)
    part, parts = share
    return torch.cat([pieces[n] for n in ring.pieces(ring.rank)], 2).chunk(parts, 2)[part]


def compared(attend, ring, causal, share=(0, 1)):
    """The largest difference of outputs and gradients from one process, and the bytes sent forward and backward."""
    *given, weights = (own(t, ring, share).clone() for t in tensors())
    given = [t.requires_grad_() for t in given]
    with CollectiveBytes("cp", dist.get_world_size()) as counted:
        out = attend(*given)
        forward = sum(counted.sent.values())
        (out * weights).sum().backward()
    expected = [own(t, ring, share) for t in whole(causal)]
    found = [out, *(t.grad for t in given)]
    worst = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    return worst, forward, sum(counted.sent.values()) - forward


def attention_on_ranks():
    rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    found = {}
    for zigzag, window, causal in itertools.product((False, True), (1, 2, 4), (False, True)):
        ring = Ring(world, rank, ranks, zigzag=zigzag, window=window)
        found["ring", zigzag, window, causal] = compared(
            lambda *t, r=ring, c=causal: RingAttention.apply(*t, r, c, SCALE), ring, causal
        )
    plain = Ring(world, rank, ranks)
    found["balanced"] = compared(lambda *t: BalancedAttention.apply(*t, plain, SCALE), plain, True)
    for by_heads in (1, 2):  # x 4, x 2 of context; four heads over four ranks is Ulysses
        rows = [[c * by_heads + h for h in range(by_heads)] for c in range(ranks // by_heads)]
        columns = [[c * by_heads + h for c in range(ranks // by_heads)] for h in range(by_heads)]
        heads = [dist.new_group(row) for row in rows][rank // by_heads]
        others = [dist.new_group(column) for column in columns][rank % by_heads]
        for window in (w for w in (1, 2, 4) if w * by_heads <= ranks):
            ring = Ring(others, rank // by_heads, ranks // by_heads, zigzag=True, window=window)
            found["loong", by_heads, window] = compared(
                lambda *t, r=ring, h=heads: attend_by_heads_and_context(*t, h, r, True, SCALE),
                ring,
                True,
                (rank % by_heads, by_heads),
            )
    for portions, causal in itertools.product((1, 2, 4), (False, True)):
        with Maps() as maps:
            found["queries", portions, causal] = compared(
                lambda *t, m=portions, c=causal: QueryAttention.apply(*t, plain, c, SCALE, m), plain, causal
            )
        found["maps", portions, causal] = (0.0, maps.largest, 0)
    found["ulysses"] = compared(lambda *t: _ulysses(*t, world), plain, True)
    return found


class Maps(TorchDispatchMode):
    """The most numbers that one exponential in place gave: a map of weights."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.exp_.default:
            self.largest = max(self.largest, out.numel())
        return out


def _ulysses(q, k, v, group):
    k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
    q, k, v = (Exchanged.apply(t, 1, 2, group) for t in (q, k, v))
    return Exchanged.apply(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1, group)


@pytest.fixture(scope="module")
def on_four():
    return on_ranks(4, attention_on_ranks)


def test_every_way_equals_attention_of_one_process(on_four):
    """Outputs and gradients: rings of one and two levels, zigzag or not, causal or not; balanced; heads x context."""
    assert len(on_four[0]) == 12 + 1 + 3 + 2 + 6 + 6 + 1
    for rank in on_four:
        assert {case: worst for case, (worst, *_) in rank.items() if worst > 1e-14} == {}


def test_bytes_of_rings_are_those_of_the_paper(on_four):
    """Forward: keys and values of a rank, n - 1 times. Backward: the same, and their gradients n times to come home; with
    windows of one rank, round the outer ring."""
    part = 2 * BATCH * KEY_HEADS * LONG // 4 * SIZE * 8
    for rank in on_four:
        for zigzag, causal in itertools.product((False, True), (False, True)):
            assert rank["ring", zigzag, 4, causal][1:] == (3 * part, (3 + 4) * part)
            assert rank["ring", zigzag, 1, causal][1:] == (3 * part, (3 + 4) * part)
            assert rank["ring", zigzag, 2, causal][1] == 3 * part


def test_bytes_of_ulysses_do_not_grow_with_the_ranks(on_four):
    """Four all-to-alls forward and four backward, each of (n - 1) / n of a rank's part."""
    part = BATCH * HEADS * LONG // 4 * SIZE * 8
    assert {rank["ulysses"][1:] for rank in on_four} == {(4 * part * 3 // 4, 4 * part * 3 // 4)}


def test_portions_of_queries_make_maps_small_and_send_the_same(on_four):
    """A map of (n/m) (n/p) weights a head. Forward sends the queries, the results and two numbers a query and head, twice each
    as they are summed; whatever m is."""
    queries, statistics = BATCH * HEADS * LONG * SIZE * 8, BATCH * HEADS * LONG * 8
    for rank in on_four:
        for portions, causal in itertools.product((1, 2, 4), (False, True)):
            assert rank["maps", portions, causal][1] == BATCH * HEADS * (LONG // portions) * (LONG // 4)
            _, forward, backward = rank["queries", portions, causal]
            assert forward == (2 * queries + 2 * 2 * statistics) * 3 // 4
            assert backward == (3 * queries + statistics) * 3 // 4


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_balanced_schedules_have_every_tile_once(ranks):
    steps = schedule(ranks)
    tiles = [tile for step in steps for tile in step if tile is not None]
    assert sorted(tiles) == [(q, k) for q in range(ranks) for k in range(q + 1)]
    assert len(steps) == ranks // 2 + 1
    assert len(tiles) == {2: 3, 4: 10, 8: 36, 16: 136}[ranks]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_work_is_equal_in_zigzag(ranks):
    """In halves of tiles: a rank with contiguous pieces has as many as its place, with zigzag all have the same."""

    def work(zigzag):
        rings = [Ring(None, rank, ranks, zigzag=zigzag) for rank in range(ranks)]
        return [sum(2 - half for owner in range(ranks) for *_, half in ring.tiles(owner, True)) for ring in rings]

    assert len(set(work(True))) == 1
    assert work(False) == [2 * rank + 1 for rank in range(ranks)]
    assert sum(work(True)) == 4 * sum(work(False))  # of pieces half as long


# models

WORDS, LENGTH, ROWS, STEPS = 64, 16, 2, 4
BUFFER = WORDS * 32 * 8 + 1024  # the largest that a collective has: the gradient of an embedding
CASES = [("llama", way) for way in ("ulysses", "zigzag", "balanced")] + [("gpt2", "ring")]


def build(name):
    torch.manual_seed(0)
    if name == "gpt2":
        config = GPT2Config(
            vocab_size=WORDS, n_embd=32, n_layer=1, n_head=4, n_positions=32, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
        )
        config.bos_token_id = config.eos_token_id = 0
        return GPT2LMHeadModel(config).double()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, **sizes)).double()


def batch():
    """With labels that are left out, so that the ranks have different numbers of them."""
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def fitted(name, way):
    model, given = build(name), batch()
    optimizer = momentum(model)
    with holdall.fit(model, optimizer, given, budget="1GiB", hardware=machine(), mesh={"cp": 2}, shard=way) as harness:
        for step in range(STEPS):
            loss = model(**given).loss
            loss.backward()
            if step == 0:
                grads, value = [p.grad.full_tensor().tolist() for p in model.parameters()], loss.item()
            optimizer.step()
            optimizer.zero_grad()
        traffic = harness.measured().traffic
    return {
        "loss": value,
        "gradients": grads,
        "peaks": harness.step_peaks[1:],
        "predicted": harness.plan.predicted,
        "traffic": traffic,
        "actions": harness.plan.count(),
    }


class Decaying(torch.nn.Module):
    """Computes a term from a parameter alone."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.scale = norm, torch.nn.Parameter(torch.ones_like(norm.weight))

    def forward(self, x):
        self.decay = self.scale.square().sum()
        return self.norm(x) * self.scale


class Numbered(torch.nn.Module):
    """Numbers positions itself, by the length of what it is given; its loss hardly depends on them."""

    def __init__(self):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(WORDS, 32), torch.nn.Embedding(LENGTH, 32)
        self.places.weight.data.mul_(1e-3)
        self.attention, self.head = torch.nn.Linear(32, 96), torch.nn.Linear(32, WORDS)

    def forward(self, input_ids, labels):
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.attention(x).chunk(3, -1))
        x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def decayed():
    model = build("llama")
    model.model.norm = Decaying(model.model.norm)
    return model


def refused():
    said = {}
    padded = batch()
    padded["attention_mask"] = torch.ones(ROWS, LENGTH, dtype=torch.long)
    padded["attention_mask"][0, -1] = 0
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8))
    for name, model, given, loss in (
        ("padding", build("llama"), padded, None),
        ("no attention", plain, torch.randn(2, 4, 8), lambda m, b: m(b).mean()),
        ("term", decayed(), batch(), lambda m, b: m(**b).loss + m.model.norm.decay),
        ("numbered", Numbered(), batch(), None),
    ):
        with pytest.raises(holdall.HoldallError) as error:
            holdall.fit(model, momentum(model), given, loss=loss, budget="1GiB", hardware=machine(), mesh={"cp": 2})
        said[name] = str(error.value)
    return said


def fitted_all():
    return {case: fitted(*case) for case in CASES} | {"refused": refused()}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, fitted_all, timeout=300)


each_case = pytest.mark.parametrize("case", CASES, ids="-".join)


@each_case
def test_loss_and_gradients_are_those_of_one_process(ran, case):
    model = build(case[0])
    loss = model(**batch()).loss
    loss.backward()
    for rank in ran:
        found = rank[case]
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)  # Hugging Face computes it in float32
        for a, p in zip(found["gradients"], model.parameters(), strict=True):
            assert torch.allclose(torch.tensor(a, dtype=p.dtype), p.grad, rtol=0, atol=1e-8)


@each_case
def test_peak_and_bytes_are_the_predicted_ones(ran, case):
    """To the byte; but a thread of gloo may hold a buffer for a moment after its collective is over."""
    for rank in ran:
        predicted = rank[case]["predicted"]
        assert predicted.peak["cpu"] <= min(rank[case]["peaks"]) <= predicted.peak["cpu"] + BUFFER
        over = {link: size for link, size in predicted.traffic.items() if link.startswith("cp ")}
        assert {link: size for link, size in rank[case]["traffic"].items() if size} == over
        assert rank[case]["actions"] == {"context": 1}


def test_activations_are_divided(ran):
    model = build("llama")
    trace = holdall.trace(model, batch(), optimizer=momentum(model))
    whole_step = holdall.plan(trace, planner="nop", budget="1GiB", hardware=machine()).predicted
    states = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    for way in ("ulysses", "zigzag"):
        divided = ran[0]["llama", way]["predicted"].peak["cpu"]
        assert divided - states < 0.62 * (whole_step.peak["cpu"] - states)


def test_what_cannot_be_divided_is_refused_in_a_line(ran):
    for rank in ran:
        assert "a mask of padding is not divided along the sequence" in rank["refused"]["padding"]
        assert "no module of Sequential calls F.scaled_dot_product_attention" in rank["refused"]["no attention"]
        assert "whose gradients are not sums over the ranks of `cp`" in rank["refused"]["term"]
        assert "of Numbered computes something else where it has a part of the sequence" in rank["refused"]["numbered"]
