"""The exact time-energy frontier of a pipeline iteration, and the plans along it.

The planner and its compiled kernels are loaded when a plan is asked for, so that looking at a
frontier stays cheap.

Frontier files are NumPy archives (.npz) of arrays with a JSON header and a digest of everything.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from perseus_planner.base.errors import (
    FrontierError,
    InfeasiblePower,
    PlanError,
    PlannerError,
    UsageError,
    shown,
)
from perseus_planner.base.fields import restore, rules
from perseus_planner.base.files import reading, replacing, sha256
from perseus_planner.base.prefixes import si
from perseus_planner.base.tables import Column, Sheet, lay_out, make_frame
from perseus_planner.base.units import CHANGES, ON_TIME, POWER, PROBABILITY, SHARE, TIME
from perseus_planner.plans.replay import all_maximum, baseline_name, origin_text
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import Evidence, Measurement
from perseus_planner.profiles.modes import OWN
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules import Computation, Schedule, generate_for_stages
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.iteration import Iteration, parse_operation
from perseus_planner.schedules.pipeline import kinds_and_modes, names_of_keys
from perseus_planner.solver.curve import TimeEnergyCurve, fastest_within_power
from perseus_planner.solver.modes import Choice, ModeProblem, baseline, in_modes
from perseus_planner.solver.network import UNLIMITED, Guides, Integers

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from perseus_planner.plans.plan import Plan
    from perseus_planner.solver.again import MeasuringAgain
    from perseus_planner.solver.on_time import OnTimePlanner
    from perseus_planner.solver.planner import Planner

_MOST_AGAIN = 256
"""Computations of a pipeline for which `Frontier.measuring_again` plans once more, by hand: a plan
of so many takes a second or two."""
_FORMAT = "perseus-planner/frontier"
_VERSION = 2
_AGAIN = "make it again with `planner solve`"

Parts = tuple[PipelineDag, tuple[Integers, Integers], Guides]
"""The parts of a frontier: the graph, (times, powers), and the guides."""


def write_frontier(
    path: str | os.PathLike[str], dag: PipelineDag, curve: tuple[Integers, Integers], guides: Guides
) -> None:
    """Write the parts of a frontier to `path`; `curve` holds its times and powers.

    Raises:
        FrontierError: If the file cannot be written.
    """
    waits = [(before, place) for place, others in enumerate(dag.predecessors) for before in others]
    lags_s = [lag_s for place_waits in dag.iteration.waits for _, lag_s in place_waits]
    arrays = {
        "header": np.frombuffer(json.dumps(_header(dag)).encode(), dtype=np.uint8),
        "waits": np.array(waits, dtype=np.int64).reshape(-1, 2),
        "lags_s": np.array(lags_s if dag.iteration.lags_s else (), dtype=np.float64),
        "times": curve[0],
        "powers": curve[1],
        **{f"guide_{name}": values for name, values in guides._asdict().items()},
    }
    rows = [row.evidence for points in dag.profile.measurements.values() for row in points]
    if any(rows):
        # Arrays have no None: a row without evidence is NaN, and one without an order is -1.
        evidence = [
            [getattr(row, name) if row else np.nan for name in rules(Evidence)] for row in rows
        ]
        arrays["evidence"] = np.array(evidence, dtype=np.float64)
        orders = [-1 if row is None or row.order is None else row.order for row in rows]
        if max(orders) >= 0:
            arrays["orders"] = np.array(orders, dtype=np.int64)
    # Last, as it is a digest of all other arrays.
    arrays["digest"] = np.frombuffer(_digest(arrays).encode(), dtype=np.uint8)
    with replacing(path, FrontierError) as file:
        np.savez_compressed(file, **arrays)


_LARGEST_BYTES = 4 * 10**8
_LARGEST_HEADER_BYTES = 4 * 10**7
"""Of an unpacked frontier that is read, and of its list of computations: ten times what 16 stages
and 512 microbatches have. A small file may unpack to more than fits in memory."""


def check_unpacked(
    file: IO[bytes],
    name: str | os.PathLike[str],
    most_bytes: int = _LARGEST_BYTES,
    most_header_bytes: int = _LARGEST_HEADER_BYTES,
) -> None:
    """Check that what an archive says it unpacks to is no more than this, before any of it is.

    Raises:
        FrontierError: If it is more.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            sizes = {member.filename: member.file_size for member in archive.infolist()}
    except (zipfile.BadZipFile, NotImplementedError):
        return  # reading it says what it is instead
    header = sizes.get("header.npy", 0)
    if header > most_header_bytes:
        raise FrontierError(
            f"{name}: its list of computations unpacks to {header} bytes, more than "
            f"{most_header_bytes}; is it a frontier?"
        )
    if (size := sum(sizes.values())) > most_bytes:
        raise FrontierError(
            f"{name}: unpacks to {size} bytes, more than {most_bytes}; is it a frontier?"
        )


