"""Plans on real models: the same bits, the predicted peak, nothing left behind."""

import copy
import gc
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist

import holdall
from holdall.actions.offload import Offload
from holdall.actions.recompute import Recompute, keepable, obstacle
from holdall.errors import Unsupported
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.runtime.budget.ledger import Ledger
from holdall.simulator import simulate
from holdall.testing.contracts import fingerprint, problem_for, run_both, traced, train
from holdall.testing.worlds import HUGGING_FACE, PLAIN, family, far_peak, far_used, machine

FAMILIES = [*PLAIN, *HUGGING_FACE]
DRAWS = 60
FULL = [("tied", 50), ("convnet", 34), ("tiny-llama", 8), ("tiny-t5", 8)]  # left out without `--all`


def random_mix(trace, rng):
    """Any mix of keep, recompute (alone, in segments, with op results kept), offload, and both."""
    blocks = [b for b in trace.blocks if b.saves and b.backward is not None]
    actions, i = [], 0
    while i < len(blocks):
        block, choice = blocks[i], rng.choice(["keep", "recompute", "offload", "both", "selective", "segment"])
        can = not obstacle(trace, [block])
        if choice in ("recompute", "both") and can:
            actions.append(Recompute.of(trace, [block]))
        if choice == "selective" and can:
            names = list(keepable(trace, block))
            actions.append(Recompute.of(trace, [block], rng.sample(names, min(2, len(names)))))
        if choice == "segment" and can:
            j = i
            while j + 1 < len(blocks) and blocks[j + 1].first == blocks[j].last + 1 and j - i < 2:
                j += 1
            if not obstacle(trace, blocks[i : j + 1]):
                actions.append(Recompute.of(trace, blocks[i : j + 1]))
                i = j
        if choice in ("offload", "both"):
            actions.append(Offload.of(trace, block, overlap=rng.random() < 0.5))
        i += 1
    rng.shuffle(actions)
    return actions


