"""Scripts of every trainer with one line more: the same losses in 60 % of the memory."""

import gc
import logging
import re
import sys
from pathlib import Path

import pytest
import torch

import holdall
from holdall.errors import Infeasible, InvalidInput, MissingExtra, Unsupported
from holdall.runtime.budget.ledger import Ledger
from holdall.testing.stand_ins import planned_for
from holdall.testing.worlds import machine

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

EXAMPLES = Path(__file__).parents[2] / "examples"
KNOWN = "trainer", "accelerate_loop", "lightning_trainer", "raw_loop"  # no file may have the name of a package that it imports


@pytest.fixture(autouse=True)
def known_machine():
    """No test here is about the speed of this one."""
    with planned_for(machine()):
        yield


def script(name, *, plain=False, budget=None):
    """Run an example as it is, or without its lines of holdall; its names afterwards."""
    if name == "lightning_trainer":
        pytest.importorskip("lightning")
    text = (EXAMPLES / f"{name}.py").read_text()
    if plain:
        text = "\n".join(line for line in text.splitlines() if "holdall" not in line)
    if budget is not None:
        text = re.sub(r"BUDGET = .*", f"BUDGET = {budget!r}", text)
    names = {"__name__": "example"}
    exec(compile(text, f"{name}.py", "exec"), names)
    return names


def harness_of(names):
    """However the example holds it; closed, as a process that ends does not need to."""
    if "trainer" in names:
        found = [c for c in callbacks_of(names["trainer"]) if type(c).__name__ == "HoldallCallback"]
        return found[0].harness
    names["harness" if "harness" in names else "fitting"].close()
    return names["harness"] if "harness" in names else names["fitting"].harness


def callbacks_of(trainer):
    return trainer.callback_handler.callbacks if hasattr(trainer, "callback_handler") else trainer.callbacks


def is_untouched(module):
    return not any(m._forward_pre_hooks or m._forward_hooks or "forward" in m.__dict__ for m in module.modules())


@pytest.mark.parametrize("name", KNOWN)
def test_a_script_trains_in_60_percent_with_one_line_more(name, capsys):
    text = (EXAMPLES / f"{name}.py").read_text()
    added = [line for line in text.split('"""', 2)[2].splitlines() if "holdall" in line]
    assert len(added) == 2 and "import holdall" in added, "one import and one line"
    with Ledger() as ledger:
        expected = script(name, plain=True)["losses"]
    gc.collect()
    names = script(name)
    harness = harness_of(names)
    budget = harness.plan.budget["cpu"]
    assert budget <= 0.6 * ledger.peak, f"plain training takes {ledger.peak} bytes"
    assert max(harness.step_peaks) <= budget
    assert len(harness.step_peaks) == names["STEPS"]
    assert names["losses"] == expected
    assert harness.plan.actions
    assert is_untouched(names["model"])
    if name == "lightning_trainer":
        assert 0 < names["trainer"].callback_metrics["holdall/peak_gib"] <= budget / 2**30


QUIET = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}


class Net(torch.nn.Module):
    """A model as the Trainer likes it, and quickly traced."""

    def __init__(self, width=16, depth=3):
        super().__init__()
        make = torch.nn.Linear, torch.nn.GELU, torch.nn.Dropout
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(make[0](width, 4 * width), make[1](), make[2](0.1), make[0](4 * width, width))
            for _ in range(depth)
        )

    def forward(self, x, labels=None):
        for block in self.blocks:
            x = x + block(x)
        loss = None if labels is None else torch.nn.functional.mse_loss(x, labels)
        return {"loss": loss, "logits": x} if loss is not None else {"logits": x}


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x}


def train(tmp_path, *callbacks, **arguments):
    """(trainer, model) after a few steps of the plain Trainer."""
    transformers.set_seed(0)
    model = Net()
    given = {"max_steps": 2, "logging_steps": 1, "use_cpu": True, **QUIET}
    args = transformers.TrainingArguments(str(tmp_path), **{**given, **arguments})
    trainer = transformers.Trainer(model, args, train_dataset=Points(), callbacks=list(callbacks))
    trainer.train()
    return trainer, model


def logged(trainer, key="loss"):
    return [row[key] for row in trainer.state.log_history if key in row]


def same_weights(one, other):
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in theirs)


def plain_peak(tmp_path, *callbacks, **arguments):
    """(60 % of what plain training takes, trainer, model)."""
    with Ledger() as ledger:
        trainer, model = train(tmp_path, *callbacks, **arguments)
    gc.collect()
    return int(0.6 * ledger.peak), trainer, model


