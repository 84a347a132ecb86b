"""Compressed activations: codecs to the byte and unbiased, the action against the ledger, gradients within what is stated."""

import copy
import functools
import gc
import random

import pytest
import torch

import holdall
from holdall.actions.compress import SIGN, Compress, codable
from holdall.actions.offload import Offload
from holdall.actions.recompute import Recompute
from holdall.codecs import Group, Sign, codec_for
from holdall.cost.roofline import cost_trace
from holdall.errors import InvalidInput, Unsupported
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.runtime.budget.ledger import Ledger
from holdall.runtime.harness import Harness
from holdall.simulator import simulate
from holdall.testing.contracts import problem_for, traced, train
from holdall.testing.worlds import family, far_peak, far_used, machine
from holdall.tracing import trace_step
from holdall.tracing.step import default_loss
from holdall.types import Plan

CODECS = [*(("group", b) for b in range(1, 9)), ("int8", 8), ("fp8", 8), ("fp8_e5m2", 8), ("sign", 1)]
SIZES = [1, 256, 256 * 258 + 7]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# codecs


@pytest.mark.parametrize(("name", "bits"), CODECS)
def test_bytes_and_workspace_are_what_was_said(name, bits):
    codec = codec_for(name, bits)
    for n in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(n).to(dtype)
            with Ledger(seed=[x]) as ledger:
                before = ledger.live
                codes = codec.encode(x, generator())
                assert codes.untyped_storage().nbytes() == codec.nbytes(n)
                encoding = ledger.peak - before - codec.nbytes(n)
                ledger.restart()
                before = ledger.live
                back = codec.decode(codes, n, dtype)
                decoding = ledger.peak - before - back.untyped_storage().nbytes()
            assert (encoding, decoding) == codec.workspace(n, "cpu")
            assert (back.shape, back.dtype) == (x.shape, dtype)


def test_a_group_takes_32_bytes_per_bit_and_4_for_its_scale():
    for bits in range(1, 9):
        assert Group(bits=bits).nbytes(256) == 32 * bits + 4
        assert Group(bits=bits).nbytes(257) == 2 * (32 * bits + 4)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_whole_levels_come_back_as_they_were(bits):
    x = torch.randint(0, 2**bits, (256 * 5 + 100,), generator=generator()).float()
    x[::256], x[1::256] = 0, 2**bits - 1
    codec = Group(bits=bits)
    assert torch.equal(codec.decode(codec.encode(x, generator()), x.numel(), torch.float32), x)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_stochastic_rounding_has_the_right_mean(bits):
    """Over 2,000 draws, with values far from zero, where the rounding of the minimum would show."""
    draws, codec, source = 2000, Group(bits=bits), generator()
    x = torch.randn(512, generator=source) + torch.tensor([0.0, 50.0]).repeat_interleave(256)
    many = x.repeat(draws)  # groups know nothing of each other
    total = codec.decode(codec.encode(many, source), many.numel(), torch.float32).view(draws, 512).double().sum(0)
    scales = codec.encode(x, source)[-8:].view(torch.bfloat16).double()
    low, step = scales[:2].repeat_interleave(256), scales[2:].repeat_interleave(256)
    share = ((x.double() - low) / step) % 1
    sigma = step * (share * (1 - share) / draws).sqrt()
    wrong = (total / draws - x.double()).abs()
    assert (wrong <= 3 * sigma + 1e-3 * step).double().mean() > 0.98  # 99.7 of a hundred, and room for chance
    assert abs(float((total / draws - x.double()).sum() / sigma.square().sum().sqrt())) < 4


def test_nearest_rounding_is_within_half_a_step_and_is_not_random():
    x = torch.randn(1000, generator=generator())
    codec = codec_for("int8")
    codes = codec.encode(x, generator(1))
    assert torch.equal(codes, codec.encode(x, generator(2)))
    steps = codes[-8:].view(torch.bfloat16).float().repeat_interleave(256)[:1000]
    assert ((codec.decode(codes, 1000, torch.float32) - x).abs() <= steps * 0.501).all()


