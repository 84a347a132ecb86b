"""Every pair of features, as `holdall.compatibility` declares it, against plain training on tiny models.

Exact: losses, norms and weights are the same bits, nothing is left behind, the peak is the predicted one, and the budget, which
is no larger than that, is kept. Close: losses stay within the declared tolerance. Refused: before the first step, in one line
with a hint. A random sample of triples is held against what follows from their pairs.
"""

import copy
import gc
import json
import random
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import holdall
from holdall import compatibility
from holdall.actions.compress import Compress
from holdall.actions.in_backward import InBackward
from holdall.actions.layer_swap import LayerSwap
from holdall.actions.offload import Offload
from holdall.actions.pieces import Pieces
from holdall.actions.place import Place, streamable
from holdall.actions.recompute import Recompute
from holdall.actions.reschedule import Reschedule, effects, region
from holdall.cli import app
from holdall.compatibility import CLOSE, REFUSED, pairs, verdict
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.simulator.lower import blocks_of
from holdall.testing.contracts import problem_for
from holdall.testing.worlds import machine
from holdall.types.program import lazily

transformers = pytest.importorskip("transformers", reason="the models are Hugging Face's")

STEPS = 2
VOCABULARY = 32
FEATURES = compatibility.features()
NAMES = compatibility.names()
GROUPS = {group: frozenset(f.name for f in FEATURES if f.group == group) for group in ("plan", "model", "loop", "precision")}
ALIKE = GROUPS["model"] | {"bf16", "autocast"}  # what a trace depends on


# what features mean


def build(features):
    """A tiny decoder; the same weights every time."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "attention_dropout": 0.1,
        "tie_word_embeddings": "tied" in features,
    }
    if "moe" in features:
        config = transformers.MixtralConfig(**sizes, num_local_experts=2, num_experts_per_tok=1)
        model = transformers.MixtralForCausalLM(config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    layers = model.model.layers
    if "frozen" in features:
        model.model.embed_tokens.requires_grad_(False)
        layers[0].requires_grad_(False)
    if "lora" in features:
        peft = pytest.importorskip("peft", reason="LoRA needs peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    if "checkpointing" in features:
        model.gradient_checkpointing_enable()
    if "compiled" in features:
        layers[1].compile(backend="aot_eager")
    if "compiled_model" in features:
        model.compile(backend="aot_eager")
    return model.train()


def make_optimizer(model, fused=True):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=fused)


def make_batch(generator):
    ids = torch.randint(0, VOCABULARY, (2, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}


def loss_of(features):
    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16) if "autocast" in features else nullcontext():
            return model(**batch).loss

    return loss


def actions_for(features, trace):
    """The plan's features, each on blocks where it may be: first and second layer, last, one of those that are left."""
    layers = [b for b in trace.blocks if ".layers." in f".{b.name}" and b.saves]
    found = []
    if "pieces" in features:
        split = Pieces.of(trace, 5)
        last = layers[-1].name if "reschedule" in features else "none"  # the block that runs op by op
        found.append(replace(split, modules=tuple(m for m in split.modules if not m.startswith(last))))
    if "recompute" in features:
        found.append(Recompute.of(trace, layers[:1]))
    if "offload" in features:
        found += [Offload.of(trace, b, overlap=False) for b in (layers[:1] if "recompute" in features else [])]
        found.append(Offload.of(trace, layers[-1], overlap=False))
    taken = {b for a in found for b in blocks_of(a)}
    left = [b for b in layers if b.name not in taken]
    if "layer_swap" in features:
        found.append(LayerSwap.of(trace, left.pop(0)))
    if "compress" in features:
        found.append(Compress.of(trace, left.pop(0), bits=8))
    if "reschedule" in features:
        if not left:
            pytest.skip("more techniques than blocks")
        ops, count = region(trace, left[-1])
        found.append(Reschedule.of(trace, left[-1], lazily(effects(ops), count)))
    if "place" in features:
        found.append(place(features, trace))
    elif "in_backward" in features:
        found.append(InBackward.of(problem_for(trace).under(found).trace, found))
    return found


def place(features, trace):
    """Weights streamed where they can be, states and updates on the host."""
    can = streamable(trace)
    rows = {u.name: ("streamed" if u.name in can else "resident", "host" if u.numel else "device") for u in trace.units}
    when = "backward" if "in_backward" in features else "step"
    return Place.of(trace, rows, when=when, share="accumulate" not in features)


@cache
def traced(alike):
    model = build(alike)
    precision = "bf16" if "bf16" in alike else None
    batch = make_batch(torch.Generator().manual_seed(1))
    return holdall.trace(model, batch, optimizer=make_optimizer(model), loss=loss_of(alike), precision=precision, head="whole")


