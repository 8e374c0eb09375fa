"""A configuration as a mixed-integer linear program, solved by HiGHS: an oracle of the solver that enumerates nothing.

It shares the problem's numbers with the solver and nothing else: no option is left out, no bound is used. A layer's
choice x[layer, stage, position, device group, option] is binary. A unit of flow runs through the layouts of
neighbouring layers, within a stage or into the next one, and carries what redistribution and sends cost; the ends of it
are the choices, so that whole choices make whole flows. Huangfu and Hall 2018 describe HiGHS.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import highspy
import numpy as np

from shardwright_search.solver.problem import Cut, Options, Position, Problem, Solution, Start
from shardwright_search.step.memory import phases

Terms = list[tuple[int, float]]

_THOUSAND = 1000.0
"""Times and memory are in units that make the largest about this, for HiGHS's tolerances are absolute."""
_FEASIBILITY = 1e-9


class HighsAnswer(NamedTuple):
    """Answer of HiGHS about a configuration."""

    solution: Solution | None
    """Best plan; None where it found none."""
    objective_ps: float
    """T of the plan as HiGHS adds it up; infinity without one."""
    done: bool
    """True where it searched everything: the plan is the best one, or there is none."""


def solve(problem: Problem, time_limit_s: float, below_ps: float = np.inf) -> HighsAnswer:
    """Return the best plan with T <= below_ps, within seconds of one thread."""
    program = _Program(problem, below_ps)
    highs = highspy.Highs()
    options = {
        "output_flag": False,
        "threads": 1,
        "time_limit": max(0.0, time_limit_s),
        "mip_rel_gap": 0.0,
        "mip_feasibility_tolerance": _FEASIBILITY,
        "primal_feasibility_tolerance": _FEASIBILITY,
    }
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(program.model())
    highs.run()
    status, kinds = highs.getModelStatus(), highspy.HighsModelStatus
    none = status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible)
    if (
        none
        or not np.isfinite(objective := highs.getInfo().objective_function_value)
        or not highs.getSolution().value_valid
    ):
        return HighsAnswer(None, np.inf, none)
    values = np.asarray(highs.getSolution().col_value)
    return HighsAnswer(program.decoded(values), objective * program.time_unit_ps, status == kinds.kOptimal)


class _StagePosition(NamedTuple):
    """A pipeline stage at a position on a device group."""

    stage: int
    position: Position
    group: int


