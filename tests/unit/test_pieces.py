"""Token-wise modules on a piece of the sequence at a time: predicted peaks are measured, and losses stay within tolerance."""

import copy
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch import nn

import holdall
from holdall.actions.offload import Offload
from holdall.actions.pieces import Pieces
from holdall.actions.pieces.regions import region_of, regions
from holdall.actions.place import Place
from holdall.actions.recompute import Recompute
from holdall.analysis.largest import largest
from holdall.errors import Infeasible, Unsupported
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.runtime.activations.pieces import split
from holdall.testing.chaos import chaos
from holdall.testing.contracts import problem_for
from holdall.testing.worlds import machine

transformers = pytest.importorskip("transformers")

NEAR = 1e-5  # of the loss, over ten steps in float32
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def llama(*, vocab=32, **options):
    sizes = {"hidden_size": 16, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=2, vocab_size=vocab, max_position_embeddings=2**16, bos_token_id=0, eos_token_id=1, **options
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(**options):
    given = {**NO_DROPOUT, **options}
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=512, bos_token_id=0, eos_token_id=1, **given
    )
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=32
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return transformers.BertForMaskedLM(config)


def made(make, **options):
    torch.manual_seed(1)
    model = make(**options).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def batch_of(length, rows=1):
    tokens = torch.randint(0, 32, (rows, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": tokens, "labels": tokens}


def train(model, optimizer, batch, steps):
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    return losses


def layers(trace):
    return [b for b in trace.blocks if b.saves and b.module.rpartition(".")[2].isdigit()]


def actions(trace, how, rows):
    found = [Pieces.of(trace, rows)]
    if how != "alone":
        found += [Recompute.of(trace, [b]) for b in layers(trace)]
    if how in ("offloaded", "streamed"):
        found += [Offload.of(trace, b, overlap=False) for b in layers(trace)]
    if how == "streamed":
        moved = {b.module for b in layers(trace)}
        found.append(Place.of(trace, {u.name: ("streamed" if u.name in moved else "resident", "host") for u in trace.units}))
    return found


@pytest.mark.parametrize(
    ("make", "how"),
    [(llama, "alone"), (llama, "recomputed"), (llama, "offloaded"), (gpt2, "recomputed"), (bert, "alone"), (bert, "offloaded")],
)
def test_the_predicted_peak_is_measured_and_losses_stay_near(make, how):
    model, optimizer = made(make)
    reference = made(make)
    batch = batch_of(75, rows=2)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    plan = finish(Nop(), problem_for(trace), actions(trace, how, 40))
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        got = train(model, optimizer, batch, 10)
    assert set(harness.step_peaks[1:]) == {plan.predicted.peak["cpu"]}  # the first step makes the optimizer's states
    assert got == pytest.approx(train(*reference, batch, 10), rel=NEAR)


@pytest.mark.parametrize("seed", [0, 1])
def test_streamed_weights_and_delayed_copies_change_nothing(seed):
    model, optimizer = made(llama)
    expected = train(*made(llama), batch_of(75), 4)
    trace = holdall.trace(model, batch_of(75), optimizer=optimizer)
    plan = finish(Nop(), problem_for(trace), actions(trace, "streamed", 30))
    with chaos(seed) if seed else nullcontext(), holdall.apply(plan, model, optimizer, enforce=False) as harness:
        got = train(model, optimizer, batch_of(75), 4)
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert got == pytest.approx(expected, rel=NEAR)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_gradients_differ_by_the_stated_tolerance(dtype, near):
    model, optimizer = made(llama)
    model.to(dtype)
    whole = copy.deepcopy(model)
    batch = batch_of(128)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    with holdall.apply(finish(Nop(), problem_for(trace), [Pieces.of(trace, 16)]), model, optimizer, enforce=False):
        model(**batch).loss.backward()
    whole(**batch).loss.backward()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert (p.grad - q.grad).float().norm() <= near * q.grad.float().norm()


class Summed(nn.Module):
    """Two weights with one gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.bias = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))

    def forward(self, x):
        return x @ (self.first + self.second) + self.bias[0] + self.bias[1:].sum(0)


def test_weights_with_one_gradient_are_added_up_apart():
    torch.manual_seed(0)
    whole, x = Summed().double(), torch.randn(1, 10, 4, dtype=torch.double)
    pieces = copy.deepcopy(whole)
    undo = split(pieces, "summed", 3, nullcontext)
    for module in (whole, pieces):
        module(x).square().sum().backward()
    undo()
    for p, q in zip(pieces.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_only_modules_that_treat_positions_alone_are_split():
    model, optimizer = made(llama)
    trace = holdall.trace(model, batch_of(64), optimizer=optimizer)
    one = {name.removeprefix("model.layers.1.") for name in regions(trace) if ".1." in name}
    assert one == {"input_layernorm", "post_attention_layernorm", "mlp"}
    block = trace.block("model.layers.1")
    assert "mix positions" in region_of(trace, block, "model.layers.1.self_attn.o_proj")
    assert isinstance(region_of(trace, block, "model.layers.1.self_attn"), str)
    model, optimizer = made(gpt2, resid_pdrop=0.1)
    trace = holdall.trace(model, batch_of(64), optimizer=optimizer)
    assert "may mix positions" in region_of(trace, trace.block("transformer.h.1"), "transformer.h.1.mlp")
    assert "transformer.h.1.mlp.act" in regions(trace)


class Mixer(nn.Module):
    """Mixes positions by views, which leave no op."""

    def __init__(self, *, scrambled):
        super().__init__()
        self.up, self.down, self.scrambled = nn.Linear(8, 8), nn.Linear(8, 8), scrambled

    def forward(self, x):
        mixed = x.transpose(1, 2) if not self.scrambled else x.transpose(1, 2).reshape(x.shape)
        return self.down(torch.tanh(self.up(mixed)))


class Mixed(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), Mixer(**options)) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.parametrize("scrambled", [False, True])
def test_a_module_that_mixes_positions_unseen_is_refused_before_the_first_step(scrambled):
    model = Mixed(scrambled=scrambled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(1, 8, 8)  # as many features as positions, so that shapes do not tell
    trace = holdall.trace(model, (x,), optimizer=optimizer)
    assert any("1" in name for name in regions(trace))
    plan = finish(Nop(), problem_for(trace), [Pieces.of(trace, 4)])
    with holdall.apply(plan, model, optimizer, enforce=False), pytest.raises(Unsupported, match="positions"):
        model(x)


LONG = 4096
GIVEN = {"hardware": machine(), "allow": ["recompute", "offload", "pieces"]}


@cache
def trace_of(length):
    model, optimizer = made(llama)
    return holdall.trace(model, batch_of(length), optimizer=optimizer)


def plan_for(length, budget, **given):
    return holdall.plan(trace_of(length), budget=budget, **{**GIVEN, **given})


def test_auto_uses_pieces_only_if_nothing_else_fits():
    with pytest.raises(Infeasible) as without:
        plan_for(LONG, 1, allow=["recompute", "offload"])
    with pytest.raises(Infeasible) as refused:
        plan_for(LONG, 1)
    exact, least = without.value.smallest, refused.value.smallest
    assert least < 0.8 * exact
    assert "pieces" not in plan_for(LONG, exact).count()
    plan = plan_for(LONG, least)  # the budget that the refusal names
    assert plan.count()["pieces"] == 1
    assert "nothing fits without `pieces`" in plan.why[0]
    with pytest.raises(Infeasible):
        plan_for(LONG, least, allow=["recompute", "offload"])
    assert plan == plan.from_json(plan.to_json(), "here")


def test_fit_trains_a_sequence_that_fits_in_pieces_alone():
    model, optimizer = made(llama)
    expected = train(*made(llama), batch_of(LONG), 2)
    budget = 4_700_000
    with holdall.fit(model, optimizer, batch_of(LONG), budget=budget, **GIVEN) as harness:
        got = train(model, optimizer, batch_of(LONG), 2)
        assert harness.plan.count()["pieces"] == 1
        assert any("last bits differ" in note for note in harness.notes)
        tighter = harness._repeat._replacements.tightest(harness.plan)[0]
    assert harness.step_peaks[-1] == harness.plan.predicted.peak["cpu"] <= budget
    assert got == pytest.approx(expected, rel=NEAR)
    assert tighter is None or tighter.count()["pieces"] == 1


def test_the_largest_length_trains_within_the_budget_and_a_longer_one_is_refused():
    budget, step = 6_000_000, 1024
    found = largest(lambda length: plan_for(length, budget), start=4 * step, step=step)
    assert found.plan.count()["pieces"] == 1
    assert isinstance(found.beyond.error, Infeasible)
    assert found.beyond.value == found.value + step
    model, optimizer = made(llama)
    with holdall.apply(found.plan, model, optimizer) as harness:
        train(model, optimizer, batch_of(found.value), 2)
    assert harness.step_peaks[-1] == found.plan.predicted.peak["cpu"] <= budget


def test_packed_weights_are_expanded_for_every_piece():
    """A frozen weight in 4 bits has no rows: what it expands to is whole in every piece, and computed for each of them."""

    def adapted():
        model, _ = made(llama)
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.input_layernorm.weight.requires_grad_()
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    given = {"precision": "nf4", "budget": "1GiB", **GIVEN}
    model, optimizer = adapted()
    with holdall.fit(model, optimizer, batch_of(LONG), planner="nop", **given) as harness:
        expected, whole = train(model, optimizer, batch_of(LONG), 3), harness.step_peaks[-1]
    model, optimizer = adapted()
    with holdall.fit(model, optimizer, batch_of(LONG), **(given | {"budget": int(0.45 * whole)})) as harness:
        got = train(model, optimizer, batch_of(LONG), 3)
        split = next(a for a in harness.plan.actions if isinstance(a, Pieces)).modules
    assert any(path.endswith("mlp") for path in split)
    assert harness.step_peaks[-1] == harness.plan.predicted.peak["cpu"] <= 0.45 * whole
    assert got == pytest.approx(expected, rel=NEAR)