@pytest.mark.parametrize("name", FAMILIES)
def test_any_mix_of_actions_gives_the_same_bits_and_the_predicted_peak(name):
    """60 draws over all families: losses, weights and buffers after 3 steps, dropout included."""
    rng = random.Random(name)
    model, batch, _, trace = traced(name)
    start = copy.deepcopy(model.state_dict())
    expected = train(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3))
    weights = copy.deepcopy(model.state_dict())
    far = []
    for _ in range(-(-DRAWS // len(FAMILIES))):
        actions = random_mix(trace, rng)
        plan = finish(Nop(), problem_for(trace), actions)
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        gc.collect()
        with holdall.apply(plan, model, optimizer) as harness:
            losses = train(model, batch, optimizer)
        assert losses == expected, actions
        assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items()), actions
        measured, predicted = harness.step_peaks[-1], plan.predicted.peak["cpu"]
        far.append(abs(predicted - measured) / measured)
        assert far[-1] < 0.02, (predicted, measured, actions)
        assert far_peak(harness) == plan.predicted.peak.get("far", 0)
        assert harness.notes == []
    assert sum(f == 0 for f in far) >= 0.9 * len(far)


def test_gradients_are_the_same_too():
    model, batch, _, trace = traced("tiny-gpt2")
    torch.manual_seed(1)
    model(**batch).loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    plan = finish(Nop(), problem_for(trace), [Recompute.of(trace, [b]) for b in trace.blocks if b.saves])
    with holdall.apply(plan, model, None):
        torch.manual_seed(1)
        model(**batch).loss.backward()
    assert all(torch.equal(p.grad, expected[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("name", "count"),
    [("tied", 12), ("convnet", 9), ("tiny-llama", 3), ("tiny-t5", 3), *FULL],
    ids=lambda part: str(part),
)
def test_no_random_budget_is_ever_exceeded(name, count):
    """Each fits as measured or is refused; `--all` draws 100 budgets."""
    rng = random.Random(name)
    model, batch, _, trace = traced(name)
    start = copy.deepcopy(model.state_dict())
    plain = simulate(problem_for(trace), []).peak["cpu"]
    with pytest.raises(holdall.Infeasible) as refusal:
        holdall.plan(trace, budget=1, hardware=machine())
    planned = 0
    for n in range(count):
        budget = rng.randint(int(refusal.value.smallest * 0.98), int(plain * 1.02))
        try:
            plan = holdall.plan(trace, budget=budget, hardware=machine(overlap=n % 2 == 0))
        except holdall.Infeasible as refused:
            assert refused.smallest > budget
            continue
        planned += 1
        assert plan.predicted.peak["cpu"] <= budget
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with holdall.apply(plan, model, optimizer) as harness:  # enforced: OverBudget would be raised
            train(model, batch, optimizer, 2)
        assert max(harness.step_peaks) <= budget
    assert planned >= count // 3


def test_gradient_accumulation_clipping_and_evaluation_work_under_a_plan():
    def loop(model, batch, optimizer):
        torch.manual_seed(1)
        losses = []
        for _ in range(2):
            for _ in range(2):
                loss = model(**batch).loss / 2
                loss.backward()
                losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                losses.append(model(**batch).loss.item())
            model.train()
        return losses

    model, batch, optimizer, trace = traced("tiny-gpt2")
    reference = copy.deepcopy(model)
    expected = loop(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-3))
    actions = [Recompute.of(trace, [b]) for b in trace.blocks[:5] if b.saves]
    actions += [Offload.of(trace, b, overlap=False) for b in trace.blocks[5:8] if b.saves]
    with holdall.apply(finish(Nop(), problem_for(trace), actions), model, optimizer) as harness:
        got = loop(model, batch, optimizer)
    assert got == expected
    assert len(harness.step_seconds) == 2


def test_no_tensor_waits_for_the_garbage_collector():
    """With the collector off, the memory after each step is the same: plans do not rest on cycles being found."""
    gc.collect()
    gc.disable()
    try:
        model, batch, optimizer, trace = traced("tiny-llama")
        actions = [Recompute.of(trace, [b]) for b in trace.blocks if b.saves and b.id % 2]
        actions += [Offload.of(trace, b, overlap=True) for b in trace.blocks[:-1] if b.saves and not b.id % 2]
        with holdall.apply(finish(Nop(), problem_for(trace), actions), model, optimizer) as harness:
            train(model, batch, optimizer, 5)
        assert len(set(harness.step_peaks[1:])) == 1
        assert far_used(harness) == 0
    finally:
        gc.enable()


def test_an_abandoned_step_leaves_nothing_in_the_far_tier():
    model, batch, optimizer, trace = traced("tied")
    actions = [Offload.of(trace, b, overlap=True) for b in trace.blocks[:-1] if b.saves]
    with holdall.apply(finish(Nop(), problem_for(trace), actions), model, optimizer) as harness:
        loss = model(*batch)  # no backward
        assert far_used(harness) > 0
        del loss
        harness._blocks.restart()
        assert far_used(harness) == 0
        train(model, batch, optimizer, 2)


def test_another_shape_is_noticed_and_stays_correct():
    model, _, optimizer, trace = traced("tied")
    reference = copy.deepcopy(model)
    longer = (torch.randint(0, 64, (2, 24)),)
    expected = train(reference, longer, torch.optim.AdamW(reference.parameters(), lr=1e-3))
    plan = finish(Nop(), problem_for(trace), [Recompute.of(trace, [b]) for b in trace.blocks if b.saves])
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        got = train(model, longer, optimizer)
    assert got == expected
    assert any("left the trace" in note for note in harness.notes)
    assert len(harness.notes) == len(set(harness.notes))


def test_another_branch_is_noticed_and_stays_correct():
    class Skipping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4))
            self.skip = False

        def forward(self, x):
            for n, layer in enumerate(self.layers):
                if not (self.skip and n == 1):
                    x = layer(x)
            return x.pow(2).mean()

    torch.manual_seed(0)
    model = Skipping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = holdall.trace(model, torch.randn(4, 8), optimizer=optimizer)
    plan = finish(Nop(), problem_for(trace), [Recompute.of(trace, [b]) for b in trace.blocks if b.saves])
    x = torch.randn(4, 8)
    reference = copy.deepcopy(model)
    model.skip = reference.skip = True
    reference(x).backward()
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        model(x).backward()
        optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)
    assert any("left the trace" in note for note in harness.notes)


