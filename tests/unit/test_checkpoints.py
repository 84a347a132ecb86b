"""A checkpoint knows nothing of the plan: a run goes on under another one, or without any, and ends with the same bits."""

import copy
import json
import logging
import os
import random
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save_file as save_with_the_library

import holdall
from holdall import checkpoints
from holdall.checkpoints import folders, plain, tensors
from holdall.errors import HoldallError, InvalidInput, Unsupported
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.registry import member_class
from holdall.testing.contracts import problem_for
from holdall.testing.stand_ins import full_disk
from holdall.testing.states import Layer, differences, place_of
from holdall.testing.worlds import machine


class Net(torch.nn.Module):
    """A tied head, dropout, and buffers that change as it is trained."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = torch.nn.Embedding(16, width)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(self.norm(x.flatten(0, 1))), ids.flatten())


class Stream:
    """Batches in an order of their own, drawn anew for every epoch of four."""

    def __init__(self):
        self.random, self.left = torch.Generator().manual_seed(3), []

    def next(self):
        if not self.left:
            self.left = torch.randperm(4, generator=self.random).tolist()
        return torch.randint(0, 16, (2, 4), generator=torch.Generator().manual_seed(self.left.pop()))

    def state_dict(self):
        return {"left": tuple(self.left), "random": self.random.get_state()}

    def load_state_dict(self, state):
        self.left = list(state["left"])
        self.random.set_state(state["random"])


def adamw(model, **options):
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, **options)


def schedule(optimizer):
    """Two schedulers in turn, with states of several kinds."""
    first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    then = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.3)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, then], [2])


class Run:
    """A training run; `seed` is for the weights, which a resumed run must not depend on."""

    def __init__(self, seed=0, **options):
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = adamw(self.model, **options)
        self.scheduler = schedule(self.optimizer)
        self.data = Stream()

    def parts(self):
        return {"scheduler": self.scheduler, "data": self.data}

    def steps(self, first, last):
        for _ in range(first, last):
            loss = self.model(self.data.next()) * (1 + random.random() + numpy.random.rand())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def save(self, out, step, **options):
        return holdall.save_checkpoint(out, self.model, self.optimizer, step=step, **self.parts(), **options)

    def load(self, out, **options):
        return holdall.load_checkpoint(out, self.model, self.optimizer, **self.parts(), **options)

    def everything(self):
        """What must be the same in the end, and the next number of every generator."""
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        for group in optimizer["param_groups"]:
            for how in ("fused", "foreach"):
                group.pop(how)
        numbers = [random.random(), float(numpy.random.rand()), torch.rand(1)]
        parts = [copy.deepcopy(part.state_dict()) for part in self.parts().values()]
        return [copy.deepcopy(dict(self.model.state_dict())), optimizer, parts, numbers]


def begin(seed=5):
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@cache
def plan_of(place):
    return finish(Nop(), problem_for(traced()), [place_of(traced(), place)])


@cache
def traced():
    run = Run()
    return holdall.trace(run.model, Stream().next(), optimizer=run.optimizer)


def under(place, run):
    """The run with a plan on it; `plain`: without."""
    if place == "plain":
        return nullcontext()
    with my_numbers():  # the plan may have been made already or not
        plan = plan_of(place)
    return holdall.apply(plan, run.model, run.optimizer, enforce=False)


@cache
def uninterrupted(**options):
    run = Run(**options)
    begin()
    run.steps(0, 6)
    return run.everything()


@contextmanager
def my_numbers():
    """The global generators go on afterwards as if nothing had happened."""
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    numpy.random.set_state(before[1])
    torch.set_rng_state(before[2])


@pytest.fixture(autouse=True)
def numbers_of_others():
    with my_numbers():
        yield


# resuming


@pytest.mark.parametrize(
    ("first", "then", "loaded"),
    [
        ("plain", "plain", "before"),
        ("host overlap_forward", "plain", "before"),
        ("plain", "via_device overlap_forward", "before"),
        ("plain", "via_device overlap_forward", "inside"),
        ("via_device overlap_forward", "host overlap_forward", "inside"),
        ("streamed overlap_forward", "mixed overlap_forward", "before"),
        ("mixed overlap_forward", "streamed overlap_forward", "inside"),
    ],
)
def test_a_run_goes_on_under_another_plan_with_the_same_bits(tmp_path, first, then, loaded, slow_host):
    expected = uninterrupted()
    one = Run()
    begin()
    with under(first, one):
        one.steps(0, 3)
        one.save(tmp_path, 3)
    other = Run(seed=9)
    begin(seed=77)
    if loaded == "before":
        other.load(tmp_path)
    with under(then, other):
        if loaded == "inside":
            assert other.load(tmp_path).step == 3
        other.steps(3, 6)
        seen = other.everything()
    assert differences(seen, expected) == []


@pytest.mark.parametrize("place", ["plain", "mixed overlap_forward", "via_device overlap_forward"])
def test_a_run_may_go_back_while_its_plan_is_on(tmp_path, place):
    run = Run()
    begin()
    with under(place, run):
        run.steps(0, 3)
        run.save(tmp_path, 3)
        run.steps(3, 5)
        run.load(tmp_path)
        run.steps(3, 6)
        seen = run.everything()
    assert differences(seen, uninterrupted()) == []


@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_how_updates_are_made_is_not_the_checkpoints_business(tmp_path, flag):
    """The reference goes on in memory, with torch's own `load_state_dict`, from where the checkpoint was made."""
    one = Run()
    begin()
    one.steps(0, 3)
    one.save(tmp_path, 3)
    state = copy.deepcopy(one.optimizer.state_dict())
    reference = Run(**{flag: True})
    reference.model.load_state_dict(one.model.state_dict())
    for group in state["param_groups"]:
        group |= {"foreach": flag == "foreach" or None, "fused": flag == "fused" or None}
    reference.optimizer.load_state_dict(state)
    for part in ("scheduler", "data"):
        getattr(reference, part).load_state_dict(copy.deepcopy(getattr(one, part).state_dict()))
    other = Run(seed=9, **{flag: True})
    other.load(tmp_path)
    assert other.optimizer.param_groups[0][flag] is True
    other.steps(3, 6)
    seen = other.everything()
    checkpoints.states.read_random(folders.folder_of(tmp_path, 3), _about(tmp_path)["random"])
    reference.steps(3, 6)
    assert differences(seen, reference.everything()) == []
    if flag == "foreach":  # on a CPU the same ops in the same order
        assert differences(seen, uninterrupted()) == []


