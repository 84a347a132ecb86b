"""The models with a plan installed. Kept here for optimizers that traverse a graph twice, which may not import the runtime."""

from __future__ import annotations

import weakref

import torch

PLANNED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
