"""Dettmers et al., "QLoRA" (arXiv 2305.14314): frozen weights in NF4, expanded at use, under trained adapters."""

import copy

import pytest
import torch
from torch import nn

import holdall
from holdall import precision
from holdall.checkpoints import load_checkpoint, save_checkpoint
from holdall.narrow.nf4 import GROUP, NormalFloat4, code_book, largest_gap
from holdall.narrow.packed_layers import PackedLinear
from holdall.runtime.budget.ledger import Ledger
from holdall.testing.worlds import family, machine
from holdall.types import Kind

PUBLISHED = (  # appendix E
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
BOTH = [NormalFloat4(), NormalFloat4(double=False)]
both = pytest.mark.parametrize("form", BOTH, ids=["double", "single"])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_trip(form, values, dtype=torch.float32):
    return form.expand(form.pack(values), values.shape, dtype)


# the format


def test_the_code_book_is_the_published_one():
    assert code_book() == pytest.approx(PUBLISHED, abs=2e-7)


def test_the_levels_hold_equal_shares_of_normal_numbers_where_there_are_two_neighbours():
    """Between the middles of neighbouring quantiles lie equal shares, on either side of zero: 1/16 and 1/14 of a half each."""
    found = torch.bucketize(normal(64, 4096) / normal(64, 4096).abs().max(), torch.tensor(code_book()))
    assert len(found.unique()) > 1  # of a block as large as that, few reach the ends
    scale = 1 / torch.special.ndtri(torch.tensor(1 - (1 / 32 + 1 / 30) / 2))
    levels = torch.tensor(code_book())[1:-1] / scale  # as numbers of the distribution itself
    shares = torch.special.ndtr(levels).diff()
    assert shares[-6:] == pytest.approx(shares[-1].item(), rel=1e-4)
    assert shares[:5] == pytest.approx(shares[0].item(), rel=1e-4)


@both
@pytest.mark.parametrize("shape", [(64, 64), (3, 5), (7, 31), (1, 1), (130, 129)])
def test_a_round_trip_is_off_by_half_a_gap_and_what_the_scale_is_off(form, shape):
    values = normal(*shape)
    before = values.clone()
    packed = form.pack(values)
    assert torch.equal(values, before)
    assert packed.dtype == torch.uint8 and packed.numel() == form.nbytes(values.numel())
    rows = nn.functional.pad(values.reshape(-1), (0, -values.numel() % 64)).view(-1, 64)
    largest, scales = rows.abs().amax(1), form.scales(packed, values.numel())
    made = nn.functional.pad(form.expand(packed, values.shape, torch.float32).reshape(-1), (0, -values.numel() % 64))
    bound = scales * largest_gap() / 2 + (largest - scales).clamp(min=0)
    assert ((made.view(-1, 64) - rows).abs() <= bound[:, None] * (1 + 1e-5)).all()
    if not form.double:
        assert torch.equal(scales, largest)
        assert torch.equal(form.expand(form.pack(made), made.shape, torch.float32), made)  # what it has, it keeps
    else:
        apart = (largest - largest.mean()).abs().max()
        assert (scales - largest).abs().max() <= apart / 127 / 2 * (1 + 1e-3) + 1e-6


@both
def test_blocks_of_zeros_and_of_one_value(form):
    values = torch.zeros(4, 64)
    assert torch.equal(round_trip(form, values), values)
    values[1] = -3.0
    values[2] = 1e-3
    made = round_trip(form, values)
    assert torch.equal(made[0], values[0]) and made[1] == pytest.approx(values[1], abs=0.02)
    assert not made.isnan().any()


def test_the_error_is_below_that_of_even_levels_and_double_quantisation_hardly_adds_to_it():
    values = normal(256, 256)
    rows = values.view(-1, 64)
    step = rows.abs().amax(1, keepdim=True) / 7
    even = ((rows / step).round() * step - rows).norm()
    once, twice = ((round_trip(form, values) - values).norm() for form in reversed(BOTH))
    assert once < 0.9 * even
    assert twice < 1.01 * once


def test_values_in_bf16_are_rounded_once():
    values = normal(33, 65)
    assert torch.equal(round_trip(BOTH[0], values, torch.bfloat16), round_trip(BOTH[0], values).bfloat16())


def test_bytes_of_a_weight():
    numel = 4096 * 4096
    blocks = numel // 64
    assert BOTH[0].nbytes(numel) == numel // 2 + blocks + 4 * blocks // GROUP + 4
    assert BOTH[1].nbytes(numel) == numel // 2 + 4 * blocks
    said = {name: precision.bytes_per_parameter(name, torch.optim.AdamW).total for name in ("nf4", "nf4:double=false")}
    assert said == pytest.approx({"nf4": 0.516, "nf4:double=false": 0.5625}, abs=2e-4)
    assert BOTH[0].nbytes(numel) / numel == pytest.approx(said["nf4"], rel=1e-4)


# a layer


def packed_linear(*sizes, bias=False):
    layer = nn.Linear(*sizes, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    plain = copy.deepcopy(layer)
    with torch.no_grad():
        plain.weight.copy_(round_trip(BOTH[0], layer.weight, torch.bfloat16))
    return layer, plain, precision.find("nf4").put_on(nn.Sequential(layer))


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_as_a_plain_one_with_the_expanded_weight_and_saves_only_the_bytes(bias):
    layer, plain, undo = packed_linear(96, 48, bias=bias)
    x, grad, saved, out = normal(2, 40, 96).bfloat16(), normal(2, 40, 48).bfloat16(), [], []
    for each in (layer, plain):
        given = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = each(given)
        y.backward(grad)
        out.append((y.detach(), given.grad))
    assert all(map(torch.equal, *out))
    assert [t.untyped_storage().nbytes() for t in saved[:1]] == [BOTH[0].nbytes(96 * 48)] and saved[0].dtype == torch.uint8
    assert len(saved) == 2 and saved[1].dtype == torch.bfloat16  # the plain layer saved its whole weight
    undo()


def test_beside_the_bytes_there_is_one_expanded_weight_at_a_time():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)]).requires_grad_(False)
    numel = 256 * 256
    undo = precision.find("nf4").put_on(model)
    x = normal(1, 256).bfloat16().requires_grad_()
    model(x).sum().backward()  # the table of codes is there from now on
    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert held == 8 * BOTH[0].nbytes(numel) < 0.53 * 8 * numel
    with Ledger(seed=[*model.parameters(), x]) as ledger:
        before = ledger.live
        model(x).sum().backward()
    scales = 3 * 4 * numel // 64
    assert 2 * numel <= ledger.peak - before <= 6 * numel + scales + 32 * 1024
    undo()


