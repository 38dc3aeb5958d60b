"""What the service answers, as plain text for a terminal."""

from __future__ import annotations

from datetime import datetime
from math import isinf
from typing import TYPE_CHECKING

from perseus_planner.views.columns import column, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.service.answers import Status, Telemetry
    from perseus_planner.service.model import Report
    from perseus_planner.service.outcomes import Answer


def answer_text(answer: Answer) -> str:
    """What follows from a request."""
    version = f"version {answer.version} of its plans"
    effect = {
        "planning": f"{version} is being planned",
        "next iteration": f"{version} is taken at the next iteration",
        "already": f"it runs by {version}",
    }.get(answer.takes_effect, f"{version}: {answer.takes_effect}")
    changed = effect if answer.changed else f"nothing changes; {effect}"
    key = f"\nReport {answer.report.key}" if answer.report is not None else ""
    saved_w = answer.expected_saving_w
    saving = "what it saves is not known yet" if saved_w is None else f"expected to save {saved_w:.4g} W"
    return f"Job {answer.job}: {changed}; {saving}\n{answer.reason}{key}"


def jobs_text(jobs: Sequence[Status]) -> str:
    """A line for each job."""
    if not jobs:
        return "No job runs."
    columns = [
        ["job", *(each.name for each in jobs)],
        column("pipelines", [str(each.pipelines) for each in jobs]),
        column("plans", [_version(each) for each in jobs]),
        column("slow", [str(len(each.decision.stragglers)) for each in jobs]),
        column("iteration s", [f"{each.decision.straggler_time_s:.6g}" for each in jobs]),
        column("saving W", [f"{each.expected_saving_w:.4g}" for each in jobs]),
        ["", *(each.decision.reason for each in jobs)],
    ]
    return table(columns)


def status_text(job: Status) -> str:
    """One job, whole."""
    decision = job.decision
    targets = list(dict.fromkeys((each.time_s, tuple(each.slow_stages.items())) for each in decision.targets))
    places = [
        [place for place, each in enumerate(decision.targets) if (each.time_s, tuple(each.slow_stages.items())) == one]
        for one in targets
    ]
    lines = [
        f"Job {job.name}: {job.pipelines} pipeline{'s' * (job.pipelines > 1)}, {job.ranks} ranks known, "
        f"since {_moment(job.since_s)}; wanted: {_wanted(job)}",
        f"Plans: {_version(job)}; expected to save {job.expected_saving_w:.4g} W",
        f"Power: {_power(job)}",
        *([] if job.telemetry is None else [_ran(job.telemetry)]),
        decision.reason,
        "",
        table(
            [
                ["pipelines", *(_ranges(each) for each in places)],
                column("plan s", [f"{time_s:.6g}" for time_s, _ in targets]),
                ["slow stages", *(", ".join(f"{each[0]}: {each[1]:.4g}x" for each in slow) for _, slow in targets)],
            ]
        ),
    ]
    if job.reports:
        lines += ["", _reports(job)]
    return "\n".join(lines)


def _reports(job: Status) -> str:
    counting, reports = set(job.decision.stragglers.values()), job.reports
    return table(
        [
            ["slow", *(_scope(each) for each in reports)],
            column("how", [_how(each) for each in reports]),
            ["cause", *(each.cause for each in reports)],
            ["from", *(_begin(each) for each in reports)],
            ["until", *(_end(each) for each in reports)],
            ["counts", *("yes" if each.key in counting else "" for each in reports)],
            ["source", *(each.source for each in reports)],
            ["key", *(each.key for each in reports)],
        ]
    )


def _version(job: Status) -> str:
    text = f"version {job.version}"
    if job.promised > job.version:
        text += f", {job.promised} is being planned"
    if job.taken is None:
        return f"{text}, none taken yet"
    ran = "taken" if job.taken.version == job.version else f"{job.taken.version} taken"
    return f"{text}, {ran} since iteration {job.taken.iteration}"


def _power(job: Status) -> str:
    expected = job.expected
    how = "replayed from a measured profile" if expected.origin == "measured" else "simulated"
    of_plans = f"{expected.power_w:.4g} W by these plans, {expected.baseline_power_w:.4g} W with all clocks at maximum"
    lately = (
        ""
        if job.telemetry is None or job.telemetry.power_w is None
        else (f"; {job.telemetry.power_w:.4g} W of late, {job.telemetry.energy_is}")
    )
    limits_w = [each.power_w for each in job.decision.targets if each.power_w is not None]
    budget = f"; a power budget leaves it {sum(limits_w):.4g} W" if limits_w else ""
    return f"{of_plans} in as long an iteration, {how}{lately}{budget}"


def _ran(ran: Telemetry) -> str:
    """What the job has counted; the baseline is that of the profile."""
    text = f"Ran: {ran.iterations} iterations, {ran.iteration_s:.6g} s each of late, until {_moment(ran.observed_s)}"
    if ran.energy_is is not None:
        text += f"; {ran.energy_j:.4g} J, {ran.energy_is}, saved {ran.saved_j:.4g} J against all clocks at maximum"
    if ran.set_p50_s is not None and ran.set_p99_s is not None:
        text += f"; clocks set in {1e3 * ran.set_p50_s:.3g} ms, 99 % in {1e3 * ran.set_p99_s:.3g} ms"
    return f"{text}, {ran.late_changes} late"


def _wanted(job: Status) -> str:
    text = "as fast as all clocks at maximum" if job.deadline_s is None else f"{job.deadline_s:.6g} s an iteration"
    return text if job.power_w is None else f"{text}, at most {job.power_w:.6g} W"


def _ranges(places: Sequence[int]) -> str:
    """Numbers in order, those in a row as first to last."""
    starts = [place for place in places if place - 1 not in places]
    ends = [place for place in places if place + 1 not in places]
    return ", ".join(
        str(start) if start == end else f"{start} to {end}" for start, end in zip(starts, ends, strict=True)
    )


def _scope(report: Report) -> str:
    scope = report.scope
    of = "" if scope.pipeline is None else f" of pipeline {scope.pipeline}"
    return f"{scope.kind} {scope.value}{of}"


def _how(report: Report) -> str:
    return f"{report.slowdown:.4g}x" if report.slowdown is not None else f"{report.iteration_s:.6g} s"


def _begin(report: Report) -> str:
    if report.begins_iteration is not None:
        return f"iteration {report.begins_iteration}"
    return _moment(report.begins_s)


def _end(report: Report) -> str:
    return "it is cleared" if isinf(report.expires_s) else _moment(report.expires_s)


def _moment(since_epoch_s: float) -> str:
    """A time of this machine's clock, to the second; only the time of day for one of today."""
    then = datetime.fromtimestamp(since_epoch_s).astimezone()
    return f"{then:%H:%M:%S}" if then.date() == datetime.now().astimezone().date() else f"{then:%Y-%m-%d %H:%M:%S}"
