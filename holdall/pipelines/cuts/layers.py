"""Layers to cut, and plans of stages with replicas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CutLayer:
    """One layer and one micro-batch: seconds and bytes."""

    forward: float
    backward: float
    weights: int = 0  # bytes of its parameters
    output: int = 0  # bytes that it hands on
    activations: int = 0  # bytes that it holds for backward


@dataclass(frozen=True, slots=True, kw_only=True)
class CutStage:
    first: int  # layer
    end: int  # the layer after its last
    replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPlan:
    stages: tuple[CutStage, ...]
    seconds: float  # what the planner minimises: of a mini-batch in the steady state (PipeDream), of a step (DAPPLE)