def test_a_run_goes_on_without_holdall(tmp_path):
    one = Run()
    begin()
    with under("mixed overlap_forward", one):
        one.steps(0, 3)
        folder = one.save(tmp_path, 3)
    other = Run(seed=9)
    weights = load_file(folder / "model.safetensors")
    weights["head.weight"] = weights["embed.weight"]
    other.model.load_state_dict(weights)
    about = json.loads((folder / "training.json").read_text())
    named = dict(other.model.named_parameters())  # from here on as the module's docstring says
    groups = [{**g, "params": [named[n] for n in g["params"]]} for g in about["optimizer"]["groups"]]
    optimizer = torch.optim.AdamW(groups)
    for key, value in load_file(folder / "optimizer.safetensors").items():
        name, _, field = key.rpartition(".")
        optimizer.state[named[name]][field] = value
    torch.set_rng_state(load_file(folder / "random.safetensors")["cpu"])
    mine = {n: optimizer.state[p] for n, p in named.items()}
    theirs = dict(one.model.named_parameters())
    assert differences(mine, {n: dict(one.optimizer.state[p]) for n, p in theirs.items()}) == []
    assert differences(dict(other.model.state_dict()), dict(one.model.state_dict())) == []
    assert torch.equal(torch.rand(3), _after(one.load(tmp_path), torch.rand, 3))


def _after(_, function, *args):
    return function(*args)


def _about(out, step=3):
    return json.loads((folders.folder_of(out, step) / "training.json").read_text())


def test_the_loop_of_the_docs_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    code = compile(text.split("```python")[1].split("```")[0], "docs/checkpoints.md", "exec")

    given = {"save_checkpoint": holdall.save_checkpoint, "load_checkpoint": holdall.load_checkpoint}
    here = SimpleNamespace(**given, fit=partial(holdall.fit, hardware=machine()))  # not measured anew by every test
    batches = torch.randint(0, 16, (5, 2, 4), generator=torch.Generator().manual_seed(0))
    for steps in (3, 5):
        run = Run(seed=steps)
        begin()
        known = {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler, "steps": steps, "every": 2}
        exec(code, {**known, "holdall": here, "batch": batches.__getitem__, "budget": "1GiB"})
    assert sorted(os.listdir("run/checkpoints")) == ["step-000002", "step-000004"]
    reference = Run(seed=3)
    begin()
    reference.model.train()
    for n in range(5):
        reference.model(batches[n]).backward()
        reference.optimizer.step()
        reference.scheduler.step()
        reference.optimizer.zero_grad()
    assert differences(run.everything()[:2], reference.everything()[:2]) == []


