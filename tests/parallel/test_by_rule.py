"""Sharded steps by rule, against recordings of torch's own engine: the same bytes at the peak, the same collectives."""

from functools import cache

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import holdall
from holdall.analysis.over_ranks import GpuCluster, ShardWay, plan_over_ranks
from holdall.machine.presets import gpu
from holdall.parallel.sharding.by_rule import sharded_by_rule
from holdall.testing.worlds import machine
from holdall.tracing import groups_of
from holdall.types import Mesh

CASES = [
    ("llama", "sgd", "zero3", 2),
    ("llama", "adamw", "fsdp", 64),  # more ranks than rows: parts are padded
    ("llama", "adamw", "zero2", 3),
    ("gpt2", "adamw", "zero3", 3),  # tied weights, and a group whose input has no gradient
    ("gpt2", "sgd", "ddp", 2),
]


@cache
def build(name):
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 16))
    if name == "gpt2":
        config = GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
        return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def optimizer_of(name, model):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters())


@cache
def plain(name, optimizer):
    model, batch = build(name)
    return holdall.trace(model, batch, optimizer=optimizer_of(optimizer, model))


def by_rule(name, optimizer, way, sizes, **given):
    trace = plain(name, optimizer)
    return sharded_by_rule(trace, Mesh.of(sizes), way, groups_of(build(name)[0], trace), **given)


def outcome(trace, planner="nop", **options):
    return holdall.plan(trace, planner=planner, budget="1GiB", hardware=machine(), **options).predicted


def collectives(trace):
    return [(c.kind, c.nbytes) for c in trace.about.shards.collectives]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_the_rule_is_what_the_engine_does(case):
    name, optimizer, way, ranks = case
    model, batch = build(name)
    recorded = holdall.trace(model, batch, optimizer=optimizer_of(optimizer, model), mesh={"dp": ranks}, shard=way)
    made = by_rule(name, optimizer, way, {"dp": ranks})
    assert collectives(made) == collectives(recorded)
    for planner, options in {"nop": {}, "chen": {"variant": "sqrt", "last": True}}.items():
        ours, theirs = outcome(made, planner, **options), outcome(recorded, planner, **options)
        assert (ours.peak, ours.traffic) == (theirs.peak, theirs.traffic)


def test_the_rule_is_what_the_engine_does_with_replicas():
    sizes, way = {"replicate": 2, "dp": 3}, "fsdp"
    model, batch = build("llama")
    recorded = holdall.trace(model, batch, optimizer=optimizer_of("adamw", model), mesh=sizes, shard=way)
    made = by_rule("llama", "adamw", way, sizes, replicate=("replicate",))
    for planner, options in {"nop": {}, "chen": {"variant": "sqrt", "last": True}}.items():
        ours, theirs = outcome(made, planner, **options), outcome(recorded, planner, **options)
        assert (ours.peak, ours.traffic) == (theirs.peak, theirs.traffic)
    assert made.about.shards.replicate == recorded.about.shards.replicate


def states(trace):
    kinds = ("param", "grad", "state")
    there = [t for t in trace.tensors.values() if t.kind.value in kinds and t.name != "gathered parameter"]
    return sum(t.nbytes for t in there)


def test_shards_of_replicas_cost_memory_and_save_traffic_between_nodes():
    """A node of 4 with a copy in each of 2, against one group of 8: what crosses nodes is an all-reduce of the parts."""
    sizes = {"nodes": 2, "dp": 4}
    flat, copies = by_rule("llama", "sgd", "zero3", sizes), by_rule("llama", "sgd", "zero3", sizes, replicate=("nodes",))
    assert states(copies) == pytest.approx(2 * states(flat), rel=0.02)
    across = [sum(v for k, v in outcome(t).traffic.items() if k.startswith("nodes ")) for t in (flat, copies)]
    inside = [sum(v for k, v in outcome(t).traffic.items() if k.startswith("dp ")) for t in (flat, copies)]
    size = sum(p.numel() * 4 for p in build("llama")[0].parameters())
    assert across == [pytest.approx(3 * size / 4 / 2, rel=0.01), pytest.approx(2 * size / 4 / 2, rel=0.01)]
    assert inside[0] == pytest.approx(inside[1], rel=0.01)


