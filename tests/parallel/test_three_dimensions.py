"""Meshes that divide a model twice, or have replicas before data and a division: against one process and the prediction."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import holdall
from holdall.testing.ranks import by_default, on_ranks
from holdall.testing.worlds import machine

WORDS, WIDTH, LENGTH, ROWS, STEPS = 64, 16, 16, 2, 3
LARGEST = ROWS * LENGTH * WORDS * 8 + 1024  # bytes: the largest buffer that a collective has
CHEN = {"planner": "chen", "variant": "all"}
CASES = {  # layers of a Llama, or none: matrices side by side; mesh, way, other arguments of `fit`
    "both": (2, {"tp": 2, "cp": 2}, "sequence+zigzag", CHEN),
    "mixtral": (2, {"ep": 2, "tp": 2}, "sequence", CHEN),
    "turned": (1, {"cp": 2, "tp": 2}, "fsdp", {"precision": "bf16"}),
    "three": (1, {"dp": 2, "tp": 2, "cp": 2}, "zero3+tensor+ring", {}),
    "replicas": (0, {"replicate": 2, "dp": 2, "tp": 2}, "zero2", {"accumulate": 2}),
}
CASES = by_default(CASES, "turned", "replicas")
FOUR, EIGHT = ([case for case in cases if case in CASES] for cases in (("both", "mixtral", "turned"), ("three", "replicas")))


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_head, self.inner_dim = 4, WIDTH
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).split(self.inner_dim, dim=-1)
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in (q, k, v))
        return (
            (x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))).square().mean()
        )


def made(case, number):
    layers, _, _, options = CASES[case]
    torch.manual_seed(0)
    dtype = torch.float32 if "precision" in options else torch.float64
    generator = torch.Generator().manual_seed(number)
    if layers == 0:
        model, given = Fused(), {"x": torch.randn(ROWS, LENGTH, WIDTH, generator=generator, dtype=dtype)}
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"vocab_size": WORDS, "num_hidden_layers": layers, "head_dim": 8}
        ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
        model, given = mixtral(sizes) if case == "mixtral" else LlamaForCausalLM(LlamaConfig(**sizes)), {}
        given |= {"input_ids": ids, "labels": ids.clone()}
    model = model.to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), given


def mixtral(sizes):
    config = MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **sizes)
    config._experts_implementation = "batched_mm"  # the one for few tokens has no float64
    return MixtralForCausalLM(config)


def loss_of(model, given):
    out = model(**given)
    return out if isinstance(out, torch.Tensor) else out.loss


def number_of(mesh, rank):
    """Of the batch that a rank has."""
    return rank // (mesh.get("tp", 1) * mesh.get("cp", 1))


def fitted(case, folder):
    _, mesh, way, options = CASES[case]
    model, optimizer, given = made(case, number_of(mesh, dist.get_rank()))
    with holdall.fit(model, optimizer, given, budget="1GiB", hardware=machine(), mesh=mesh, shard=way, **options) as harness:
        for step in range(STEPS):
            for _ in range(options.get("accumulate", 1)):
                loss_of(model, given).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor().item()
            if step == 0:
                norms, grads = norm, [p.grad.full_tensor().tolist() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        traffic = {link: size for link, size in harness.measured().traffic.items() if size and "->" not in link}
        if case == "both":
            holdall.save_checkpoint(folder, model, optimizer, step=STEPS)
    return {
        "gradients": grads,
        "norm": norms,
        "weights": [p.full_tensor().tolist() for p in model.parameters()],
        "peaks": harness.step_peaks[1:],
        "predicted": harness.plan.predicted,
        "traffic": traffic,
        "actions": harness.plan.count(),
    }


def fitted_all(cases, folder):
    return {case: fitted(case, folder) for case in cases}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "latest"


@pytest.fixture(scope="module")
def four(folder):
    return on_ranks(4, fitted_all, FOUR, folder)


@pytest.fixture(scope="module")
def eight(folder):
    return on_ranks(8, fitted_all, EIGHT, folder)


@pytest.fixture
def ran(request, case):
    return [rank[case] for rank in request.getfixturevalue("four" if case in FOUR else "eight")]


def alone(case):
    """Clipped gradients of the first step, their norm, and the weights after all, of one process that has all batches; in
    bf16, of one under a plan."""
    options = CASES[case][3]
    numbers = range({"three": 2, "replicas": 4, "mixtral": 2}.get(case, 1))
    model, optimizer, _ = made(case, 0)
    batches, backwards = [made(case, number)[2] for number in numbers], options.get("accumulate", 1)
    narrow = {"budget": "1GiB", "hardware": machine(), "precision": options.get("precision")}
    with holdall.fit(model, optimizer, batches[0], **narrow):
        for step in range(STEPS):
            for _ in range(backwards):
                for given in batches:
                    (loss_of(model, given) / len(batches)).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if step == 0:
                norms, grads = float(norm), [p.grad.double().clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return grads, norms, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_weights_are_those_of_one_process(ran, case):
    """In float64 by rounding; in bf16 by 1 % of the norm, and weights after clipped steps by 0.1 % of theirs."""
    grads, norm, weights = alone(case)
    for rank in ran:
        for found, exact, off in ((rank["gradients"], grads, 0.01), (rank["weights"], weights, 0.001)):
            exact = torch.cat([t.double().flatten() for t in exact])
            error = torch.cat([torch.tensor(t, dtype=torch.float64).flatten() for t in found]) - exact
            if case == "turned":
                assert error.norm() < off * exact.norm()
            else:
                assert error.abs().max() <= 1e-14 * exact.abs().max()
        assert rank["norm"] == pytest.approx(norm, rel=1e-3 if case == "turned" else 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_peaks_and_bytes_are_the_predicted_ones(ran, case):
    """Peaks but for a scalar; bytes of steps of one backward, since the last alone sends to replicas."""
    for rank in ran:
        predicted = rank["predicted"]
        if case == "mixtral":  # loads of experts are taken to be equal
            assert max(rank["peaks"]) == pytest.approx(predicted.peak["cpu"], rel=0.25)
            links = rank["traffic"].keys() - {"ep all_to_all"}
            assert all(rank["traffic"][link] == predicted.traffic[link] for link in links)
            continue
        assert predicted.peak["cpu"] - 4 <= min(rank["peaks"]) <= predicted.peak["cpu"] + LARGEST
        if case != "replicas":
            assert rank["traffic"] == {link: size for link, size in predicted.traffic.items() if "->" not in link}
            assert {link.split()[0] for link in rank["traffic"]} == set(CASES[case][1])
    assert ("recompute" in ran[0]["actions"]) == (CASES[case][3] is CHEN)


def test_a_checkpoint_loads_in_one_process(four, folder):
    model, optimizer, _ = made("both", 0)
    holdall.load_checkpoint(folder, model, optimizer)
    weights = four[0]["both"]["weights"]
    assert all(torch.equal(p, torch.tensor(w, dtype=p.dtype)) for p, w in zip(model.parameters(), weights, strict=True))


def test_one_process_plans_for_many_ranks():
    model, optimizer, given = made("three", 0)
    peaks = []
    for ranks in (2, 8):
        trace = holdall.trace(model, given, optimizer=optimizer, mesh={"dp": ranks, "cp": 2, "tp": 2}, shard="zero3")
        assert trace.about.shards.way == "zero3+ulysses+tensor"
        assert {c.dim for c in trace.about.shards.collectives} == {"dp", "cp", "tp"}
        peaks.append(holdall.plan(trace, planner="nop", budget="1GiB", hardware=machine()).predicted.peak["cpu"])
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize(
    ("mesh", "way", "said"),
    [
        ({"tp": 2, "dp": 2, "cp": 2}, "fsdp", 'use mesh={"dp": 2, "tp": 2, "cp": 2}'),
        ({"tp": 2, "ep": 2}, "fsdp", "has no experts that can be divided over 2 ranks"),
        ({"tp": 2, "ep": 2, "dp": 2}, "fsdp", 'use mesh={"dp": 2, "tp": 2, "ep": 2}'),
        ({"tp": 2, "ep": 2}, "tensor+ring", "unknown way to divide a model over `tp` and `ep` `ring`"),
        ({"nodes": 2, "dp": 2, "tp": 2}, "fsdp", "nodes are for whole models"),
        ({"replicate": 2, "dp": 2, "tp": 2}, "ddp", "ddp is over one dimension of ranks"),
        ({"tp": 2, "cp": 2}, "tensor+rings", "unknown way to divide a model over `tp` and `cp` `rings`"),
        ({"tp": 2, "cp": 2}, "ring+zigzag", "unknown way to divide a model over `tp` and `cp` `zigzag`"),
        ({"tp": 2, "cp": 2}, "zero2+ring", "unknown way to divide a model over `tp` and `cp` `zero2`"),
    ],
)
def test_other_meshes_and_ways_are_refused(mesh, way, said):
    model, optimizer, given = made("three", 0)
    with pytest.raises(holdall.HoldallError) as error:
        holdall.trace(model, given, optimizer=optimizer, mesh=mesh, shard=way)
    assert said in str(error.value)