@pytest.mark.parametrize(("name", "error"), [("fp8", 2**-4), ("fp8_e5m2", 2**-3)])
def test_fp8_is_within_its_precision_for_normal_values(name, error):
    """FP8: a scaled round trip of e4m3 is within 2^-4 of normal values."""
    codec = codec_for(name)
    x = torch.randn(256 * 40, generator=generator()) * torch.logspace(-20, 20, 40, dtype=torch.float32).repeat_interleave(256)
    back = codec.decode(codec.encode(x, generator()), x.numel(), torch.float32)
    largest = x.view(40, 256).abs().amax(1, keepdim=True)
    least = largest * torch.finfo(codec.dtype).smallest_normal / torch.finfo(codec.dtype).max
    normal = x.view(40, 256).abs() > least
    assert normal.float().mean() > 0.9
    relative = ((back - x).view(40, 256) / x.view(40, 256)).abs()[normal]
    assert relative.max() <= error * 1.001
    assert back.isfinite().all()


def test_a_constant_a_zero_and_what_is_not_a_number_come_back():
    for bits in (1, 2, 4, 8):
        codec = Group(bits=bits)
        for value in (0.0, 1.0, -3.5):
            x = torch.full((300,), value)
            assert torch.equal(codec.decode(codec.encode(x, generator()), 300, torch.float32), x)
        x = torch.randn(600)
        x[300] = float("nan")
        back = codec.decode(codec.encode(x, generator()), 600, torch.float32)
        assert back[256:512].isnan().all() and back[:256].isfinite().all() and back[512:].isfinite().all()


def test_signs_are_exact():
    x = torch.randn(1000)
    x[::7] = 0
    assert torch.equal(Sign().decode(Sign().encode(x, generator()), 1000, torch.float32), (x > 0).float())


def test_a_codec_that_cannot_be_is_refused():
    with pytest.raises(InvalidInput, match="1 to 8"):
        codec_for("group", 9)
    with pytest.raises(InvalidInput, match="has 8 bits"):
        codec_for("fp8", 4)
    with pytest.raises(InvalidInput, match=r"unknown codec `gruop`\n.*did you mean `group`"):
        codec_for("gruop")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_kernels_of_a_gpu_do_what_the_plain_ops_do(bits):
    for n, dtype in [(256 * 19 + 100, torch.float32), (100, torch.bfloat16), (256 * 8, torch.float16)]:
        x = (torch.randn(n, generator=generator()) + 3).to(dtype)
        nearest, codec = Group(bits=bits, stochastic=False), Group(bits=bits)
        there = nearest.encode(x.cuda(), generator())
        here = nearest.encode(x, generator())
        step = float(here[-2 * -(-n // 256) :].view(torch.bfloat16).max())
        back = nearest.decode(there, n, dtype).cpu().float()
        assert (back - nearest.decode(here, n, dtype).float()).abs().max() <= 1.01 * step  # a tie may fall to either side
        assert torch.allclose(nearest.decode(here.cuda(), n, dtype).cpu().float(), nearest.decode(here, n, dtype).float())
        many = x.repeat(256 * 4)
        mean = codec.decode(codec.encode(many.cuda(), generator()), many.numel(), dtype).float().view(-1, n).mean(0).cpu()
        assert (mean - x.float()).abs().max() < 6 * step * 0.5 / 32 + 0.02 * (dtype != torch.float32)


# the action


@functools.cache
def world(name):
    return traced(name)


def fresh(name):
    """A copy of a family's model, so that it is traced once."""
    model, batch, _, trace = world(name)
    model = copy.deepcopy(model)
    return model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3), trace


def run(name, actions, steps=2):
    """(harness, plan, losses)"""
    model, batch, optimizer, trace = fresh(name)
    plan = finish(Nop(), problem_for(trace), actions)
    gc.collect()
    with holdall.apply(plan, model, optimizer) as harness:
        losses = train(model, batch, optimizer, steps)
        assert far_used(harness) == 0
    return harness, plan, losses


def gradients(name, actions):
    """Of one step, as one vector."""
    model, batch, _, trace = fresh(name)
    torch.manual_seed(1)
    with holdall.apply(finish(Nop(), problem_for(trace), actions), model, None, enforce=False):
        default_loss(model, batch).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def everywhere(trace, **options):
    return [Compress.of(trace, b, **options) for b in trace.blocks if b.backward is not None and codable(trace, b)]


def cosine(a, b):
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))


