"""`fit` with the vocabulary head in rows, on the heads and losses that Hugging Face models have: what plain training computes.

The loss in rows is summed in another order than the whole one (`runtime/head/chunked_loss.py` states by how much), so losses
and weights are compared within a tolerance; logits that somebody reads are compared by their bits.
"""

import copy

import pytest
import torch

import holdall
from holdall.fitting import head as choosing
from holdall.fitting.head import choose_head
from holdall.runtime.head.lazy_logits import LazyLogits
from holdall.testing.worlds import machine

hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul", "ignore:Accessing the data pointer of FakeTensor")
VOCAB, WIDTH, ROWS = 211, 16, 32
TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = {**TOKENS, **LAYERS, "num_key_value_heads": 2}
BART = {
    "d_model": WIDTH,
    **{f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 32))},
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}


def _gemma(name, **more):
    return getattr(hf, f"{name}ForCausalLM")(
        getattr(hf, f"{name}{'Text' if name == 'Gemma3' else ''}Config")(
            **GROUPED, head_dim=8, final_logit_softcapping=5.0, **more
        )
    )


CAUSAL = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "llama-tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TOKENS, **LAYERS)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**TOKENS, n_embd=WIDTH, n_layer=2, n_head=2)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=2, output_router_logits=True)),
    "gemma2": lambda: _gemma("Gemma2"),
    "gemma3": lambda: _gemma("Gemma3"),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**GROUPED, logit_scale=0.3)),
    "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**GROUPED, logits_scaling=3.0)),
    "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(**{**TOKENS, **LAYERS}, ffn_dim=32, word_embed_proj_dim=WIDTH)),
    "falcon": lambda: hf.FalconForCausalLM(hf.FalconConfig(**TOKENS, **LAYERS)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**GROUPED)),  # a head with a bias
    "mamba2": lambda: hf.Mamba2ForCausalLM(
        hf.Mamba2Config(
            **TOKENS, hidden_size=WIDTH, num_hidden_layers=1, state_size=4, num_heads=4, head_dim=8, n_groups=1, chunk_size=8
        )
    ),
    "bert": lambda: hf.BertLMHeadModel(hf.BertConfig(**TOKENS, **LAYERS, is_decoder=True)),
}
MASKED = {
    "bert-masked": lambda: hf.BertForMaskedLM(hf.BertConfig(**TOKENS, **LAYERS)),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**TOKENS, **LAYERS, max_position_embeddings=40)),
    "electra": lambda: hf.ElectraForMaskedLM(hf.ElectraConfig(**TOKENS, **LAYERS, embedding_size=WIDTH)),
}
SEQ2SEQ = {
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**TOKENS, **T5)),
    "t5-untied": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**TOKENS, **T5, tie_word_embeddings=False)),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**TOKENS, **BART)),
    "mbart": lambda: hf.MBartForConditionalGeneration(hf.MBartConfig(**TOKENS, **BART)),
}
AUDIO = {
    "whisper": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            **TOKENS,
            **{k: v for k, v in BART.items() if k not in ("max_position_embeddings", "forced_eos_token_id")},
            num_mel_bins=4,
            max_source_positions=8,
            max_target_positions=32,
        )
    ),
}
FAMILIES = {**CAUSAL, **MASKED, **SEQ2SEQ, **AUDIO}


def build(name):
    """A tiny model, in training mode, with its dropout; `use_cache` and the like are what the config says by default."""
    torch.manual_seed(0)
    model = FAMILIES[name]().train()
    for module in model.modules():  # a bias that is zero would hide that it is left out
        bias = module._buffers.get("final_logits_bias")
        if bias is not None:
            torch.nn.init.normal_(bias)
    return model


def text(name, rows=3, length=24):
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB, (rows, length))
    labels = ids.clone()
    labels[0, :4] = -100
    if name in AUDIO:
        return {"input_features": torch.randn(rows, 4, 16), "labels": labels}
    if name in SEQ2SEQ:
        return {"input_ids": torch.randint(3, VOCAB, (rows, length + 4)), "labels": labels}
    return {"input_ids": ids, "labels": labels}


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def train(model, optimizer, batches, *, loss_of=lambda model, batch: model(**batch).loss, autocast=False):
    losses = []
    torch.manual_seed(2)
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def fit(model, optimizer, batch, **options):
    return holdall.fit(model, optimizer, batch, **{"budget": "1GiB", "head": ROWS, "hardware": machine(), **options})


def assert_same(model, reference, losses, expected, tolerance=1e-4):
    assert losses == pytest.approx(expected, rel=tolerance)
    assert losses[-1] < losses[0]
    others = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, others[name], rtol=10 * tolerance, atol=1e-4, msg=name)