def test_a_hugging_face_model_is_saved_as_itself(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=32, n_positions=16, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    theirs = transformers.modeling_utils.safe_save_file
    folder = holdall.save_checkpoint(tmp_path, model, step=1)
    assert transformers.modeling_utils.safe_save_file is theirs
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")  # tied: it is there once
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "latest")
    assert loaded.config.use_cache and not model.config.use_cache
    assert differences(dict(loaded.state_dict()), dict(model.state_dict())) == []
    other = transformers.GPT2LMHeadModel(config)
    holdall.load_checkpoint(tmp_path, other)
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []


def test_experts_that_the_library_would_rename_come_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    config = transformers.MixtralConfig(**small, num_key_value_heads=1, num_local_experts=2)
    model, other = transformers.MixtralForCausalLM(config), transformers.MixtralForCausalLM(config)
    folder = holdall.save_checkpoint(tmp_path, model, step=1)
    holdall.load_checkpoint(tmp_path, other)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for found in (other, loaded):
        assert differences(dict(found.state_dict()), dict(model.state_dict())) == []


def test_of_a_model_with_adapters_those_are_saved(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted(seed):
        torch.manual_seed(0)
        base = Net()
        torch.manual_seed(seed)
        return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["up"], init_lora_weights=False))

    model, other = adapted(1), adapted(2)
    optimizers = [torch.optim.AdamW(p for p in m.parameters() if p.requires_grad) for m in (model, other)]
    model(Stream().next()).backward()
    optimizers[0].step()
    folder = holdall.save_checkpoint(tmp_path, model, optimizers[0], step=1)
    assert (folder / "adapter_model.safetensors").stat().st_size < 4096
    holdall.load_checkpoint(tmp_path, other, optimizers[1])
    trained = [{n: p for n, p in m.named_parameters() if p.requires_grad} for m in (model, other)]
    assert differences(trained[1], trained[0]) == []
    states = [{n: dict(o.state[p]) for n, p in t.items()} for o, t in zip(optimizers, trained, strict=True)]
    assert differences(states[1], states[0]) == []


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adafactor, torch.optim.NAdam, torch.optim.ASGD])
def test_other_optimizers_come_back_whole(tmp_path, make):
    model = Net()
    options = {"lr": torch.tensor(0.125)} if make is torch.optim.NAdam else {"lr": 0.1}
    options |= {"momentum": 0.9} if make is torch.optim.SGD else {}
    one, other = make(model.parameters(), **options), make(model.parameters(), **{**options, "weight_decay": 0.5})
    model(Stream().next()).backward()
    one.step()
    holdall.save_checkpoint(tmp_path, model, one, step=1)
    holdall.load_checkpoint(tmp_path, model, other)
    assert differences(other.state_dict(), one.state_dict()) == []


@pytest.mark.parametrize("name", ["adam8bit", "adafactor", "adam_mini", "galore", "came", "flora", "apollo"])
def test_our_own_optimizers_go_on_with_the_same_bits(tmp_path, name):
    make = member_class("optim", name)

    def fresh():
        torch.manual_seed(0)
        model = Net().bfloat16() if name == "adafactor" else Net()
        return model, make(model.parameters(), lr=1e-2)

    def step(model, optimizer):
        model.eval()(Stream().next()).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, one = fresh()
    step(model, one)
    holdall.save_checkpoint(tmp_path, model, one, step=1)
    step(model, one)
    again, other = fresh()
    holdall.load_checkpoint(tmp_path, again, other)
    step(again, other)
    assert differences(dict(again.state_dict()), dict(model.state_dict())) == []
    assert differences(other.state_dict(), one.state_dict()) == []