@functools.cache
def plain(name):
    return run(name, [])


@functools.cache
def exact_gradients(name):
    return gradients(name, [])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tied", {"bits": 2}),
        ("tied", {"bits": 8, "codec": "fp8", "swap": True}),
        ("twice", {"bits": 4, "swap": True, "overlap": True}),
        ("convnet", {"bits": 4, "swap": True, "overlap": True}),
    ],
)
def test_every_block_compressed_has_the_predicted_peak_and_the_forward_of_plain_training(name, options):
    harness, plan, losses = run(name, everywhere(world(name)[3], **options))
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert far_peak(harness) == plan.predicted.peak.get("far", 0)
    assert harness.step_peaks[-1] < plain(name)[0].step_peaks[-1]
    assert losses[0] == plain(name)[2][0]  # before any update: the same bits
    assert harness.notes == []


@pytest.mark.parametrize(
    ("name", "codec", "bits", "least"),
    [
        ("tied", "group", 2, 0.75),
        ("tied", "group", 4, 0.98),
        ("convnet", "group", 8, 0.999),
        ("tied", "int8", 8, 0.999),
        ("convnet", "fp8", 8, 0.999),
        ("tied", "fp8_e5m2", 8, 0.998),
    ],
)
def test_gradients_are_within_the_tolerance_that_is_stated(name, codec, bits, least):
    assert least < cosine(gradients(name, everywhere(world(name)[3], codec=codec, bits=bits)), exact_gradients(name)) < 1


def test_any_mix_with_other_actions_has_the_predicted_peak():
    """Blocks at random under compress, recompute and offload."""
    for name, seed in [("tied", 0), ("convnet", 2), ("twice", 3)]:
        trace, draw = world(name)[3], random.Random(seed)
        actions = []
        for block in trace.blocks:
            if block.backward is None or not block.saves:
                continue
            overlap = draw.random() < 0.5
            choice = draw.choice(["compress", "swap", "recompute", "offload", "keep"])
            if choice in ("compress", "swap"):
                actions.append(Compress.of(trace, block, bits=draw.randint(1, 8), swap=choice == "swap", overlap=overlap))
            elif choice == "recompute":
                actions.append(Recompute.of(trace, [block]))
            elif choice == "offload":
                actions.append(Offload.of(trace, block, overlap=overlap))
        draw.shuffle(actions)
        harness, plan, _ = run(name, actions)
        assert harness.step_peaks[-1] == plan.predicted.peak["cpu"], (name, actions)
        assert simulate(problem_for(trace), actions, checked=True).peak == plan.predicted.peak


def test_the_same_block_is_not_compressed_and_recomputed_or_offloaded():
    trace = world("tied")[3]
    block = trace.block("layers.1")
    mine = Compress.of(trace, block, bits=4)
    for other, said in ((Recompute.of(trace, [block]), "recompute"), (Offload.of(trace, block, overlap=False), "offload")):
        with pytest.raises(InvalidInput, match=f"`layers.1` cannot have both {said} and compress"):
            simulate(problem_for(trace), [mine, other])


def test_parameters_masks_statistics_and_outputs_stay_as_they_are():
    for name in ("tied", "convnet"):
        trace = world(name)[3]
        for block in trace.blocks:
            for x in codable(trace, block):
                info = trace.tensors[x]
                assert info.dtype == "float32" and info.born >= 0 and x not in block.outputs
                assert "empty_like" not in info.name  # on a CPU, dropout draws its mask into it
                assert trace.ops[info.born].writes[0] == x


def test_the_model_draws_the_same_random_numbers():
    """Dropout after a compressed block is as it was: the state of the global generator is the same at the end."""
    run("tied", [], steps=1)
    expected = torch.get_rng_state()
    run("tied", everywhere(world("tied")[3], bits=2), steps=1)
    assert torch.equal(torch.get_rng_state(), expected)


