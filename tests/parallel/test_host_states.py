"""Optimizer states on the host beside shards: bits, peaks and bytes on two real ranks, under chaos too."""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import holdall
from holdall.actions.host_states import HostStates
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.problem import make_problem
from holdall.testing.chaos import chaos
from holdall.testing.ranks import by_default, on_ranks
from holdall.testing.worlds import machine

STEPS = 5
SHAKEN = ("all", "some")
HELD = 2 * 4 * 34 * 34  # bytes: two layers of the stack, padded for two ranks, which is more than two of the Llama
CASES = {  # model, way, rule, backwards of a step, what may be done, and how near the budget is to the least that it takes
    "all": ("stack", "zero3", "adamw", 2, ["place"], 0.0),
    "some": ("stack", "fsdp", "momentum", 2, ["place"], 0.5),
    "fused": ("stack", "ddp", "fused", 1, ["place"], 0.0),
    "with activations": ("llama", "zero2", "adamw", 2, ["place", "recompute", "offload"], 0.2),
}
CASES = by_default(CASES, "fused")


class Stack(torch.nn.Module):
    def __init__(self, width=33, depth=4):  # an odd width: parts of unequal sizes
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        self.drop, self.last = torch.nn.Dropout(0.1), torch.nn.Linear(width, 1)

    def forward(self, x):
        for layer in self.layers:
            x = x + self.drop(torch.nn.functional.gelu(layer(x)))
        return self.last(x).square().mean()


