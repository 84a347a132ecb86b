"""Runs a step in Harmony's order, in one process: every pack of layers for all micro-batches, then the next.

No more than one pack's weights are needed at a time, and nothing between two packs but the inputs of backward packs. What is
held where is the caller's: `enter` and `leave` say which pack's weights come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Pack = Sequence[int]


def step_in_packs(
    layers: Sequence[torch.nn.Module],
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    forward_packs: Sequence[Pack],
    backward_packs: Sequence[Pack],
    enter: Callable[[Pack], object] = lambda _: None,
    leave: Callable[[Pack, bool], object] = lambda _, __: None,
) -> float:
    """Forward and backward of all micro-batches, (inputs, targets) each; gradients are added to those that are there.

    `enter(pack)` is called before a pack is computed, and `leave(pack, updated)` after it; `updated`: its gradients are whole,
    so that it can be updated. Returns the sum of the losses. Gradients are the bits of one backward after the other in the same
    order. Layers that draw random numbers draw the same ones again in backward, but not in the order of plain training.
    """
    heads = {pack[0] for pack in backward_packs}
    stash = {0: [inputs.detach() for inputs, _ in batches]}  # layer -> its inputs
    drawn: dict[tuple[int, int], torch.Tensor] = {}  # (layer, micro-batch) -> the random state before
    values = list(stash[0])
    for pack in forward_packs:
        enter(pack)
        with torch.no_grad():
            for i in range(len(batches)):
                x = values[i]
                for number in pack:
                    if number in heads:
                        stash.setdefault(number, list(values))[i] = x
                    drawn[number, i] = torch.get_rng_state()
                    x = layers[number](x)
                values[i] = x
        leave(pack, False)
    stash.setdefault(backward_packs[-1][0], values)
    total = 0.0
    grads: list[torch.Tensor | None] = [None] * len(batches)
    for pack in reversed(backward_packs):
        enter(pack)
        own = stash.pop(pack[0])
        for i, (_, targets) in enumerate(batches):
            x = own[i].detach().requires_grad_(pack[0] > 0)
            own[i] = torch.empty(0)
            end = _again(layers, pack, x, i, drawn)
            if grads[i] is None:
                value = loss(end, targets)
                total += float(value.detach())
                value.backward()
            else:
                end.backward(grads[i])
            grads[i] = x.grad
        leave(pack, True)
    return total


def _again(
    layers: Sequence[torch.nn.Module], pack: Pack, x: torch.Tensor, i: int, drawn: dict[tuple[int, int], torch.Tensor]
) -> torch.Tensor:
    """A pack's forward with gradients; its layers draw what they drew before, if they did."""
    for number in pack:
        state = drawn.pop((number, i), None)
        if state is None:
            x = layers[number](x)
            continue
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            x = layers[number](x)
    return x
