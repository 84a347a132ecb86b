"""Evaluations between steps on a real GPU: plain logits and tokens, weights that stay where there is room, the model back."""

import copy
import gc
from dataclasses import replace
from functools import cache

import pytest
import torch

pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers import LlamaConfig, LlamaForCausalLM

import holdall
from holdall.actions.place import Place, streamable
from holdall.cost.roofline import cost_trace
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.problem import resolve_hardware
from holdall.runtime.budget.meter import device_context
from holdall.runtime.states.unit import PlacedUnit
from holdall.runtime.states.weights.cache import Gauge, Lender
from holdall.types import Problem
from holdall.units import MiB

DEVICE = "cuda"
HIDDEN, LAYERS, VOCABULARY = 256, 4, 1024
ROWS, LENGTH = 8, 128
PROMPT, TOKENS = 4, 8
KINDS = {  # where updates happen, what the model computes in, when updates begin
    "host": ("host", None, "overlap_forward"),
    "host in bf16": ("host", "bf16", "step"),
    "spilled in bf16": ("host", "bf16", "overlap_forward"),
    "through in bf16": ("via_device", "bf16", "overlap_forward"),
    "made when used": ("device", "bf16", "step"),
}


@pytest.fixture(autouse=True)
def same_bits():
    """No kernel that adds in any order: plain training would differ from itself."""
    gc.collect()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# the model, and what is done with it


@cache
def start():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        attention_dropout=0.1,  # an evaluation in the wrong mode would be seen
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=None,
        attn_implementation="eager",  # its backward is the same every time
    )
    return LlamaForCausalLM(config)


def fresh(device="cpu"):
    model = copy.deepcopy(start()).to(device).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def ids(seed, rows=ROWS, length=LENGTH):
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def batch(n):
    return {"input_ids": ids(n), "labels": ids(n)}


