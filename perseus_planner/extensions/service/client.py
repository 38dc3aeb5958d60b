"""A client of the planner's service, with a method for each route.

For example:

    with Client("http://127.0.0.1:8400") as service:
        slow = ReportRequest("ops", Scope("pipeline", "3"), slowdown=1.2, ttl_s=1800.0)
        print(service.report("gpt3", slow).reason)
"""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from perseus_planner.base.errors import (
    PlanError,
    ServiceAway,
    ServiceRefusal,
    UsageError,
    how_to_install,
    one_line,
)
from perseus_planner.extensions.service.curve import Curve
from perseus_planner.extensions.service.models import (
    EPOCH,
    LEASE,
    Answer,
    Answers,
    Counters,
    DeadlineRequest,
    History,
    Jobs,
    JobStatus,
    JobTotals,
    Pipelines,
    PipelineStatus,
    PlanSet,
    PowerBudget,
    PowerRequest,
    PowerStep,
    Registered,
    Registration,
    Report,
    ReportRequest,
    Reports,
    TakenRequest,
    Totals,
    from_json,
    to_json,
)

if TYPE_CHECKING:
    import httpx

Value = TypeVar("Value")

DEFAULT_ADDRESS = "http://127.0.0.1:8400"
"""Where the service listens by default."""
ADDRESS_VARIABLE = "PLANNER_SERVICE"
TOKEN_VARIABLE = "PLANNER_TOKEN"
"""The environment variables with the address of the service and the token to send."""
TIMEOUT_S = 10.0
"""How long a client waits for an answer, besides what a long poll waits."""
_REGISTERING_S = 120.0  # for which a profile is solved and plans are made

