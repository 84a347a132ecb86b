"""Linear and mixed-integer programs as flat arrays, solved by HiGHS through highspy or scipy.

highspy is faster and accepts a start solution. But highspy and ortools each bring a `libhighs.so.1` that the other cannot use:
the one imported second fails (seen with highspy 1.15 and ortools 9.15). So where ortools is installed, scipy is preferred: it
has a HiGHS of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from math import inf, isfinite

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holdall.errors import Unsupported

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Values of the columns, or None if no solution was found; `bound`: a lower bound on the objective."""

    x: Floats | None
    objective: float
    bound: float
    status: str  # optimal, feasible, infeasible, unknown
    seconds: float


class Model:
    """Columns and rows, added many at a time. Minimises."""

    def __init__(self) -> None:
        self.columns = self.rows = 0
        self._cols: list[tuple[Floats, Floats, Floats, NDArray[np.bool_]]] = []  # cost, lower, upper, whole
        self._rows: list[tuple[Floats, Floats]] = []  # lower, upper
        self._entries: list[tuple[Ints, Ints, Floats]] = []  # row, column, value

    def add_columns(
        self, many: int, *, cost: ArrayLike = 0.0, lower: ArrayLike = 0.0, upper: ArrayLike = 1.0, whole: bool = False
    ) -> Ints:
        """The indices of the new columns."""
        spread = [np.broadcast_to(np.asarray(a, float), many) for a in (cost, lower, upper)]
        self._cols.append((spread[0], spread[1], spread[2], np.full(many, whole)))
        self.columns += many
        return np.arange(self.columns - many, self.columns)

    def add_rows(self, terms: Sequence[tuple[Ints, ArrayLike]], *, lower: ArrayLike = -inf, upper: ArrayLike = inf) -> Ints:
        """One row per element: row k is the sum over `terms` of value * column[k]; a column of -1 means no entry."""
        many = len(terms[0][0])
        at = np.arange(self.rows, self.rows + many)
        for columns, value in terms:
            there = columns >= 0
            values = np.broadcast_to(np.asarray(value, float), many)
            self._entries.append((at[there], columns[there], values[there]))
        self._rows.append((np.broadcast_to(np.asarray(lower, float), many), np.broadcast_to(np.asarray(upper, float), many)))
        self.rows += many
        return at

    def add_entries(self, rows: Ints, columns: Ints, values: ArrayLike) -> None:
        """More terms for existing rows."""
        there = columns >= 0
        self._entries.append((rows[there], columns[there], np.broadcast_to(np.asarray(values, float), len(rows))[there]))

    def columns_data(self) -> tuple[Floats, Floats, Floats, NDArray[np.bool_]]:
        cost, lower, upper, whole = (np.concatenate(part) for part in zip(*self._cols, strict=True))
        return cost, lower, upper, whole

    def rows_data(self) -> tuple[Floats, Floats, Ints, Ints, Floats]:
        """(lower, upper, starts, columns, values): the matrix row by row, duplicate entries added."""
        lower, upper = (np.concatenate(part) for part in zip(*self._rows, strict=True))
        row, column, value = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        key, where = np.unique(row * self.columns + column, return_inverse=True)
        summed = np.bincount(where, weights=value, minlength=len(key))
        key, summed = key[summed != 0], summed[summed != 0]
        starts = np.searchsorted(key // self.columns, np.arange(self.rows + 1))
        return lower, upper, starts, key % self.columns, summed


def solve(
    model: Model, *, time_limit: float = 60.0, gap: float = 0.0, start: tuple[Ints, Floats] | None = None, relaxed: bool = False
) -> Solution:
    """The best solution within the time limit. `start`: columns and values to begin with; `relaxed`: ignore integrality."""
    began = time.perf_counter()
    found = _backend()(model, time_limit, gap, start, relaxed)
    x, objective, bound, status = found
    return Solution(x=x, objective=objective, bound=bound, status=status, seconds=time.perf_counter() - began)


_Found = tuple["Floats | None", float, float, str]


def _through_highspy(model: Model, time_limit: float, gap: float, start: tuple[Ints, Floats] | None, relaxed: bool) -> _Found:
    import highspy

    cost, col_lower, col_upper, whole = model.columns_data()
    row_lower, row_upper, starts, columns, values = model.rows_data()
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = model.columns, model.rows
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, col_lower, col_upper
    lp.row_lower_, lp.row_upper_ = row_lower, row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = starts, columns, values
    mixed = bool(whole.any()) and not relaxed
    if mixed:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[w] for w in whole.tolist()]
    highs = highspy.Highs()
    options = {"output_flag": False, "time_limit": float(time_limit), "mip_rel_gap": gap, "random_seed": 0, "threads": 1}
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(lp)
    if mixed and start is not None:
        highs.setSolution(len(start[0]), start[0].astype(np.int32), start[1])
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None, inf, inf, "infeasible"
    solved = status == highspy.HighsModelStatus.kOptimal
    there = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if not there or not (solved or mixed):  # an LP that was stopped gives no bound
        return None, inf, float(info.mip_dual_bound) if mixed else -inf, "unknown"
    x = np.asarray(highs.getSolution().col_value, float)
    objective = float(info.objective_function_value)
    return x, objective, float(info.mip_dual_bound) if mixed else objective, "optimal" if solved else "feasible"


def _through_scipy(
    model: Model,
    time_limit: float,
    gap: float,
    start: tuple[Ints, Floats] | None,  # noqa: ARG001
    relaxed: bool,
) -> _Found:
    from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
    from scipy.sparse import csr_array  # type: ignore[import-untyped]

    cost, col_lower, col_upper, whole = model.columns_data()
    row_lower, row_upper, starts, columns, values = model.rows_data()
    matrix = csr_array((values, columns, starts), shape=(model.rows, model.columns))
    mixed = bool(whole.any()) and not relaxed
    found = milp(
        cost,
        integrality=whole.astype(int) if mixed else None,
        bounds=Bounds(col_lower, col_upper),
        constraints=LinearConstraint(matrix, row_lower, row_upper),
        options={"time_limit": time_limit, "mip_rel_gap": gap},
    )
    if found.status == 2:
        return None, inf, inf, "infeasible"
    solved = found.status == 0
    bound = found.mip_dual_bound if mixed and found.mip_dual_bound is not None else (found.fun if solved else -inf)
    if found.x is None or not (solved or mixed):
        return None, inf, float(bound) if bound is not None and isfinite(bound) else -inf, "unknown"
    return np.asarray(found.x, float), float(found.fun), float(bound), "optimal" if solved else "feasible"


def _backend() -> Callable[[Model, float, float, tuple[Ints, Floats] | None, bool], _Found]:
    ways = [("highspy", _through_highspy), ("scipy.optimize", _through_scipy)]
    for module, way in reversed(ways) if find_spec("ortools") else ways:
        try:
            import_module(module)
        except ImportError:
            continue
        return way
    raise Unsupported("this solver needs the package `highspy` or `scipy`", hint='pip install "holdall[solvers]"')