def assert_foreseen(report):
    """To the byte, but for tensors of one number, some of which are counted on one side only."""
    assert report.measured.peak["cpu"] == pytest.approx(report.predicted.peak["cpu"], abs=64)


def whole_logits(monkeypatch):
    """Shapes of the logits that were computed whole from now on."""
    made, plain = [], LazyLogits.whole

    def whole(lazy):
        made.append(tuple(lazy.shape))
        return plain(lazy)

    monkeypatch.setattr(LazyLogits, "whole", whole)
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_is_that_of_plain_training_and_never_makes_the_logits(name, monkeypatch):
    """Defaults, but for the head: repetition is on, `use_cache` is what the config says."""
    model, batch = build(name), text(name)
    reference = copy.deepcopy(model)
    expected = train(reference, adam(reference), [batch] * 4)
    made = whole_logits(monkeypatch)
    optimizer = adam(model)
    with fit(model, optimizer, batch) as harness:
        losses = train(model, optimizer, [batch] * 4)
        report = harness.report()
    assert made == []
    assert harness.notes == []
    assert_foreseen(report)
    assert_same(model, reference, losses, expected)


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize("lengths", [[40, (2, 16)], "auto"])
def test_batches_of_other_lengths(name, lengths):
    model = build(name)
    batches = [text(name, length=length) for length in (24, 16, 40, 24)]
    reference = copy.deepcopy(model)
    expected = train(reference, adam(reference), batches)
    optimizer = adam(model)
    with fit(model, optimizer, batches[0], lengths=lengths) as harness:
        losses = train(model, optimizer, batches)
        assert len(harness.all_peaks) == 4
    assert losses == pytest.approx(expected, rel=1e-4)


def test_the_head_is_whole_in_short_batches_and_in_rows_in_long_ones(monkeypatch):
    """By the size of the logits; those of a sequence-to-sequence model are as many as the labels."""
    monkeypatch.setattr(choosing, "BIG_LOGITS", 100 * VOCAB * 4)
    model = build("llama")
    batches = [text("llama", length=length) for length in (24, 40, 24)]
    reference = copy.deepcopy(model)
    expected = train(reference, adam(reference), batches)
    optimizer, heads = adam(model), []
    with fit(model, optimizer, batches[0], lengths=[40], head="auto") as harness:
        model.register_forward_hook(lambda *_: heads.append("head" in harness.plan.count()))
        losses = train(model, optimizer, batches)
    assert heads == [False, True, False]
    assert losses == pytest.approx(expected, rel=1e-4)
    model, batch = build("t5"), text("t5", length=24)
    batch["input_ids"] = batch["input_ids"].repeat(1, 4)
    assert choose_head(model, batch, "auto") is None
    assert choose_head(model, hf.BatchEncoding(text("t5", length=40)), "auto") == ("lm_head", 256)
    assert choose_head(model, {"input_ids": batch["input_ids"]}, "auto") == ("lm_head", 384)


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5"])
def test_parameters_in_float32_computed_with_in_bfloat16(name, monkeypatch):
    batch, results = text(name), []
    made = whole_logits(monkeypatch)
    for head in (ROWS, "whole"):
        model = build(name)
        optimizer = adam(model)
        with fit(model, optimizer, batch, head=head, precision="bf16") as harness:
            results.append(train(model, optimizer, [batch] * 3))
            report = harness.report()
        assert_foreseen(report)
    assert made == []
    assert results[0] == pytest.approx(results[1], rel=1e-2)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_step_that_runs_out_is_repeated(name):
    """In forward and in backward; the loop holds the output, and the logits that it shows are still those of the step."""
    batch, losses = text(name), {}
    for phase in ("", "forward", "backward"):
        model = build(name)
        optimizer = adam(model)
        fails, seen = Fails(model.model.layers[0].mlp, phase), []
        with fit(model, optimizer, batch, allow=["recompute", "head"]) as harness:
            for step in range(3):
                fails.armed = step == 1
                torch.manual_seed(step)
                out = model(**batch)
                out.loss.backward()
                seen += [out.loss.detach().clone(), out.logits.detach().clone()]
                optimizer.step()
                optimizer.zero_grad()
        losses[phase] = seen
        assert [f"out of memory in {phase}: the step was retried" in note for note in harness.notes] == [True] * bool(phase)
    for phase in ("forward", "backward"):
        assert all(torch.equal(a, b) for a, b in zip(losses[phase], losses[""], strict=True))