def test_leaving_gives_the_values_of_the_packed_weights_or_the_weights_that_waited():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).requires_grad_(False)
    before, weights = [p.clone() for p in model.parameters()], list(model.parameters())
    for name in ("nf4:keep=true", "nf4"):
        undo = precision.put_on(precision.find(name), model)
        assert [type(m) for m in model] == [PackedLinear] * 2 and model[0].weight.dtype == torch.uint8
        undo()
        assert [type(m) for m in model] == [nn.Linear] * 2
        assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))
        if "keep" in name:
            assert all(map(torch.equal, model.parameters(), before))
    assert torch.equal(model[0].weight, round_trip(BOTH[0], before[0])) and torch.equal(model[0].bias, before[1])
    assert not torch.equal(model[0].weight, before[0])


def test_a_state_dict_has_whole_weights_and_one_that_is_loaded_is_packed():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).requires_grad_(False)
    before = model.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    undo = precision.find("nf4").put_on(model)
    inside = model.state_dict()
    assert {n: (v.shape, v.dtype) for n, v in inside.items()} == {n: (v.shape, v.dtype) for n, v in before.items()}
    assert torch.equal(inside["0.weight"], round_trip(BOTH[0], before["0.weight"]))
    other = {name: value * 2 for name, value in before.items()}
    model.load_state_dict(other)
    assert torch.equal(model.state_dict()["0.weight"], round_trip(BOTH[0], other["0.weight"]))
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**other, "0.weight": torch.zeros(3, 3)})
    undo()
    assert torch.equal(model[0].weight, round_trip(BOTH[0], other["0.weight"]))


def test_a_checkpoint_that_is_read_inside_reaches_the_packed_weights(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).requires_grad_(False)
    model[1].requires_grad_(True)
    save_checkpoint(tmp_path, model, step=1)
    expected = round_trip(BOTH[0], model[0].weight)
    with torch.no_grad():
        model[0].weight.zero_()
    undo = precision.find("nf4").put_on(model)
    load_checkpoint(tmp_path, model)
    assert torch.equal(model.state_dict()["0.weight"], expected)
    undo()


# which layers


def test_only_frozen_weights_that_are_used_once_and_become_smaller_are_packed():
    model, _ = family("tiny-llama")
    model.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(True)
    undo = precision.find("nf4:skip=o_proj").put_on(model)
    packed = {name for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    undo()
    assert packed and not any("lm_head" in n or "o_proj" in n or "layers.0.mlp" in n for n in packed)
    assert {n.rpartition(".")[2] for n in packed} == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}
    tied = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(2, 2)).requires_grad_(False)
    tied[1].weight = tied[0].weight
    with pytest.raises(holdall.InvalidInput, match="has none"):
        precision.find("nf4").put_on(tied)


def test_a_model_without_frozen_weights_is_refused_with_what_to_type():
    model, batch = family("tiny-llama")
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(holdall.InvalidInput, match="has none") as refused:
        holdall.fit(model, "adamw", batch, hardware=machine(), precision="nf4")
    assert "peft.get_peft_model(model, peft.LoraConfig(" in refused.value.hint and "\n" not in str(refused.value.fact)
    assert all(map(torch.equal, model.parameters(), before))
    with pytest.raises(holdall.InvalidInput, match="power of two"):
        precision.find("nf4:block=60")
    assert str(precision.find("qlora:double=false")) == "nf4:double=false"


