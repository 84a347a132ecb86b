"""Models that a plan is on. Kept here since optimizers that walk a graph twice must know, and may not import the runtime."""

from __future__ import annotations

import weakref

import torch

PLANNED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
