"""Calibration: the corrections of a job or profile that make replayed iteration times equal
measured ones.

Which terms a few measurements can carry, and how large they are, is a regression: non-negative
least squares of relative errors (Lawson and Hanson 1974; with so few terms all subsets are tried),
by the method of Gauss and Newton, as an iteration's time is linear in each term only until another
path is critical. Terms are chosen by leave-one-out cross-validation (Stone 1974).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.edits import with_values
from perseus_planner.base.errors import UsageError
from perseus_planner.base.file_kinds import kind_of
from perseus_planner.base.prefixes import si
from perseus_planner.plans.job import Correction, Job, job_document, read_settings
from perseus_planner.plans.replay import replay
from perseus_planner.profiles.jitter import Jitter, Tail
from perseus_planner.profiles.profiles import Profile, profile_document

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from perseus_planner.base.documents import Document
    from perseus_planner.plans.plan import Plan
    from perseus_planner.schedules.iteration import Iteration

    Floats = NDArray[np.float64]

_KEY = "overhead_s"
_DIGITS_OF_JITTER = 4
_DIGITS = 9  #: of seconds and factors, so that 0.1234 is not written as 0.12340000000000018
# Terms beside the constant; others are kinds, such as "F": their factors less 1
_LATENCY = "hop"
_FACTOR = "all"
_SCALES = {_LATENCY: 1e-3, **dict.fromkeys((_FACTOR, *"FBIW"), 0.1)}
"""Term -> a value that makes a difference; the latency as a part of an iteration."""
_MOST_APART = 2.0
"""Times as long or as short as the replay; beyond that, another plan or GPU was measured."""
_LEAST_PLANS = 3


class MeasuredPlan(NamedTuple):
    """A plan that a job ran with, and how long an iteration took."""

    plan: Plan
    time_s: float  #: mean, seconds
    source: str  #: the name of the measured time in error messages
    #: of its computations, from iteration to iteration; None if it is not known.
    jitter: Jitter | None = None


@dataclass(frozen=True)
class CalibratedPlan:
    """What the calibration changes for one plan; all are iteration times in seconds."""

    source: str  #: where the measured time is from
    measured_s: float  #: measured, mean over all runs with the plan
    replayed_s: float  #: replayed without any overhead or correction that the calibration finds
    predicted_before_s: float  #: predicted before the calibration
    predicted_s: float  #: predicted now


@dataclass(frozen=True)
class Calibration:
    """The calibration of a profile or job by measured iteration times, which are means over the
    plans here.
    """

    measured_s: float  #: measured iteration time, seconds
    replayed_s: float  #: replayed iteration time, without any overhead or correction, seconds
    overhead_before_s: float  #: overhead before the calibration, seconds
    #: overhead now: seconds of an iteration that are not replayed, whatever the plan.
    overhead_s: float
    predicted_before_s: float  #: iteration time predicted before the calibration, seconds
    predicted_s: float  #: iteration time predicted now, seconds
    #: seconds that each transfer between stages takes beside the job's `transfer`, as found.
    hop_latency_s: float = 0.0
    #: kind, such as "F" -> how many times as long as profiled a computation takes, as found.
    time_factors: Mapping[str, float] = field(default_factory=dict)
    #: mean relative error of the predicted time of a plan by a calibration without it; None if
    #: there is only one plan.
    left_out_error: float | None = None
    plans: tuple[CalibratedPlan, ...] = ()  #: the plans, each once
    #: jitter of computations; None if no run shows it.
    jitter: Jitter | None = None

    @property
    def overhead_share(self) -> float:
        """The overhead, over the measured iteration time."""
        return self.overhead_s / self.measured_s


def calibrate(path: Path, measured: Sequence[MeasuredPlan]) -> tuple[Calibration, str]:
    """Return the calibration by iterations that were measured, and the text of the file at `path`
    with it.

    A profile gets a constant overhead. A job whose schedule the plans have may also get a latency
    of transfers and factors of its computations' times, if plans that are left out are then
    predicted clearly better.

    Args:
        path: the profile.yaml, or the job file, from which the plans were made.
        measured: plans that the job ran with; the runs of one plan count as one.

    Raises:
        UsageError: If a plan is of another profile, or a time cannot be that of its plan.
        PlannerError: If the file cannot be read, or its numbers cannot be changed.
    """
    if path.suffix.lower() == ".csv":
        raise UsageError(
            f"{path}: a CSV does not hold an overhead; name a profile.yaml, or a job file"
        )
    document, profiles, bare, correction = _read(path)
    # Runs of one plan are one measurement: they share whatever makes it special.
    plans = [_replayable(path, measured_plan, profiles, bare) for measured_plan in _means(measured)]
    jobs = [plan for plan in plans if isinstance(plan, _PlanOfJob)]
    # A plan that does not fit the job can only be replayed as it was made, so none is refitted
    # then.
    is_fitted = len(jobs) == len(plans) >= _LEAST_PLANS  # fewer leave the correction as it is
    # A time of another plan or machine would spoil the fit of all others.
    for plan in plans:
        _check_time(plan.measured, plan.replayed_s(correction))
    # The replay for given terms is what the regression fits; a constant is always among them.
    fit = fit_terms(
        [plan.measured.time_s for plan in plans],
        lambda values: [
            plan.replayed_s(_correction(values, jobs) if is_fitted else correction)
            for plan in plans
        ],
        _candidates(jobs[0].measured.plan.iteration) if is_fitted else (),
        _SCALES | {_LATENCY: _SCALES[_LATENCY] * plans[0].measured.time_s},
    )
    now = _correction(fit.values, jobs) if is_fitted else correction
    # Rounded before predictions are made, so that what is reported is what is written.
    overhead_s = round(fit.constant_s, _DIGITS)
    before_s = profiles[0].overhead_s
    calibrated = tuple(
        CalibratedPlan(
            plan.measured.source,
            plan.measured.time_s,
            plan.replayed_s(Correction() if is_fitted else correction),
            plan.replayed_s(correction) + before_s,
            plan.replayed_s(now) + overhead_s,
        )
        for plan in plans
    )
    result = Calibration(
        measured_s=fmean(plan.measured_s for plan in calibrated),
        replayed_s=fmean(plan.replayed_s for plan in calibrated),
        overhead_before_s=before_s,
        overhead_s=overhead_s,
        predicted_before_s=fmean(plan.predicted_before_s for plan in calibrated),
        predicted_s=fmean(plan.predicted_s for plan in calibrated),
        hop_latency_s=now.hop_latency_s,
        time_factors=dict(now.time_factors),
        left_out_error=fit.left_out_error,
        plans=calibrated,
        jitter=_jitter(measured),
    )
    # An unchanged correction leaves its lines in the file as they are.
    changes = _changes(result, None if now == correction else now)
    return result, with_values(document, changes)


class _Calibrated(NamedTuple):
    """The file that is calibrated."""

    document: Document
    profiles: tuple[Profile, ...]  #: those of its kinds of pipelines; one of a profile
    bare: Job | None  #: the job without its correction; None if the file is a profile
    correction: Correction  #: that it has until now


def _read(path: Path) -> _Calibrated:
    if kind_of(path) != "job":
        # A profile has no schedule of its own, so nothing but a constant can be fitted to it.
        return _Calibrated(profile_document(path), (Profile.load(path),), None, Correction())
    settings = read_settings(path)
    # Without its correction, as a new one is to be found.
    bare = Job.of(replace(settings, correction=Correction()))
    return _Calibrated(job_document(path), Job.of(settings).profiles, bare, settings.correction)


def _changes(result: Calibration, correction: Correction | None) -> dict[str, object]:
    """Return the values to write into the file; those that are None are left out of it.

    Args:
        result: what was found.
        correction: the new one; None if it stays as it is.
    """
    changes: dict[str, object] = {_KEY: result.overhead_s}
    if result.jitter is not None:
        # Nothing is written for a part of 0, which is a file's default.
        tail = result.jitter.tail
        changes["jitter"] = result.jitter.own or None
        changes["jitter_common"] = result.jitter.common or None
        changes["jitter_tail"] = None if tail is None else asdict(tail)
    if correction is not None:
        entries = {
            "hop_latency_s": correction.hop_latency_s,
            "time_factors": dict(correction.time_factors),
        }
        changes["correction"] = {name: value for name, value in entries.items() if value} or None
    return changes


@dataclass(frozen=True)
class _PlanAsMade:
    """A measured plan that is replayed as it was made, with the correction that it was made
    with.
    """

    measured: MeasuredPlan

    def replayed_s(self, _: Correction) -> float:
        """Return the iteration time without overhead, seconds."""
        return replay(self.measured.plan).time_s - self.measured.plan.overhead_s


@dataclass(frozen=True)
class _PlanOfJob:
    """A measured plan that can be replayed with any correction of its job."""

    measured: MeasuredPlan  #: the plan and its time
    job: Job  #: the job without correction
    kind: int  #: number of its kind of pipelines in the job

    def replayed_s(self, correction: Correction) -> float:
        """Return the iteration time without overhead, seconds."""
        plan = self.measured.plan
        rows = self._profile.measurements
        # Latency makes transfers longer; factors make computations longer.
        later = replace(self.job, transfer=self.job.transfer.later(correction.hop_latency_s))
        # The plan's own table, with rows as the correction would have them.
        points = {}
        # Plans for a probability scale their rows, so that full clocks take as long as measured.
        scale = 1.0 if plan.on_time is None else plan.on_time.time_scale
        for key, clocks in plan.measurements.items():
            factor = scale * correction.time_factors.get(key.kind[0], 1.0)
            points[key] = {
                row.clock_mhz: replace(row, time_s=factor * row.time_s)
                for row in rows[key]
                if row.clock_mhz in clocks
            }
        iteration = later.dags()[self.kind].iteration
        # Without overhead: that is what the regression's constant finds.
        return replay(
            replace(plan, iteration=iteration, measurements=points, overhead_s=0.0)
        ).time_s

    @cached_property
    def _profile(self) -> Profile:
        """The rows that the plan was made from."""
        profile = self.job.profiles[self.kind]
        believed = self.measured.plan.on_time is None or profile.is_exact
        return profile if believed else profile.estimated().mean


def _replayable(
    path: Path, measured: MeasuredPlan, profiles: Sequence[Profile], bare: Job | None
) -> _PlanAsMade | _PlanOfJob:
    """Return the plan with what it takes to replay it: the job, if it is a plan of an iteration of
    that.

    Args:
        path: the file that is calibrated.
        measured: the plan.
        profiles: those of the file.
        bare: the job without its correction; None if the file is a profile.
    """
    plan = measured.plan
    # A plan of the job is looked for first: it can be replayed with other corrections.
    for candidates in (() if bare is None else bare.profiles, profiles):
        for kind, profile in enumerate(candidates):
            # The digest holds the overhead, which may have been another one when the plan was made.
            if replace(profile, overhead_s=plan.overhead_s).digest != plan.profile_digest:
                continue
            # The lags of transfers are what is to be fitted, so they do not count here.
            if bare is not None and _shape(bare.dags()[kind].iteration) == _shape(plan.iteration):
                return _PlanOfJob(measured, bare, kind)
            if candidates is profiles:
                return _PlanAsMade(measured)
    raise UsageError(
        f"{path}: is not the profile that the plan was made from, which has the digest "
        f"{plan.profile_digest[:12]}; name the profile.yaml, or the job file, that it was made "
        "from without further options"
    )


def _shape(iteration: Iteration) -> Iteration:
    """Return an iteration without the time of transfers."""
    return replace(iteration, lags_s=())


def _means(measured: Sequence[MeasuredPlan]) -> list[MeasuredPlan]:
    """Return each plan once, with the mean of its times."""
    groups: dict[tuple[object, ...], list[MeasuredPlan]] = {}
    for run in measured:
        # Plans with equal clocks are one plan, whichever file they are from.
        key = run.plan.profile_digest, run.plan.schedule, *run.plan.clocks.values()
        groups.setdefault(key, []).append(run)
    return [
        group[0]._replace(time_s=fmean(run.time_s for run in group)) for group in groups.values()
    ]


def _jitter(measured: Sequence[MeasuredPlan]) -> Jitter | None:
    """Return the jitter of all runs together, rounded."""
    known = [run.jitter for run in measured if run.jitter is not None]
    if not known:
        return None

    def rounded(value: float) -> float:
        return round(value, _DIGITS_OF_JITTER)

    own = math.sqrt(fmean(jitter.own**2 for jitter in known))
    common = math.sqrt(fmean(jitter.common**2 for jitter in known))
    tails = [jitter.tail for jitter in known if jitter.tail is not None]
    # A run without a tail has none of its computations in one.
    share = math.fsum(tail.share for tail in tails) / len(known)
    if rounded(share) == 0.0:
        return Jitter(rounded(own), rounded(common))
    longer = math.fsum(tail.share * tail.factor for tail in tails) / len(known)
    return Jitter(rounded(own), rounded(common), Tail(rounded(share), rounded(longer / share)))


def _check_time(measured: MeasuredPlan, replayed_s: float) -> None:
    if not replayed_s / _MOST_APART <= measured.time_s <= _MOST_APART * replayed_s:
        apart = "less than half of" if measured.time_s < replayed_s else "more than twice"
        raise UsageError(
            f"{measured.source}: {si(measured.time_s, 's', 6)} is {apart} the "
            f"{si(replayed_s, 's', 6)} of the replay; give the mean time of an iteration with "
            "this plan, on the GPUs that were profiled"
        )


def _kinds(iteration: Iteration) -> tuple[str, ...]:
    return tuple(sorted({computation.kind for computation in iteration.computations}))


def _candidates(iteration: Iteration) -> list[tuple[str, ...]]:
    """Return the terms that are tried, the fewest first: the transfers' latency, one factor for
    all kinds, or each.
    """
    kinds = _kinds(iteration)
    latency = (_LATENCY,) if len(iteration.schedule.ranks) > 1 else ()
    candidates = [latency, (_FACTOR,), kinds, (*latency, _FACTOR), (*latency, *kinds)]
    return [terms for terms in dict.fromkeys(candidates) if terms]


def _correction(values: Mapping[str, float], jobs: Sequence[_PlanOfJob]) -> Correction:
    """Return the correction that the regression's terms stand for."""
    kinds = _kinds(jobs[0].measured.plan.iteration)
    factors = {
        # A kind's own term, or the one of all kinds.
        kind: round(1 + values.get(kind, values.get(_FACTOR, 0.0)), _DIGITS)
        for kind in kinds
    }
    # A factor of 1 is none.
    factors = {kind: factor for kind, factor in factors.items() if factor != 1.0}
    return Correction(round(values.get(_LATENCY, 0.0), _DIGITS), factors)