def plan_for(features):
    """As a user would who says what the loop does; the budget is what is predicted and not a byte more."""
    trace = traced(frozenset(features) & ALIKE)
    looks = bool({"clip", "scaler"} & set(features)) or "in_backward" not in features
    problem = replace(problem_for(trace), reads_gradients=looks, accumulate=2 if "accumulate" in features else 1)
    made = finish(Nop(), problem, actions_for(features, trace))
    room = made.predicted.peak["cpu"] + verdict(*features).extra
    return replace(made, budget={**made.budget, "cpu": room})


def train(model, optimizer, features, *, narrow=False):
    """Losses and norms of the loop. `narrow`: the reference for bfloat16, written out: copies compute, float32 is updated."""
    loss_fn, seen = loss_of(features), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if "scaler" in features else None
    work = copy.deepcopy(model) if narrow else model
    pairs = list(zip(model.parameters(), work.parameters(), strict=True)) if narrow else []
    for _, w in pairs:
        w.data = w.data.bfloat16()
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        for _ in range(2 if "accumulate" in features else 1):
            batch = make_batch(generator)
            loss = loss_fn(work, batch)
            (scaler.scale(loss) if scaler else loss).backward()
            seen.append(loss.item())
            for p, w in pairs:
                if w.grad is not None:
                    p.grad = w.grad.float() if p.grad is None else p.grad + w.grad.float()
                    w.grad = None
        if "clip" in features:
            if scaler:
                scaler.unscale_(optimizer)
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        for p, w in pairs:
            w.data.copy_(p.data)
        if "evaluate" in features:
            with torch.no_grad():
                seen.append(loss_fn(work.eval(), batch).item())
            work.train()
    return seen


@cache
def plainly(features):
    """What the loop gives without a plan: (seen, weights)."""
    model = build(features)
    seen = train(model, make_optimizer(model), features, narrow="bf16" in features)
    return seen, model.state_dict()


def left_behind(model, optimizer):
    """Everything that could have stayed on them."""
    modules = [
        ("forward" in m.__dict__, [len(v) for k, v in sorted(vars(m).items()) if k.endswith("_hooks") and v is not None])
        for m in model.modules()
    ]
    return modules, [len(v) for k, v in sorted(vars(optimizer).items()) if k.endswith("_hooks") and hasattr(v, "__len__")]


def run(features):
    """Trains under the plan: (harness, seen, weights)."""
    plan = plan_for(features)
    model = build(features)
    optimizer = make_optimizer(model)
    before = left_behind(model, optimizer)
    gc.collect()
    with holdall.apply(plan, model, optimizer) as harness:
        seen = train(model, optimizer, features)
    assert left_behind(model, optimizer) == before
    assert [note for note in harness.notes if "in pieces" not in note] == []
    return harness, seen, model.state_dict()


# what is declared of them


def assert_as_declared(features):
    said = verdict(*features)
    if said.level == REFUSED:
        with pytest.raises(holdall.HoldallError) as refused:
            plan_for(features)
        assert refused.value.hint and "\n" not in refused.value.fact
        return
    expected, weights = plainly(frozenset(features) - GROUPS["plan"])
    harness, seen, mine = run(features)
    if said.level == CLOSE:
        assert seen == pytest.approx(expected, rel=1e-3)
    else:
        assert seen == expected
        assert [k for k in weights if not torch.equal(mine[k], weights[k])] == []
    peak, predicted = harness.measured().peak["cpu"], harness.plan.predicted.peak["cpu"]
    if said.is_bound:
        assert 0.9 * predicted < peak <= predicted + said.extra
    else:
        assert predicted <= peak <= predicted + said.extra


@pytest.mark.parametrize("pair", pairs(), ids="+".join)
def test_a_pair_is_as_declared(pair):
    assert_as_declared(pair)


def triples():
    """Some that no pair refuses, the same every time."""
    can = [n for n in NAMES if verdict(n).level != REFUSED]
    found, rng = [], random.Random(0)
    while len(found) < 36:
        drawn = tuple(n for n in can if n in rng.sample(can, 3))
        if len(drawn) == 3 and drawn not in found and verdict(*drawn).level != REFUSED:
            found.append(drawn)
    return found


@pytest.mark.parametrize("triple", triples(), ids="+".join)
def test_a_triple_follows_from_its_pairs(triple):
    assert_as_declared(triple)


@pytest.mark.parametrize("feature", sorted(GROUPS["model"] | GROUPS["loop"] | GROUPS["precision"]))
def test_fit_keeps_a_tight_budget_or_refuses_before_the_first_step(feature):
    """With the planner that people use, in a budget that plain training does not fit."""
    model = build({feature})
    options = {
        "loss": loss_of({feature}),
        "precision": "bf16" if feature == "bf16" else None,
        "accumulate": 2 if feature == "accumulate" else 1,
    }
    if verdict(feature).level == REFUSED:
        with pytest.raises(holdall.HoldallError) as refused:
            holdall.fit(model, make_optimizer(model), make_batch(None), hardware=machine(), **options)
        assert refused.value.hint and "\n" not in refused.value.fact
        return
    budget = plan_for([feature]).predicted.peak["cpu"] * 8 // 10
    expected, weights = plainly(frozenset({feature}))
    optimizer = make_optimizer(model)
    with holdall.fit(model, optimizer, make_batch(None), hardware=machine(), budget=budget, **options) as harness:
        assert train(model, optimizer, {feature}) == expected
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert harness.measured().peak["cpu"] <= budget


