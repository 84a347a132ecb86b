"""What one step does, seen without running it."""

import copy

import pytest
import torch
from torch import nn

import holdall
from holdall.errors import InvalidInput, Unsupported
from holdall.simulator import simulate
from holdall.testing.contracts import problem_for, train
from holdall.testing.worlds import HUGGING_FACE, PLAIN, family
from holdall.tracing import trace_step
from holdall.tracing.eager import record_real_step
from holdall.tracing.step import How
from holdall.types import Kind, Phase, Trace

FAMILIES = [*PLAIN, *HUGGING_FACE]


def measured_peak(model, batch, optimizer):
    plan = holdall.plan(
        holdall.trace(model, batch, optimizer=optimizer),
        planner="nop",
        hardware=problem_for(Trace(ops=(), tensors={}, blocks=(), saves=())).hardware,
    )
    with holdall.apply(plan, model, optimizer) as harness:
        train(model, batch, optimizer, 2)
    assert harness.notes == []
    return plan.predicted.peak["cpu"], harness.step_peaks[-1]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_predicted_peak_is_the_measured_one_to_the_byte(name):
    model, batch = family(name)
    predicted, measured = measured_peak(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert predicted == measured


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-bert", "tiny-t5", "tiny-mixtral"])
def test_a_padded_batch_takes_the_branch_of_a_real_run(name):
    model, batch = family(name, padded=True)
    predicted, measured = measured_peak(model, batch, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert predicted == measured


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
        lambda p: torch.optim.Adafactor(p, lr=1e-3),
        lambda p: torch.optim.RMSprop(p, lr=1e-3),
    ],
)
def test_optimizers_are_traced_with_their_state(make):
    model, batch = family("tied")
    predicted, measured = measured_peak(model, batch, make(model.parameters()))
    assert predicted == measured


def test_tracing_leaves_the_model_the_optimizer_and_the_random_state_as_they_were():
    for name in ("convnet", "branching", "tiny-gpt2"):
        model, batch = family(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(model, batch, optimizer, 1)
        before = copy.deepcopy(model.state_dict())
        state = copy.deepcopy(optimizer.state_dict())
        random = torch.get_rng_state()
        trace_step(model, batch, optimizer=optimizer)
        assert torch.equal(random, torch.get_rng_state())
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert str(state) == str(optimizer.state_dict())
        assert all(p.grad is None for p in model.parameters())
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_model_that_decides_by_its_values_is_watched_as_it_runs_and_says_so():
    model, batch = family("branching")
    trace = trace_step(model, batch)
    assert trace.about.source == "eager"
    assert "real step" in trace.about.notes[0]


def test_a_model_that_decides_by_its_values_and_has_none_is_refused():
    with torch.device("meta"):
        model = type(family("branching")[0])()
    with pytest.raises(Unsupported) as refused:
        trace_step(model, (torch.zeros(2, 8, dtype=torch.long),))
    assert refused.value.hint


def test_blocks_are_the_layers_and_repeated_ones_are_recognised():
    model, batch = family("tiny-llama")
    trace = trace_step(model, batch)
    layers = [b for b in trace.blocks if "layers" in b.module]
    assert [b.module for b in layers] == [f"model.layers.{i}" for i in range(len(layers))]
    assert all(b.same_as == layers[0].id for b in layers[1:])
    assert all(a.last < b.first for a, b in zip(trace.blocks, trace.blocks[1:], strict=False))


def test_a_module_used_twice_is_two_blocks():
    trace = trace_step(*family("twice"))
    assert [b.name for b in trace.blocks] == ["embed", "shared", "other", "shared#1", "head"]


def test_encoder_and_decoder_layers_are_blocks():
    names = [b.module for b in trace_step(*family("tiny-t5")).blocks]
    assert "encoder.block.0" in names
    assert "decoder.block.1" in names


def test_a_tied_weight_is_counted_once():
    model, batch = family("tied")
    trace = trace_step(model, batch)
    params = sum(t.nbytes for t in trace.tensors.values() if t.kind is Kind.PARAM)
    assert params == sum(p.numel() * 4 for p in model.parameters())


def test_random_in_place_and_phases_are_marked():
    trace = trace_step(*family("convnet"), optimizer=None)
    assert any(op.mutates for op in trace.ops)
    assert any(trace.tensors[x].kind is Kind.BUFFER for op in trace.ops for x in op.mutates)
    dropout = trace_step(*family("tied"))
    assert any(op.random for op in dropout.ops)
    phases = [op.site.phase for op in dropout.ops]
    assert phases == sorted(phases, key=[Phase.FORWARD, Phase.BACKWARD, Phase.STEP].index)


def test_flops_of_a_matrix_product_are_counted():
    model = nn.Linear(32, 64, bias=False)
    trace = trace_step(model, torch.randn(8, 32), loss=lambda m, x: m(x).sum())
    forward = [op for op in trace.ops if op.site.phase is Phase.FORWARD]
    assert sum(op.flops for op in forward) == 2 * 8 * 32 * 64


def test_backward_ops_belong_to_the_modules_of_their_forward():
    trace = trace_step(*family("tiny-llama"))
    backward = [op for op in trace.ops if op.site.phase is Phase.BACKWARD]
    named = [op for op in backward if op.site.module]
    assert len(named) > 0.9 * len(backward)


def test_a_gpu_is_planned_for_without_one():
    model, batch = family("tiny-llama")
    model = model.to(torch.bfloat16)
    trace = trace_step(model, batch, device="cuda", optimizer=torch.optim.AdamW(model.parameters()))
    ops = {op.site.op for op in trace.ops}
    assert "aten._scaled_dot_product_flash_attention.default" in ops
    assert any("_foreach" in op for op in ops)
    assert all(t.nbytes % 512 == 0 for t in trace.tensors.values())


def test_a_trace_survives_saving_and_loading(tmp_path):
    trace = trace_step(*family("tied"))
    trace.save(tmp_path / "trace.json")
    again = Trace.load(tmp_path / "trace.json")
    assert again == trace
    assert again.fingerprint == trace.fingerprint
    assert simulate(problem_for(again), []) == simulate(problem_for(trace), [])


def test_another_shape_has_another_fingerprint():
    model, _ = family("tied")
    short, long = (trace_step(model, (torch.zeros(2, n, dtype=torch.long),)) for n in (8, 16))
    assert short.fingerprint != long.fingerprint
    assert short.fingerprint == trace_step(model, (torch.ones(2, 8, dtype=torch.long),)).fingerprint


# bad input


def test_a_loss_that_is_not_a_scalar_is_refused():
    with pytest.raises(InvalidInput, match="scalar"):
        trace_step(nn.Linear(4, 4), torch.randn(2, 4))


def test_a_model_without_a_loss_is_refused_with_what_to_do():
    class Two(nn.Module):
        def forward(self, x):
            return {"logits": x}

    with pytest.raises(InvalidInput) as refused:
        trace_step(Two(), torch.randn(2, 4))
    assert "loss=" in refused.value.hint


def test_a_batch_the_model_rejects_is_one_clear_line():
    model, batch = family("tied")
    rejected = [(batch[0].float(),), (batch[0], batch[0]), (torch.full((2, 8), 64),)]
    for wrong in rejected:
        with pytest.raises(InvalidInput, match="rejected the batch") as refused:
            trace_step(model, wrong)
        assert "\n" not in refused.value.fact
    with torch.device("meta"):
        empty = type(model)()
    with pytest.raises(InvalidInput, match="out of range"):
        trace_step(empty, (torch.full((2, 8), 64),))


def test_an_optimizer_over_other_parameters_is_refused():
    model, batch = family("tied")
    other, _ = family("tied")
    with pytest.raises(InvalidInput, match="not the model's"):
        trace_step(model, batch, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))


