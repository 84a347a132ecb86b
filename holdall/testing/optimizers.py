"""What every optimizer must do, found by folder: a file added to `optim/` is tested by existing.

Elsewhere: subclass `OptimizerContract`, set `optimizer`, and let pytest collect it. Rules differ in what they need of a step: a
class with `forward_only` gets a closure that returns the loss and makes no gradient, all others a backward before `step()`.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from holdall.errors import HoldallError, InvalidInput
from holdall.runtime.budget.ledger import Ledger
from holdall.updates.parts import Part, snapshot

Shapes = Sequence[tuple[int, ...]]


class Task:
    """Parameters to be pulled to fixed targets, a bit differently at every step."""

    def __init__(self, shapes: Shapes, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.params = [torch.nn.Parameter(torch.randn(s, generator=random).to(dtype)) for s in shapes]
        self.targets = [torch.randn(s, generator=random) for s in shapes]
        self.weights = [torch.rand(s, generator=random) + 0.5 for s in shapes]

    def loss(self, step: int = 0) -> torch.Tensor:
        total = torch.zeros(())
        for p, target, weight in zip(self.params, self.targets, self.weights, strict=True):
            uneven = weight.roll(step) if weight.dim() else weight
            total = total + ((p.float() - target).square() * uneven).mean()
        return total

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.params]


def allocated(state: dict[str, Any]) -> int:
    """Bytes of the storages that a parameter's state holds; a storage counts once and whole."""
    tensors = [v for v in state.values() if isinstance(v, torch.Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def sketch(seed: int, rank: int, short: int, like: torch.Tensor) -> torch.Tensor:
    """The random projection that a seed stands for, as optimizers that draw one must draw it: N(0, 1/rank)."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rank, short, generator=random, dtype=like.dtype).div_(rank**0.5)


def seed_after(seed: int) -> int:
    """The seed of the next projection: the fifteenth whole number that the old one draws."""
    random = torch.Generator().manual_seed(seed)
    return int(torch.randint(0, 2**63 - 1, (15,), generator=random)[14])


def refusal(call: Callable[[], Any]) -> HoldallError:
    """The error with which a call is refused; it must be one of ours, in one line, with a hint."""
    try:
        call()
    except HoldallError as error:
        assert "\n" not in error.fact and error.hint, error
        return error
    raise AssertionError("was not refused")


class OptimizerContract:
    """A plain torch optimizer: its state is what it says, can be saved, and is each parameter's own."""

    optimizer: ClassVar[Any]  # the class
    options: ClassVar[list[dict[str, Any]]] = [{}]  # ways to use it; they are for matrices
    decaying: ClassVar[list[dict[str, Any]]] = []  # ways in which every element decays in every step; empty: all of them
    common: ClassVar[dict[str, Any]] = {}  # what all groups get
    shapes: ClassVar[Shapes] = [(12, 20), (20, 12), (20,), (6, 4, 3), ()]
    steps: ClassVar[int] = 4
    most: ClassVar[float] = 4  # times a parameter's 32-bit size: what a step may take on the way
    falls: ClassVar[float] = 0.999  # the share of the loss that is left after a few steps, at most

    # -- worlds

    def make(self, params: Sequence[torch.Tensor], options: dict[str, Any]) -> Any:
        """The optimizer with matrices in a group with the options, everything else in one without."""
        matrices = [p for p in params if p.dim() == 2]
        rest = [p for p in params if p.dim() != 2]
        groups = [g for g in ({"params": matrices, **options}, {"params": rest}) if g["params"]]
        return self.optimizer(groups, **self.common)

    @property
    def forward_only(self) -> bool:
        return bool(getattr(self.optimizer, "forward_only", False))

    def train(self, task: Task, optimizer: Any, steps: int, *, first: int = 0) -> list[float]:
        losses = []
        for n in range(first, first + steps):
            if self.forward_only:
                losses.append(float(optimizer.step(lambda n=n: task.loss(n))))
            else:
                loss = task.loss(n)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            optimizer.zero_grad()
        return losses

    def ready(self, options: dict[str, Any], *, dtype: torch.dtype = torch.float32) -> tuple[Task, Any]:
        task = Task(self.shapes, dtype=dtype)
        return task, self.make(task.params, options)

    # -- what must hold

    def test_it_says_what_it_is(self) -> None:
        cls = self.optimizer
        assert issubclass(cls, torch.optim.Optimizer)
        assert cls.name == inspect.getmodule(cls).__name__.rpartition(".")[2]  # type: ignore[union-attr]
        assert isinstance(cls.paper, str) and cls.paper
        assert isinstance(cls.exact, bool) and isinstance(cls.consumes_gradients, bool)

    def test_it_learns(self) -> None:
        for options in self.options:
            task, optimizer = self.ready(options)
            before = task.loss().item()
            self.train(task, optimizer, 30 if self.forward_only else 15)
            assert task.loss().item() < self.falls * before, options

    def test_state_bytes_are_what_is_allocated(self) -> None:
        for options in self.options:
            for dtype in (torch.float32, torch.bfloat16):
                task, optimizer = self.ready(options, dtype=dtype)
                said = [optimizer.state_bytes(p) for p in task.params]
                self.train(task, optimizer, self.steps)
                assert said == [allocated(optimizer.state.get(p, {})) for p in task.params], (options, dtype)
                assert said == [optimizer.state_bytes(p) for p in task.params]

    def test_a_saved_state_goes_on_with_the_same_bits(self) -> None:
        """Through a file that holds nothing but tensors and plain values, for parameters of 16 bits too."""
        for options in self.options:
            for dtype in (torch.float32, torch.bfloat16):
                task, optimizer = self.ready(options, dtype=dtype)
                self.train(task, optimizer, self.steps)
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                other, second = self.ready(options, dtype=dtype)
                for p, value in zip(other.params, task.values(), strict=True):
                    p.data.copy_(value)
                second.load_state_dict(torch.load(file, weights_only=True))
                assert self.train(task, optimizer, self.steps, first=self.steps) == self.train(
                    other, second, self.steps, first=self.steps
                )
                assert all(map(torch.equal, task.values(), other.values())), (options, dtype)
                assert [optimizer.state_bytes(p) for p in task.params] == [
                    allocated(second.state.get(p, {})) for p in other.params
                ]

    def test_it_repeats_itself_and_leaves_the_global_generator_alone(self) -> None:
        for options in self.options:
            results = []
            for seed in (1, 2):
                torch.manual_seed(seed)
                before = torch.get_rng_state()
                task, optimizer = self.ready(options)
                self.train(task, optimizer, self.steps)
                assert torch.equal(before, torch.get_rng_state())
                results.append(task.values())
            assert all(map(torch.equal, *results)), options

    def test_each_parameter_is_updated_alone(self) -> None:
        """In any order, by a copy of the optimizer that holds only that one: what an engine does in backward or on the host."""
        if self.forward_only or self.optimizer.consumes_gradients:
            return
        for options in self.options:
            task, optimizer = self.ready(options)
            other, source = self.ready(options)
            states: list[dict[str, Any]] = [source.state.get(p) or {} for p in other.params]
            for n in range(self.steps):
                self.train(task, optimizer, 1, first=n)
                other.loss(n).backward()
                part = Part(source, other.params)
                for i in reversed(range(len(other.params))):
                    grad, other.params[i].grad = other.params[i].grad, None
                    assert grad is not None
                    part.step([other.params[i].detach()], [grad], [states[i]], snapshot(source), [i])
            assert all(map(torch.equal, task.values(), other.values())), options

    def test_sixteen_bits_are_computed_in_thirty_two(self) -> None:
        """A first step from the same gradient gives the 32-bit result, rounded."""
        if self.forward_only:
            return
        for options in self.options:
            if options.get("variant") == "torch":  # as torch does: in the parameter's precision
                continue
            narrow = Task(self.shapes, dtype=torch.bfloat16)
            wide = Task(self.shapes)
            for p, q in zip(narrow.params, wide.params, strict=True):
                q.data.copy_(p.data)
            first, second = self.make(narrow.params, options), self.make(wide.params, options)
            for p, q in zip(narrow.params, wide.params, strict=True):
                p.grad = torch.full_like(p, 0.25) * torch.sign(p.detach())
                q.grad = p.grad.float()
            first.step()
            second.step()
            for p, q in zip(narrow.params, wide.params, strict=True):
                assert torch.equal(p.detach(), q.detach().to(torch.bfloat16)), options

    def test_frozen_parameters_and_later_groups(self) -> None:
        for options in self.options:
            task = Task(self.shapes)
            task.params[0].requires_grad_(False)
            frozen = task.params[0].detach().clone()
            optimizer = self.make(task.params[:-1], options)
            assert optimizer.state_bytes(task.params[0]) == 0
            self.train(task, optimizer, 1)
            late = task.params[-1].detach().clone()
            optimizer.add_param_group({"params": [task.params[-1]]})
            self.train(task, optimizer, 2, first=1)
            assert torch.equal(frozen, task.params[0]), options
            assert not torch.equal(late, task.params[-1]), options
            assert allocated(optimizer.state.get(task.params[0], {})) == 0

    def test_a_scheduler_rules_the_learning_rate_of_each_group(self) -> None:
        task, optimizer = self.ready(self.options[0])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 1.0 if n < 1 else 0.0, lambda _: 1.0])
        self.train(task, optimizer, 1)
        scheduler.step()
        before = task.values()
        self.train(task, optimizer, 1, first=1)
        for p, old in zip(task.params, before, strict=True):
            assert torch.equal(p.detach(), old) == (p.dim() == 2)

    def test_weight_decay_is_decoupled(self) -> None:
        """Without a gradient a parameter shrinks towards zero, all of it by the same factor."""
        if "weight_decay" not in self.make(Task(self.shapes).params, {}).defaults:
            return
        for options in self.decaying or self.options:
            task, optimizer = self.ready(options)
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.1
            before = task.values()
            if self.forward_only:
                optimizer.step(lambda: torch.zeros(()))
            else:
                for p in task.params:
                    p.grad = torch.zeros_like(p)
                optimizer.step()
            for p, old in zip(task.params, before, strict=True):
                ratio = (p.detach() / old).flatten()
                if self.forward_only and p.dim() < 2:  # vectors may be spared
                    continue
                assert 0 < ratio[0] < 1, options
                assert torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-5), options

    def test_gradients_are_left_as_they_were(self) -> None:
        if self.forward_only or self.optimizer.consumes_gradients:
            return
        for options in self.options:
            task, optimizer = self.ready(options)
            task.loss().backward()
            before = [copy.deepcopy(p.grad) for p in task.params]
            optimizer.step()
            for p, grad in zip(task.params, before, strict=True):
                assert p.grad is not None and grad is not None and torch.equal(p.grad, grad)

    def test_what_a_step_takes_on_the_way_is_one_parameters(self) -> None:
        """A few times a parameter's size, however many parameters there are."""
        if self.forward_only or self.optimizer.consumes_gradients:
            return
        for options in self.options:
            taken = []
            for count in (1, 4):
                task = Task([(48, 64)] * count)
                optimizer = self.make(task.params, options)
                self.train(task, optimizer, 1)
                task.loss().backward()
                state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
                with Ledger(seed=[*task.params, *(p.grad for p in task.params if p.grad is not None), *state]) as ledger:
                    before = ledger.live
                    optimizer.step()
                taken.append(ledger.peak - before)
            assert taken[1] <= 1.5 * taken[0] <= 1.5 * self.most * 4 * 48 * 64, (options, taken)

    def test_a_closure_is_called_and_its_loss_returned(self) -> None:
        task, optimizer = self.ready(self.options[0])

        def closure() -> torch.Tensor:
            loss = task.loss()
            if not self.forward_only:
                optimizer.zero_grad()
                loss.backward()
            return loss

        expected = task.loss().item()
        before = task.values()
        returned = float(torch.as_tensor(optimizer.step(closure)).detach())
        if not self.forward_only:  # which may return the mean of its probes
            assert returned == expected
        assert not any(map(torch.equal, before, task.values()))

    def test_sparse_gradients_are_refused(self) -> None:
        if self.forward_only:
            return
        p = torch.nn.Parameter(torch.ones(self.shapes[0]))
        optimizer = self.make([p], self.options[0])
        p.grad = torch.ones(self.shapes[0]).to_sparse()
        assert "sparse" in refusal(optimizer.step).fact

    def test_unknown_options_are_refused(self) -> None:
        p = torch.nn.Parameter(torch.ones(20, 12))
        for call in (
            lambda: self.optimizer([p], **self.common, learning_speed=3),
            lambda: self.optimizer([{"params": [p], "learning_speed": 3}], **self.common),
            lambda: self.make([p], {}).add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "learning_speed": 3}),
        ):
            error = refusal(call)
            assert isinstance(error, InvalidInput) and "learning_speed" in error.fact
