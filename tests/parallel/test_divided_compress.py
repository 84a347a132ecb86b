"""Saved tensors in codes where ranks divide the model: copies of a parameter stay alike, gradients, peaks and bytes."""

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import holdall
from holdall.testing.ranks import by_default, on_ranks
from holdall.testing.worlds import machine

STEPS = 4
EVERY = {  # way -> mesh
    "tensor": {"tp": 2},
    "sequence": {"tp": 2},
    "ring": {"cp": 2},
    "experts": {"ep": 2},
    "fsdp+tensor": {"dp": 2, "tp": 2},
    "tensor+experts": {"ep": 2, "tp": 2},  # ranks of `tp` have unequal numbers of tokens
}
CASES = by_default(EVERY, "sequence", "ring", "experts", "fsdp+tensor")
LEAST_COSINE = 0.97
BUFFER = 2 * 4 * 32 * 64 * 4  # bytes: twice the largest that a collective has, the logits


def build(way):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes["num_key_value_heads"] = 2
    if "experts" in way:
        return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **sizes))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def number_of(way, rank):
    """Of the batch that a rank has."""
    return {"experts": rank, "fsdp+tensor": rank // 2, "tensor+experts": rank // 2}.get(way, 0)


def batch(number):
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids.clone()}


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def fitted(way):
    model, given = build(way), batch(number_of(way, dist.get_rank()))
    optimizer, grads = momentum(model), []
    how = {"planner": "actnn", "bits": 4, "allow": ["compress"], "budget": "1GiB", "hardware": machine()}
    with holdall.fit(model, optimizer, given, mesh=CASES[way], shard=way, **how) as harness:
        for _ in range(STEPS):
            loss = model(**given).loss  # kept, as in most loops
            loss.backward()
            grads = grads or [p.grad.full_tensor().tolist() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        traffic = harness.measured().traffic
    whole = {
        name: p.to_local().tolist()
        for name, p in model.named_parameters()
        if all(
            place.is_replicate() for dim, place in zip(p.device_mesh.mesh_dim_names, p.placements, strict=True) if dim == "tp"
        )
    }
    return {
        "gradients": grads,
        "copies": whole,
        "peaks": harness.step_peaks[1:],
        "predicted": harness.plan.predicted,
        "traffic": {link: size for link, size in traffic.items() if size},
        "actions": harness.plan.count(),
    }


def fitted_all(ranks):
    return {way: fitted(way) for way, mesh in CASES.items() if len(mesh) == ranks // 2}


@pytest.fixture(scope="module")
def ran():
    """way -> what each rank found."""
    each = [on_ranks(ranks, fitted_all, ranks, timeout=300) for ranks in (2, 4)]
    return {way: [rank[way] for rank in each[len(CASES[way]) - 1]] for way in CASES}


each_way = pytest.mark.parametrize("way", CASES)


@each_way
def test_gradients_are_those_of_one_process_within_what_is_stated(ran, way):
    model = build(way)
    numbers = {number_of(way, rank) for rank in range(len(ran[way]))}
    sum(model(**batch(n)).loss / len(numbers) for n in numbers).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    for rank in ran[way]:
        assert rank["actions"]["compress"] >= 2
        ours = torch.cat([torch.tensor(g).flatten() for g in rank["gradients"]])
        cosine = torch.nn.functional.cosine_similarity(ours, expected, dim=0).item()
        assert LEAST_COSINE < cosine < 1.0 - 1e-12


@each_way
def test_copies_of_a_parameter_stay_the_same_on_ranks_that_divide_tensors(ran, way):
    """To the bit, after steps with momentum."""
    if "tp" not in CASES[way]:
        pytest.skip("no tensors are divided")
    for first, second in pairs_of_tensors(way, ran[way]):
        assert first["copies"] == second["copies"] != {}


def pairs_of_tensors(way, ranks):
    """Ranks that differ in `tp` alone, which is the last dimension."""
    return zip(ranks[::2], ranks[1::2], strict=True)


@each_way
def test_peaks_and_bytes_are_as_predicted(ran, way):
    for rank in ran[way]:
        predicted = rank["predicted"]
        if "experts" in way:  # of unequal loads
            assert min(rank["peaks"]) == pytest.approx(predicted.peak["cpu"], rel=0.1)
            continue
        assert predicted.peak["cpu"] <= min(rank["peaks"]) <= predicted.peak["cpu"] + BUFFER
        assert rank["traffic"] == {link: size for link, size in predicted.traffic.items() if size}
