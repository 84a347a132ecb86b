"""Questions before a run, answered by planning: memory of every phase, the largest batch that fits, the smallest budget.

Each answer rests on real plans at the values that it names, so it can be reproduced with `holdall.plan`.
"""

from holdall.analysis.alternatives import Alternative, alternatives
from holdall.analysis.evaluation import evaluation_of, trace_evaluation
from holdall.analysis.largest import Largest, Probe, largest
from holdall.analysis.layouts import LayoutRow, compare_layouts
from holdall.analysis.pareto import Curve, Point, pareto
from holdall.analysis.phases import PhasePeak, deciding, phases, tied_bytes
from holdall.analysis.smallest import Smallest, needed, smallest_budget

__all__ = [
    "Alternative",
    "Curve",
    "Largest",
    "LayoutRow",
    "PhasePeak",
    "Point",
    "Probe",
    "Smallest",
    "alternatives",
    "compare_layouts",
    "deciding",
    "evaluation_of",
    "largest",
    "needed",
    "pareto",
    "phases",
    "smallest_budget",
    "tied_bytes",
    "trace_evaluation",
]