def test_float32_shards_of_a_bf16_step_take_twice_the_bytes():
    model, batch = build("llama")
    model = model.to(torch.bfloat16)
    try:
        trace = holdall.trace(model, batch, optimizer=torch.optim.AdamW(model.parameters()))
        groups = groups_of(model, trace)
        narrow, wide = (sharded_by_rule(trace, Mesh.of({"dp": 4}), "zero3", groups, held=h) for h in (None, "float32"))
    finally:
        model.to(torch.float32)
    assert states(wide) == pytest.approx(2 * states(narrow), rel=0.01)
    sent = [{kind: sum(b for k, b in collectives(t) if k == kind) for kind, _ in collectives(t)} for t in (narrow, wide)]
    assert sent[1]["all_gather"] == sent[0]["all_gather"]
    assert sent[1]["reduce_scatter"] == 2 * sent[0]["reduce_scatter"]


def test_the_plan_over_many_gpus_is_the_fastest_that_fits():
    model, batch = build("llama")
    trace = holdall.trace(model, batch, optimizer=torch.optim.AdamW(model.parameters()), device="cuda")
    groups = groups_of(model, trace)
    found = plan_over_ranks(trace, groups, GpuCluster(gpus=16), gpu("h100-sxm"))
    assert {str(t.way) for t in found.trials} >= {"ddp over nodes 2 x dp 8", "zero3 over dp 8, replicated over nodes 2"}
    assert found.plan.predicted.seconds == min(t.outcome.seconds for t in found.trials)
    least = min(t.peak for t in found.trials)
    tight = plan_over_ranks(trace, groups, GpuCluster(gpus=16), gpu("h100-sxm"), budget=least)
    assert tight.plan.count().get("recompute", 0) == 0
    assert next(t for t in tight.trials if t.fits).peak <= least
    with pytest.raises(holdall.Infeasible, match="no way to shard over 16 GPUs fits"):
        plan_over_ranks(trace, groups, GpuCluster(gpus=16), gpu("h100-sxm"), budget=100_000)
    one = ShardWay(mesh=GpuCluster(gpus=16).mesh, shard="zero3")
    chosen = plan_over_ranks(trace, groups, GpuCluster(gpus=16), gpu("h100-sxm"), choices=[one])
    assert [t.way for t in chosen.trials] == [one]


def test_what_the_rule_does_not_cover_is_refused():
    with pytest.raises(holdall.HoldallError, match="is of a sharded model already"):
        sharded_by_rule(by_rule("llama", "sgd", "zero3", {"dp": 2}), Mesh.of({"dp": 2}), "zero3", [])
    with pytest.raises(holdall.HoldallError, match="zero1 is not known by rule"):
        by_rule("llama", "sgd", "zero1", {"dp": 2})
    with pytest.raises(holdall.HoldallError, match="do not fill nodes of 8"):
        _ = GpuCluster(gpus=12).mesh


def test_optimizer_states_are_on_the_host_where_nothing_else_fits():
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # as torch updates shards
    trace = holdall.trace(model, torch.randn(4, 512), loss=lambda m, x: m(x).sum(), optimizer=optimizer, device="cuda")

    def planned(budget):
        return plan_over_ranks(trace, groups_of(model, trace), GpuCluster(gpus=4), gpu("h100-sxm"), budget=budget)

    with pytest.raises(holdall.Infeasible) as refused:
        planned(100_000)
    kept = min(t.peak for t in planned("1GiB").trials)
    most = 8 * 512 * 513 * 8 // 4  # bytes of a rank's states
    assert refused.value.smallest < kept - most // 2
    everything, some = planned(refused.value.smallest), planned((refused.value.smallest + kept) // 2)
    held = [found.plan.predicted.peak["cpu"] for found in (everything, some)]
    assert 0 < held[1] < held[0] == pytest.approx(most, rel=0.01)
    for found in (everything, some):
        assert found.plan.count()["host_states"] == 1
        assert found.plan.predicted.seconds > min(t.outcome.seconds for t in planned("1GiB").trials)