@pytest.mark.parametrize("feature", ["compiled", "compiled_model", "checkpointing"])
def test_a_plan_is_not_applied_to_a_model_that_was_changed_since(feature):
    plan = plan_for(["recompute"])
    model = build({feature})
    with pytest.raises(holdall.Unsupported, match=r"compiled by torch.compile|gradient checkpointing is on"):
        holdall.apply(plan, model, make_optimizer(model))


@pytest.mark.parametrize("block", [False, True], ids=["model", "block"])
def test_a_model_that_is_compiled_under_a_plan_is_refused_when_its_next_step_begins(block):
    model = build(())
    with holdall.apply(plan_for(["recompute"]), model, make_optimizer(model)):
        (model.model.layers[0] if block else model).compile(backend="eager")
        with pytest.raises(holdall.Unsupported, match=r"compiled by torch\.compile while a plan is on it"):
            model(**make_batch(None))


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("scale", [256.0, 300.0, 1e38])
def test_a_scaler_of_any_scale_trains_as_without_a_plan_and_skips_what_is_not_finite(scale, narrow):
    """A fused optimizer is handed the scale and the finding; a scale that is too large must change nothing."""
    features = frozenset({"place", "bf16"} if narrow else {"place"})
    model = build(features)
    start = copy.deepcopy(model.state_dict())
    optimizer = make_optimizer(model)
    reference = build(features)
    plain = make_optimizer(reference)

    def step(model, optimizer):
        torch.manual_seed(5)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(model(**make_batch(torch.Generator().manual_seed(7))).loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return scaler.get_scale()

    expected = step(reference, plain)
    with holdall.apply(plan_for(features), model, optimizer, enforce=False):
        assert step(model, optimizer) == expected
    mine, theirs = model.state_dict(), reference.state_dict()
    if scale == 1e38:
        assert expected < scale
        assert all(torch.equal(mine[k], start[k]) for k in start)
    elif not narrow:
        assert all(torch.equal(mine[k], theirs[k]) for k in theirs)
    else:
        assert any(not torch.equal(mine[k], start[k]) for k in start)


# what is said of it


def test_the_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "compatibility.md"
    assert page.read_text() == compatibility.page(), "write it again: holdall compatible --markdown > docs/compatibility.md"


def test_every_word_about_a_pair_is_about_features_that_exist():
    assert all(a in NAMES and b in NAMES for a, b in compatibility.PAIRS)
    assert all(v.hint for v in (*compatibility.ALONE.values(), *compatibility.PAIRS.values()) if v.level == REFUSED)


def test_an_unknown_feature_is_answered_with_the_closest():
    with pytest.raises(holdall.InvalidInput, match="unknown feature `offlod`") as error:
        verdict("offlod", "lora")
    assert "offload" in error.value.hint


def test_the_command_says_the_same():
    def says(*words):
        result = CliRunner().invoke(app, ["compatible", *words])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert says("--markdown") == compatibility.page()
    assert len(json.loads(says("--json"))) == len(pairs()) + len(compatibility.members()) * len(NAMES)
    assert json.loads(says("in_backward", "clip", "--json"))["level"] == REFUSED
    assert "refused" in says("in_backward", "clip", "lora") and "exact" in says("offload", "lora")
    table = says()
    assert all(name in table for name in NAMES)


# bugs that the matrix found


def test_tracing_leaves_pythons_random_state_as_it_was():
    def loss(model, batch):
        random.random()  # as a model that skips layers does
        return model(**batch).loss

    random.seed(3)
    before = random.getstate()
    holdall.trace(build(()), make_batch(None), loss=loss)
    assert random.getstate() == before


@pytest.mark.parametrize("watched", [False, True], ids=["fake", "eager"])
def test_a_loss_that_hands_the_model_part_of_the_batch_raises_no_alarm(watched):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        x, y = batch
        found = torch.nn.functional.mse_loss(model(x), y)
        return found if not watched or found.item() > -1 else -found  # a value that only a run can know

    batch = (torch.randn(3, 4), torch.randn(3, 1))
    with holdall.fit(model, optimizer, batch, loss=loss, hardware=machine()) as harness:
        for _ in range(2):
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert harness.notes == []
        loss(model, tuple(t[:2] for t in batch)).backward()
        optimizer.step()
    assert any("left the trace" in note for note in harness.notes)