def build(name):
    torch.manual_seed(0)
    if name == "stack":
        return Stack()
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def batch(rank, name, nth=0):
    generator = torch.Generator().manual_seed(10 * nth + rank)
    if name == "stack":
        return {"x": torch.randn(4, 33, generator=generator)}
    ids = torch.randint(0, 64, (2, 24), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def loss_of(model, batch):
    out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out.loss


def optimizer_of(model, rule):
    if rule == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    flat = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": flat, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, fused=rule == "fused" or None)


@cache
def traced(name, way, rule):
    model = build(name)
    return holdall.trace(model, batch(0, name), optimizer=optimizer_of(model, rule), mesh={"dp": 2}, shard=way)


def planned(case, budget):
    name, way, rule, backwards, allow, _ = CASES[case]
    return holdall.plan(traced(name, way, rule), budget=budget, hardware=machine(), allow=allow, accumulate=backwards)


@cache
def bounds(case):
    """What a rank takes with everything on the device, and the least that the planner finds."""
    with pytest.raises(holdall.Infeasible) as error:
        planned(case, 1000)
    return planned(case, "1GiB").predicted.peak["cpu"], error.value.smallest


def budget_of(case):
    most, least = bounds(case)
    return int(least + CASES[case][-1] * (most - least))


def one_step(case, model, optimizer, schedule, nth, held):
    """Clipped; one step is skipped, one leaves its gradients as zeros, an evaluation is in between."""
    rank, (name, _, _, backwards, *_) = dist.get_rank(), CASES[case]
    torch.manual_seed(100 * nth + rank)
    for half in range(backwards):
        held["loss"] = loss_of(model, batch(rank, name, 2 * nth + half))
        held["loss"].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    if nth != 2:
        optimizer.step()
        schedule.step()
    if nth == 3:
        model.eval()
        with torch.no_grad():
            loss_of(model, batch(rank, name))
        model.train()
    optimizer.zero_grad(set_to_none=nth != 1 or backwards == 1)  # where the prediction has them already


def decaying(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def weights_of(model):
    return [p.full_tensor().detach() for p in model.parameters()]


def fitted(case, budget):
    name, way, rule, backwards, allow, _ = CASES[case]
    model = build(name)
    optimizer = optimizer_of(model, rule)
    given = {"budget": budget, "hardware": machine(), "mesh": {"dp": 2}, "shard": way, "allow": allow, "accumulate": backwards}
    given["enforce"] = False  # a thread of gloo may hold a buffer for a moment after its collective is over
    harness = holdall.fit(model, optimizer, batch(dist.get_rank(), name), **given)
    return model, optimizer, decaying(optimizer), harness


def trained(case, budget):
    model, optimizer, schedule, harness = fitted(case, budget)
    sent, held = [], {}  # one loss, as a loop's variable, which the prediction counts
    for nth in range(STEPS):
        one_step(case, model, optimizer, schedule, nth, held)
        sent.append({k: v for k, v in harness.measured().traffic.items() if "far" in k})
    found = {
        "loss": held["loss"].item(),
        "weights": weights_of(model),
        "peaks": list(harness.step_peaks),
        "host": harness.measured().peak.get("far", 0),
        "predicted": harness.plan.predicted,
        "traffic": sent[-1],
        "actions": harness.plan.count(),
        "pieces": [piece for a in harness.plan.actions if a.name == "host_states" for piece in a.pieces],
    }
    optimizer.state.clear()  # begins anew
    one_step(case, model, optimizer, schedule, STEPS, held)
    one_step(case, model, optimizer, schedule, STEPS + 1, held)
    harness.close()
    one_step(case, model, optimizer, schedule, STEPS + 2, held)
    states = [v for p in model.parameters() for v in optimizer.state[p].values()]
    return {**found, "afterwards": weights_of(model), "states": [v.full_tensor() if v.dim() else v for v in states]}


def trained_all(budgets):
    found = {}
    for case, budget in budgets.items():
        found[case, "plain"] = trained(case, "1GiB")
        found[case, "calm"] = trained(case, budget)
        if case in SHAKEN:
            with chaos(5, longest=0.001):
                found[case, "chaos"] = trained(case, budget)
    return found


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, trained_all, {case: budget_of(case) for case in CASES}, timeout=300)


each_case = pytest.mark.parametrize("case", CASES)


@pytest.mark.parametrize(("case", "how"), [*((case, "calm") for case in CASES), *((case, "chaos") for case in SHAKEN)])
def test_weights_and_states_are_those_of_ranks_without_a_plan(ran, case, how):
    for rank in ran:
        plain, found = rank[case, "plain"], rank[case, how]
        assert found["loss"] == plain["loss"]
        for what in ("weights", "afterwards", "states"):
            assert all(torch.equal(a, b) for a, b in zip(found[what], plain[what], strict=True)), what


@each_case
def test_states_are_on_the_host_only_where_the_budget_asks_for_it(ran, case):
    for rank in ran:
        assert rank[case, "plain"]["actions"] == {"shard": 1}
        found = rank[case, "calm"]
        assert found["actions"]["host_states"] == 1
        assert found["predicted"].peak["cpu"] <= budget_of(case) < rank[case, "plain"]["predicted"].peak["cpu"]
        if case != "with activations":
            every = {name for name, _ in build(CASES[case][0]).named_parameters()}
            named = {name for piece in found["pieces"] for name in piece}
            assert (named == every) == (case != "some")


@each_case
def test_peaks_are_the_predicted_ones(ran, case):
    """To the byte; a thread of gloo may hold what it has gathered for a layer or two for a moment longer."""
    for rank in ran:
        for how in ("plain", "calm"):
            found = rank[case, how]
            predicted = found["predicted"].peak["cpu"]
            assert min(found["peaks"][1:]) <= predicted <= max(found["peaks"]) <= predicted + HELD
        assert rank[case, "calm"]["host"] == rank[case, "calm"]["predicted"].peak["far"]


@each_case
def test_states_go_there_and_back_once_in_a_step(ran, case):
    if case == "with activations":
        pytest.skip("activations go there too")
    for rank in ran:
        predicted = rank[case, "calm"]["predicted"].traffic
        moved = {k: v for k, v in predicted.items() if "far" in k}
        assert set(moved) == {"cpu->far", "far->cpu"}
        assert rank[case, "calm"]["traffic"] == {k: (STEPS - 2) * v // (STEPS - 1) for k, v in moved.items()}


def resumed(budget, folder):
    """Weights after steps with a checkpoint in the middle, and after going on from it with and without states on the host."""
    found = {}
    for how, asked in {"whole": budget, "again": budget, "without": "1GiB"}.items():
        model, optimizer, schedule, harness = fitted("all", asked)
        begin = holdall.load_checkpoint(folder, model, optimizer, scheduler=schedule).step if how != "whole" else 0
        for nth in range(begin, 6):
            one_step("all", model, optimizer, schedule, nth, {})
            if how == "whole" and nth == 3:
                holdall.save_checkpoint(folder, model, optimizer, scheduler=schedule, step=4)
        found[how] = weights_of(model), harness.measured().peak["cpu"], harness.plan.predicted.peak["cpu"]
        harness.close()
    return found


def test_checkpoints_hold_states_of_the_host_and_are_read_into_it(tmp_path):
    for rank in on_ranks(2, resumed, budget_of("all"), tmp_path):
        whole, _, _ = rank["whole"]
        for how in ("again", "without"):
            weights, peak, predicted = rank[how]
            assert all(torch.equal(a, b) for a, b in zip(weights, whole, strict=True)), how
            assert peak <= predicted + HELD, how


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (partial(torch.optim.AdamW, foreach=True), "temporaries of all parameters together"),
        (torch.optim.SGD, "SGD has none"),
    ],
)
def test_what_is_not_planned_is_refused(rule, why):
    model = build("stack")
    trace = holdall.trace(model, batch(0, "stack"), optimizer=rule(model.parameters()), mesh={"dp": 2}, shard="fsdp")
    problem = make_problem(trace, hardware=machine())
    with pytest.raises(holdall.HoldallError, match=why):
        finish(Nop(), problem, [HostStates(pieces=(("layers.0.weight",),))])
    with pytest.raises(holdall.Infeasible):
        holdall.plan(trace, budget=1000, hardware=machine(), allow=["place"])