def test_a_layer_whose_model_reads_the_dtype_of_its_weight_is_named():
    layer, _, undo = packed_linear(64, 64)
    with pytest.raises(holdall.Unsupported, match="reads the dtype") as refused:
        layer(normal(2, 64).to(layer.weight.dtype))
    assert "skip=" in refused.value.hint
    undo()


# under plans


def adapted(rank=2, target="all-linear"):
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    base, batch = family("tiny-llama")
    torch.manual_seed(0)
    return peft.get_peft_model(base, peft.LoraConfig(r=rank, target_modules=target)).train(), batch


def adamw(model, lr=1e-2):
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)  # frozen ones too, as loops often have it


def train(model, batch, optimizer, steps=3):
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    return losses


def trained(model):
    return [p.detach() for p in model.parameters() if p.requires_grad]


def test_every_budget_gives_the_bits_of_plain_training_with_the_expanded_weights_and_its_peak_is_the_predicted_one():
    model, batch = adapted(target=["q_proj", "v_proj"])
    before = [p.clone() for p in model.parameters()]
    traces = {name: holdall.trace(model, batch, optimizer=adamw(model), precision=name) for name in ("nf4", "bf16")}
    assert all(map(torch.equal, model.parameters(), before)), "a trace leaves the model as it is"
    held = {name: {t.name: t.nbytes for t in trace.tensors.values() if t.kind is Kind.PARAM} for name, trace in traces.items()}
    packed = [n for n in held["bf16"] if n.endswith(("base_layer.weight", "_proj.weight"))]
    assert len(packed) == 7 * len(model.base_model.model.model.layers)
    assert [held["nf4"][n] for n in packed] == [BOTH[0].nbytes(held["bf16"][n] // 2) for n in packed]
    reference = copy.deepcopy(model)
    precision.find("nf4").put_on(reference)()  # the values of the packed weights
    optimizer = adamw(reference)
    with holdall.apply(holdall.plan(traces["bf16"], hardware=machine(), planner="nop"), reference, optimizer):
        expected = train(reference, batch, optimizer)
    assert len(set(expected)) == 3
    peak = holdall.plan(traces["nf4"], hardware=machine(), planner="nop").predicted.peak["cpu"]
    for share, options in (
        (1.0, {"planner": "nop"}),
        (0.5, {}),
        (0.3, {"allow": ["offload", "place"]}),
        (0.8, {"planner": "chen", "variant": "all"}),
    ):
        plan = holdall.plan(traces["nf4"], budget=int(share * peak), hardware=machine(), **options)
        mine = copy.deepcopy(model)
        optimizer = adamw(mine)
        with holdall.apply(plan, mine, optimizer) as harness:
            losses = train(mine, batch, optimizer)
        assert harness.measured().peak["cpu"] == plan.predicted.peak["cpu"] <= share * peak
        assert harness.notes == [] and losses == expected
        assert all(map(torch.equal, trained(mine), trained(reference)))
        assert share == 1 or len(plan.actions) > 1
        assert not any(isinstance(m, PackedLinear) for m in mine.modules())


def test_adapters_learn_about_as_well_as_over_bf16_weights():
    """A batch learnt by heart: the losses of the last steps are within 2 % of those over bf16 weights."""
    found = {}
    for name in ("bf16-master", "nf4"):
        model, batch = adapted(rank=8)
        optimizer, losses = adamw(model, lr=5e-3), []
        with precision.prepare(name, model, optimizer) as session:
            assert name != "nf4" or any(p.dtype == torch.uint8 for p in model.parameters())
            for _ in range(30):
                loss = model(**batch).loss
                session.backward(loss)
                session.step()
                losses.append(loss.item())
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        found[name] = losses
    plain, packed = found.values()
    assert plain[-1] < 0.85 * plain[0] and packed != plain
    assert packed[-5:] == pytest.approx(plain[-5:], rel=0.02)


def test_after_training_the_weights_that_waited_are_back_and_the_adapters_are_saved(tmp_path):
    model, batch = adapted(target=["q_proj"])
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = adamw(model)
    with holdall.fit(model, optimizer, batch, hardware=machine(), precision="nf4:keep=true"):
        train(model, batch, optimizer, steps=1)
        save_checkpoint(tmp_path, model, step=1)
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    other, _ = adapted(target=["q_proj"])
    load_checkpoint(tmp_path, other)
    assert all(map(torch.equal, trained(other), trained(model)))


def test_a_trace_for_a_gpu_has_one_op_for_each_expansion_and_no_wide_copy():
    """Seven weights a layer, each way, less those of the first layer whose input needs no gradient."""
    model, batch = adapted(target=["q_proj"])
    trace = holdall.trace(model, batch, optimizer=adamw(model), device="cuda", precision="nf4")
    made = [op for op in trace.ops if op.site.op == "holdall.nf4_expand.default"]
    layers = len(model.base_model.model.model.layers)
    assert 7 * (2 * layers - 1) <= len(made) <= 7 * 2 * layers
    numels = {p.numel() for n, p in model.named_parameters() if n.endswith(("base_layer.weight", "_proj.weight"))}
    sizes = {t.nbytes for op in made for t in trace.tensors.values() if t.born == op.id}
    assert sizes == {2 * n for n in numels}  # bf16, and nothing else
