"""A module that several layers have: torch swapped its tensors once for each path, and left fake ones in the model."""

import pytest
import torch

import holdall


class Shared(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("angles", torch.ones(1024))

    def forward(self, x):
        return self.linear(x) * self.angles[0]


class Layer(torch.nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.linear, self.shared = torch.nn.Linear(8, 8), shared

    def forward(self, x):
        return self.shared(torch.tanh(self.linear(x)))


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_model_with_a_shared_module_is_traced_and_left_as_it_was(precision):
    shared = Shared()
    model = torch.nn.Sequential(Layer(shared), Layer(shared))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    trace = holdall.trace(model, torch.randn(2, 8), loss=lambda model, x: model(x).sum(), precision=precision)
    assert trace.about.source == "fake"
    assert sum(t.nbytes for t in trace.tensors.values() if "angles" in t.name) == 4096  # one tensor under two names
    after = model.state_dict()
    assert all(type(t) is torch.Tensor and torch.equal(after[name], t) for name, t in before.items())
    assert model[0].shared.linear.weight is model[1].shared.linear.weight