def test_the_same_run_gives_the_same_bits():
    first, second = (gradients("twice", everywhere(world("twice")[3], bits=2)) for _ in range(2))
    assert torch.equal(first, second)


def test_a_language_model_of_hugging_face_has_the_predicted_peak():
    """Without an optimizer, so that the peak is the activations'."""
    pytest.importorskip("transformers")
    model, batch = family("tiny-llama")
    batch = {k: v.repeat(4, 1) for k, v in batch.items()}
    problem = problem_for(cost_trace(trace_step(model, batch), machine()))
    plan = finish(Nop(), problem, everywhere(problem.trace, bits=3, swap=True, overlap=True))
    gc.collect()
    with holdall.apply(plan, model, None) as harness:
        default_loss(model, batch).backward()
    assert harness.step_peaks == [plan.predicted.peak["cpu"]]
    assert far_peak(harness) == plan.predicted.peak["far"]
    assert harness.step_peaks[0] < 0.6 * simulate(problem, []).peak["cpu"]


def test_the_result_of_a_relu_is_kept_as_signs_where_only_they_are_asked_for():
    trace = world("convnet")[3]
    action = Compress.of(trace, trace.block("stages.1"), bits=4)
    assert SIGN in action.bits and 4 in action.bits
    block = trace.block("stages.1")
    signs = [trace.saves[block.saves[n]] for n, b in zip(action.saves, action.bits, strict=True) if b == SIGN]
    assert all(trace.ops[s.unpacked + 1].site.op == "aten.threshold_backward.default" for s in signs)


def test_backward_may_be_run_twice():
    model, batch, optimizer, trace = fresh("twice")
    plan = finish(Nop(), problem_for(trace), everywhere(trace, bits=8))
    with holdall.apply(plan, model, optimizer, enforce=False):
        loss = default_loss(model, batch)
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters()]
        loss.backward()
    assert all(torch.allclose(p.grad, 2 * g, rtol=1e-6, atol=1e-9) for p, g in zip(model.parameters(), once, strict=True))


def test_another_shape_is_noticed_and_its_forward_stays_exact():
    model, _, optimizer, trace = fresh("tied")
    reference = copy.deepcopy(model)
    plan = finish(Nop(), problem_for(trace), everywhere(trace, bits=8))
    batch = (torch.randint(0, 64, (3, 11)),)
    expected = train(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-3), 1)
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        assert train(model, batch, optimizer, 1) == expected
    assert harness.notes


def test_a_plan_with_it_survives_saving_and_is_labelled_as_not_exact(tmp_path):
    trace = world("tied")[3]
    plan = finish(Nop(), problem_for(trace), everywhere(trace, bits=3, swap=True, overlap=True))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert not any(a.exact for a in plan.actions)


def test_auto_does_not_choose_it():
    trace = world("tied")[3]
    top = simulate(problem_for(trace), []).peak["cpu"]
    for allow in (None, ["recompute", "offload", "place", "head"]):
        plan = holdall.plan(trace, budget=top * 9 // 10, hardware=machine(), allow=allow)
        assert plan.actions and all(a.name != "compress" for a in plan.actions)


def test_codes_cannot_be_swapped_where_there_is_no_tier():
    model, _, optimizer, trace = fresh("tied")
    plan = finish(Nop(), problem_for(trace), everywhere(trace, bits=4, swap=True))
    with pytest.raises(Unsupported, match="no second tier"):
        Harness(plan, model, optimizer)
    assert "forward" not in model.layers[0].__dict__


def test_auto_compresses_only_by_consent():
    """Where nothing else is allowed, and never unasked."""
    _, _, _, trace = traced("tied")
    plain = simulate(problem_for(trace), []).peak["cpu"]
    fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    budget = fixed + (plain - fixed) * 90 // 100
    plan = holdall.plan(trace, budget=budget, hardware=machine(), allow=["compress"])
    assert {a.name for a in plan.actions} == {"compress"}
    assert any(row.nbytes_held < row.nbytes_plain for row in plan.about.rows)
    assert all(a.name != "compress" for a in holdall.plan(trace, budget=budget, hardware=machine()).actions)