_NOT_UNDERSTOOD = (
    ValueError,  # from `from_json`: it is not JSON, or not of such a value
    UsageError,  # from the value's own checks
    PlanError,  # from a text that is not a plan
    IndexError,  # from a pipeline whose plan is not there
)
"""What reading an answer of another version may raise."""


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
        self.address = address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
        self._timeout_s = timeout_s
        #: For how many seconds the plans hold after the last answer to `plans`, if no other comes;
        #: None if they do not end.
        self.lease_s: float | None = None
        self._epochs: dict[str, str] = {}  # of jobs, as the service last said
        sent = os.environ.get(TOKEN_VARIABLE, "").strip() if token is None else token
        self._http = _connected(self.address, sent, timeout_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def register(self, job: Registration) -> Registered:
        """Register a job; the same registration again changes nothing. Refused (409) if another job
        has its name.

        The answer, which may take 2 minutes, comes when the job has plans.
        """
        short_s = self._timeout_s
        # to connect, read, write, for a connection
        waiting = (short_s, max(short_s, _REGISTERING_S), short_s, short_s)
        response = self._send(
            "POST", "/v1/jobs", body=to_json(job, without_defaults=True), timeout=waiting
        )
        registered = self._read(Registered, response)
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
        self._send("DELETE", _path(job))

    def report(self, job: str, request: ReportRequest, *, wait_s: float = 0.0) -> Answer:
        """Report that something is slow, or has recovered. What is acknowledged survives the
        service's death.

        If slow stages have to be solved and planned first, the answer waits up to `wait_s` seconds
        for that.
        """
        body = to_json(request, without_defaults=True)
        options = {"params": {"wait_s": wait_s}, "timeout": wait_s + self._timeout_s}
        return self._ask(Answer, "POST", _path(job, "reports"), body, **(options if wait_s else {}))

    def reports(self, job: str) -> tuple[Report, ...]:
        """Return the reports of a job that count now or will count."""
        return self._ask(Reports, "GET", _path(job, "reports")).reports

    def clear(self, job: str, key: str) -> Answer:
        """Withdraw the report with that key."""
        return self._ask(Answer, "DELETE", _path(job, "reports", key))

    def plans(self, job: str, *, after: int = 0, wait_s: float = 0.0) -> PlanSet | None:
        """Return the plans of all pipelines as soon as their version is above `after`, or at once
        if the service numbers them anew since this client was last answered.

        Returns:
            None if it is not within `wait_s` seconds.
        """
        params: dict[str, Any] = {"after": after, "wait_s": wait_s}
        # A service that numbers anew would otherwise be asked for a version that comes much later.
        if after and self._epochs.get(job):
            params["epoch"] = self._epochs[job]
        timeout_s = wait_s + self._timeout_s
        response = self._send("GET", _path(job, "plans"), params=params, timeout=timeout_s)
        self._epochs[job] = response.headers.get(EPOCH, "")
        try:
            self.lease_s = max(float(response.headers[LEASE]), 0.0)
        except (KeyError, ValueError):
            # Without the header, the plans hold until others come.
            self.lease_s = None
        if response.status_code == HTTPStatus.NO_CONTENT:
            return None
        return self._read(PlanSet, response)

    def taken(self, job: str, version: int, iteration: int) -> None:
        """Report that the job runs that version since that iteration."""
        self._send("POST", _path(job, "taken"), body=to_json(TakenRequest(version, iteration)))

    def telemetry(self, job: str, counters: Counters) -> None:
        """Send what a run of the job has counted since it began; sending the same again changes
        nothing.
        """
        self._send("POST", _path(job, "telemetry"), body=to_json(counters))

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
        return self._send("GET", "/metrics").text

    def check(self) -> None:
        """Raise an error unless the service is healthy."""
        self._send("GET", "/readyz")

    def _send(
        self, method: str, path: str, *, body: bytes | None = None, **options: Any
    ) -> httpx.Response:
        """Send a request and return a successful answer; `body` is JSON, `options` are those of
        httpx.
        """
        import httpx

        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            response = self._http.request(method, path, content=body, headers=headers, **options)
        except httpx.RequestError as error:
            raise self._away(path, error) from error
        if not response.is_success:
            self._refuse(path, response)
        return response

    def _read(self, kind: type[Value], response: httpx.Response) -> Value:
        """Return the value in a JSON answer."""
        try:
            value = from_json(kind, response.content)
            if isinstance(value, PlanSet):
                _ = value.plans  # parsed now, so that what is not a plan is an error here
        except _NOT_UNDERSTOOD as error:
            if isinstance(error, ValidationError) and error.errors()[0]["type"] == "json_invalid":
                self._refuse_answer(response.text)
            raise ServiceAway(
                f"the service at {self.address} answered what this planner does not understand "
                f"({one_line(str(error), 200)}); use the same version of perseus-planner on both "
                "sides"
            ) from error
        return value

    def _away(self, path: str, error: Exception) -> ServiceAway:
        import httpx

        if isinstance(error, httpx.TimeoutException) and not isinstance(
            error, httpx.ConnectTimeout
        ):
            return ServiceAway(
                f"the service at {self.address} did not answer {path} in time; check whether it "
                "still runs, and its log"
            )
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            why = str(error).rpartition("failed: ")[2].partition(" (_ssl")[0]
            return ServiceAway(
                f"the certificate of the service at {self.address} is not trusted "
                f"({one_line(why, 80)}); name the file of the certificate, or of who has signed "
                "it, in SSL_CERT_FILE"
            )
        # A server with TLS hangs up on what is not TLS, and says nothing.
        if self.address.startswith("http:") and isinstance(
            error, (httpx.RemoteProtocolError, httpx.ReadError)
        ):
            return ServiceAway(
                f"there is no answer from the service at {self.address}: it hung up; if it has "
                "TLS, write https:// in its address, else see its log"
            )
        if self.address.startswith("https:") and re.search(
            "WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|record layer failure", str(error)
        ):
            return ServiceAway(
                f"what answers at {self.address} has no TLS; write http:// in its address, or "
                "start the service with --tls-cert and --tls-key"
            )
        # without [Errno 111]
        reason = one_line(str(error), 80).rpartition("] ")[2] or type(error).__name__
        return ServiceAway(
            f"there is no answer from the service at {self.address} ({reason}); start it with "
            f"`planner serve`, or name another in {ADDRESS_VARIABLE} or --service"
        )

    def _refuse(self, path: str, response: httpx.Response) -> NoReturn:
        """Raise the error for a status that is not a success."""
        try:
            error = response.json()
            code = str(error["code"])
            message = one_line(str(error["detail"]), 400)
            least = error.get("least_power_w", error.get("least_deadline_s"))
            least = None if least is None else float(least)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            self._refuse_answer(f"HTTP {response.status_code} {response.text}")
        # 429 comes from a proxy. Neither says that the request is wrong, so it may be tried again.
        if response.status_code == HTTPStatus.TOO_MANY_REQUESTS or response.status_code >= 500:
            raise ServiceAway(f"the service at {self.address} could not answer {path}: {message}")
        if response.status_code == 401:
            message += f"; put a token of the service in {TOKEN_VARIABLE}"
        raise ServiceRefusal(
            f"the service at {self.address} refused: {message}", response.status_code, code, least
        )

    def _refuse_answer(self, answer: object) -> NoReturn:
        raise ServiceAway(
            f"what answers at {self.address} is not a planner's service of this version: "
            f"{one_line(str(answer), 120)!r}"
            f"; check what listens there, or name another address in {ADDRESS_VARIABLE} or "
            "--service"
        )

    def _ask(
        self, kind: type[Value], method: str, path: str, body: bytes | None = None, **options: Any
    ) -> Value:
        response = self._send(method, path, body=body, **options)
        return self._read(kind, response)


def _path(job: str, *parts: str) -> str:
    if not job:
        raise UsageError("the job has no name; give the name that it was registered with")
    return "/".join(["/v1/jobs", *(quote(part, safe="") for part in (job, *parts))])


def _connected(address: str, token: str, timeout_s: float) -> httpx.Client:
    try:
        import httpx
    except ImportError as error:
        raise UsageError(f"the client needs httpx; {how_to_install('service')}") from error
    if not re.fullmatch(r"[!-~]*", token):
        raise UsageError(
            f"{TOKEN_VARIABLE} holds a blank or a letter that is not ASCII, which tokens do not "
            "have; set it again"
        )
    base, transport = _base(address)
    return httpx.Client(
        base_url=base,
        transport=transport,
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=timeout_s,
        trust_env=False,  # a proxy in the environment does not lead to a service of this cluster
        verify=ssl.create_default_context() if base.startswith("https:") else True,
    )


def _base(address: str) -> tuple[str, httpx.HTTPTransport | None]:
    """Return the URL before every path, and the transport if it is a unix socket."""
    import httpx

    if address.startswith("unix:"):
        path = re.sub("^//+", "/", address.removeprefix("unix:"))
        if path:
            return "http://localhost", httpx.HTTPTransport(uds=path)
    elif re.fullmatch(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?", address):
        try:
            return str(httpx.URL(address)), None
        except httpx.InvalidURL:
            pass
    raise UsageError(
        f"the service's address {address!r} is malformed; write http://host:port, "
        f"https://host:port or unix:/path/of/socket, such as {DEFAULT_ADDRESS}"
    )
