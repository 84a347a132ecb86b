"""In evaluations, memory that steps need for activations keeps streamed weights; steps get it back, and nothing changes."""

import copy
import gc
from dataclasses import replace
from functools import cache

import pytest
import torch

import holdall
from holdall.actions.place import Place, streamable
from holdall.analysis import phases, trace_evaluation
from holdall.cost.roofline import cost_trace
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.testing.contracts import problem_for
from holdall.testing.worlds import machine

transformers = pytest.importorskip("transformers", reason="generation is Hugging Face's")

TOKENS = 8
VOCABULARY = 32


@cache
def start():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        attention_dropout=0.1,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def fresh():
    model = copy.deepcopy(start()).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def ids(rows=2, length=8, seed=0):
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


@cache
def traced(precision=None):
    model, optimizer = fresh()
    batch = ids()
    given = {"input_ids": batch, "labels": batch}
    return cost_trace(holdall.trace(model, given, optimizer=optimizer, precision=precision, head="whole"), machine())


def make_plan(budget=None, precision=None, when="step"):
    """Every weight that can come and go does; `budget` None: what a step is predicted to take."""
    trace = traced(precision)
    can = streamable(trace)
    rows = {u.name: ("streamed" if u.name in can else "resident", "host") for u in trace.units}
    made = finish(Nop(), problem_for(trace), [Place.of(trace, rows, when=when)])
    return replace(made, budget={**made.budget, "cpu": made.predicted.peak["cpu"] if budget is None else budget})


class Fetches:
    """How often weights were fetched, and what that took: by evaluation."""

    def __init__(self, harness):
        self.harness = harness
        self.units = len(harness.engine.streaming.units)
        self.count = self.peak = 0
        pull = harness.store.pull

        def counted(*args, **kwargs):
            self.count += 1
            return pull(*args, **kwargs)

        harness.store.pull = counted

    def of(self, evaluation):
        """Passes over all weights, in an evaluation."""
        before, self.harness.ledger.peak = self.count, 0
        evaluation()
        self.peak = self.harness.ledger.peak
        return (self.count - before) / self.units


def generate(model, rows=2, tokens=TOKENS, length=4):
    with torch.no_grad():
        return model.eval().generate(ids(rows, length, 5), max_new_tokens=tokens, do_sample=False).tolist()


def evaluate(model, rows=2):
    with torch.no_grad():
        batch = ids(rows, seed=9)
        return model.eval()(input_ids=batch, labels=batch).loss.item()