def test_a_batch_without_tensors_and_an_unknown_device_are_refused():
    model, batch = family("tied")
    with pytest.raises(InvalidInput):
        trace_step(model, {"ids": [1, 2]})
    with pytest.raises(InvalidInput):
        trace_step(model, batch, device="tpu")


@pytest.mark.parametrize("loss", [nn.functional.mse_loss, nn.functional.smooth_l1_loss])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_mean_keeps_the_memory_of_its_elements(loss, narrow):
    model, x, y = nn.Linear(32, 32), torch.randn(8, 32), torch.randn(8, 32)
    dtype = torch.bfloat16 if narrow else torch.float32
    trace = trace_step(model, (x, y), loss=lambda m, b: loss(m(b[0]).to(dtype), b[1]))
    made = {op.site.op: trace.tensors[op.writes[0]] for op in trace.ops if loss.__name__ in op.site.op}
    assert made[f"aten.{loss.__name__}.default"].nbytes == loss(x, y).untyped_storage().nbytes()
    assert made[f"aten.{loss.__name__}_backward.default"].dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8)])
def test_statistics_of_a_narrow_input_are_those_of_the_real_kernel(norm):
    x = torch.randn(4, 8, requires_grad=True)

    def loss(m, b):
        return m(b[0].to(torch.bfloat16)).float().sum()

    found = []
    for trace in (trace_step(norm, (x,), loss=loss).tensors.values(), _real(norm, x, loss)):
        found.append(sorted((t.dtype, t.nbytes) for t in trace if "norm" in t.name))
    assert found[0] == found[1]


class Transposed(nn.Module):
    """A batch norm in the last dimension, as models of time series have it, between layers that need no copies of their own."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.norm(self.up(x).transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_of_a_transposed_input_makes_the_copies_of_the_real_kernel(training):
    model, x = Transposed().train(training), torch.randn(4, 6, 8)

    def loss(m, b):
        return m(b[0]).square().mean()

    fake, real = (
        [op.site.op for op in trace.ops] for trace in (trace_step(model, (x,), loss=loss), _real_trace(model, x, loss))
    )
    assert fake == real
    assert "aten.clone.default" in real


def _real_trace(model, x, loss):
    return record_real_step(model, (x,), None, loss, How())


def _real(model, x, loss):
    return record_real_step(model, (x,), None, loss, How()).tensors.values()
