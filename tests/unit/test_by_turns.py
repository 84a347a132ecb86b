"""A model whose modules have their parameters by turns: the results of the whole one, and little there at once."""

import weakref

import pytest
import torch

from holdall.parallel.checks.by_turns import by_turns


class Tied(torch.nn.Module):
    """Three layers, one of which is called twice, and a head with the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(50, 16)
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.gain = torch.nn.Parameter(torch.full((16,), 1.5))
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.first(self.words(ids))
        return self.head(self.second(self.first(x)) * self.gain)


class Brought:
    """Copies, and the most of their bytes that were there at once."""

    def __init__(self):
        self.most = self.count = 0
        self._now: dict[int, int] = {}

    def __call__(self, t):
        copied = t.clone()
        storage, key = copied.untyped_storage(), self.count
        self.count += 1
        self._now[key] = storage.nbytes()
        self.most = max(self.most, sum(self._now.values()))
        weakref.finalize(storage, self._now.pop, key)
        return copied


def test_results_are_those_of_the_whole_model_with_one_module_there_at_a_time():
    torch.manual_seed(0)
    model, ids, brought = Tied(), torch.arange(6).view(2, 3), Brought()
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    with torch.no_grad():
        expected = model(ids)
        with by_turns(model, brought):
            assert torch.equal(model(ids), expected)
    assert brought.count == 9  # the model's own, two for each call of a layer, embedding and head
    assert brought.most == (16 + 50 * 16) * 4  # the model's own and the largest module's
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == {name: at for name, (at, _) in before.items()}
    assert all(torch.equal(p, before[name][1]) for name, p in model.named_parameters())


def test_a_forward_that_ends_in_an_error_leaves_the_parameters():
    model = Tied()
    places = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(IndexError), torch.no_grad(), by_turns(model, torch.Tensor.clone):
        model(torch.full((1, 2), 77))
    assert [p.data_ptr() for p in model.parameters()] == places
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