class Fails:
    """Runs out of memory once when armed, as a module's forward begins or as the gradient of its result arrives."""

    def __init__(self, module, phase):
        self.armed, self.phase = False, phase
        module.register_forward_hook(self.hook)

    def hook(self, module, args, output):
        self.fail("forward")
        if output.requires_grad:
            output.register_hook(lambda _: self.fail("backward"))

    def fail(self, phase):
        if self.armed and phase == self.phase:
            self.armed = False
            raise torch.OutOfMemoryError("no more memory")


def outside(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_loss_that_the_loop_takes_is_taken_in_rows_and_not_repeated(name, monkeypatch):
    model, batch = build(name), text(name)
    reference = copy.deepcopy(model)
    expected = train(reference, adam(reference), [batch] * 3, loss_of=outside)
    made, optimizer = whole_logits(monkeypatch), adam(model)
    fails = Fails(model.model.layers[0].mlp, "backward")
    with fit(model, optimizer, batch, loss=outside, allow=["recompute", "head"]) as harness:
        losses = train(model, optimizer, [batch] * 3, loss_of=outside)
        report = harness.report()
        fails.armed = True
        with pytest.raises(torch.OutOfMemoryError) as caught:
            train(model, optimizer, [batch], loss_of=outside)
    assert made == []
    assert_foreseen(report)
    assert_same(model, reference, losses, expected)
    assert "let the model return its loss" in " ".join(caught.value.__notes__)


def smoothed(model, batch):
    """As `Trainer` does with `label_smoothing_factor`: the model is not given the labels."""
    from transformers.trainer_pt_utils import LabelSmoother

    out = model(input_ids=batch["input_ids"])
    return LabelSmoother(epsilon=0.1)(out, batch["labels"].clone(), shift_labels=True)


def counted(model, batch):
    """As `Trainer` does with gradient accumulation."""
    return model(**batch, num_items_in_batch=torch.tensor(60)).loss


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("loss", [smoothed, counted])
def test_losses_of_the_trainer(name, loss):
    """A smoothed loss wants the logits: they are computed, and that was foreseen."""
    model, batch = build(name), text(name)
    reference = copy.deepcopy(model)
    expected = train(reference, adam(reference), [batch] * 3, loss_of=loss)
    optimizer = adam(model)
    with fit(model, optimizer, batch, loss=loss) as harness:
        losses = train(model, optimizer, [batch] * 3, loss_of=loss)
        report = harness.report()
    assert_foreseen(report)
    assert harness.notes == []
    assert_same(model, reference, losses, expected)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma2", "bart"])
@pytest.mark.parametrize("planner", ["auto", "zero_offload"])
def test_logits_can_be_read_in_training_and_in_evaluation(name, planner):
    model, batch = build(name).eval(), text(name)
    reference = copy.deepcopy(model)
    expected = reference(**batch).logits.detach()
    with torch.no_grad():
        predicted = reference(**{k: v for k, v in batch.items() if k != "labels"}, **decoder(name, batch)).logits
    optimizer = adam(model)
    with fit(model, optimizer, batch, planner=planner, enforce=False):
        with torch.no_grad():
            without = model(**{k: v for k, v in batch.items() if k != "labels"}, **decoder(name, batch)).logits
            assert torch.equal(without.argmax(-1), predicted.argmax(-1)) and torch.equal(without, predicted)
            assert torch.equal(model(**batch).logits, expected)
        out = model(**batch)
        out.loss.backward()
        assert torch.equal(out.logits.argmax(-1), expected.argmax(-1)) and torch.equal(out.logits.detach(), expected)
        optimizer.step()


def decoder(name, batch):
    return {"decoder_input_ids": batch["labels"].clamp(min=0)} if name in SEQ2SEQ else {}


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5", "bart", "gpt2"])
def test_a_block_that_is_run_again_finds_the_cache_of_keys_as_it_was(name):
    """A call that asks for the cache gets it, also in training; eager attention would see every key twice."""
    model, batch = build(name), {**text(name), "use_cache": True}
    model.set_attn_implementation("eager")
    reference = copy.deepcopy(model)
    expected = train(reference, adam(reference), [batch] * 3)
    optimizer = adam(model)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    whole = holdall.plan(trace, planner="nop", hardware=machine()).predicted.peak["cpu"]
    with fit(model, optimizer, batch, head="whole", allow=["recompute"], budget=int(0.8 * whole)) as harness:
        assert harness.plan.count().get("recompute", 0) > 0
        losses = train(model, optimizer, [batch] * 3)
        report = harness.report()
    assert harness.notes == []
    assert_foreseen(report)
    assert losses == expected
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