Replay = Callable[[Mapping[str, float]], Sequence[float]]
"""Values of some terms, others being 0 -> replayed seconds of each measurement, without the
constant.
"""

_ROUNDS = 12
_STEP = 1e-3  #: of a term's scale, to find by how much it lengthens iterations
_LEAST_CHANGE = 1e-10  #: of a term's scale
_SAME = 1e-18  #: difference of squared relative errors that is rounding
_GAIN = 0.8  #: more terms must bring the error of measurements that are left out to this part
#: how many more measurements than terms there must be: one for the constant, one to be left out
_SPARE = 2


@dataclass(frozen=True)
class Fit:
    """The values of the terms that were chosen."""

    constant_s: float  #: seconds that every iteration takes beside what is replayed
    values: Mapping[str, float]  #: term -> its value
    #: the mean relative error of predictions of a measurement by a fit to the others; None if there
    #: is only one measurement.
    left_out_error: float | None


def fit_terms(
    measured_s: Sequence[float],
    replay: Replay,
    candidates: Sequence[Sequence[str]],
    scales: Mapping[str, float],
) -> Fit:
    """Return the fit of a constant and of the terms of one of the candidates, that which predicts
    best.

    Args:
        measured_s: seconds of each measurement.
        replay: replays all of them.
        candidates: terms to try, those to prefer first. The constant alone is tried before them.
        scales: term -> a value that makes a difference.
    """
    measured = np.array(measured_s)
    best = _fit(measured, replay, (), scales)
    for terms in candidates:
        # One measurement is left out in turn, so there must be one more than what is fitted.
        if len(measured) < len(terms) + _SPARE:
            continue
        fit = _fit(measured, replay, terms, scales)
        # More terms always fit better, so they must clearly predict better what they were not
        # fitted to.
        if fit.left_out_error is not None and best.left_out_error is not None:
            best = fit if fit.left_out_error < _GAIN * best.left_out_error else best
    return best