def test_wrappers_leave_no_prefix(tmp_path):
    model = Net()
    folder = holdall.save_checkpoint(tmp_path, torch.compile(model), adamw(model), step=1)
    assert set(load_file(folder / "model.safetensors")) == set(model.state_dict()) - {"head.weight"}
    holdall.load_checkpoint(tmp_path, torch.compile(Net()))


# memory


def test_a_save_is_no_part_of_a_step(tmp_path):
    """Under an enforced budget with not a byte to spare, what a save and a load touch is not counted."""

    def peaks(saves):
        run = Run()
        plan = holdall.plan(traced(), planner="zero_offload", hardware=machine())
        budget = {**plan.budget, next(iter(plan.budget)): next(iter(plan.predicted.peak.values()))}
        with holdall.apply(replace(plan, budget=budget), run.model, run.optimizer) as harness:
            for step in range(3):
                run.steps(step, step + 1)
                if saves:
                    run.save(tmp_path, step)
                    run.load(tmp_path)
            return harness.step_peaks, budget

    assert peaks(True) == peaks(False)


def resident():
    """(bytes of this process's memory now, the most since the peak was last set back)"""
    with open("/proc/self/status") as file:
        said = dict(line.split(":", 1) for line in file)
    return tuple(int(said[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))


@pytest.mark.parametrize("on", ["host", "device"])
def test_neither_saving_nor_loading_makes_a_second_copy(tmp_path, on, monkeypatch):
    """Measured by the system itself. A device's tensors go through the host in pieces; here the CPU plays the device."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pytest.skip("the system does not let a process set its peak back")
    if on == "device":
        monkeypatch.setattr(tensors, "PIECE", 2**20)
        write, read = tensors._pieces, tensors.read_into
        monkeypatch.setattr(tensors, "_pieces", lambda t: write(_Far(t)) if t.numel() > 99 else write(t))
        for module in (tensors, checkpoints.states):
            monkeypatch.setattr(module, "read_into", lambda e, t: read(e, _Far(t)) if t.numel() > 99 else read(e, t))
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(6)])  # 24 MiB
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()

    def extra(call):
        before = resident()[0]
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        call()
        return resident()[1] - before

    whole = 3 * sum(p.nbytes for p in model.parameters())
    one = 4 * 2**20
    extra(lambda: holdall.save_checkpoint(tmp_path / "warm", Net(), step=0))
    assert extra(lambda: holdall.save_checkpoint(tmp_path, model, optimizer, step=1)) < one < whole / 10
    assert extra(lambda: holdall.load_checkpoint(tmp_path, model, optimizer)) < one


class _Far:
    """A tensor of the CPU that says it lies elsewhere."""

    def __init__(self, tensor):
        self.tensor = tensor

    class device:
        type = "elsewhere"

    def __getattr__(self, name):
        return getattr(self.tensor, name)


# files


def test_files_are_those_of_the_library(tmp_path):
    torch.manual_seed(0)
    made = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4, 6).t(),
        "c": torch.tensor(7),
        "d": torch.randn(2, 3).bfloat16(),
        "e": torch.tensor([True, False]),
        "f": torch.empty(0, 4),
        "g": torch.randn(4).to(torch.float8_e4m3fn),
        "h": torch.arange(9, dtype=torch.uint8)[2:5],
    }
    tensors.save_file(made, tmp_path / "ours", {"format": "pt"})
    whole = {k: v.contiguous().clone() for k, v in made.items()}
    save_with_the_library(whole, tmp_path / "theirs")
    assert (
        differences({k: v.float() for k, v in load_file(tmp_path / "ours").items()}, {k: v.float() for k, v in made.items()})
        == []
    )
    for name, entry in tensors.read_header(tmp_path / "theirs").items():
        into = torch.zeros_like(made[name])
        tensors.read_into(entry, into)
        assert into.dtype == made[name].dtype and torch.equal(into.float(), made[name].float())


@pytest.mark.parametrize("content", [b"", b"\x08", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0[]", b"\x05\0\0\0\0\0\0\0{'a':"])
def test_what_is_no_such_file_is_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(InvalidInput, match="is not a safetensors file") as caught:
        tensors.read_header(tmp_path / "x")
    assert "\n" not in caught.value.fact


def test_plain_data_survives():
    from collections import Counter

    value = {
        "a": (1, 2.5, float("inf"), None),
        "b": {3: "x", (1, 2): True},
        "$c": [numpy.int64(4), numpy.float32(0.5)],
        "d": Counter({2: 1}),
        "e": torch.tensor([1.1, 2.2], dtype=torch.bfloat16),
    }
    back = plain.unpack(json.loads(json.dumps(plain.pack(value, "it"))), "it")
    assert differences(back, value) == [] and type(back["d"]) is Counter
    with pytest.raises(Unsupported, match=r"it\['f'\]\[0\] is a Net") as caught:
        plain.pack({"f": [Net()]}, "it")
    assert "\n" not in caught.value.fact


def test_the_last_ones_are_kept_and_the_link_follows(tmp_path):
    for step in (1, 2, 3):
        holdall.save_checkpoint(tmp_path, Net(), step=step, keep=2)
        assert (tmp_path / "latest").resolve() == folders.folder_of(tmp_path, step).resolve()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-000002", "step-000003"]
    holdall.save_checkpoint(tmp_path, Net(), step=1, keep=2)  # gone back: this is the last one now
    assert holdall.load_checkpoint(tmp_path).step == 1
    with pytest.raises(InvalidInput, match="`keep` is 0"):
        holdall.save_checkpoint(tmp_path, Net(), step=4, keep=0)


@pytest.mark.parametrize("kind", ["generator", "plain"])
def test_the_position_may_be_a_generator_or_plain_data(tmp_path, kind):
    source = torch.Generator().manual_seed(8)
    holdall.save_checkpoint(tmp_path, Net(), step=1, data=source if kind == "generator" else {"epoch": (1, 2)})
    if kind == "plain":
        assert holdall.load_checkpoint(tmp_path).data == {"epoch": (1, 2)}
        return
    again = torch.Generator()
    holdall.load_checkpoint(tmp_path, data=again)
    assert torch.equal(torch.rand(3, generator=again), torch.rand(3, generator=source))


# what goes wrong


def test_nothing_there_is_no_error_and_a_new_run_begins(tmp_path):
    assert holdall.load_checkpoint(tmp_path / "nowhere", Net()) is None


@pytest.mark.parametrize("lost", ["complete.json", "model.safetensors", "training.json"])
def test_a_half_written_folder_is_passed_over_with_a_note(tmp_path, lost, caplog):
    for step in (1, 2):
        holdall.save_checkpoint(tmp_path, Net(), step=step)
    damaged = folders.folder_of(tmp_path, 2)
    (damaged / lost).write_bytes((damaged / lost).read_bytes()[:20])
    with caplog.at_level(logging.WARNING, "holdall"):
        found = holdall.load_checkpoint(tmp_path, Net())
    assert found.step == 1 and "step-000002` is not complete and was ignored" in found.notes[0]
    assert found.notes[0] in caplog.text
    with pytest.raises(InvalidInput, match="is not complete: a file of it is missing or cut off"):
        holdall.load_checkpoint(damaged, Net())


def another(model):
    model.layers[0].up = torch.nn.Linear(8, 24)
    return model


def less(model):
    del model.layers[2]
    return model


def more(model):
    model.extra = torch.nn.Linear(2, 3)
    return model


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (another, r"`layers.0.up.weight` is float32 \[16, 8\] in it, and float32 \[24, 8\] in the model"),
        (less, r"it has `layers.2.\w+.\w+`, float32 \[.*\], which the model has not"),
        (more, r"it has no `extra.weight`, which is float32 \[3, 2\] in the model"),
        (torch.nn.Module.bfloat16, r"`embed.weight` is float32 \[16, 8\] in it, and bfloat16 \[16, 8\] in the model"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_the_first_difference(tmp_path, change, says):
    holdall.save_checkpoint(tmp_path, Net(), step=1)
    model = change(Net())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidInput, match=f"is a checkpoint of another model: {says}") as caught:
        holdall.load_checkpoint(tmp_path, model)
    assert "\n" not in caught.value.fact and caught.value.hint
    assert differences(dict(model.state_dict()), dict(before)) == []  # nothing was touched


def stepped():
    run = Run()
    run.steps(0, 1)
    return run


def test_a_missing_entry_of_the_optimizer_is_named_and_nothing_is_touched(tmp_path):
    run = stepped()
    folder = run.save(tmp_path, 1)
    kept = load_file(folder / "optimizer.safetensors")
    del kept["layers.1.up.bias.exp_avg"]
    save_with_the_library(kept, folder / "optimizer.safetensors")
    marker = json.loads((folder / "complete.json").read_text())
    marker["files"]["optimizer.safetensors"] = (folder / "optimizer.safetensors").stat().st_size
    (folder / "complete.json").write_text(json.dumps(marker))
    other = Run(seed=9)
    before = copy.deepcopy(other.model.state_dict())
    with pytest.raises(InvalidInput, match=r"the entry `layers.1.up.bias.exp_avg` of the optimizer is missing") as caught:
        other.load(tmp_path)
    assert "\n" not in caught.value.fact
    assert differences(dict(other.model.state_dict()), dict(before)) == []


def test_what_does_not_belong_together_is_refused(tmp_path):
    run = stepped()
    run.save(tmp_path / "whole", 1)
    holdall.save_checkpoint(tmp_path / "alone", run.model, step=1, rng=False)
    new = Run()
    load = holdall.load_checkpoint
    cases = {
        "holds no optimizer": lambda: load(tmp_path / "alone", new.model, new.optimizer),
        "holds no scheduler": lambda: load(tmp_path / "alone", scheduler=new.scheduler),
        "holds no random numbers": lambda: load(tmp_path / "alone"),
        "holds no position in the data": lambda: load(tmp_path / "alone", data=new.data, rng=False),
        "`data` is a int, which cannot be set": lambda: load(tmp_path / "whole", data=3),
        "`step` is -1": lambda: run.save(tmp_path, -1),
        "without its model": lambda: load(tmp_path / "whole", optimizer=new.optimizer),
        "the state of AdamW, not of SGD": lambda: load(tmp_path / "whole", new.model, torch.optim.SGD(new.model.parameters())),
        "`layers.0.norm.weight` was in group 1 in it and is in group 0 in this one": lambda: load(
            tmp_path / "whole", new.model, torch.optim.AdamW(new.model.parameters())
        ),
        "are not the model's": lambda: load(tmp_path / "whole", new.model, torch.optim.AdamW(Net().parameters())),
    }
    for says, call in cases.items():
        with pytest.raises(InvalidInput, match=says) as caught:
            call()
        assert "\n" not in caught.value.fact and caught.value.hint


def test_states_where_the_checkpoint_has_none_are_refused(tmp_path):
    Run().save(tmp_path, 0)
    with pytest.raises(InvalidInput, match=r"has a state for `embed.weight` already, and the checkpoint has none"):
        stepped().load(tmp_path)


def test_a_tensor_that_no_plain_file_can_hold_is_refused_and_leaves_nothing(tmp_path):
    run = stepped()
    run.save(tmp_path, 1)
    run.optimizer.state[run.model.embed.weight]["odd"] = torch.eye(3).to_sparse()
    with pytest.raises(Unsupported, match=r"`embed.weight.odd` is a Tensor of float32, which a plain file cannot hold"):
        run.save(tmp_path, 2)
    assert os.listdir(tmp_path / "checkpoints") == ["step-000001"]


@pytest.mark.parametrize("room", [0, 100, 5_000, 20_000])  # in the header, in the weights, in the optimizer's states
def test_a_full_disk_loses_nothing(tmp_path, room):
    run = stepped()
    before = run.save(tmp_path, 1)
    content = {path.name: path.read_bytes() for path in before.iterdir()}
    with full_disk(room), pytest.raises(HoldallError) as caught:
        run.save(tmp_path, 2, keep=1)
    assert caught.value.fact == "cannot save the checkpoint of step 2: No space left on device; the one of step 1 is intact"
    assert os.listdir(tmp_path / "checkpoints") == ["step-000001"]
    assert {path.name: path.read_bytes() for path in before.iterdir()} == content
    assert Run(seed=4).load(tmp_path).step == 1


def test_a_system_that_limits_files_is_a_full_disk_too(tmp_path):
    """The system's own refusal in the middle of a file, not a simulated one."""
    resource, signal = pytest.importorskip("resource"), pytest.importorskip("signal")
    run = stepped()
    run.save(tmp_path, 1)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
        with pytest.raises(
            HoldallError, match="cannot save the checkpoint of step 2: File too large; the one of step 1 is intact"
        ):
            run.save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert run.load(tmp_path).step == 1