class _Program:
    """Columns and rows of a configuration: minimise cost x, low <= A x <= high, 0 <= x."""

    def __init__(self, problem: Problem, below_ps: float) -> None:
        self._problem = problem
        options = (o for group in problem.device_groups for o in group.options)
        longest = max(float(o.time_ps.max() + o.exposed_ps.max()) for o in options)
        self.time_unit_ps = max(1.0, longest * len(problem.layers)) / _THOUSAND
        self._byte_unit = max(1.0, *(float(group.budget_bytes) for group in problem.device_groups)) / _THOUSAND
        self._costs: list[float] = []
        self._whole: list[bool] = []
        self._rows: list[Terms] = []
        self._bounds: list[tuple[float, float]] = []
        self._times: list[Terms] = [[] for _ in problem.in_flight]
        self._enters: dict[_StagePosition, Terms] = {}
        self._received: list[Terms] = [[] for _ in problem.in_flight]
        self._given: list[Terms] = [[] for _ in problem.in_flight]
        self._choices = [self._choices_of(number) for number in range(len(problem.layers))]
        for number in range(len(problem.layers) - 1):
            self._join(number)
        self._limit_memory()
        self._add_maxima()
        self._add_tied_parameters()
        if np.isfinite(below_ps):
            self._row(list(enumerate(self._costs)), high=below_ps / self.time_unit_ps)

    def model(self) -> highspy.HighsLp:
        """Return the program as HiGHS takes it."""
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self._costs), len(self._rows)
        lp.col_cost_ = np.array(self._costs)
        lp.col_lower_ = np.zeros(len(self._costs))
        lp.col_upper_ = np.where(self._whole, 1.0, highspy.kHighsInf)
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in self._whole]
        lp.row_lower_, lp.row_upper_ = np.array(self._bounds).T
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(row) for row in self._rows)])
        lp.a_matrix_.index_ = np.array([column for row in self._rows for column, _ in row])
        lp.a_matrix_.value_ = np.array([value for row in self._rows for _, value in row])
        return lp

    def decoded(self, values: np.ndarray) -> Solution:
        """Return the plan of HiGHS's values, which are whole up to its tolerance."""
        taken = [max(columns, key=lambda choice: values[columns[choice]]) for columns in self._choices]
        starts = [e for e in range(1, len(taken)) if taken[e][0] != taken[e - 1][0]]
        device_groups = [taken[e][0].group for e in (0, *starts)]
        return Solution((*starts, len(taken)), tuple(option for _, option in taken), tuple(device_groups))

    def _column(self, cost_ps: float, whole: bool = False) -> int:
        self._costs.append(cost_ps / self.time_unit_ps)
        self._whole.append(whole)
        return len(self._costs) - 1

    def _row(self, terms: Iterable[tuple[int, float]], low: float = -np.inf, high: float = np.inf) -> None:
        """Add a row; a column may come several times."""
        summed: dict[int, float] = {}
        for column, value in terms:
            summed[column] = summed.get(column, 0.0) + value
        self._rows.append([(column, value) for column, value in summed.items() if value])
        self._bounds.append((low, high))

    def _choices_of(self, number: int) -> dict[tuple[_StagePosition, int], int]:
        """Add a binary column for each stage, device group and option, of which one is taken; it costs its time."""
        problem, columns = self._problem, {}
        for stage in _stages_of(problem, number):
            for where in _stage_positions(problem, stage):
                options = self._options(where, problem.layers[number])
                for option, time_ps in enumerate(options.time_ps):
                    column = self._column(problem.closed_form.fill * time_ps, whole=True)
                    columns[where, option] = column
                    self._times[stage].append((column, time_ps))
                    if number == 0:
                        self._enters.setdefault(where, []).append((column, 1.0))
        self._row([(column, 1.0) for column in columns.values()], 1.0, 1.0)
        return columns

    def _by_layout(self, number: int, side: str) -> dict[tuple[_StagePosition, int], Terms]:
        """Return the choices that work in a layout (`input_layout`) or give one out (`output_layout`)."""
        choices: dict[tuple[_StagePosition, int], Terms] = {}
        for (where, option), column in self._choices[number].items():
            options = self._options(where, self._problem.layers[number])
            choices.setdefault((where, int(getattr(options, side)[option])), []).append((column, 1.0))
        return choices

    def _join(self, number: int) -> None:
        """Add the flow from a layer to the next one: its ends are their choices, it costs what the move costs."""
        problem, kind = self._problem, self._problem.layers[number]
        output_layout = self._by_layout(number, "output_layout")
        input_layout = self._by_layout(number + 1, "input_layout")
        outward: dict[tuple[_StagePosition, int], Terms] = {key: [] for key in output_layout}
        inward: dict[tuple[_StagePosition, int], Terms] = {key: [] for key in input_layout}
        for here, layout in output_layout:
            for there, wanted in input_layout:
                if there != here and not self._follows(here, there):
                    continue
                send, received = 0.0, layout
                if there != here:
                    in_place = problem.start(here.group, there.group) is Start.IN_PLACE
                    received = wanted if in_place else layout
                    send = float(problem.sends_ps[Cut(there.position, here.group, there.group)][kind, layout, received])
                move = float(problem.device_groups[there.group].redistribution_ps[kind, received, wanted])
                column = self._column(problem.closed_form.fill * (move + 2 * send))
                outward[here, layout].append((column, -1.0))
                inward[there, wanted].append((column, -1.0))
                self._times[there.stage].append((column, move + send))
                if there != here:
                    self._times[here.stage].append((column, send))
                    self._enters.setdefault(there, []).append((column, 1.0))
                    held = problem.boundary_bytes[kind] / self._byte_unit
                    self._given[here.stage].append((column, float(held[layout])))
                    self._received[there.stage].append((column, float(held[received])))
        for ends, flows in ((output_layout, outward), (input_layout, inward)):
            for key, choices in ends.items():
                self._row(choices + flows[key], 0.0, 0.0)

    def _follows(self, here: _StagePosition, there: _StagePosition) -> bool:
        """Return whether the one can be the stage behind the other."""
        placements = self._problem.placements[here.stage][here.position]
        return there.stage == here.stage + 1 and (here.group, there.position) in placements

    def _limit_memory(self) -> None:
        """Limit what a stage holds in each phase while a microbatch is at a layer, for every stage and number.

        Without the layer in the stage this is less than what the stage holds at its first or last one.
        """
        problem = self._problem
        for stage, count in enumerate(problem.in_flight):
            inside = [e for e in range(len(problem.layers)) if stage in _stages_of(problem, e)]
            resident = self._running_sums("activation_bytes", stage, inside)
            budget = [
                (column, -problem.device_groups[where.group].budget_bytes / self._byte_unit)
                for where, entered in self._enters.items()
                if where.stage == stage
                for column, _ in entered
            ]
            for phase in phases(count, problem.num_microbatches, problem.keeps_sums):
                comes = "renewed_bytes" if phase.summed else "late_bytes"
                late = self._running_sums(comes, stage, inside[::-1]) if phase.late else {}
                total = self._column(0.0)
                static = [(column, (phase.in_flight + 2) * resident) for column, resident in self._received[stage]]
                static += self._given[stage]
                for number in inside:
                    static += self._bytes("state_bytes", stage, number)
                    static += self._bytes("activation_bytes", stage, number, phase.in_flight - 1)
                    static += self._bytes("late_bytes", stage, number)
                    static += self._bytes(comes, stage, number, -phase.late)
                    static += self._bytes("sum_bytes", stage, number, phase.summed)
                self._row([*static, (total, -1.0)], 0.0, 0.0)
                for at in inside:
                    terms = [(total, 1.0), (resident[at], 1.0), *self._bytes("workspace_bytes", stage, at), *budget]
                    self._row([*terms, (late[at], 1.0)] if phase.late else terms, high=0.0)

    def _bytes(self, field: str, stage: int, number: int, times: int = 1) -> Terms:
        """Return a kind of memory that a layer's choices hold in a stage."""
        kind = self._problem.layers[number]
        return [
            (column, times * _held(self._options(where, kind), field)[option] / self._byte_unit)
            for (where, option), column in self._choices[number].items()
            if where.stage == stage
        ]

    def _running_sums(self, field: str, stage: int, layers: Iterable[int]) -> dict[int, int]:
        """Add columns of what the layers hold from the first up to each."""
        sums: dict[int, int] = {}
        before: Terms = []
        for number in layers:
            sums[number] = self._column(0.0)
            self._row([*before, *self._bytes(field, stage, number), (sums[number], -1.0)], 0.0, 0.0)
            before = [(sums[number], 1.0)]
        return sums

    def _options(self, where: _StagePosition, kind: int) -> Options:
        return self._problem.device_groups[where.group].options[kind]

    def _add_maxima(self) -> None:
        """Add the slowest stage and the longest end, as often as they count."""
        problem = self._problem
        slowest = self._column(problem.closed_form.steady * self.time_unit_ps)
        longest = self._column(problem.closed_form.once * self.time_unit_ps)
        for stage, times in enumerate(self._times):
            self._row([*((c, v / self.time_unit_ps) for c, v in times), (slowest, -1.0)], high=0.0)
            ends = [
                (column, float(self._options(where, kind).exposed_ps[option]) / self.time_unit_ps)
                for kind, choices in zip(problem.layers, self._choices, strict=True)
                for (where, option), column in choices.items()
                if where.stage == stage
            ]
            self._row([*ends, (longest, -1.0)], high=0.0)

    def _add_tied_parameters(self) -> None:
        """Add the cost of tied parameters: a flow from the embedding's class to the head's."""
        first, last = self._by_class(0, "input_layout"), self._by_class(-1, "output_layout")
        tied_ps = self._problem.tied_ps
        pairs = {(a, b): self._column(float(tied_ps[a, b])) for a in first for b in last if np.isfinite(tied_ps[a, b])}
        for side, ends in enumerate((first, last)):
            for number, choices in ends.items():
                flows = [(column, -1.0) for pair, column in pairs.items() if pair[side] == number]
                self._row([*choices, *flows], 0.0, 0.0)

    def _by_class(self, number: int, side: str) -> Mapping[int, Terms]:
        by_class: dict[int, Terms] = {}
        for (_, tied_class), choices in self._by_layout(number, side).items():
            by_class.setdefault(tied_class, []).extend(choices)
        return by_class


def _held(options: Options, field: str) -> np.ndarray:
    """Return a column of memory; late bytes are renewed in every backward pass if there are sums."""
    if field == "renewed_bytes":
        return np.where(options.sum_bytes > 0, options.late_bytes, 0.0)
    return getattr(options, field)


def _stages_of(problem: Problem, number: int) -> range:
    """Return the pipeline stages that a layer can be in, so that each has one."""
    last = problem.pp_size - 1
    return range(max(0, last - (len(problem.layers) - 1 - number)), min(last, number) + 1)


def _stage_positions(problem: Problem, stage: int) -> list[_StagePosition]:
    """Return every position and device group that a pipeline stage can be on."""
    moves = problem.placements[stage].items()
    return [_StagePosition(stage, position, group) for position, groups in moves for group, _ in groups]
