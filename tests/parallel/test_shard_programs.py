"""Blocks op by op and heads in chunks inside ranks that `fit` has sharded: bits, peaks and bytes on two real ranks."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import holdall
from holdall.actions.reschedule import obstacle
from holdall.errors import Unsupported
from holdall.testing.ranks import by_default, on_ranks
from holdall.testing.worlds import machine

STEPS = 3
TWO, REPLICAS, NODES = {"dp": 2}, {"replicate": 2, "dp": 2}, {"nodes": 2, "dp": 2}
PROGRAMS = by_default({"ddp": TWO, "zero2": TWO, "fsdp": TWO, "hpz": NODES}, "ddp", "zero2")  # way -> mesh
HEADS = by_default(  # way, tied, where -> mesh
    {("fsdp", True, "loop"): TWO, ("zero3", False, "model"): TWO, ("zero2", True, "model"): REPLICAS},
    ("zero2", True, "model"),
)


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Stack(torch.nn.Module):
    def __init__(self, width=16, depth=4):
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def stack():
    torch.manual_seed(0)
    return Stack()


def rows(rank, nth=0):
    return {"x": torch.randn(200, 16, generator=torch.Generator().manual_seed(10 * nth + rank))}


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@cache
def plain(way):
    model = stack()
    return holdall.trace(model, rows(0), optimizer=adam(model), mesh=PROGRAMS[way], shard=way)


def least_by_ops(way):
    """A budget in which two of the four layers must hold less."""
    return int(0.85 * holdall.plan(plain(way), planner="nop", budget="1GiB", hardware=machine()).predicted.peak["cpu"])


def trained(way, budget, **given):
    """Clipped steps of two backwards each, with dropout."""
    rank, model = dist.get_rank(), stack()
    optimizer = adam(model)
    asked = {"budget": budget, "hardware": machine(), "mesh": PROGRAMS[way], "shard": way, "accumulate": 2, **given}
    with holdall.fit(model, optimizer, rows(rank), **asked) as harness:
        for step in range(STEPS):
            for nth in range(2):
                torch.manual_seed(100 * step + 10 * nth + rank)
                loss = model(**rows(rank, nth))
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        sent = {link: size for link, size in harness.measured().traffic.items() if size and "->" not in link}
    return {
        "weights": [p.full_tensor().tolist() for p in model.parameters()],
        "peaks": harness.step_peaks[1:],  # the first makes the optimizer's states
        "predicted": harness.plan.predicted,
        "actions": harness.plan.count(),
        "sent": sent,
        "notes": harness.notes,
    }


def trained_both(budgets):
    return {
        way: (trained(way, "1GiB", planner="nop"), trained(way, size, allow=["recompute"])) for way, size in budgets.items()
    }


@pytest.fixture(scope="module")
def ran():
    """way -> of every rank: without a plan, and with one."""
    sizes = {way: least_by_ops(way) for way in PROGRAMS}
    over = {2: {way: size for way, size in sizes.items() if way != "hpz"}, 4: {"hpz": sizes["hpz"]}}
    found = [rank for ranks, some in over.items() for rank in on_ranks(ranks, trained_both, some, timeout=300)]
    return {way: [rank[way] for rank in found if way in rank] for way in PROGRAMS}


@pytest.mark.parametrize("way", PROGRAMS)
def test_blocks_op_by_op_have_the_bits_of_the_same_ranks_without(ran, way):
    for without, planned in ran[way]:
        assert planned["actions"]["reschedule"] >= 2
        assert planned["weights"] == without["weights"]
        assert planned["notes"] == without["notes"]
        assert planned["actions"] == ran[way][0][1]["actions"]


@pytest.mark.parametrize("way", PROGRAMS)
def test_blocks_op_by_op_take_the_predicted_memory_and_send_nothing_twice(ran, way):
    """To the byte; but a thread of gloo may hold a buffer for a moment after its collective is over."""
    for without, planned in ran[way]:
        peak = planned["predicted"].peak["cpu"]
        assert peak <= least_by_ops(way) < without["predicted"].peak["cpu"]
        assert peak <= min(planned["peaks"]) <= 1.02 * peak
        assert planned["sent"] == without["sent"] != {}


class Nested(torch.nn.Module):
    """Layers in layers, each gathered by itself."""

    def __init__(self):
        super().__init__()
        self.outer = torch.nn.ModuleList(torch.nn.Sequential(Layer(8), Layer(8)) for _ in range(2))

    def forward(self, x):
        for layer in self.outer:
            x = layer(x)
        return x.square().mean()


def test_what_is_gathered_in_parts_does_not_run_op_by_op():
    trace = holdall.trace(Nested(), torch.ones(4, 8), mesh={"dp": 2}, shard="zero3")
    groups = trace.about.shards.groups
    around = [b for b in trace.blocks if any(g.startswith(f"{b.module}.") for g in groups)]
    assert all("gathered and reduced by themselves" in obstacle(trace, b) for b in [*around, trace.whole])
    assert [obstacle(trace, b) for b in trace.blocks if b.module in groups] == [""] * len(groups)


def test_only_the_engines_own_ways_run_op_by_op():
    trace = holdall.trace(stack(), rows(0), mesh=REPLICAS, shard="nig")
    assert all("ops of its own" in obstacle(trace, b) for b in trace.blocks if b.module in trace.about.shards.groups)


def llama(is_tied):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=is_tied,
    )
    return LlamaForCausalLM(config)


def text(rank, length=96):
    ids = torch.randint(0, 211, (2, length), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids.clone()}


def outside(model, batch):
    """The loss of loops that compute it themselves."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"][:, 1:].flatten())