def _fit(
    measured: Floats, replay: Replay, terms: Sequence[str], scales: Mapping[str, float]
) -> Fit:
    # In units of each term's scale all values are near 1, which least squares need.
    sizes = np.array([float(measured[0]), *(scales[term] for term in terms)])

    def missing_at(values: Floats) -> Floats:
        """Return what the prediction lacks, as parts of the measured times."""
        replayed_s = np.array(replay(dict(zip(terms, (values * sizes)[1:].tolist(), strict=True))))
        return np.asarray(1 - (replayed_s + values[0] * sizes[0]) / measured)

    values = np.zeros(len(sizes))
    columns = np.empty((len(measured), len(sizes)))
    missing = missing_at(values)
    # The method of Gauss and Newton: linear near the last values, and again from there.
    for _ in range(_ROUNDS):
        # How much an iteration grows with each term, by finite differences.
        for term in range(len(sizes)):
            step = np.zeros(len(sizes))
            step[term] = _STEP
            columns[:, term] = (missing - missing_at(values + step)) / _STEP
        change = _solve(columns, missing, values)
        # The change is right where the same path stays critical, and too far behind that.
        tried = missing_at(values + change)
        while np.sum(tried**2) >= np.sum(missing**2) and np.max(np.abs(change)) > _LEAST_CHANGE:
            change /= 2  # another path is critical there
            tried = missing_at(values + change)
        # No shorter change is better either, so this is the end.
        if np.sum(tried**2) >= np.sum(missing**2):
            break
        values = values + change
        missing = tried
    # With the columns of the last round the fit without one measurement is a linear problem.
    left_out = [abs(_left_out(columns, missing, values, run)) for run in range(len(measured))]
    return Fit(
        float(values[0] * sizes[0]),
        dict(zip(terms, (values * sizes)[1:].tolist(), strict=True)),
        float(np.mean(left_out)) if len(measured) > 1 else None,
    )


def _left_out(columns: Floats, missing: Floats, values: Floats, place: int) -> float:
    """Return the relative error at one measurement of a fit to the others."""
    others = np.arange(len(missing)) != place
    return float(columns[place] @ _solve(columns[others], missing[others], values) - missing[place])


def _solve(columns: Floats, missing: Floats, values: Floats) -> Floats:
    """Return the change of least squared error; no value becomes negative, unless the constant
    is alone.
    """
    count = len(values)
    best = np.zeros(count)
    least = np.inf
    # Terms at their bound are found by trying all subsets, of which there are few.
    for chosen in map(
        list, chain.from_iterable(combinations(range(count), size) for size in range(count, -1, -1))
    ):
        # What is not chosen becomes 0.
        change = -values
        if chosen:
            change[chosen] = 0.0
            change[chosen] = np.linalg.lstsq(
                columns[:, chosen], missing - columns @ change, rcond=1e-9
            )[0]
        error = float(np.sum((columns @ change - missing) ** 2))
        # A larger subset that is no better than by rounding is not preferred.
        if (count == 1 or np.all(values + change >= 0.0)) and error < least - _SAME:
            best = change
            least = error
    return best
