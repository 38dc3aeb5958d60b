"""Answers of the service as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from math import isinf
from typing import TYPE_CHECKING, Any

from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.tables import Column, lay_out, table
from perseus_planner.extensions.service.headline import together
from perseus_planner.plans.replay import ALL_MAXIMUM, profile_of_origin
from perseus_planner.views.context import saved_text, share

if TYPE_CHECKING:
    from perseus_planner.extensions.service.models import (
        Answer,
        Event,
        JobStatus,
        JobTelemetry,
        JobTotals,
        RegisteredJob,
        Report,
        Together,
    )


_SUMS = ("iterations", "time_s", "energy_j", "judged_j", "saved_j")


def answer_text(answer: Answer) -> str:
    """Describe the effect of a request."""
    version = f"version {answer.version} of its plans"
    effect = {
        "planning": f"{version} is being planned",
        "next iteration": f"{version} is taken at the next iteration",
        "already": f"it runs {version}",
    }[answer.takes_effect]
    changed = effect if answer.changed else f"its plans stay as they are; {effect}"
    if not answer.changed and answer.takes_effect == "planning":
        changed = f"{version}, which is being planned, stays as it was asked for"
    key = f"\nReport {answer.report.key}" if answer.report is not None else ""
    saved_w = answer.expected_saving_w
    saving = "the saving is not known yet" if saved_w is None else _extra(saved_w)
    return f"Job {answer.job}: {changed}; {saving}\n{answer.reason}{key}"


def _extra(saved_w: float) -> str:
    """Say what is saved beside stragglers: by the frontier, which plans come close to, so that it
    does not add up with what is saved by plans.
    """
    by = ", by the bound of its frontier" if saved_w else ""
    return f"extra beside stragglers: {si(saved_w, 'W')}{by}"


def jobs_text(jobs: Sequence[JobStatus]) -> str:
    """List jobs, one on each line."""
    if not jobs:
        return "No job runs."
    of_all = (
        Column("job", "job.name", "<"),
        Column("pipelines", "job.pipelines"),
        Column("plans", _version),
    )
    of_now = (
        Column("slow", lambda status: len(status.decision.stragglers)),
        Column("target s", "decision.straggler_time_s", ".6g"),
        Column("now s", lambda status: status.telemetry and status.telemetry.iteration_s, ".6g"),
        Column("saves W", "saves_w", ".4g"),
        Column("extra W", "expected_saving_w", ".4g"),
    )
    state = Column("state", state_text, "<")
    # Apart, as nobody knows how those that are not heard of run now.
    silent = [job for job in jobs if job.silent_since_s is not None]
    heard_of = [job for job in jobs if job.silent_since_s is None]
    parts = [table(lay_out(heard_of, *of_all, *of_now, state))] if heard_of else []
    if silent:
        parts.append(f"Not heard of:\n{table(lay_out(silent, *of_all, state))}")
    return "\n\n".join([*parts, together_text(together(jobs))])


def together_text(all_jobs: Together) -> str:
    """Say what jobs draw and save together, whose power that is, and whose it is not."""
    by_plans = all_jobs.heard_of - all_jobs.measured
    whose = []
    if all_jobs.measured:
        whose.append(f"{all_jobs.measured} measured")
    if by_plans:
        whose.append(f"{by_plans} by plans")
    origin = f" ({', '.join(whose)})" if whose else ""
    power = f"Power of {counted(all_jobs.heard_of, 'job')}{origin}: {si(all_jobs.power_w, 'W')}"
    if all_jobs.compared:
        power += f", {si(all_jobs.saves_w, 'W')} less than with {ALL_MAXIMUM}"
        if all_jobs.compared != all_jobs.heard_of:
            power += f" in {all_jobs.compared} of them"
    text = f"{power}; extra beside stragglers: {si(all_jobs.extra_w, 'W')}"
    if all_jobs.silent:
        text += f". Left out: {counted(all_jobs.silent, 'job')} not heard of"
    return f"{text}."


def totals_text(jobs: Sequence[JobTotals]) -> str:
    """List what jobs ran, used and saved, one on each line, with their sum at the end."""
    if not jobs:
        return "No job runs or has run."
    rows: list[dict[str, Any]] = [
        {
            "job": job.name,
            "since": _moment(job.since_s),
            "until": "it runs" if job.ended_s is None else _moment(job.ended_s),
            "energy is": (job.telemetry and job.telemetry.energy_is) or "-",
            **{name: getattr(job.telemetry, name, 0) for name in _SUMS},
        }
        for job in jobs
    ]
    # Energy that was measured and energy that was simulated are added up; so the sum says of
    # neither what it is.
    sums = {name: sum(row[name] for row in rows) for name in _SUMS}
    rows.append({"job": "all", "since": "", "until": "", "energy is": "", **sums})
    columns = lay_out(
        rows,
        *(Column(name, name, "<") for name in ("job", "since", "until")),
        Column("iterations", "iterations"),
        Column("seconds", "time_s", ".6g"),
        Column("joules", "energy_j", ".6g"),
        Column("saved", "saved_j", ".6g"),
        Column("saved %", lambda row: share(row["saved_j"], row["judged_j"] + row["saved_j"]), "%"),
        Column("  energy is", "energy is", "<"),
    )
    return (
        f"{table(columns)}\n\nSaved: joules against {ALL_MAXIMUM} in iterations as long, where "
        "that is known."
    )


def status_text(status: JobStatus, events: Sequence[Event] = ()) -> str:
    """Describe one job in full, with the events that are given, oldest first."""
    job = status.job
    decision = status.decision
    pipelines = dict[tuple[float, tuple[tuple[int, float], ...]], list[int]]()
    # Hundreds of pipelines mostly do the same: one line for all of them.
    for number, pipeline_target in enumerate(decision.each):
        pipelines.setdefault(
            (pipeline_target.time_s, tuple(pipeline_target.slow_stages.items())), []
        ).append(number)
    targets = lay_out(
        list(pipelines.items()),
        Column("pipelines", lambda target: _ranges(target[1]), "<"),
        Column("target s", lambda target: target[0][0], ".6g"),
        Column(
            "slow stages",
            lambda target: ", ".join(f"{stage}: {factor:.4g}x" for stage, factor in target[0][1]),
            "<",
        ),
    )
    lines = [
        f"Job {job.name}: {counted(job.pipelines, 'pipeline')}, {counted(job.ranks, 'rank')} "
        f"known, since {_moment(job.since_s)}; settings: {_settings(job)}",
        f"State: {state_text(status)}",
        f"Plans: {_version(status)}",
        f"Power: {_power(status)}",
    ]
    # Only lines that say something: most jobs have no verdict and no autopilot.
    if status.unlike_plan is not None:
        lines.append(f"{status.unlike_plan}.")
    if status.verdict is not None:
        lines.append(status.verdict)
    if status.telemetry is not None:
        lines.append(_telemetry(status.telemetry, saves=status.unlike_plan is None))
    if status.autopilot is not None:
        lines.append(f"{status.autopilot.name.capitalize()}: {status.autopilot}")
    # Beside a straggler, the state is what was decided.
    if decision.reason not in status.state.text:
        lines.append(f"Decided: {decision.reason}")
    lines += ["", table(targets)]
    if status.reports:
        lines += ["", _reports(status)]
    if events:
        lines += ["", *(f"{_moment(event.at_s)}  {event.text}" for event in events)]
    return "\n".join(lines)


def state_text(status: JobStatus) -> str:
    """Say what an operator has to know first."""
    state = status.state
    since = "" if state.since_s is None else f" since {_moment(state.since_s)}"
    return f"{state.name}{since}: {state.text}"


def _reports(job: JobStatus) -> str:
    counting = set(job.decision.stragglers.values())
    reports = job.reports
    return table(
        lay_out(
            reports,
            Column("slow", _scope, "<"),
            Column("how", _how),
            Column("cause", "cause", "<"),
            Column("from", _begin, "<"),
            Column("until", _end, "<"),
            Column("counts", lambda report: "yes" if report.key in counting else "", "<"),
            Column("source", "source", "<"),
            Column("key", "key", "<"),
        )
    )


def _version(job: JobStatus) -> str:
    text = f"version {job.version}"
    if job.promised > job.version:
        text += f", {job.promised} is being planned"
    if job.taken is None:
        return f"{text}, none taken yet"
    taken = "taken" if job.taken.version == job.version else f"{job.taken.version} taken"
    return f"{text}, {taken} since iteration {job.taken.iteration}"


def _power(job: JobStatus) -> str:
    parts = []
    if job.silent_since_s is not None:
        parts.append("not known, as it is not heard of")
    else:
        expected = job.expected
        how = f"replayed from a {profile_of_origin(expected.origin)}"
        if expected.origin == "simulated":
            how = "simulated"
        as_long = ""
        if expected.iteration_s is not None:
            as_long = f" in iterations of {si(expected.iteration_s, 's')}"
        parts.append(
            f"{si(expected.power_w, 'W')} with these plans, "
            f"{si(expected.baseline_power_w, 'W')} with {ALL_MAXIMUM}, both{as_long}, {how}"
        )
        sent = job.telemetry
        against = ""
        if sent is not None and sent.power_w is not None:
            parts.append(f"recently {si(sent.power_w, 'W')}, {sent.energy_is}")
            # Those by the plans are of the iterations that are planned, which may be shorter.
            baseline_w = sent.power_w + (job.saves_w or 0.0)
            against = (
                f" against {si(baseline_w, 'W')} with {ALL_MAXIMUM} in iterations of "
                f"{si(sent.iteration_s, 's')}"
            )
        extra = _extra(job.expected_saving_w)
        if job.saves_w is None:
            parts[-1] += f", {extra}"
        else:
            parts.append(f"saves {si(job.saves_w, 'W')}{against}, {extra}")
    if job.power_limit_w is not None:
        parts.append(f"a power budget leaves it {si(job.power_limit_w, 'W')}")
    return "; ".join(parts)


def _telemetry(sent: JobTelemetry, *, saves: bool) -> str:
    parts = [
        f"Ran: {sent.iterations} iterations, recently {si(sent.iteration_s, 's', 6)} each, from "
        f"begin to begin, until {_moment(sent.observed_s)}"
    ]
    if sent.energy_is is not None:
        saved = f", {saved_text(sent)}" if saves else ""
        parts.append(f"{si(sent.energy_j, 'J')}, {sent.energy_is}{saved}")
    if sent.set_p50_s is not None and sent.set_p99_s is not None:
        p50 = si(sent.set_p50_s, "s", 3)
        p99 = si(sent.set_p99_s, "s", 3)
        parts.append(f"clocks set in {p50}, 99 % in {p99}, {sent.changes_late} late")
    elif sent.changes_late:
        parts.append(f"{sent.changes_late} changes of clocks late")
    if sent.off_plan_since_s is not None:
        since = _moment(sent.off_plan_since_s)
        parts.append(
            f"{sent.following} of {sent.ranks} ranks follow their plan, not all since {since}"
        )
    return "; ".join(parts)


def _settings(job: RegisteredJob) -> str:
    parts = [
        f"iterations as fast as {ALL_MAXIMUM}"
        if job.deadline_s is None
        else f"iterations of {si(job.deadline_s, 's', 6)}"
    ]
    if job.power_w is not None:
        parts.append(f"at most {si(job.power_w, 'W', 6)}")
    step = job.next_power
    if step is not None:
        most = "no power budget" if step.power_w is None else f"at most {si(step.power_w, 'W', 6)}"
        parts.append(f"{most} from {_moment(step.start_s)}")
    if job.gpu_power_limit_w is not None:
        parts.append(f"each GPU limited to {si(job.gpu_power_limit_w, 'W', 6)}")
    return ", ".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """Write rising numbers, with runs of them as first to last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join(" to ".join(map(str, run)) for run in runs)


def _scope(report: Report) -> str:
    scope = report.scope
    within = "" if scope.pipeline is None else f" of pipeline {scope.pipeline}"
    return f"{scope.kind} {scope.value}{within}"


def _how(report: Report) -> str:
    return (
        f"{report.slowdown:.4g}x"
        if report.slowdown is not None
        else si(report.iteration_s or 0.0, "s", 6)
    )


def _begin(report: Report) -> str:
    if report.begins_iteration is not None:
        return f"iteration {report.begins_iteration}"
    return _moment(report.begins_s)


def _end(report: Report) -> str:
    return "it is cleared" if isinf(report.expires_s) else _moment(report.expires_s)


def _moment(since_epoch_s: float) -> str:
    """Write a moment in local time to the second, with its zone, as readers may be in another one;
    only the time of day if it is today.
    """
    then = datetime.fromtimestamp(since_epoch_s).astimezone()
    is_today = then.date() == datetime.now().astimezone().date()
    return f"{then:%H:%M:%S %Z}" if is_today else f"{then:%Y-%m-%d %H:%M:%S %Z}"