def step(model, optimizer, n):
    torch.manual_seed(n)
    batch = ids(seed=n)
    loss = model.train()(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("when", ["step", "overlap_forward"])
def test_a_generation_fetches_weights_about_once_and_training_goes_on_as_if_nothing_had_been_lent(when):
    reference, plain = fresh()
    expected = [(step(reference, plain, n), generate(reference), evaluate(reference)) for n in range(2)]
    model, optimizer = fresh()
    gc.collect()
    plan = make_plan(when=when)
    with holdall.apply(plan, model, optimizer) as harness:
        fetches = Fetches(harness)
        seen, passes, peaks = [], [], []
        for n in range(2):
            seen.append([step(model, optimizer, n)])
            passes.append(fetches.of(lambda: seen[-1].append(generate(model))))
            peaks.append(fetches.peak)
            again = [fetches.of(lambda: seen[-1].append(evaluate(model))) for _ in range(3)]
            assert again == ([1, 1, 0] if n == 0 else [0, 0, 0])  # another kind of call: its need is measured first
    assert [tuple(s[:3]) for s in seen] == expected
    assert all(len(set(s[2:])) == 1 for s in seen)
    assert passes[0] <= 2 and passes[1] == 1  # the very first forward is measured; without lending there are as many as tokens
    assert max(peaks) <= plan.budget["cpu"]
    assert harness.step_peaks == [plan.predicted.peak["cpu"]] * 2
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_copies_in_bfloat16_are_lent_room_too():
    model, optimizer = fresh()
    plan = make_plan(precision="bf16")
    with holdall.apply(plan, model, optimizer) as harness:
        fetches = Fetches(harness)
        step(model, optimizer, 0)
        first = generate(model)
        assert fetches.of(lambda: None) == 0
        second = []
        assert fetches.of(lambda: second.append(generate(model))) == 0
        step(model, optimizer, 1)
    assert second == [first]
    assert harness.step_peaks[1] == plan.predicted.peak["cpu"]


def by_streaming(rows):
    """(tokens, peak, passes) of a generation that is lent nothing."""
    model, optimizer = fresh()
    with holdall.apply(make_plan(), model, optimizer, enforce=False) as harness:
        harness.engine.lender = None
        fetches, tokens = Fetches(harness), []
        passes = fetches.of(lambda: tokens.append(generate(model, rows)))
    return tokens[0], fetches.peak, passes


def under(budget, rows):
    """(tokens, peak, passes) of the second of two generations, in no more than the budget."""
    model, optimizer = fresh()
    with holdall.apply(make_plan(budget), model, optimizer) as harness:
        fetches, tokens = Fetches(harness), []
        generate(model, rows)
        assert fetches.of(lambda: evaluate(model)) <= 1
        passes = fetches.of(lambda: tokens.append(generate(model, rows)))
    return tokens[0], fetches.peak, passes


def test_any_budget_is_kept_and_a_larger_one_saves_fetches():
    tokens, least, passes = by_streaming(2)
    assert passes == TOKENS
    weights = sum(p.nbytes for p in start().parameters())
    found = []
    for extra in (0, weights // 2, 3 * weights // 4, 2 * weights):
        mine, peak, passes = under(least + extra, 2)
        assert mine == tokens and peak <= least + extra
        found.append(passes)
    assert found[0] > TOKENS - 2  # the tokens after the prompt need a little less than the prompt
    assert found == sorted(found, reverse=True) and found[-1] <= 1
    assert 1 < found[1] < TOKENS


def test_what_an_evaluation_needs_is_not_taken_for_the_need_of_a_generation():
    """Which keeps keys and values, of 16 rows here; the weights that the evaluation was lent room for have to go."""
    tokens, least, _ = by_streaming(16)
    model, optimizer = fresh()
    with holdall.apply(make_plan(least), model, optimizer) as harness:
        for _ in range(3):
            evaluate(model)
        assert harness.engine.lender.lent
        assert generate(model, 16) == tokens


def test_where_there_is_no_room_to_lend_weights_are_streamed_as_ever():
    model, optimizer = fresh()
    with holdall.apply(make_plan(), model, optimizer, enforce=False) as harness:
        fetches = Fetches(harness)
        seen = []
        assert fetches.of(lambda: seen.append(evaluate(model))) == 1
    model, optimizer = fresh()
    with holdall.apply(make_plan(fetches.peak), model, optimizer) as harness:
        fetches = Fetches(harness)
        assert [fetches.of(lambda: seen.append(evaluate(model))) for _ in range(3)] == [1, 1, 1]
        assert harness.engine.lender.lent == []
    assert len(set(seen)) == 1


def test_a_cache_of_keys_and_values_takes_its_room_back_and_when_there_is_none_it_is_said_in_one_line():
    rows = 16
    model, optimizer = fresh()
    expected = generate(copy.deepcopy(model), rows, 40)
    _, least, _ = by_streaming(rows)
    weights = sum(p.nbytes for p in model.parameters())
    with holdall.apply(make_plan(least + weights), model, optimizer) as harness:
        generate(model, rows, 2)
        lent = []
        handle = model.register_forward_hook(lambda *_: lent.append(len(harness.engine.lender.lent)))
        try:
            generate(model, rows, 40)
        except holdall.OverBudget as error:
            said, hint = error.fact, error.hint
        handle.remove()
        assert "over the budget" in said and "\n" not in said and hint
        assert max(lent) > lent[-1]  # given back as the cache grew
        assert sorted(lent[lent.index(max(lent)) :], reverse=True) == lent[lent.index(max(lent)) :]
        gc.collect()
        assert generate(model, rows, TOKENS) == [row[: 4 + TOKENS] for row in expected]


def test_weights_that_were_lent_room_are_never_old():
    """Steps, writes and loading between evaluations, without a forward in between that would give them back."""

    def loop(model, optimizer):
        seen = [step(model, optimizer, 0), evaluate(model), evaluate(model)]
        batch = ids(seed=1)
        model.train()
        torch.manual_seed(1)
        model(input_ids=batch, labels=batch).loss.backward()
        seen += [evaluate(model), evaluate(model)]  # within a step: nothing is lent
        optimizer.step()
        seen += [evaluate(model), evaluate(model)]
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        seen.append(evaluate(model))
        model.load_state_dict(start().state_dict())
        seen += [evaluate(model), [p.sum().item() for p in model.parameters()], step(model, optimizer, 2)]
        return seen

    expected = loop(*fresh())
    model, optimizer = fresh()
    with holdall.apply(make_plan(), model, optimizer, enforce=False) as harness:  # what is loaded counts as the device's, here
        assert loop(model, optimizer) == expected
        assert harness.engine.lender.lent == []
        assert harness.engine.streaming.here() == []


def test_an_evaluation_that_fails_half_way_leaves_nothing_wrong():
    expected = evaluate(fresh()[0])
    sums = [p.sum().item() for p in start().parameters()]
    model, optimizer = fresh()
    with holdall.apply(make_plan(), model, optimizer) as harness:
        evaluate(model)

        def fail(*_):
            raise ValueError("of the loop's own")

        handle = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="of the loop's own"):
            evaluate(model)
        assert [p.sum().item() for p in model.parameters()] == sums
        with pytest.raises(ValueError, match="of the loop's own"):
            step(model, optimizer, 0)
        assert [p.sum().item() for p in model.parameters()] == sums
        handle.remove()
        assert evaluate(model) == expected
        step(model, optimizer, 0)
    assert harness.step_peaks == [harness.plan.predicted.peak["cpu"]]


def test_a_generation_that_does_not_call_the_model_itself_is_an_evaluation_too():
    """PEFT's `generate` calls the model inside; what modules hold afterwards are the parameters."""
    peft = pytest.importorskip("peft", reason="LoRA needs peft")

    def adapted():
        torch.manual_seed(0)
        base = copy.deepcopy(start())
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).train()
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)

    def loop(model, optimizer, seen):
        for n in range(2):
            seen.append(step(model, optimizer, n))
            with torch.no_grad():
                given = {"max_new_tokens": TOKENS, "do_sample": False}
                seen.append(model.eval().generate(input_ids=ids(2, 4, 5), **given).tolist())
            seen.append([p.sum().item() for p in model.parameters()])

    expected, seen = [], []
    loop(*adapted(), expected)
    model, optimizer = adapted()
    batch = ids()
    given = {"input_ids": batch, "labels": batch}
    trace = cost_trace(holdall.trace(model, given, optimizer=optimizer, head="whole"), machine())
    can = streamable(trace)
    rows = {u.name: ("streamed" if u.name in can else "resident", "host" if u.numel else "device") for u in trace.units}
    with holdall.apply(finish(Nop(), problem_for(trace), [Place.of(trace, rows)]), model, optimizer) as harness:
        fetches = Fetches(harness)
        loop(model, optimizer, seen)
        assert fetches.count < 4 * 2 * fetches.units  # of each step's forward and backward, and about one for a generation
    assert seen == expected


@pytest.mark.parametrize("share", [30, 60, 100])
def test_the_predicted_peak_of_an_evaluation_holds_with_what_is_lent(share):
    model, optimizer = fresh()
    batch = ids(seed=9)
    given = {"input_ids": batch, "labels": batch}
    plan = make_plan()
    budget = plan.predicted.peak["cpu"] * share // 100
    plan = replace(plan, budget={**plan.budget, "cpu": budget})
    problem = replace(problem_for(traced()), budget=plan.budget)
    said = {p.name: p for p in phases(problem, plan, evaluation=trace_evaluation(model, given, head="whole"))}["evaluation"]
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        fetches = Fetches(harness)
        peaks = []
        for _ in range(3):
            fetches.of(lambda: evaluate(model))
            peaks.append(fetches.peak)
    assert max(peaks) <= said.device
    assert max(peaks) <= max(budget, peaks[0])
    assert (peaks[-1] > peaks[0]) == (share > 30)