MADE = []


@pytest.fixture(autouse=True)
def closed_afterwards():
    """A test that fails must not leave its ledger to the next."""
    yield
    while MADE:
        MADE.pop().close()


def callback(*args, **kwargs):
    MADE.append(holdall.integrations.HoldallCallback(*args, **kwargs))
    return MADE[-1]


class Tracker(transformers.TrainerCallback):
    """What wandb and its like would be told."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def test_figures_reach_the_log_and_the_trackers_that_were_there_before(tmp_path):
    budget, plain, _ = plain_peak(tmp_path)
    tracker, ours = Tracker(), callback(budget)
    trainer, model = train(tmp_path, tracker, ours)
    assert logged(trainer) == logged(plain)
    for rows in (tracker.seen, trainer.state.log_history):
        first = rows[0]
        assert first["holdall/budget_gib"] == pytest.approx(budget / 2**30)
        assert 0 < first["holdall/peak_gib"] <= first["holdall/budget_gib"]
        assert first["holdall/peak_predicted_gib"] <= first["holdall/budget_gib"]
        assert first["holdall/step_seconds"] > 0 and first["holdall/step_predicted_seconds"] > 0
    assert "step" in str(ours.report())
    assert is_untouched(model)


def test_blocks_can_be_compiled_under_the_trainer(tmp_path):
    plain, expected = train(tmp_path)
    ours = callback("64MiB", compile="aot_eager")
    trainer, model = train(tmp_path, ours)
    assert logged(trainer) == logged(plain) and same_weights(model, expected)
    assert ours.harness.compiler.count > 0
    with pytest.raises(holdall.InvalidInput, match="did you mean"):
        train(tmp_path, callback("64MiB", compile="aot_eagr"))


def test_saving_generating_and_evaluating_between_steps_change_nothing(tmp_path):
    class Between(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            model.eval()
            with torch.no_grad():
                self.last = model(torch.ones(1, 3, 16))["logits"]

    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "save_strategy": "steps", "save_steps": 2}
    plain, between = Between(), Between()
    budget, reference, expected = plain_peak(tmp_path / "plain", plain, **options)
    ours = callback(budget, allow=("recompute", "place"))
    trainer, model = train(tmp_path / "ours", between, ours, **options)
    assert logged(trainer) == logged(reference)
    assert same_weights(model, expected)
    assert torch.equal(between.last, plain.last)
    name = "checkpoint-2/model.safetensors"
    assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_lora_through_the_trainer(tmp_path):
    peft = pytest.importorskip("peft")

    class Tokens(Points):
        def __getitem__(self, index):
            x = torch.randint(0, 32, (32,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": x, "labels": x}

    def run(*callbacks):
        transformers.set_seed(0)
        sizes = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 1, "n_positions": 32}
        base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, logging_steps=1, use_cpu=True, learning_rate=0.1, **QUIET
        )
        trainer = transformers.Trainer(model, args, train_dataset=Tokens(), callbacks=list(callbacks))
        trainer.train()
        return trainer, model

    with Ledger() as ledger:
        plain, expected = run()
    gc.collect()
    ours = callback(int(0.6 * ledger.peak))
    trainer, model = run(ours)
    assert logged(trainer) == logged(plain)
    assert same_weights(model, expected)
    assert any(p.abs().max() > 0 for n, p in model.named_parameters() if "lora_B" in n), "the adapters were trained"
    assert max(ours.harness.step_peaks) <= 0.6 * ledger.peak
    assert is_untouched(model)


def test_a_training_that_raises_leaves_nothing_behind_in_a_with_block(tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, *args, model=None, **kwargs):
            self.model = model
            raise KeyboardInterrupt

    stop, longest = Stop(), torch.ones(8, 24, 16)
    with pytest.raises(KeyboardInterrupt), callback("1GiB", planner="nop", batch={"x": longest, "labels": longest}) as ours:
        train(tmp_path, ours, stop)
    assert is_untouched(stop.model)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert ours.harness.plan.about.batch == ((8, 24, 16), (8, 24, 16)), "a batch of one's own is planned for"
    train(tmp_path, ours)  # and can be used again
    assert len(ours.harness.step_peaks) == 2


def test_a_loss_outside_of_the_model_is_planned_for_where_it_is_given(tmp_path):
    def run(*callbacks):
        transformers.set_seed(0)
        model = Net()
        args = transformers.TrainingArguments(str(tmp_path), max_steps=2, logging_steps=1, use_cpu=True, **QUIET)

        def compute(outputs, labels, num_items_in_batch=None):
            return (outputs["logits"] - labels).square().mean()

        given = {"train_dataset": Points(), "callbacks": list(callbacks), "compute_loss_func": compute}
        trainer = transformers.Trainer(model, args, **given)
        trainer.train()
        return trainer, model

    with Ledger() as ledger:
        reference, expected = run()
    gc.collect()
    # the trainer takes the labels away from the model, which then returns no loss; the points have their shape
    given = callback(int(0.6 * ledger.peak), loss=lambda model, batch: (model(**batch)["logits"] - batch["x"]).square().mean())
    trainer, model = run(given)
    assert logged(trainer) == logged(reference) and same_weights(model, expected)
    assert given.harness.plan.actions


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"gradient_checkpointing": True}, "gradient_checkpointing"), ({"torch_compile": True}, "torch_compile")],
)
def test_what_would_be_done_twice_is_refused(arguments, said):
    args = transformers.TrainingArguments("unused", use_cpu=True, report_to="none", **arguments)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(Unsupported, match=said):
        callback("1GiB").on_train_begin(args, None, None, model=model, optimizer=optimizer)
    assert is_untouched(model)


def test_a_budget_that_nothing_fits_says_how_much_would(tmp_path):
    ours = callback("20KiB", allow=("recompute",))
    with pytest.raises(Infeasible) as caught, ours:
        train(tmp_path, ours)
    assert "trainer needs" in str(caught.value)
    enough = callback(caught.value.smallest, allow=("recompute",))
    train(tmp_path, enough)
    assert max(enough.harness.step_peaks) <= caught.value.smallest


def test_accumulation_belongs_to_the_trainer():
    with pytest.raises(InvalidInput, match="accumulate"):
        callback("1GiB", accumulate=2)


# accelerate and Fabric


def test_where_a_model_returns_no_loss_its_outputs_stand_for_it():
    from accelerate import Accelerator

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    peaks = []
    for loss in (None, lambda model, batch: model(**batch)["logits"].sum()):
        accelerator, batch = Accelerator(cpu=True), {"x": torch.ones(1, 2, 16)}
        with holdall.integrations.accelerate.fit(accelerator, model, optimizer, batch, planner="nop", loss=loss) as fitting:
            peaks.append(fitting.harness.plan.predicted.peak["cpu"])
    assert peaks[0] == peaks[1] > 0


def test_accelerate_plans_at_once_for_a_given_batch():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(8, 16, 16)
    with holdall.integrations.accelerate.fit(accelerator, model, optimizer, {"x": x, "labels": x}, planner="nop") as fitting:
        assert fitting.harness is not None and fitting.metrics() == {}
        accelerator.backward(model(x, labels=x)["loss"])  # positional and named
        optimizer.step()
        optimizer.zero_grad()
        assert fitting.metrics()["holdall/peak_gib"] > 0
    assert is_untouched(model)


def test_mixed_precision_of_the_trainer_is_traced(tmp_path):
    plain, expected = train(tmp_path, bf16=True)
    ours = callback("64MiB")
    trainer, model = train(tmp_path, ours, bf16=True)
    assert logged(trainer) == logged(plain) and same_weights(model, expected)
    wide = callback("64MiB")
    train(tmp_path, wide)
    peaks = [c.report().predicted.peak["cpu"] for c in (ours, wide)]
    assert peaks[0] != peaks[1]
    assert ours.report().measured.peak["cpu"] <= 1.02 * peaks[0]
    assert not [n for n in ours.harness.notes if "autocast" in n]


@pytest.mark.parametrize("prepared", [True, False])
def test_mixed_precision_of_accelerate_is_traced(prepared, request):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    request.addfinalizer(AcceleratorState._reset_state)  # it is one for the process, with its precision
    predicted = {}
    x = torch.randn(8, 16, 16)
    for width in ("bf16", "no"):
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, mixed_precision=width)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if prepared:
            model, optimizer = accelerator.prepare(model, optimizer)
        sample = {"x": x, "labels": x}
        with holdall.integrations.accelerate.fit(accelerator, model, optimizer, sample, planner="nop") as fitting:
            if not prepared:
                model, optimizer = accelerator.prepare(model, optimizer)
            for _ in range(2):
                accelerator.backward(model(x, labels=x)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            report = fitting.report()
        predicted[width] = report.predicted.peak["cpu"]
        assert 0.85 < report.measured.peak["cpu"] / predicted[width] <= 1.0  # room for batches that are read ahead
    assert predicted["bf16"] != predicted["no"]


def test_arguments_by_place_and_by_name_are_planned_for():
    from accelerate import Accelerator

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 16, 16)
    with holdall.integrations.accelerate.fit(Accelerator(cpu=True), model, optimizer, planner="nop") as fitting:
        with torch.no_grad():
            model(x)
        assert fitting.harness is None, "nothing was trained yet"
        model(x, labels=x)["loss"].backward()
        optimizer.step()
        assert fitting.harness.step_peaks and not fitting.harness.notes


def test_fabric_trains_in_60_percent():
    fabric_of = pytest.importorskip("lightning").Fabric

    def run(budget):
        torch.manual_seed(0)
        fabric = fabric_of(accelerator="cpu", devices=1)
        model = Net()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        if budget:
            run.fitting = holdall.integrations.lightning.fit(fabric, model, optimizer, budget=budget)
        losses = []
        for _ in range(3):
            x = torch.randn(16, 32, 16)
            loss = model(x, labels=x)["loss"]
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model

    with Ledger() as ledger:
        expected, _ = run(None)
    gc.collect()
    budget = int(0.6 * ledger.peak)
    losses, model = run(budget)
    run.fitting.close()
    assert losses == expected
    assert max(run.fitting.harness.step_peaks) <= budget
    assert is_untouched(model.module)


# Lightning


def test_lightning_is_left_alone_when_training_raises_and_refuses_what_it_cannot_do():
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, by_hand=False):
            super().__init__()
            self.net = Net()
            self.automatic_optimization = not by_hand

        def training_step(self, batch, index):
            if index == 1:
                raise KeyError("mine")
            return self.net(batch, labels=batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(module):
        ours = holdall.integrations.lightning.HoldallCallback("1GiB", planner="nop")
        trainer = lightning.Trainer(
            max_steps=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[ours],
        )
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(16, 4, 16), batch_size=8))
        return ours

    module = Module()
    with pytest.raises(KeyError, match="mine"):
        fit(module)
    assert is_untouched(module) and "training_step" not in module.__dict__ and "log" not in module.__dict__
    with pytest.raises(Unsupported, match="by hand"):
        fit(Module(by_hand=True))


# packages that are not there


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("hf_trainer", "transformers", "hf"), ("accelerate", "accelerate", "hf"), ("lightning", "lightning", "lightning")],
)
def test_a_missing_package_is_answered_with_its_install_command(module, package, extra, monkeypatch):
    for name in ("transformers", "accelerate", "lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"holdall.integrations.{module}", raising=False)
    monkeypatch.delitem(vars(holdall.integrations), module, raising=False)
    with pytest.raises(MissingExtra) as caught:
        getattr(holdall.integrations, module)
    assert "\n" not in caught.value.fact and package in caught.value.fact
    assert caught.value.hint == f'pip install "holdall[{extra}]"'


def test_lines_of_the_log_go_above_a_progress_bar(monkeypatch):
    from accelerate import Accelerator

    pytest.importorskip("tqdm")
    log, said = logging.getLogger("holdall"), []
    monkeypatch.setattr("tqdm.tqdm.write", said.append)
    monkeypatch.setattr(log, "propagate", False)  # as where nobody has set up logging
    with holdall.integrations.accelerate.fit(Accelerator(cpu=True), Net(), None):
        log.warning("something to know")
    log.propagate = True
    assert said == ["something to know"]
    assert not log.handlers


def test_trl_trains_the_same_in_less_memory(tmp_path):
    trl, datasets, tokenizers = (pytest.importorskip(name) for name in ("trl", "datasets", "tokenizers"))
    words = {word: n for n, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(60))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    texts = [" ".join(f"w{(n + k) % 60}" for k in range(24)) for n in range(32)]

    def losses(*callbacks):
        transformers.set_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
        )
        given = {
            "max_steps": 3,
            "logging_steps": 1,
            "per_device_train_batch_size": 4,
            "use_cpu": True,
            "max_length": 32,
            **QUIET,
        }
        args = trl.SFTConfig(str(tmp_path), bf16=False, gradient_checkpointing=False, **given)
        data = datasets.Dataset.from_dict({"text": texts})
        model = transformers.LlamaForCausalLM(config)
        trainer = trl.SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer, callbacks=list(callbacks))
        trainer.train()
        return logged(trainer)

    expected = losses()
    roomy = callback("1GiB")
    assert losses(roomy) == expected
    tight = callback(max(roomy.harness.all_peaks) - 300_000)
    assert losses(tight) == expected
    assert tight.harness.plan.actions
    assert max(tight.harness.all_peaks) <= next(iter(tight.harness.plan.budget.values()))