def test_an_error_inside_the_loop_still_restores_the_model():
    model, batch, optimizer, trace = traced("tied")
    before = fingerprint(model, optimizer)
    plan = finish(Nop(), problem_for(trace), [Recompute.of(trace, [trace.blocks[1]])])
    with pytest.raises(ZeroDivisionError), holdall.apply(plan, model, optimizer):
        model(*batch)
        raise ZeroDivisionError
    assert fingerprint(model, optimizer) == before
    train(model, batch, optimizer, 1)


def test_autocast_is_the_same_again_in_the_replay():
    model, batch, optimizer, trace = traced("tied")
    reference = copy.deepcopy(model)

    def run(m):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = m(*batch)
        loss.backward()
        return {n: p.grad for n, p in m.named_parameters()}

    expected = run(reference)
    plan = finish(Nop(), problem_for(trace), [Recompute.of(trace, [b]) for b in trace.blocks if b.saves])
    with holdall.apply(plan, model, optimizer, enforce=False):
        got = run(model)
    assert all(torch.equal(got[n], expected[n]) for n in expected)


def test_the_ledger_counts_a_storage_once_and_until_its_last_view_goes():
    with Ledger() as ledger:
        x = torch.ones(1000)
        y = x[10:20]
        assert ledger.live == 4000
        del x
        assert ledger.live == 4000
        del y
        assert ledger.live == 0
        assert ledger.peak == 4000


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(f"{tmp_path}/store", 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def filled_beside(letting_go):
    """Fill a tensor of 4000 bytes under a budget of 6000, while another thread keeps one of the same size for a while."""

    def keep(buffer):
        time.sleep(letting_go)
        del buffer[:]

    held = []
    with Ledger(budget=6000) as ledger:
        held.append(torch.zeros(1000))
        thread = threading.Thread(target=keep, args=(held,))
        thread.start()
        try:
            torch.ones(1000)
        finally:
            thread.join()
    return ledger.peak


def test_what_a_thread_of_a_collective_lets_go_of_does_not_exceed_the_budget(group):
    assert filled_beside(0.05) == 4000


def test_what_a_thread_keeps_exceeds_the_budget(group):
    with pytest.raises(holdall.OverBudget, match="2,000 bytes too many"):
        filled_beside(1.0)


def test_a_process_alone_waits_for_no_thread():
    with pytest.raises(holdall.OverBudget, match="2,000 bytes too many"):
        filled_beside(0.05)


def test_selective_recompute_does_not_run_the_kept_op_again():
    model, batch, _, trace = traced("tiny-llama")
    name = next(op.site.op for op in trace.ops if "scaled_dot_product" in op.site.op)
    layers = [b for b in trace.blocks if "layers" in b.module]
    for keep, runs in (((), 2), ((f"{name}#0",), 1)):
        same, _, harness, _, _ = run_both(
            "tiny-llama", lambda trace, keep=keep: [Recompute.of(trace, [trace.block(b.name)], keep) for b in layers], steps=1
        )
        assert same
        ran = count(model, batch, harness.plan, name)
        assert ran == runs * len(layers)


def count(model, batch, plan, name):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal seen
            seen += str(func) == name
            return func(*args, **(kwargs or {}))

    with Count(), holdall.apply(plan, model, None):
        model(**batch).loss.backward()
    model.zero_grad()
    return seen


def test_a_plan_for_another_model_or_optimizer_is_refused():
    model, batch, optimizer, trace = traced("tied")
    plan = finish(Nop(), problem_for(trace), [])
    other, _ = family("twice")
    with pytest.raises(holdall.TraceMismatch) as refused:
        holdall.apply(plan, other)
    assert refused.value.hint
    with pytest.raises(holdall.InvalidInput):
        holdall.apply(plan, model, torch.optim.SGD(other.parameters(), lr=0.1))
    train(model, batch, optimizer, 1)


def test_a_second_plan_on_a_model_is_refused_until_the_first_is_off():
    model, batch = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)), torch.randn(2, 4)
    options = {"loss": lambda m, b: m(b).sum(), "hardware": machine()}
    first = holdall.fit(model, None, batch, **options)
    with pytest.raises(Unsupported, match="under a plan already"):
        holdall.fit(model, None, batch, **options)
    with pytest.raises(Unsupported, match="under a plan already"):
        holdall.apply(first.plan, model)
    first.close()
    holdall.fit(model, None, batch, **options).close()
