"""A client of the planner's service, with a method for each route.

with Client("http://127.0.0.1:8400") as service:
    answer = service.report("gpt3", ReportRequest("ops", Scope("pipeline", "3"), slowdown=1.2,
    ttl_s=1800.0)) print(answer.version, answer.reason)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from perseus_planner.base.errors import UsageError
from perseus_planner.service.answers import (
    Answer,
    Answers,
    History,
    Jobs,
    JobStatus,
    Pipelines,
    PowerBudget,
    Registered,
    Reports,
    Totals,
)
from perseus_planner.service.client.transport import Transport
from perseus_planner.service.model import PlanSet, PowerStep, Report
from perseus_planner.service.planning.curves import Curve
from perseus_planner.service.schemas import (
    DeadlineRequest,
    PowerRequest,
    TakenRequest,
    from_json,
    to_json,
)

if TYPE_CHECKING:
    from perseus_planner.service.answers import JobTotals, PipelineStatus
    from perseus_planner.service.schemas import Counters, Registration, ReportRequest

Value = TypeVar("Value")

TIMEOUT_S = 10.0
"""How long a client waits for an answer, besides what a long poll waits."""
_REGISTERING_S = 120.0  # for which a profile is solved and plans are made


class Client:
    """A client of the service at one address. Use it as a context manager, which closes its
    connections.

    It connects when a method is first called. Every method raises `ServiceAway` if the service
    cannot be reached or something else answers, and `ServiceRefusal` if the service refuses the
    request. Use a client from one thread at a time.

    Args:
        address: "http://host:port", "https://host:port" or "unix:/path/of/socket". By default the
            value of PLANNER_SERVICE, or else a service on this node. Certificates are checked
            against those of the system, or of SSL_CERT_FILE.
        token: Bearer token; by default that in PLANNER_TOKEN, if any.
        timeout_s: How long to wait for an answer, seconds.

    Raises:
        UsageError: If the address or the token is malformed, or httpx is not installed.
    """

    def __init__(
        self, address: str | None = None, token: str | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._transport = Transport(address, token, timeout_s)

    @property
    def address(self) -> str:
        """The address of the service."""
        return self._transport.address

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def register(self, job: Registration) -> Registered:
        """Register a job; the same registration again changes nothing. Refused (409) if another job
        has its name.

        The answer, which may take 2 minutes, comes when the job has plans.
        """
        short_s = self._transport.timeout_s
        waiting = (
            short_s,
            max(short_s, _REGISTERING_S),
            short_s,
            short_s,
        )  # to connect, read, write, for a connection
        response = self._transport.send(
            "POST", "/v1/jobs", body=to_json(job, without_nulls=True), timeout=waiting
        )
        registered = self._transport.read(lambda text: from_json(Registered, text), response)
        return replace(registered, is_new=response.status_code == HTTPStatus.CREATED)

    def jobs(self) -> tuple[JobStatus, ...]:
        """Return the status of every running job."""
        return self._ask(Jobs, "GET", "/v1/jobs").jobs

    def totals(self) -> tuple[JobTotals, ...]:
        """Return what every job ran, used and saved, also of jobs that have ended."""
        return self._ask(Totals, "GET", "/v1/totals").jobs

    def status(self, job: str) -> JobStatus:
        """Return the status of one job."""
        return self._ask(JobStatus, "GET", _path(job))

    def history(self, job: str) -> History:
        """Return the events and figures of one job, oldest first."""
        return self._ask(History, "GET", _path(job, "history"))

    def end(self, job: str) -> None:
        """Report that a job has ended; the service keeps its totals alone."""
        self._transport.send("DELETE", _path(job))

    def report(self, job: str, request: ReportRequest, *, wait_s: float = 0.0) -> Answer:
        """Report that something is slow, or has recovered. What is acknowledged survives the
        service's death.

        If slow stages have to be solved and planned first, the answer waits up to `wait_s` seconds
        for that.
        """
        waiting = (
            {"params": {"wait_s": wait_s}, "timeout": wait_s + self._transport.timeout_s}
            if wait_s
            else {}
        )
        return self._ask(
            Answer, "POST", _path(job, "reports"), to_json(request, without_nulls=True), **waiting
        )

    def reports(self, job: str) -> tuple[Report, ...]:
        """Return the reports of a job that count now or will count."""
        return self._ask(Reports, "GET", _path(job, "reports")).reports

    def clear(self, job: str, key: str) -> Answer:
        """Withdraw the report with that key."""
        return self._ask(Answer, "DELETE", _path(job, "reports", key))

    def plans(self, job: str, *, after: int = 0, wait_s: float = 0.0) -> PlanSet | None:
        """Return the plans of all pipelines as soon as their version is above `after`.

        Returns:
            None if it is not within `wait_s` seconds.
        """

        def parsed(text: bytes) -> PlanSet:
            found = from_json(PlanSet, text)
            found.plans  # noqa: B018 - parsed now, so that what is not a plan is an error here
            return found

        return self._poll(parsed, _path(job, "plans"), after, wait_s)

    def taken(self, job: str, version: int, iteration: int) -> None:
        """Report that the job runs that version since that iteration."""
        self._transport.send(
            "POST", _path(job, "taken"), body=to_json(TakenRequest(version, iteration))
        )

    def telemetry(self, job: str, counters: Counters) -> None:
        """Send what a run of the job has counted since it began; sending the same again changes
        nothing.
        """
        self._transport.send("POST", _path(job, "telemetry"), body=to_json(counters))

    def frontier(self, job: str) -> Curve:
        """Return the least energy of an iteration of one pipeline for every iteration time, with
        at most 500 points.
        """
        return self._ask(Curve, "GET", _path(job, "frontier"))

    def pipelines(self, job: str) -> tuple[PipelineStatus, ...]:
        """Return the pipelines of a job and their newest plans, in order."""
        return self._ask(Pipelines, "GET", _path(job, "pipelines")).pipelines

    def set_deadline(self, job: str, deadline_s: float | None) -> Answer:
        """Set the iteration time to aim for without stragglers, seconds; None for that of all
        clocks at maximum.
        """
        return self._ask(
            Answer, "PUT", _path(job, "deadline"), to_json(DeadlineRequest(deadline_s))
        )

    def set_power(
        self, power_w: float | None, job: str | None = None, schedule: tuple[PowerStep, ...] = ()
    ) -> tuple[Answer, ...]:
        """Bound the average power of all GPUs of a job, or of all jobs without one, watts; None
        removes the bound.

        `schedule` has the budgets that replace it later. Refused (409) if no plans draw so little.
        """
        path = "/v1/power" if job is None else _path(job, "power")
        return self._ask(Answers, "PUT", path, to_json(PowerRequest(power_w, schedule))).answers

    def power(self) -> PowerBudget:
        """Return the power budget of all jobs together, and what replaces it later."""
        return self._ask(PowerBudget, "GET", "/v1/power")

    def metrics(self) -> str:
        """Return the metrics in the text format of Prometheus."""
        return self._transport.send("GET", "/metrics").text

    def check(self) -> None:
        """Raise an error unless the service is healthy."""
        self._transport.send("GET", "/healthz")

    def _ask(
        self, kind: type[Value], method: str, path: str, body: bytes | None = None, **options: Any
    ) -> Value:
        response = self._transport.send(method, path, body=body, **options)
        return self._transport.read(lambda text: from_json(kind, text), response)

    def _poll(
        self, parse: Callable[[bytes], Value], path: str, after: int, wait_s: float
    ) -> Value | None:
        """Return the parsed answer to a long poll; None if nothing came."""
        params, timeout_s = {"after": after, "wait_s": wait_s}, wait_s + self._transport.timeout_s
        response = self._transport.send("GET", path, params=params, timeout=timeout_s)
        return (
            None
            if response.status_code == HTTPStatus.NO_CONTENT
            else self._transport.read(parse, response)
        )


def _path(job: str, *parts: str) -> str:
    if not job:
        raise UsageError("the job has no name; give the name that it was registered with")
    return "/".join(["/v1/jobs", *(quote(part, safe="") for part in (job, *parts))])
