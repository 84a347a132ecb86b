"""Plain frozen data that everything passes through; standard library only.

Glossary, one word per idea across the package:

tensor    a value together with the bytes it owns; views are folded into the tensor that owns the bytes
site      the address shared by trace and runtime: (phase, module, op, nth call)
block     one call of one module, the unit that planners decide about
unit      parameters that move and are updated together: a block's, or a module's outside of every block
save      one reference that autograd takes to a tensor, from packing it to releasing it
tier      a memory (gpu, cpu, nvme; on a machine that computes on its CPU: cpu and far)
link      a connection between two tiers, in one direction
mesh      the ranks of a run, by named dimensions; a network joins the ranks of each
budget    bytes allowed in a tier
recompute run again in backward what was dropped in forward
offload   copy a tensor to a farther tier and free it here; fetch brings it back
keep      leave it where it is

Sizes are bytes, times are seconds, always. Every moment of a step is written "after op k": the state between
op k's completion and the start of op k + 1; -1 is the moment before the first op.
"""

from holdall.types.choice import KEEP, Choice
from holdall.types.hardware import Hardware, Link, Rate, Tier
from holdall.types.info import (
    BlockRow,
    ChunkedHead,
    HardwareInfo,
    HostLink,
    PlanInfo,
    PlannedLayout,
    QueueRate,
    SplitModules,
    StepInfo,
    TierRate,
    TraceInfo,
)
from holdall.types.mesh import Mesh, MeshDim, Network
from holdall.types.outcome import Holder, Moment, Outcome, Span
from holdall.types.plan import Action, Facts, Plan, Planner, Problem, Progress
from holdall.types.schedule import Collect, Copy, Drop, Run, Schedule, Step, Wait
from holdall.types.trace import Block, Kind, Op, Phase, Save, Site, TensorInfo, Trace, Unit

__all__ = [
    "KEEP",
    "Action",
    "Block",
    "BlockRow",
    "Choice",
    "ChunkedHead",
    "Collect",
    "Copy",
    "Drop",
    "Facts",
    "Hardware",
    "HardwareInfo",
    "Holder",
    "HostLink",
    "Kind",
    "Link",
    "Mesh",
    "MeshDim",
    "Moment",
    "Network",
    "Op",
    "Outcome",
    "Phase",
    "Plan",
    "PlanInfo",
    "PlannedLayout",
    "Planner",
    "Problem",
    "Progress",
    "QueueRate",
    "Rate",
    "Run",
    "Save",
    "Schedule",
    "Site",
    "Span",
    "Step",
    "SplitModules",
    "StepInfo",
    "TensorInfo",
    "Tier",
    "TierRate",
    "Trace",
    "TraceInfo",
    "Unit",
    "Wait",
]
