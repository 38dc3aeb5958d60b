"""A client of the planner's service: a method for each thing that can be asked, values out, one kind of error.

with Client("http://127.0.0.1:8400") as service:
    answer = service.report("gpt3", ReportRequest("ops", Scope("pipeline", "3"), slowdown=1.2, ttl_s=1800.0))
    print(answer.version, answer.reason)
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from perseus_planner.errors import UsageError
from perseus_planner.service.answers import (
    PlanVersion,
    Points,
    Registered,
    Status,
    answer_from,
    pipelines_from,
    plan_from,
    plan_version_from,
    points_from,
    registered_from,
    report_from,
    status_from,
)
from perseus_planner.service.client.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from perseus_planner.plans.plan import Plan
    from perseus_planner.service.model import Report
    from perseus_planner.service.outcomes import Answer, PipelineStatus
    from perseus_planner.service.requests import Registration, ReportRequest
    from perseus_planner.service.telemetry import Counters

TIMEOUT_S = 10.0
"""For how long an answer is waited for, beside what a long poll waits."""


class Client:
    """A service, at one address. Nothing is asked before a method is called; a context manager that closes it.

    Every method raises `ServiceAway` where the service cannot be reached or something else answers, and
    `ServiceRefusal` where it says no. One thread at a time may use it.

    Args:
        address: "http://host:port", "https://host:port" or "unix:/path/of/socket"; None: as PLANNER_SERVICE says, or
            else that of a service on this node. Certificates are checked by those of the system, or of SSL_CERT_FILE.
        token: shown to the service; None: that in PLANNER_TOKEN, if any.
        timeout_s: for how long an answer is waited for, seconds.

    Raises:
        UsageError: the address or the token is none, or httpx is not installed.
    """

    def __init__(self, address: str | None = None, token: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._transport = Transport(address, token, timeout_s)

    @property
    def address(self) -> str:
        """Where the service is."""
        return self._transport.address

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def register(self, job: Registration) -> Registered:
        """Make a job known; the same again changes nothing. Refused (409) where another one of its name runs."""
        status, content = self._transport.asked("POST", "/v1/jobs", json=job.body())
        return self._transport.read(lambda found: registered_from(found, is_new=status == 201), content)

    def jobs(self) -> tuple[Status, ...]:
        """All jobs that run."""
        _, content = self._transport.asked("GET", "/v1/jobs")
        return self._transport.read(lambda found: tuple(map(status_from, found["jobs"])), content)

    def status(self, job: str) -> Status:
        """One job."""
        _, content = self._transport.asked("GET", _path(job))
        return self._transport.read(status_from, content)

    def end(self, job: str) -> None:
        """The job has ended; what was reported of it is forgotten."""
        self._transport.asked("DELETE", _path(job))

    def report(self, job: str, request: ReportRequest, *, wait_s: float = 0.0) -> Answer:
        """Say that something is slow, or has recovered; what is acknowledged survives the service's death.

        Where slow stages are solved and planned first, it waits `wait_s` seconds for that at most.
        """
        waiting = {"params": {"wait_s": wait_s}, "timeout": wait_s + self._transport.timeout_s} if wait_s else {}
        return self._answer("POST", _path(job, "reports"), request.body(), **waiting)

    def reports(self, job: str) -> tuple[Report, ...]:
        """The reports of a job that stand."""
        _, content = self._transport.asked("GET", _path(job, "reports"))
        return self._transport.read(lambda found: tuple(map(report_from, found["reports"])), content)

    def clear(self, job: str, key: str) -> Answer:
        """Take the report of that key back."""
        return self._answer("DELETE", _path(job, "reports", key))

    def plan(self, job: str, pipeline: int, *, after: int = 0, wait_s: float = 0.0) -> tuple[int, Plan] | None:
        """The version and plan of one pipeline, if the version is above `after`; waits `wait_s` seconds for one.

        Returns:
            None where there was none within that time.
        """
        content = self._awaited(_path(job, "pipelines", str(pipeline), "plan"), after, wait_s)
        if content is None:
            return None
        return self._transport.read(lambda found: (int(found["version"]), plan_from(found["plan"])), content)

    def plans(self, job: str, *, after: int = 0, wait_s: float = 0.0) -> PlanVersion | None:
        """As `plan`, of all pipelines at once."""
        content = self._awaited(_path(job, "plans"), after, wait_s)
        return None if content is None else self._transport.read(plan_version_from, content)

    def events(self, job: str) -> Iterator[int]:
        """Each version of the job's plans as it comes; ends where the service ends it."""
        for line in self._transport.lines(_path(job, "events")):
            if line.startswith("data:"):
                yield self._transport.read(lambda text: int(json.loads(text)["version"]), line.removeprefix("data:"))

    def taken(self, job: str, version: int, iteration: int) -> None:
        """Say that the job runs by that version since that iteration."""
        self._transport.asked("POST", _path(job, "taken"), json={"version": version, "iteration": iteration})

    def telemetry(self, job: str, counters: Counters) -> None:
        """Say what a run of the job has counted since it began; what was said before changes nothing."""
        self._transport.asked("POST", _path(job, "telemetry"), json=asdict(counters))

    def frontier(self, job: str) -> Points:
        """What iterations of a pipeline of the job take at least, 500 points at most."""
        _, content = self._transport.asked("GET", _path(job, "frontier"))
        return self._transport.read(points_from, content)

    def pipelines(self, job: str) -> tuple[PipelineStatus, ...]:
        """The pipelines of a job, in order, with their newest plans."""
        _, content = self._transport.asked("GET", _path(job, "pipelines"))
        return self._transport.read(pipelines_from, content)

    def set_deadline(self, job: str, deadline_s: float | None) -> Answer:
        """What iteration time is wanted where nobody straggles, seconds; None: that of all clocks at maximum."""
        return self._answer("PUT", _path(job, "deadline"), {"deadline_s": deadline_s})

    def set_power(self, power_w: float | None, job: str | None = None) -> tuple[Answer, ...]:
        """What all GPUs of a job, or with None of all jobs, may draw on average, watts; None: any.

        Refused (409) where no plans draw so little.
        """
        path = "/v1/power" if job is None else _path(job, "power")
        _, content = self._transport.asked("PUT", path, json={"power_w": power_w})
        return self._transport.read(lambda found: tuple(map(answer_from, found["answers"])), content)

    def metrics(self) -> str:
        """What Prometheus reads."""
        return self._transport.sent("GET", "/metrics").text

    def check(self) -> None:
        """Ask whether the service is well, which raises if it is not."""
        self._transport.sent("GET", "/healthz")

    def _answer(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        _, content = self._transport.asked(method, path, **({} if body is None else {"json": body}), **options)
        return self._transport.read(answer_from, content)

    def _awaited(self, path: str, after: int, wait_s: float) -> Any:
        """What a long poll gives; None where nothing came."""
        status, content = self._transport.asked(
            "GET", path, params={"after": after, "wait_s": wait_s}, timeout=wait_s + self._transport.timeout_s
        )
        return None if status == 204 else content


def _path(job: str, *parts: str) -> str:
    if not job:
        raise UsageError("the job has no name; give the one that it was registered by")
    return "/".join(["/v1/jobs", *(quote(part, safe="") for part in (job, *parts))])