def with_head(way, is_tied, where, head, **given):
    model, loss = llama(is_tied), outside if where == "loop" else None
    optimizer, mine = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), text(dist.get_rank(), **given.pop("text", {}))
    asked = {"budget": "1GiB", "hardware": machine(), "mesh": TWO, "shard": way, "head": head, "loss": loss}
    with holdall.fit(model, optimizer, mine, **{**asked, **given}) as harness:
        for step in range(STEPS):
            value = outside(model, mine) if loss is not None else model(**mine).loss
            value.backward()
            if step == 0:
                grads = [p.grad.full_tensor().tolist() for p in model.parameters()]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return {
        "gradients": grads,
        "peaks": harness.step_peaks[1:],
        "predicted": harness.plan.predicted.peak["cpu"],
        "actions": harness.plan.count(),
    }


def whole_and_chunked(mesh):
    asked = {"planner": "nop", "mesh": mesh}
    return {case: [with_head(*case, head, **asked) for head in ("whole", 32)] for case in HEADS if HEADS[case] == mesh}


def with_less():
    long = {"text": {"length": 384}, "planner": "nop"}
    with pytest.raises(holdall.Infeasible) as refused:
        with_head("fsdp", True, "model", "whole", **long, budget=100_000)
    less = int(0.8 * refused.value.smallest)
    return less, with_head("fsdp", True, "model", "auto", **long, budget=less)


def with_heads():
    return whole_and_chunked(TWO), with_less()


@pytest.fixture(scope="module")
def heads():
    """case -> of every rank: the whole head, and in chunks; and what was done where the whole does not fit."""
    two = on_ranks(2, with_heads, timeout=300)
    four = on_ranks(4, whole_and_chunked, REPLICAS, timeout=300) if REPLICAS in HEADS.values() else []
    by_rank = [*(found for found, _ in two), *four]
    return {case: [rank[case] for rank in by_rank if case in rank] for case in HEADS}, [less for _, less in two]


@pytest.mark.parametrize("case", HEADS, ids=str)
def test_a_head_in_chunks_has_the_gradients_of_the_whole(heads, case):
    """Within what `runtime/head/chunked_loss.py` states for one process."""
    for whole, chunked in heads[0][case]:
        assert chunked["actions"] == {"shard": 1, "head": 1}
        for a, b in zip(chunked["gradients"], whole["gradients"], strict=True):
            assert (torch.tensor(a) - torch.tensor(b)).norm() <= 4e-7 * torch.tensor(b).norm()


@pytest.mark.parametrize("case", HEADS, ids=str)
def test_a_head_in_chunks_takes_the_predicted_memory(heads, case):
    for whole, chunked in heads[0][case]:
        assert chunked["predicted"] < 0.85 * whole["predicted"]
        assert chunked["predicted"] <= min(chunked["peaks"]) <= 1.02 * chunked["predicted"]


def test_a_head_is_chunked_where_the_whole_does_not_fit(heads):
    for budget, chunked in heads[1]:
        assert chunked["actions"]["head"] == 1
        assert max(chunked["peaks"]) <= budget


def test_a_loss_of_the_loop_needs_a_head_that_stays():
    """Under zero3 the head's weight leaves with the model's forward."""
    given = {"loss": outside, "mesh": {"dp": 2}, "shard": "zero3"}
    with pytest.raises(Unsupported, match="left the device"):
        holdall.trace(llama(True), text(0), head=32, **given)