def read_frontier(path: str | os.PathLike[str]) -> Parts:
    """Read a file that `write_frontier` wrote.

    Raises:
        FrontierError: If the file cannot be read, or is not exactly what was written.
    """
    path = Path(path)
    with reading(path, FrontierError), path.open("rb") as file:
        archived = file.read(2) == b"PK"
        check_unpacked(file, path)
        file.seek(0)
        try:
            with np.load(file, allow_pickle=False) if archived else nullcontext({}) as archive:
                arrays = {name: np.asarray(archive[name]) for name in archive}
        except Exception as error:  # NumPy and zipfile have no common error for damaged bytes
            raise FrontierError(f"{path}: is damaged or cut short ({error}); {_AGAIN}") from error
    _check(path, arrays)
    with checking_frontier(path):
        return _parts(arrays)


@contextmanager
def checking_frontier(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise a FrontierError that names the file for any error that its content causes in the
    block.
    """
    try:
        yield
    except (
        PlannerError,
        ArithmeticError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
    ) as error:
        raise FrontierError(f"{os.fspath(path)}: is not a frontier: {error}; {_AGAIN}") from error


def _header(dag: PipelineDag) -> dict[str, Any]:
    """Return what a file says in words: all but the arrays, as JSON can hold it."""
    profile = dag.profile
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "profile": profile.rest(),
        "measurements": {
            str(key): [(point.clock_mhz, point.time_s, point.energy_j) for point in points]
            for key, points in profile.measurements.items()
        },
        "schedule": dag.schedule.name,
        "ranks": [" ".join(map(str, rank)) for rank in dag.schedule.ranks],
        # Only schedules that overlap a forward and a backward have pairs.
        **(
            {"pairs": [f"{forward} {backward}" for forward, backward in dag.schedule.pairs]}
            if dag.schedule.pairs
            else {}
        ),
        "kinds": names_of_keys(dag.iteration),
        "operations": [
            (str(operation), operation.rank, operation.time_s, operation.energy_j)
            for operation in dag.iteration.operations
        ],
    }


def _check(path: Path, arrays: dict[str, Any]) -> None:
    """Refuse what is no frontier file, or of another version, or changed since it was written."""
    try:
        header = json.loads(arrays["header"].tobytes())
        format_version = header["format"], header["version"]
        digest = arrays["digest"].tobytes().decode()
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise FrontierError(
            f"{path}: is not a frontier file; name one that `planner solve` wrote"
        ) from error
    if format_version[0] != _FORMAT:
        raise FrontierError(
            f"{path}: holds {shown(format_version[0])}, not a frontier; name a file that `planner "
            "solve` wrote"
        )
    if format_version[1] != _VERSION:
        raise FrontierError(
            f"{path}: is of version {shown(format_version[1])} and this planner reads version "
            f"{_VERSION}; "
            f"{_AGAIN}"
        )
    if digest != _digest(arrays):
        raise FrontierError(
            f"{path}: its digest does not match its content, so it was changed; {_AGAIN}"
        )


def _digest(arrays: dict[str, Any]) -> str:
    parts = []
    for name in sorted(arrays):
        if name != "digest":
            parts += [
                f"{name} {arrays[name].dtype.str} {arrays[name].shape}".encode(),
                arrays[name].tobytes(),
            ]
    return sha256(*parts)


def _parts(arrays: dict[str, Any]) -> Parts:
    """Return the graph, the curve and the guides that checked arrays hold."""
    header = json.loads(arrays["header"].tobytes())
    _need(isinstance(header["schedule"], str), "schedule", "is not a name")
    numbers = arrays["evidence"].tolist() if "evidence" in arrays else []
    orders = arrays["orders"].tolist() if "orders" in arrays else [-1] * len(numbers)
    # Evidence is one array over all rows, in the order of the measurements; exact files have none.
    evidence = iter(list(map(_evidence, numbers, orders)))
    measurements = {
        Key.parse(text): tuple(
            Measurement(clock, time_s, energy_j, next(evidence, None))
            for clock, time_s, energy_j in points
        )
        for text, points in header["measurements"].items()
    }
    profile = restore(Profile, header["profile"], measurements=measurements)
    ranks = tuple(tuple(map(Computation.parse, rank.split())) for rank in header["ranks"])
    pairs = [tuple(map(Computation.parse, text.split())) for text in header.get("pairs", ())]
    operations = tuple(parse_operation(*fields) for fields in header["operations"])
    waits = arrays["waits"].tolist()
    lags = arrays["lags_s"].tolist()
    before: list[list[int]] = [[] for _ in range(sum(map(len, ranks)) + len(operations))]
    # A negative index would count from the end of the list, and so pass for another node.
    if any(place < 0 for _, place in waits):
        raise ValueError("waits: a place is below 0")
    lags_s: list[list[float]] = [[] for _ in before]
    for (other, place), lag_s in zip(waits, lags or [0.0] * len(waits), strict=True):
        before[place].append(other)
        lags_s[place].append(lag_s)
    iteration = Iteration(
        Schedule(
            header["schedule"], ranks, tuple((forward, backward) for forward, backward in pairs)
        ),
        tuple(map(tuple, before)),
        tuple(map(tuple, lags_s)) if lags else (),
        operations,
        *kinds_and_modes(header["kinds"]),
    )
    dag = PipelineDag(profile, iteration)
    guides = Guides(*(arrays[f"guide_{name}"] for name in Guides._fields))
    return dag, (arrays["times"], arrays["powers"]), guides


def _evidence(numbers: Sequence[float], order: int) -> Evidence | None:
    """Return the evidence of a row without its throttle reasons, which no plan depends on; None
    if it has none.
    """
    if np.isnan(numbers).any():
        return None
    achieved_mhz, time_s, energy_j, windows, temperature_c = numbers
    number = None if order < 0 else order
    return Evidence(achieved_mhz, time_s, energy_j, int(windows), temperature_c, order=number)


_MOST = 2**60  #: no time or flow is larger
_LARGE = 1e30  #: no second or watt is larger


def check_frontier(dag: PipelineDag, times: Integers, powers: Integers, guides: Guides) -> None:
    """Check that the curve is convex and falls, and that the guides are numbers of its iteration.

    Raises:
        FrontierError: If they are not; names the first field that is wrong.
    """
    # A file may come from anywhere: types and shapes first, as all else rests on them.
    for name, array in (("times", times), ("powers", powers)):
        _need(
            array.dtype == np.int64 and array.ndim == 1 and len(array) == len(times) > 0,
            name,
            "is not a list",
        )
    _need(_within(times, _MOST) and bool((times[1:] < times[:-1]).all()), "times", "do not fall")
    # Convex: the slope grows towards the fast end, below which nothing is feasible.
    rising = (
        _within(powers[:-1], _MOST)
        and powers[-1] == UNLIMITED
        and bool((powers[1:] >= powers[:-1]).all())
    )
    _need(rising, "powers", "do not rise")
    count = len(guides.time_s)
    shaped = guides.time_s.dtype == np.float64 and guides.time_s.shape == (count,) and count > 0
    _need(shaped and bool((np.diff(guides.time_s) <= 0).all()), "guide_time_s", "does not fall")
    _need(_within(guides.time_s, _LARGE), "guide_time_s", "is not a time")
    # Guides have a column for each node of this very graph.
    for name, values in (("guide_end_s", guides.end_s), ("guide_price_w", guides.price_w)):
        shaped = values.dtype == np.float32 and values.shape == (count, len(dag.keys))
        _need(shaped and _within(values, _LARGE), name, "is not of this graph")


def _within(values: NDArray[Any], most: float) -> bool:
    return bool(((values >= 0) & (values <= most)).all())


def _need(is_right: bool, field: str, problem: str) -> None:
    if not is_right:
        raise FrontierError(f"{field}: {problem}")


_SHOWN_PARTS = 8  #: parts of a frontier that a notebook shows the ends of (by hand)


@dataclass(frozen=True, eq=False, repr=False)
class Frontier(TimeEnergyCurve):
    """The exact time-energy curve of an iteration, and the plans along it."""

    def __repr__(self) -> str:
        fastest, best, slowest = (
            si(s, "s", 6) for s in (self.min_time_s, self.least_energy_time_s, self.max_time_s)
        )
        least = f"least energy {si(float(self.energies_j.min()), 'J', 6)} at {best}"
        return f"<Frontier: {self.schedule}, {fastest} to {slowest}, {least}>"

    def plan_for(self, deadline_s: float, **limits: Any) -> Plan:
        """Return the plan for an iteration that may take `deadline_s` seconds: as slow as saves
        energy, and no slower.

        It is never slower than `least_energy_time_s`, as waiting costs energy too. If others wait
        until the deadline anyway, ask for `plan_beside_straggler`. `limits` are those of
        `plan_until`.

        Raises:
            InfeasibleDeadline: If no choice of clocks is that fast; names the least feasible time.
            InfeasibleBudget: If no plan found is that fast with so few changes; names the least
                time found.
            UsageError: If an argument is out of range.
        """
        deadline_s = self.check_deadline(deadline_s)
        # Which modes save most depends on the deadline, so this least-energy time is not that of
        # the modes.
        if self.dag.has_open_modes:
            return self._no_slower_than_saves(deadline_s, **limits)
        least_energy_s = self.least_energy_deadline_s(limits.get("on_time", ON_TIME))
        return self.plan_until(min(deadline_s, least_energy_s), **limits)

    def plan_until(
        self,
        deadline_s: float,
        *,
        max_changes: int | None = None,
        on_time: float | None = ON_TIME,
        tolerance: float = 0.001,
    ) -> Plan:
        """Return the plan for an iteration that others end at `deadline_s` seconds; never slower
        than `max_time_s`.

        It spends the least effective energy, whatever waiting costs until then.

        Args:
            deadline_s: seconds.
            max_changes: how often each GPU may change its clock in an iteration, including the
                change back for the next one; 0 for one clock per GPU, None for any number.
            on_time: the probability, up to 0.99, of meeting the deadline in spite of what is
                uncertain about the profile, unless `Profile.is_exact` and without jitter. The
                deadline is then taken relative to `baseline_time_s`, and may be met by clocks that
                were not measured: the plan is made of `Profile.estimated()`, and `Plan.on_time`
                says how sure it is. None for a plan that takes the measured times for the true
                ones.
            tolerance: a plan that is slower than all clocks at maximum by at most this share is on
                time as well if the deadline is `baseline_time_s` or more; only with `on_time`.

        Raises:
            InfeasibleDeadline: If no choice of clocks is that fast; names the least feasible time.
            InfeasibleBudget: If no plan found is that fast with so few changes; names the least
                time found.
            UsageError: If an argument is out of range.
        """
        most = None if max_changes is None else CHANGES.check(max_changes, "max_changes")
        deadline_s = self.check_deadline(deadline_s)
        tolerance = SHARE.check(tolerance, "tolerance")
        if self.dag.has_open_modes:
            return self._of_modes(
                self.in_modes(deadline_s, on_time).plan_until(
                    deadline_s, max_changes=most, on_time=on_time, tolerance=tolerance
                )
            )
        if not self._is_uncertain(on_time):
            return self._planner.plan(deadline_s, most)
        probability = PROBABILITY.check(on_time, "on_time")
        return self._on_time_planner.plan(deadline_s, probability, tolerance, most)

    def plan_for_least_energy(self, **limits: Any) -> Plan:
        """Return the plan with the least energy per iteration, for a pipeline that does not wait
        for others.

        `limits` are those of `plan_until`.
        """
        if self.dag.has_open_modes:
            return self._no_slower_than_saves(self.max_time_s, **limits)
        deadline_s = self.least_energy_deadline_s(limits.get("on_time", ON_TIME))
        return self.plan_until(deadline_s, **limits)

    def plan_beside_straggler(self, straggler_time_s: float, **limits: Any) -> Plan:
        """Return the plan beside a straggler whose iteration takes `straggler_time_s` seconds.

        The plan is as slow as the straggler, but never slower than `max_time_s` (Perseus, SOSP'24).
        If the straggler is faster, the plan is as fast as `least_deadline_s`. `limits` are those of
        `plan_until`.

        Raises:
            UsageError: If an argument is out of range.
        """
        on_time = limits.get("on_time", ON_TIME)
        straggler_time_s = TIME.check(straggler_time_s, "straggler_time_s")
        if self.dag.has_open_modes:
            fixed = self.in_modes(max(straggler_time_s, self.min_time_s), on_time)
            return self._of_modes(fixed.plan_beside_straggler(straggler_time_s, **limits))
        least_s = self.least_deadline_s(on_time)
        return self.plan_until(max(straggler_time_s, least_s), **limits)

    def plan_within_power(
        self,
        power_w: float,
        *,
        max_changes: int | None = None,
        on_time: float | None = ON_TIME,
    ) -> Plan:
        """Return the fastest plan found whose average power over all GPUs of the pipeline is at
        most `power_w` watts.

        Args:
            power_w: watts.
            max_changes: as in `plan_until`.
            on_time: the probability, up to 0.99, of drawing no more in spite of what is uncertain
                about the profile, unless it is exact; None to take its rows for the truth.

        Raises:
            InfeasiblePower: If no plan found draws that little; names the least power found.
            UsageError: If an argument is out of range.
        """
        power_w = POWER.check(power_w, "power_w")
        if self.dag.has_open_modes:
            limits: dict[str, Any] = {"max_changes": max_changes, "on_time": on_time}
            # Modes are best for a time, and the power decides the time: begin with the baseline's,
            # and try again with the modes for the time that was found.
            fixed = self.in_modes(self.baseline_time_s, on_time)
            plan = fixed.plan_within_power(power_w, **limits)
            again = self.in_modes(plan.deadline_s, on_time)
            with suppress(InfeasiblePower):
                plan = min(
                    plan, again.plan_within_power(power_w, **limits), key=attrgetter("time_s")
                )
            return self._of_modes(plan)
        if not self._is_uncertain(on_time):
            plan_until = partial(self.plan_until, max_changes=max_changes, on_time=None)
            return fastest_within_power(self, power_w, plan_until, lambda plan: plan.power_w)
        probability = PROBABILITY.check(on_time, "on_time")
        most = None if max_changes is None else CHANGES.check(max_changes, "max_changes")
        return self._on_time_planner.plan_within_power(power_w, probability, most)

    def plan_of(self, clocks: Mapping[str, int]) -> Plan:
        """Return the plan that runs every computation at its clock in `clocks`: "3F17" -> MHz; in
        the training's own way, if the profile has modes.

        Raises:
            PlanError: If the clock of a computation is missing or was not measured.
        """
        if self.dag.has_open_modes:
            return self._of_modes(self._fixed((OWN,) * len(self.dag.computations)).plan_of(clocks))
        chosen = []
        # Checked one by one, so that the refusal can name the first computation that is wrong.
        for computation, key in zip(self.dag.computations, self.dag.iteration.keys, strict=True):
            clock = clocks.get(str(computation))
            if clock is None or all(m.clock_mhz != clock for m in self.profile.measurements[key]):
                read = "has no clock" if clock is None else f"{clock} MHz was not measured"
                raise PlanError(f"{computation}: {read}; choose a clock of the profile")
            chosen.append(clock)
        return self._planner.plan_of(chosen, None)

    @property
    def baseline_plan(self) -> Plan:
        """The iteration with all clocks at their maximum, with which plans are compared."""
        dag = baseline(self.dag)
        if dag is self.dag:
            return self.plan_of(all_maximum(dag))
        modes = tuple(key.mode for key in dag.iteration.keys)
        return self._of_modes(self._fixed(modes).plan_of(all_maximum(dag)))

    def point_bound_j(self, deadline_s: float) -> float:
        """Return a bound on the energy of an iteration of that time in which every clock is a
        measured one, joules.

        It is at least `bound_j`, which also allows what lies between two measured clocks, and no
        plan of that time is below it. Waiting is included, on all GPUs. It is tighter where ranks
        wait for each other in every microbatch, as in 1F1B, and their stages are unlike
        (`solver/point_problem.py`).

        Raises:
            InfeasibleDeadline: If no iteration is that fast.
            UsageError: If `deadline_s` is not a time.
        """
        return self._planner.point_bound_j(self.check_deadline(deadline_s))

    def with_point_bound(self, plan: Plan) -> Plan:
        """Return the plan with `Plan.point_bound_j`, the bound of `point_bound_j` at its time.

        That of a plan that was made for a probability is, as its energy, one of expected rows.

        Raises:
            UsageError: If the plan is not of this frontier.
        """
        iteration = self.dag.iteration
        if self.dag.has_open_modes and plan.schedule == iteration.schedule:
            iteration = plan.iteration  # in its modes
        if (plan.profile_digest, plan.iteration) != (self.profile.digest, iteration):
            raise UsageError("plan: is not of this frontier; give the one that it was made from")
        # A plan for a probability was made of expected rows, and only their bound holds for it.
        planner = self._planner if plan.on_time is None else self._on_time_planner.mean_planner
        at_s = max(plan.time_s, planner.curve.min_time_s)
        return replace(plan, point_bound_j=planner.point_bound_j(at_s))

    def _repr_html_(self) -> str:
        """What a notebook shows: the frontier in a line, and a few of its points."""
        last = len(self.times_s) - 1
        places = sorted({round(last * part / _SHOWN_PARTS) for part in range(_SHOWN_PARTS + 1)})
        rows = [(float(self.times_s[at]), float(self.energies_j[at])) for at in reversed(places)]
        columns = lay_out(
            rows,
            Column("time {}", lambda row: row[0], "s"),
            Column("bound {}", lambda row: row[1], "J"),
            Column("saved %", lambda row: 1.0 - row[1] / self.baseline_energy_j, "%"),
        )
        note = f"Saved: against {baseline_name(self.profile)}, {origin_text(self.profile.origin)}."
        return Sheet("", repr(self), columns, [note]).html()

    def measuring_again(self, plan: Plan, **limits: Any) -> MeasuringAgain | None:
        """Return what a plan of this frontier is expected to gain if its rows are measured again.

        It is found by planning with the doubt that is left then, which takes as long as the plan
        did. None if that is not told: of a plan that takes rows as measured or is made for a power,
        of one whose margin costs next to nothing, of rows without standard errors, of modes, and of
        more than 256 computations.

        Args:
            plan: the plan.
            limits: those of `plan_until` with which it was made.
        """
        from perseus_planner.solver.again import LEAST_SHARE, MeasuringAgain, measured_again

        sure = plan.on_time
        estimate = self._on_time_planner.estimate
        if sure is None or sure.limit_ratio is None or estimate is None or not sure.has_errors:
            return None
        # A margin that costs next to nothing has nothing to give back.
        if sure.safety_share < LEAST_SHARE:
            return None
        if self.dag.has_open_modes or len(self.dag.computations) > _MOST_AGAIN:
            return None
        profile, rows = measured_again(self.profile, estimate, plan)
        after = solve_dag(self.dag.with_profile(profile))
        # Measured again, the baseline may differ: the deadline keeps its ratio to it.
        ratio = plan.deadline_s / plan.baseline_time_s
        surer = after.plan_until(min(ratio * after.baseline_time_s, after.max_time_s), **limits)
        assert surer.on_time is not None
        more_share = surer.on_time.saved_share.expected - sure.saved_share.expected
        # The two plans are of two searches and slightly other rows, whose savings may differ by
        # more than a margin costs. What a smaller margin gives back is at most what it costs less,
        # each told against the plan without a margin of its own search.
        less_share = sure.safety_share - surer.on_time.safety_share
        return MeasuringAgain(rows, max(0.0, min(more_share, less_share)))

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas frame with a row for each of `times_s`, fastest first.

        Its columns are time_s, time_ratio, bound_j, saved_j, and power_w of the bound. Ratio and
        saving are against the baseline that `attrs` names.

        Raises:
            UsageError: If pandas is not installed.
        """
        times_s = self.times_s[::-1]
        bounds_j = self.energies_j[::-1]
        columns = {
            "time_s": times_s,
            "time_ratio": times_s / self.baseline_time_s,
            "bound_j": bounds_j,
            "saved_j": self.baseline_energy_j - bounds_j,
            "power_w": bounds_j / times_s,
        }
        return make_frame(
            columns,
            origin=origin_text(self.profile.origin),
            baseline=baseline_name(self.profile),
            baseline_time_s=self.baseline_time_s,
            baseline_energy_j=self.baseline_energy_j,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file that `load` reads; equal frontiers give equal bytes.

        Raises:
            FrontierError: If the file cannot be written.
        """
        write_frontier(path, self.dag, (self.times, self.powers), self.guides)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Frontier:
        """Read a file that `save` wrote.

        Raises:
            FrontierError: If the file cannot be read, or does not hold what `save` writes.
        """
        dag, (times, powers), guides = read_frontier(path)
        with checking_frontier(path):
            check_frontier(dag, times, powers, guides)
        return cls(dag, times, powers, guides)

    def least_deadline_s(self, on_time: float | None = ON_TIME) -> float:
        """Return the least deadline for which there is a plan of this probability, seconds:
        `min_time_s`, or `baseline_time_s` if rows are uncertain, as nothing is surely faster than
        all clocks at maximum.
        """
        return self.baseline_time_s if self._is_uncertain(on_time) else self.min_time_s

    def least_energy_deadline_s(self, on_time: float | None = ON_TIME) -> float:
        """Return the deadline of the plan of this probability with the least energy, seconds.

        It is a hair above `least_energy_time_s`, so that a plan of exactly that time is not refused
        because of a rounding error.
        """
        return max(self.least_energy_time_s * (1 + 1e-9), self.least_deadline_s(on_time))

    def _is_uncertain(self, on_time: float | None) -> bool:
        """Return whether a plan for this probability needs a margin."""
        if on_time is None:
            return False
        PROBABILITY.check(on_time, "on_time")
        profile = self.profile
        return profile.assumed_spread > 0.0 or bool(profile.all_jitter) or not profile.is_exact

    def _no_slower_than_saves(self, deadline_s: float, **limits: Any) -> Plan:
        """Return the plan for a deadline, or an earlier one at which energy is least, in the modes
        for it.
        """
        on_time = limits.get("on_time", ON_TIME)
        fixed = self.in_modes(deadline_s, on_time)
        # At the earlier deadline other modes may be better, whose least energy is earlier still:
        # on, until the modes stay.
        while (least_energy_s := fixed.least_energy_deadline_s(on_time)) < deadline_s:
            deadline_s = least_energy_s
            before = fixed
            fixed = self.in_modes(deadline_s, on_time)
            if fixed is before:
                break
        return self._of_modes(fixed.plan_for(deadline_s, **limits))

    def in_modes(self, deadline_s: float, on_time: float | None = None) -> Frontier:
        """Return the frontier of the modes that are best for a deadline; if none is that fast, of
        the fastest ones that were found.

        Modes are chosen by the expected times and energies of uncertain rows, with each deadline
        as far from the baseline.
        """
        if self._is_uncertain(on_time) and not self.profile.is_exact:
            # Deadlines keep their ratio to the baseline, as expected rows have another one.
            expected = self._expected_modes
            ratio = expected.baseline_time_s / self.baseline_time_s
            choice = expected._choice(deadline_s * ratio)
            return self._fixed(choice.modes)
        choice = self._choice(deadline_s)
        fixed = self._fixed(choice.modes)
        # An exact choice has clocks as well, and the planner takes the better of both.
        if choice.clocks is not None:
            fixed._planner.keep(deadline_s, choice.clocks)
        return fixed

    def _choice(self, deadline_s: float) -> Choice:
        """Return the best modes for a deadline."""
        if deadline_s not in self._choices:
            problem = self._mode_problem
            if problem.modes.are_tied:
                choice = problem.choose(deadline_s)
            else:  # rounding picks mode and clock
                points = self._planner.points(max(deadline_s, self.min_time_s))
                choice = Choice(
                    tuple(point.mode for point in points),
                    -math.inf,
                    tuple(point.clock_mhz for point in points),
                )
            self._choices[deadline_s] = choice
        return self._choices[deadline_s]

    def _fixed(self, modes: tuple[str, ...]) -> Frontier:
        """Return the frontier of these modes."""
        if modes not in self._frontiers:
            dag = in_modes(self.dag, modes, baseline(self.dag))
            self._frontiers[modes] = Frontier.of(dag)
        return self._frontiers[modes]

    def _of_modes(self, plan: Plan) -> Plan:
        """Return a plan of chosen modes with the bound of all that could have been chosen."""
        choice = self._choices.get(plan.deadline_s)
        bound_j = self.bound_j(max(plan.time_s, self.min_time_s))
        # The duals of the choice bound all modes too; the larger bound is the tighter one.
        if choice is not None and plan.on_time is None:
            bound_j = max(bound_j, choice.effective_bound_j + self.dag.waiting_w * plan.time_s)
        return replace(plan, bound_j=bound_j)

    @cached_property
    def _mode_problem(self) -> ModeProblem:
        return ModeProblem(self.dag)

    @cached_property
    def _expected_modes(self) -> Frontier:
        return Frontier.of(self.dag.with_profile(self.profile.estimated().mean))

    @cached_property
    def _choices(self) -> dict[float, Choice]:
        return {}

    @cached_property
    def _frontiers(self) -> dict[tuple[str, ...], Frontier]:
        return {}

    @cached_property
    def _planner(self) -> Planner:
        from perseus_planner.solver.planner import Planner

        return Planner(self)

    @cached_property
    def _on_time_planner(self) -> OnTimePlanner:
        from perseus_planner.solver.on_time import OnTimePlanner

        return OnTimePlanner(self)


def solve(
    profile: Profile,
    schedule: Schedule | str,
    *,
    microbatches: int | None = None,
    ranks: int | None = None,
    virtual_stages: int | None = None,
    group: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **extras: Any,
) -> Frontier:
    """Compute the exact frontier of an iteration: `solve(profile, "1f1b", microbatches=96)`.

    Args:
        profile: measurements of as many stages as the schedule has.
        schedule: the computations of an iteration, rank by rank; or the name of a schedule, as
            `planner solve --schedule` takes it, which then has the stages of the profile.
        microbatches: microbatches of one iteration; for a name, and required there.
        ranks: ranks of the pipeline; for a name. One for each stage, or as the virtual stages tell,
            unless given.
        virtual_stages: stages that each rank holds; for the name of an interleaved schedule.
        group: microbatches that go through a stage at a time, as `schedules.generate` takes it; for
            a name.
        progress: called with (parts done, all parts) from time to time.
        extras: `transfer`, `operations` and `variants`, as `pipeline_iteration` takes them.

    Raises:
        ProfileError: If the profile has other stages than the schedule.
        ScheduleError: If the name is unknown, or the schedule cannot run.
        UsageError: If `microbatches` is missing for a name, or sizes are given with a schedule that
            has its own.
    """
    sizes = {
        "microbatches": microbatches,
        "ranks": ranks,
        "virtual_stages": virtual_stages,
        "group": group,
    }
    if isinstance(schedule, str):
        if microbatches is None:
            raise UsageError(
                f'microbatches: is missing; write solve(profile, "{schedule}", microbatches=8)'
            )
        schedule = generate_for_stages(schedule, profile.stages, **sizes)  # type: ignore[arg-type]
    elif given := [name for name, size in sizes.items() if size is not None]:
        raise UsageError(
            f"{given[0]}: the schedule has its sizes; leave it out, or name the schedule"
        )
    return solve_dag(PipelineDag.from_schedule(profile, schedule, **extras), progress=progress)


def solve_dag(dag: PipelineDag, *, progress: Callable[[int, int], None] | None = None) -> Frontier:
    """Compute the exact frontier of any graph of computations, from its slow end to its fast one,
    by minimum cuts.

    Raises:
        ProfileError: If the overhead leaves nothing of an iteration, or the measurements cannot be
            scaled.
    """
    return Frontier.of(dag, progress)