def step(model, optimizer, n):
    torch.manual_seed(n)
    loss = model.train()(**batch(n)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def evaluate(model):
    """Logits of the next token; as numbers, which take no memory of the device."""
    with torch.no_grad():
        return model.eval()(input_ids=ids(99), use_cache=False).logits[:, -1].tolist()


def forward_by_forward(model):
    """Greedy decoding without a cache: each token by a forward that is one longer than the last."""
    seen = ids(98, 2, PROMPT)
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model.eval()(input_ids=seen, use_cache=False).logits
            seen = torch.cat([seen, logits[:, -1:].argmax(-1)], dim=1)
    return seen.tolist()


def generated(model):
    with torch.no_grad():
        return model.eval().generate(ids(98, 2, PROMPT), max_new_tokens=TOKENS, do_sample=False).tolist()


# what it is compared with


def narrowed(model):
    for p in model.parameters():
        p.data = p.data.bfloat16()
    return model


class Plain:
    """Everything on the device, written out: float32, or copies in bfloat16 of parameters in float32."""

    def __init__(self, precision):
        self.model, self.optimizer = fresh(DEVICE)
        self.work = narrowed(copy.deepcopy(self.model)) if precision else self.model

    def step(self, n):
        if self.work is self.model:
            return step(self.model, self.optimizer, n)
        torch.manual_seed(n)
        loss = self.work.train()(**batch(n)).loss
        loss.backward()
        for p, w in zip(self.model.parameters(), self.work.parameters(), strict=True):
            p.grad, w.grad = w.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for p, w in zip(self.model.parameters(), self.work.parameters(), strict=True):
                w.copy_(p)
        return loss.item()


def twin(model, precision):
    """A plain model with the parameters that this one has now; on the host, for the budget is not for it."""
    other = copy.deepcopy(start())
    other.load_state_dict(model.state_dict())
    return narrowed(other) if precision else other


def assert_like(got, expected, update, precision):
    """The same bits where the device updates. The host's Adam rounds otherwise than the GPU's, by an ulp; and it makes the
    first update of units that pass through the device, which have no states yet."""
    assert len(got) == len(expected)
    for a, b in zip(map(torch.as_tensor, got), map(torch.as_tensor, expected), strict=True):
        if update == "device":
            assert torch.equal(a, b.to(a.device))
        else:
            far = (a.double() - b.to(a.device).double()).norm() / b.double().norm().to(a.device)
            assert far <= (2e-2 if precision else 1e-4)


# plans


@cache
def traced(precision):
    model, optimizer = fresh()
    return holdall.trace(model, batch(0), optimizer=optimizer, device=DEVICE, precision=precision, head="whole")


def make_plan(kind):
    """Every weight that can come and go does; the budget is a tenth over what a step is predicted to take."""
    update, precision, when = KINDS[kind]
    trace = traced(precision)
    hardware = resolve_hardware(holdall.probe(DEVICE, quick=True), DEVICE)  # with the kernels that were loaded meanwhile
    can = streamable(trace)
    rows = {u.name: ("streamed" if u.name in can else "resident", update) for u in trace.units}
    everything = {t.name: t.capacity for t in hardware.tiers}
    problem = Problem(trace=cost_trace(trace, hardware), hardware=hardware, budget=everything)
    plan = finish(Nop(), problem, [Place.of(problem.trace, rows, when=when)])
    home = hardware.home.name
    taken = max(plan.predicted.peak[home], plan.predicted.reserved or 0)
    return replace(plan, budget={**plan.budget, home: taken * 11 // 10})


class Watch:
    """Counts weights that come, by a copy or a cast, and keeps peaks: the lender looks at them within a forward, and resets."""

    def __init__(self, monkeypatch):
        self.arrivals = self.highest = 0
        resize, reset = PlacedUnit.resize, torch.cuda.reset_peak_memory_stats

        def counted(unit, present):
            self.arrivals += present
            resize(unit, present)

        def remembered(*args):
            self.highest = max(self.highest, torch.cuda.max_memory_allocated(*args))
            reset(*args)

        monkeypatch.setattr(PlacedUnit, "resize", counted)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", remembered)

    def of(self, harness, work):
        """(its result, passes over all weights that come and go, the most bytes of tensors)."""
        torch.cuda.reset_peak_memory_stats()
        before, self.highest = self.arrivals, 0
        result = work()
        highest = max(self.highest, torch.cuda.max_memory_allocated())
        return result, (self.arrivals - before) / len(harness.engine.streaming.units), highest


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


def outside():
    """What the device sees beside tensors."""
    return device_context(torch.device(DEVICE, torch.cuda.current_device()))


# tests


@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_between_steps_are_plain_ones_and_fetch_less_and_less(kind, watch):
    update, precision, _ = KINDS[kind]
    plain = Plain(precision)
    expected = [([plain.step(n) for n in (k, k + 1)], [evaluate(plain.work) for _ in range(3)]) for k in (0, 2)]
    state = {name: value.cpu() for name, value in plain.model.state_dict().items()}
    del plain
    gc.collect()
    model, optimizer = fresh()
    plan = make_plan(kind)
    losses, logits, passes, evaluating, stepping, twins = [], [], [], [], [], []
    with holdall.apply(plan, model, optimizer) as harness:
        weights = sum(u.layout.nbytes for u in harness.engine.streaming.units)
        for k in (0, 2):
            for n in (k, k + 1):
                loss, _, peak = watch.of(harness, lambda n=n: step(model, optimizer, n))
                losses.append(loss)
                stepping.append(peak)
                assert harness.engine.lender.lent == [] and harness.engine.streaming.here() == []
            for _ in range(3):
                seen, fetched, peak = watch.of(harness, lambda: evaluate(model))
                logits.append(seen)
                passes.append(fetched)
                evaluating.append(peak)
            assert max(evaluating) + outside() <= next(iter(plan.budget.values()))
            with harness.quiet():
                twins.append(twin(model, precision))
        assert harness.notes == []
    assert passes == [1, 1, 0, 1, 0, 0]  # the very first forward is measured; the second lets weights stay
    assert stepping[2] - stepping[1] < weights // 2  # a step after an evaluation has all of its memory
    assert_like(losses, [loss for some, _ in expected for loss in some], update, precision)
    assert_like(logits, [seen for _, some in expected for seen in some], update, precision)
    assert logits == [evaluate(other.to(DEVICE)) for other in twins for _ in range(3)]  # whoever updated them
    assert_like(list(model.state_dict().values()), list(state.values()), update, precision)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_any_budget_is_kept_and_a_larger_one_saves_fetches(precision, watch):
    kind = "spilled in bf16" if precision else "host"
    model, optimizer = fresh()
    with holdall.apply(make_plan(kind), model, optimizer, enforce=False) as harness:
        step(model, optimizer, 0)
        streaming = harness.engine.streaming
        weights = sum(u.layout.nbytes for u in streaming.units)
        harness.engine.lender = None
        evaluate(model)  # the update of the step is over, too
        expected, passes, least = watch.of(harness, lambda: evaluate(model))
        assert passes == 1
        found = []
        for extra in (0, 3 * weights // 4, 2 * weights):
            budget = least + extra
            whole = budget if harness.ledger is not None else -(-budget * 32 // 31)  # one part in 32 may be lost to holes
            gauge = Gauge(whole, ledger=harness.ledger, device=harness.device, outside=0, busy=lambda: False)
            harness.engine.lender = Lender(streaming, gauge)
            seen = [watch.of(harness, lambda: evaluate(model)) for _ in range(3)]
            assert all(logits == expected for logits, _, _ in seen)
            assert max(peak for _, _, peak in seen) <= budget
            found.append([passes for _, passes, _ in seen])
            harness.engine.lender.give_back()
    assert found[0] == [1, 1, 1] and found[2] == [1, 1, 0]
    assert found[1][:2] == [1, 1] and 0 < found[1][2] < 1


@pytest.mark.parametrize("decode", [forward_by_forward, generated])
@pytest.mark.parametrize("kind", ["host", "through in bf16", "made when used"])
def test_greedy_decoding_gives_the_tokens_of_a_plain_model(kind, decode, watch):
    update, precision, _ = KINDS[kind]
    plain = Plain(precision)
    plain.step(0)
    expected = decode(plain.work)
    del plain
    gc.collect()
    model, optimizer = fresh()
    with holdall.apply(make_plan(kind), model, optimizer) as harness:
        step(model, optimizer, 0)
        first, passes, _ = watch.of(harness, lambda: decode(model))
        again, fewer, _ = watch.of(harness, lambda: decode(model))
        assert passes <= 3 and fewer == 0  # without lending there would be as many as tokens
        with harness.quiet():
            other = twin(model, precision)
    assert decode(other.to(DEVICE)) == first == again
    if update != "host":
        assert first == expected
    assert len(first[0]) == PROMPT + TOKENS


@pytest.mark.parametrize("kind", ["host", "spilled in bf16", "through in bf16", "made when used"])
def test_weights_that_were_lent_room_are_never_old(kind):
    precision = KINDS[kind][1]
    model, optimizer = fresh()

    def halve():
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)

    seen = []
    with holdall.apply(make_plan(kind), model, optimizer, enforce=False) as harness:
        for change in (halve, lambda: model.load_state_dict(start().state_dict()), lambda: step(model, optimizer, 0)):
            before = [evaluate(model) for _ in range(3)][-1]
            assert len(harness.engine.lender.lent) == len(harness.engine.streaming.units)
            change()
            after = evaluate(model)
            assert after != before
            with harness.quiet():
                seen.append((after, twin(model, precision)))
    assert all(logits == evaluate(other.to(DEVICE)) for logits, other in seen)


@pytest.mark.parametrize("fails", [False, True], ids=["between forwards", "by an error within one"])
@pytest.mark.parametrize("kind", ["host", "spilled in bf16", "through in bf16", "made when used"])
def test_a_harness_left_in_an_evaluation_gives_the_model_back_whole(kind, fails):
    update, precision, _ = KINDS[kind]
    plain = Plain(precision)
    for n in range(2):
        plain.step(n)
    expected = {name: value.cpu().clone() for name, value in plain.model.state_dict().items()}
    following = step(plain.model, plain.optimizer, 2)  # in float32, as the model is when it is left
    del plain
    plan = make_plan(kind)
    model, optimizer = fresh(DEVICE)
    gc.collect()
    before = torch.cuda.memory_allocated()

    def fail(*_):
        raise ValueError("of the loop's own")

    with torch.no_grad(), holdall.apply(plan, model, optimizer) as harness:
        with torch.enable_grad():
            for n in range(2):
                step(model, optimizer, n)
        for _ in range(3):
            evaluate(model)
        assert len(harness.engine.lender.lent) == len(harness.engine.streaming.units)
        if fails:
            handle = model.model.layers[LAYERS - 1].register_forward_pre_hook(fail)
            with pytest.raises(ValueError, match="of the loop's own"):
                evaluate(model)
            handle.remove()
    gc.collect()
    assert not model.training
    assert all(p.device.type == DEVICE and p.requires_grad and p.grad is None for p in model.parameters())
    assert all(p is q for p, q in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))
    mine = model.state_dict()
    assert list(mine) == list(expected)
    assert_like(list(mine.values()), list(expected.values()), update, precision)
    states = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    assert len(states) == 2 * len(list(model.parameters())) and {v.device.type for v in states} == {DEVICE}
    assert torch.cuda.memory_allocated() - before <= sum(v.nbytes for v in states) + MiB  # no weights that were lent room
    assert evaluate(model) == evaluate(twin(model, None).to(DEVICE))
    assert_like([step(model, optimizer, 2)], [following], update, precision)
