"""`planner serve` as a process, and the server behind it: ports, unix sockets, TLS, waiting,
ends.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import logging
import os
import re
import select
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from click.core import ParameterSource
from command_options import ROOT
from commands import refusal
from service_stand_in import StandIn
from services import service_at, serving
from strategies import smooth_profile
from waiting import LONG_S, calmly, eventually

from perseus_planner import Plan, schedules, solve
from perseus_planner.base.errors import ServiceAway, UsageError
from perseus_planner.base.files import sha256
from perseus_planner.extensions.service import planning
from perseus_planner.extensions.service import serve as server
from perseus_planner.extensions.service.access import TOKENS_VARIABLE, Access, Limits, read_tokens
from perseus_planner.extensions.service.app import create_app
from perseus_planner.extensions.service.client import Client
from perseus_planner.extensions.service.database import without_password
from perseus_planner.extensions.service.live import AsyncService
from perseus_planner.extensions.service.models import Place, RegisteredJob, Registration, to_json
from perseus_planner.extensions.service.serve import Address, listening
from perseus_planner.extensions.service.serve_command import (
    JsonLine,
    LogLine,
    _listening,
    serve,
)
from perseus_planner.extensions.service.service import Service
from perseus_planner.extensions.service.solving import Unsolved
from perseus_planner.extensions.service.store import Storage

httpx = pytest.importorskip("httpx")

SLOW = {
    "source": "ops",
    "scope": {"kind": "pipeline", "value": 1},
    "slowdown": 1.2,
    "key": "r1",
    "ttl_s": 600,
}
TOKEN = "0123456789abcdef"
PYTHON = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else [])]


LACK = "Connections are refused, as 256 files may be open; raise the limit, such as LimitNOFILE"


@contextmanager
def planner_serve(
    folder: Path, *options: str, before: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command as a process, and the URL that it says."""
    command = [*before, *PYTHON, "-m", "perseus_planner", "serve", *options]
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("Listening at "), process.stderr.read()
            yield process, line.removeprefix("Listening at ").partition(",")[0]
        finally:
            if process.poll() is None:
                process.kill()


def ended(process: subprocess.Popen[str], number: int) -> tuple[int, str, str]:
    """How a process ends on a signal: its exit code, and what else it said."""
    process.send_signal(number)
    said, complained = process.communicate(timeout=LONG_S)
    return process.returncode, said, complained


def a_job() -> dict[str, Any]:
    return {"name": "gpt3", "frontier": base64.b64encode(frontier_file()).decode(), "pipelines": 2}


def frontier_file() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder, "frontier.npz")
        solve(smooth_profile(2, 90), schedules.one_f_one_b(stages=2, microbatches=3)).save(path)
        return path.read_bytes()


def test_a_service_that_ended_knows_all_when_it_is_started_again(folder: Path):
    options = ("--port", "0", "--database", "kept.sqlite")
    with (
        planner_serve(folder, *options) as (process, url),
        httpx.Client(base_url=url, timeout=LONG_S) as client,
    ):
        assert client.post("/v1/jobs", json=a_job()).json()["version"] == 1
        answer = client.post("/v1/jobs/gpt3/reports", json=SLOW)
        assert (answer.status_code, answer.json()["changed"]) == (202, True)
        version = answer.json()["version"]
        plans = client.get(
            "/v1/jobs/gpt3/plans", params={"after": version - 1, "wait_s": 60}
        ).json()
        code, said, logged = ended(process, signal.SIGTERM)
        assert (code, said) == (0, "")
        line = r'time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ level=info job="gpt3" msg="(.*)"'
        events = [re.fullmatch(line, each)[1] for each in logged.splitlines()]
        assert events[0] == "registered with 2 pipelines of 2 GPUs"
        assert events[1].startswith("pipeline 1 slow 1.2x (ops), pipeline 0 aims for ")
    with (
        planner_serve(folder, *options) as (process, url),
        httpx.Client(base_url=url, timeout=LONG_S) as client,
    ):
        assert client.get("/v1/jobs/gpt3/plans").json() == plans
        assert [each["key"] for each in client.get("/v1/jobs/gpt3/reports").json()["reports"]] == [
            "r1"
        ]
        assert client.post("/v1/jobs", json=a_job()).status_code == 200
        slow, other = (Plan.loads(plans["plans"][place]) for place in plans["of_pipeline"][::-1])
        assert other.time_s > slow.time_s  # the other pipeline waits for the slow one, so it saves
        assert ended(process, signal.SIGINT)[0] == 130


def test_a_request_whose_planning_processes_are_killed_is_answered_with_503_and_works_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    curve_of = planning.curve_of
    monkeypatch.setattr(planning, "curve_of", _dies)
    with (
        Storage(folder / "kept.sqlite") as storage,
        Service(storage) as service,
        serving(service, Address(port=0)) as url,
        httpx.Client(base_url=url, timeout=LONG_S) as client,
    ):
        answer = client.post("/v1/jobs", json=a_job())
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.json()["detail"].startswith(
            "the process that solves and plans was killed twice"
        )
        monkeypatch.setattr(planning, "curve_of", curve_of)
        assert client.post("/v1/jobs", json=a_job()).status_code == 201


def test_tokens_are_read_again_on_sighup_and_warned_of_where_others_have_them(folder: Path):
    tokens = folder / "tokens.txt"
    tokens.write_text(f"{TOKEN} operate first\n")
    tokens.chmod(0o644)
    options = ("--host", "0.0.0.0", "--port", "0", "--database", "kept.sqlite")
    with planner_serve(folder, *options, "--tokens", "tokens.txt") as (process, url):
        url = url.replace("0.0.0.0", "127.0.0.1")

        def name(token: str) -> str | None:
            headers = {"Authorization": f"Bearer {token}"}
            said = httpx.get(f"{url}/v1/me", headers=headers, timeout=LONG_S)
            found: str | None = said.json()["name"]
            return found

        assert name(TOKEN) == "first"
        for text, is_taken in ((f"{'n' * 16} read second\n", True), ("wrong\n", False)):
            tokens.write_text(text)
            process.send_signal(signal.SIGHUP)
            if is_taken:
                eventually(lambda: name("n" * 16) == "second")
            assert name(TOKEN) is None
        code, _, logged = ended(process, signal.SIGTERM)
        assert code == 0
    lines = [re.search(r'level=(\w+) msg="(.*)"', line).groups() for line in logged.splitlines()]
    readable = (
        "tokens.txt: everyone on this machine can read the tokens; run `chmod 600 tokens.txt`"
    )
    assert [level for level, _ in lines] == ["warning", "warning", "warning", "info", "error"]
    assert lines[0][1] == readable
    assert lines[1][1].startswith("Tokens are sent in plain text to http://0.0.0.0:")
    assert lines[3][1] == "The tokens were read again: 1"
    assert lines[4][1].startswith("The tokens stay as they were: tokens.txt, line 1: is not a")


def _dies(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_job_may_be_registered_with_its_profile_and_schedule(folder: Path):
    smooth_profile(2, 90).save("measured.yaml")
    texts = {f"profile_{kind}": Path(f"measured.{kind}").read_text() for kind in ("yaml", "csv")}
    sent = {"name": "gpt3", "pipelines": 2, "schedule": "1f1b", "microbatches": 3, **texts}
    grid = schedules.grid_text(schedules.one_f_one_b(stages=2, microbatches=3))
    evil = texts["profile_yaml"].replace("measured.csv", "../../measured.csv")
    service = StandIn()
    with (
        serving(service, Address(port=0)) as url,
        httpx.Client(base_url=url, timeout=LONG_S) as client,
    ):
        assert client.post("/v1/jobs", json=sent).status_code == 201
        by_grid = {**sent, "name": "grid", "schedule": grid, "microbatches": None}
        assert client.post("/v1/jobs", json=by_grid).status_code == 201
        for changes, complaint in (
            (
                {"schedule": "/etc/passwd", "microbatches": None},
                "schedule.txt, line 1, cell 1: '/etc/passwd' is",
            ),
            ({"profile_csv": "a,b\n"}, "measured.csv, line 1: no column"),
            ({"profile_yaml": "a: 1"}, "profile.yaml: has no key 'format'"),
            (
                {"profile_yaml": evil},
                "profile.yaml: measurements: is not a plain file name; write profile.csv there",
            ),
        ):
            refused = client.post("/v1/jobs", json={**sent, "name": "other", **changes})
            assert refused.status_code == 422
            assert refused.json()["detail"].startswith(complaint)
    assert service.kept["gpt3"].frontier == sha256(
        frontier_file()
    )  # as `planner solve` has it, to the byte
    assert list(service.kept) == ["gpt3", "grid"]


class _Slow(StandIn):
    """Solves when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.solved: list[str] = []

    def solve(self, unsolved: Unsolved, most_s: float) -> bytes:
        self.solved.append(unsolved.profile_csv)
        self.begun.set()
        assert self.go_on.wait(300)
        return unsolved.profile_csv.encode()


def test_profiles_that_wait_to_be_solved_take_no_threads_and_each_is_solved_once():
    service = _Slow()

    async def asked() -> list[bytes]:
        live = AsyncService(service, Limits())  # type: ignore[arg-type]
        async with live.running():
            each = [Unsolved(str(number), "", "1f1b", 3) for number in (*range(40), *range(40))]
            solutions = [asyncio.create_task(live.solve(unsolved)) for unsolved in each]
            await live.call(lambda: service.begun.wait(300))
            assert await asyncio.wait_for(live.call(service.jobs), 300) == ()
            solutions.pop().cancel()  # who asks for the same gets it nevertheless
            assert service.solved == ["0"]
            service.go_on.set()
            return await asyncio.gather(*solutions)

    assert asyncio.run(asked()) == [str(number).encode() for number in (*range(40), *range(39))]
    assert sorted(service.solved, key=int) == [str(number) for number in range(40)]


def test_a_job_whose_client_goes_away_while_its_profile_is_solved_is_not_registered(folder: Path):
    service = _Slow()
    sent = {
        "name": "gone",
        "pipelines": 2,
        "profile_csv": "PK",
        "profile_yaml": "",
        "schedule": "1f1b",
    }
    with (
        serving(service, Address(port=0)) as url,
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as impatient:
            body = json.dumps({**sent, "microbatches": 3})
            head = "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            impatient.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            assert service.begun.wait(300)
        assert client.get("/v1/jobs").json()["jobs"] == []
        with ThreadPoolExecutor(1) as other:
            again = other.submit(
                client.post, "/v1/jobs", json={**sent, "name": "stays", "microbatches": 3}
            )
            service.go_on.set()
            assert again.result().status_code == 201
    assert list(service.kept) == ["stays"]


def test_a_unix_socket_is_its_owner_s_alone_and_gone_afterwards(folder: Path):
    path = folder / "planner.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))  # of a service that was killed
    with serving(StandIn(), Address(unix=path)) as url:
        assert url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any", timeout=LONG_S
        ) as client:
            assert client.get("/v1/jobs", timeout=LONG_S).json()["jobs"] == []
        code, _, complaint = refusal(f"serve --unix {path}")
        assert (code, complaint) == (
            2,
            f"Error: --unix {path}: another process listens there; stop it, or give another path\n",
        )
    assert not path.exists()


def test_a_unix_socket_is_its_owner_s_alone_without_a_change_of_the_umask_of_other_threads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    before = os.umask(0)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "umask", lambda _: pytest.fail("the umask is that of all threads"))
            with listening(Address(unix=folder / "planner.sock")):
                assert stat.S_IMODE((folder / "planner.sock").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_no_answer_waits_long_for_a_thread_that_computes(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: dict[str, Any] = {}

    class Running:
        live = SimpleNamespace(fenced=None)

        def run(self, sockets: list[socket.socket]) -> None:
            seen.update(switch_s=sys.getswitchinterval())

    switch_s = sys.getswitchinterval()
    monkeypatch.setattr(server, "server_of", lambda *_: Running())
    try:
        with listening(Address(port=0)) as listener:
            server.serve(StandIn(), listener)
    finally:
        sys.setswitchinterval(switch_s)
    assert seen["switch_s"] <= 0.001


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "cert.pem", folder / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=test"
    )
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {made}"
    try:
        subprocess.run(command.split(), check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return made, key


@pytest.mark.parametrize("with_tls", [False, True])
def test_the_health_check_of_the_image_sees_the_service_with_tls_and_without(
    tmp_path: Path, certificate: tuple[Path, Path], with_tls: bool
):
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    check = json.loads(re.search(r"^HEALTHCHECK .* CMD (.*)$", text, re.MULTILINE)[1])
    made, key = certificate if with_tls else (None, None)

    def is_healthy() -> bool:
        here = check[2].replace("8400", url.rpartition(":")[2])
        ran = subprocess.run([sys.executable, "-c", here], capture_output=True, timeout=LONG_S)
        return ran.returncode == 0

    with (
        service_at(tmp_path / "service.sqlite") as service,
        serving(service, Address(port=0, certificate=made, key=key)) as url,
    ):
        assert is_healthy()
        ended = threading.Thread(target=int)
        ended.start()
        ended.join()
        service.watchdog.watch(ended)
        assert not is_healthy()
    assert not is_healthy()


def test_with_tls_files_it_speaks_https_alone(certificate: tuple[Path, Path]):
    address = Address(port=0, certificate=certificate[0], key=certificate[1])
    with serving(StandIn(), address) as url:
        assert url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=str(certificate[0]))
        assert httpx.get(f"{url}/healthz", verify=trust, timeout=LONG_S).status_code == 200
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(f"{url}/healthz", timeout=LONG_S)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url.replace('https', 'http')}/healthz", timeout=LONG_S)
        with Client(url) as client, pytest.raises(ServiceAway) as refusal:
            client.check()
        assert str(refusal.value) == (
            f"the certificate of the service at {url} is not trusted (self-signed certificate); "
            "name the file of the certificate, or of who has signed it, in SSL_CERT_FILE"
        )
        plain = url.replace("https", "http")
        with Client(plain) as client, pytest.raises(ServiceAway, match="write https:// in its"):
            client.check()
    with serving(StandIn(), Address(port=0)) as url:
        secure = url.replace("http", "https")
        with Client(secure) as client, pytest.raises(ServiceAway, match="write http:// in its"):
            client.check()


def test_off_loopback_it_listens_with_tokens_alone():
    tokens = read_tokens(None, {TOKENS_VARIABLE: f"{TOKEN} read dashboard"})
    with (
        pytest.raises(UsageError, match="other machines can reach it"),
        listening(Address("0.0.0.0", 0)),
    ):
        pass
    with serving(StandIn(), Address("0.0.0.0", 0), tokens) as url:
        assert url.startswith("http://0.0.0.0:")
        at = url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{at}/v1/jobs", timeout=LONG_S).status_code == 401
        assert (
            httpx.get(
                f"{at}/v1/jobs", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=LONG_S
            ).status_code
            == 200
        )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            "--host 0.0.0.0",
            "--host 0.0.0.0: other machines can reach it, so clients need tokens; give --tokens "
            "FILE, or set PLANNER_SERVICE_TOKENS, or listen on 127.0.0.1",
        ),
        ("--host ::", "--host ::: other machines can reach it, so clients need tokens;"),
        ("--host 999.1.2.3", "--host 999.1.2.3 --port 8400: cannot listen there: "),
        (f"--host {'x' * 70}.y", f"--host {'x' * 70}.y --port 8400: cannot listen there: "),
        (
            "--port 70000",
            "--port 70000: is not a port; give one from 1 to 65535, or 0 for any free port",
        ),
        ("--unix a.sock --port 1", "--unix: replaces --host and --port; give one or the other"),
        ("--unix file.txt", "--unix file.txt: exists and is not a socket; give another path"),
        (
            "--unix absent/a.sock",
            "--unix absent/a.sock: cannot listen there: No such file or directory",
        ),
        (f"--unix {'a' * 120}", f"--unix {'a' * 120}: cannot listen there: AF_UNIX path too long"),
        ("--tls-cert file.txt", "TLS: give both --tls-cert and --tls-key"),
        (
            "--unix a.sock --tls-cert file.txt --tls-key file.txt",
            "TLS: is not needed on a unix socket",
        ),
        (
            "--port 0 --tls-cert file.txt --tls-key absent",
            "--tls-key absent: no such file; name a PEM file",
        ),
        (
            "--port 0 --tls-cert file.txt --tls-key file.txt",
            "--tls-cert file.txt, --tls-key file.txt: are no",
        ),
        (
            "--lease 10",
            "--lease 10s: is shorter than jobs may be quiet while all is well; give 60s",
        ),
        ("--port 0 --tokens absent", "absent: no such file; check the path"),
        (
            "--port 0 --tokens file.txt",
            "file.txt, line 1: is not a token of 16 characters or more, a role and a name",
        ),
    ],
)
def test_what_a_user_can_correct_is_refused_in_one_line(folder: Path, options: str, complaint: str):
    Path("file.txt").write_text("some text\n")
    code, said, complained = refusal(f"serve {options}")
    assert (code, said, complained.count("\n")) == (2, "", 1)
    assert complained.startswith(f"Error: {complaint}")
    assert os.listdir() == ["file.txt"]  # no database, no socket


def test_a_port_in_use_is_refused(folder: Path):
    with listening(Address(port=0)) as listener:
        port = listener.socket.getsockname()[1]
        code, _, complained = refusal(f"serve --port {port}")
    assert (code, complained) == (
        2,
        f"Error: --host 127.0.0.1 --port {port}: cannot listen there: Address already in use; give "
        "another address\n",
    )


def test_no_answer_waits_for_the_client_to_acknowledge_a_part_of_it():
    with (
        listening(Address(port=0)) as listener,
        socket.create_connection(listener.socket.getsockname()),
    ):
        accepted, _ = listener.socket.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_database_that_is_none_is_refused(folder: Path):
    Path("text.sqlite").write_text("no database, but long enough to be looked at as one" * 40)
    code, said, complained = refusal("serve --port 0 --database text.sqlite")
    assert (code, said, complained.count("\n")) == (2, "", 1)
    assert "text.sqlite" in complained


@pytest.mark.parametrize(
    "line", [line.strip() for line in str(serve.epilog).splitlines() if " planner " in line]
)
def test_the_examples_of_the_help_are_taken_as_they_stand(line: str):
    context = serve.make_context("serve", line.split()[2:])
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is ParameterSource.COMMANDLINE
    }
    assert given == {word for word in line.split() if word.startswith("--")}


def test_a_service_ends_when_another_has_opened_its_database(folder: Path):
    options = ("--port", "0", "--database", "kept.sqlite")
    with (
        planner_serve(folder, *options) as (first, url),
        planner_serve(folder, *options) as (second, _),
    ):
        answer = httpx.put(f"{url}/v1/power", json={"power_w": 1e6}, timeout=LONG_S)
        assert answer.status_code == 503
        assert "another service has opened it" in answer.json()["detail"]
        _, complaint = first.communicate(timeout=LONG_S)
        assert (first.returncode, complaint.splitlines()[-1]) == (
            2,
            "Error: kept.sqlite: another service has opened it, so this one writes no more; run "
            "one of them",
        )
        assert ended(second, signal.SIGTERM)[0] == 0


@pytest.mark.parametrize("source", ["file", "environment"])
def test_the_place_of_the_database_comes_from_a_file_or_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str
):
    (folder / "place").write_text("named.sqlite\n")
    if source == "environment":
        monkeypatch.setenv("PLANNER_SERVICE_DATABASE", "named.sqlite")
    options = ("--database", "@place") if source == "file" else ()
    with planner_serve(folder, "--port", "0", "--workers", "2", *options) as (process, _):
        assert (folder / "named.sqlite").is_file()
        assert ended(process, signal.SIGTERM)[0] == 0


def test_the_database_is_in_the_folder_for_state(folder: Path):
    with planner_serve(folder, "--port", "0", "--log-level", "debug") as (process, url):
        assert (folder / "state" / "perseus-planner" / "service.sqlite").is_file()
        assert httpx.get(f"{url}/healthz", timeout=LONG_S).status_code == 200
        code, _, logged = ended(process, signal.SIGTERM)
        assert code == 0
        assert re.search(r'level=debug msg="GET /healthz: 200 in [\d.]+ ms"', logged)


def test_each_line_that_is_printed_is_json_if_the_log_is(folder: Path):
    command = [*PYTHON, "-m", "perseus_planner", "serve", "--port", "0", "--log-format", "json"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        first = json.loads(process.stdout.readline())
        assert (first["level"], first["msg"][:13]) == ("info", "Listening at ")
        assert {"time", "level", "msg"} == set(first)
        process.send_signal(signal.SIGTERM)
        for line in process.stdout:
            assert json.loads(line)["level"]


def test_what_others_send_neither_begins_a_line_of_the_log_nor_controls_a_terminal():
    forged = 'x\n\x1b[2J\x7f\x9b\u202etime=2026-11-22T14:02:11Z level=info “gü"'
    error = ValueError(forged)
    record = logging.LogRecord("a", logging.INFO, "", 1, "%s", (forged,), (ValueError, error, None))
    record.job = forged
    first, *trace = LogLine().format(record).split("\n")
    fields = re.fullmatch(r'time=\S+ level=info job=(".*") msg=(".*")', first)
    assert [json.loads(each) for each in fields.groups()] == [forged] * 2
    assert all(each.startswith("  ") and each.isprintable() for each in trace)
    assert trace[-1].endswith('level=info \\u201cg\\u00fc\\"')
    fields = json.loads(JsonLine().format(record))
    assert (fields["level"], fields["job"], fields["msg"]) == ("info", forged, forged)
    assert fields["trace"].endswith(forged)
    assert "\n" not in JsonLine().format(record)
    record.msg, record.args = "gültig", ()
    assert 'msg="gültig"' in LogLine().format(record)


def test_a_password_of_a_database_is_not_shown():
    shown = without_password("postgresql://planner:secret@host/name")
    assert _listening("http://127.0.0.1:1", 2, shown) == (
        "Listening at http://127.0.0.1:1, 2 tokens, database postgresql://planner:***@host/name"
    )


def until(served: Any, count: int) -> None:
    """Until so many requests wait there."""
    while f"planner_http_waiting {count}.0" not in served.get("/metrics").text:
        pass


def test_who_waits_is_answered_when_the_service_ends():
    service = StandIn()
    service.register(RegisteredJob("gpt3", 2, ""), b"PK")
    path = "/v1/jobs/gpt3/plans?after=1&wait_s=60"
    with (
        ThreadPoolExecutor(4) as pool,
        serving(service, Address(port=0)) as url,
        httpx.Client(base_url=url, timeout=LONG_S) as client,
    ):
        polls = [pool.submit(httpx.get, f"{url}{path}", timeout=LONG_S) for _ in range(3)]
        until(client, 3)
    assert [poll.result().status_code for poll in polls] == [204] * 3


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\xff: \xff\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_bytes_that_are_no_http_harm_nobody(sent):
    with serving(StandIn(), Address(port=0)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=LONG_S) as raw:
            raw.sendall(sent)
            raw.shutdown(socket.SHUT_WR)
            assert raw.recv(65536)[:10] in (b"", b"HTTP/1.1 4")
        assert httpx.get(f"{url}/healthz", timeout=LONG_S).status_code == 200


def test_the_service_leaves_no_thread_behind():
    before = set(threading.enumerate())
    with serving(StandIn(), Address(port=0)) as url:
        assert httpx.get(f"{url}/v1/jobs", timeout=LONG_S).status_code == 200
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=LONG_S)
    assert set(threading.enumerate()) <= before  # a thread of an earlier test may end meanwhile


@pytest.mark.parametrize(
    "sent", [b"", b"GET /heal", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he"]
)
def test_a_connection_without_a_whole_head_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes):
    monkeypatch.setattr(server, "HEAD_S", 0.3)
    with (
        serving(StandIn(), Address(port=0)) as url,
        socket.create_connection(where(url), timeout=LONG_S) as client,
    ):
        client.sendall(sent)
        with suppress(ConnectionResetError):
            while client.recv(1000):  # until it is closed; else this times out
                pass


def test_a_head_that_waits_while_the_service_computes_is_answered(
    monkeypatch: pytest.MonkeyPatch,
):
    """A request comes at the end of its connection's time, and before the service looks."""
    monkeypatch.setattr(server, "HEAD_S", 2.0)
    service = StandIn()
    service.register(RegisteredJob("gpt3", 2, ""), b"PK")
    plans = service.plans
    with serving(service, Address(port=0)) as url:
        # Again if a busy machine took so long that the connection was closed before that.
        calmly(lambda: check_late_head(url, service, plans, monkeypatch))


def check_late_head(
    url: str, service: StandIn, plans: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(where(url), timeout=LONG_S) as idle:

        def slow_plans(job: str, after: int, *, asks: bool) -> Any:
            asyncio.get_running_loop().call_later(0.0, send)  # before the limit
            time.sleep(2.1)  # computes, until after it
            return plans(job, after, asks=asks)

        def send() -> None:
            with suppress(ConnectionError):  # it is closed
                idle.sendall(request)

        monkeypatch.setattr(service, "plans", slow_plans)
        idle.sendall(request)
        assert status_of_next(idle) == 200  # its time begins anew
        assert httpx.get(f"{url}/v1/jobs/gpt3/plans", timeout=LONG_S).status_code == 200
        assert status_of_next(idle) == 200


def status_of_next(connection: socket.socket) -> int:
    """Read an answer; return its status, 0 if the connection was closed instead."""
    answer = HTTPResponse(connection)
    try:
        answer.begin()
        answer.read()
    except ConnectionError:
        return 0
    return answer.status


def test_a_body_that_stays_out_is_answered_and_a_long_poll_is_not_cut_short(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(server, "HEAD_S", 0.3)
    service = StandIn()
    service.register(RegisteredJob("gpt3", 2, ""), b"PK")
    path = b"/v1/jobs/gpt3/plans?after=1&wait_s=1.0"
    poll = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path
    half = (
        b"POST /v1/jobs/gpt3/reports HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        b"application/json\r\nContent-Length: 1000\r\n\r\n{"
    )
    with serving(service, Address(port=0), limits=Limits(body_s=0.2)) as url:
        for sent, status in ((poll, b"204"), (half, b"408")):
            # Again if the head came so late that the connection was closed.
            calmly(lambda sent=sent, status=status: check_status(url, sent, status))


def check_status(url: str, sent: bytes, status: bytes) -> None:
    with socket.create_connection(where(url), timeout=LONG_S) as client:
        client.sendall(sent)
        said = b""
        with suppress(ConnectionResetError):
            said = client.recv(100)
        assert said.startswith(b"HTTP/1.1 %b " % status)


def test_a_body_that_drips_is_answered_when_its_time_is_over():
    """However often a part of it comes: until then it took 20 s for each byte."""
    with (
        serving(StandIn(), Address(port=0), limits=Limits(body_s=0.5)) as url,
        socket.create_connection(where(url), timeout=LONG_S) as client,
    ):
        client.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 60000\r\n\r\n"
        )
        client.setblocking(False)
        answered: list[bytes] = []

        def dripped() -> bool:
            with suppress(BlockingIOError):
                answered.append(client.recv(1000))
            if not answered:
                with suppress(ConnectionError):  # it is answered and closed between the two
                    client.send(b" ")
            return bool(answered)

        eventually(dripped)
        assert answered[0].startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("hard", [256, 4096])
def test_many_connections_are_answered_or_refused_and_the_log_says_so_once(folder: Path, hard: int):
    """With 256 descriptors, each connection beyond them was a traceback, again and again."""
    limit = ["prlimit", f"--nofile=256:{hard}"]
    with planner_serve(folder, "--port", "0", before=limit) as (process, url):
        with ExitStack() as held:
            clients = [
                held.enter_context(socket.create_connection(where(url), timeout=LONG_S))
                for _ in range(300)
            ]
            if hard > 300:
                assert httpx.get(f"{url}/livez", timeout=LONG_S).status_code == 200
            else:
                assert select.select(clients, [], [], LONG_S)[0]  # it is closed
        eventually(lambda: answers_on(url))
        code, _, logged = ended(process, signal.SIGTERM)
    lines = [line.partition(" level=")[2] for line in logged.splitlines()]
    assert code == 0
    assert lines == ([] if hard > 300 else [f"warning msg={json.dumps(LACK)}"])


def answers_on(url: str) -> bool:
    try:
        return httpx.get(f"{url}/livez", timeout=LONG_S).status_code == 200
    except httpx.TransportError:  # as connections that have ended are not closed yet
        return False


def where(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def test_a_service_whose_stdout_is_full_serves_all_the_same(folder: Path):
    command = [sys.executable, "-m", "perseus_planner", "serve", "--unix", "planner.sock"]
    with open("/dev/full", "w") as full:
        service = subprocess.Popen(command, cwd=folder, stdout=full, stderr=subprocess.PIPE)
    try:
        eventually((folder / "planner.sock").exists)
        with Client(f"unix:{folder / 'planner.sock'}") as client:
            assert client.jobs() == ()
        service.terminate()
        _, complaint = service.communicate(timeout=LONG_S)
        assert (service.returncode, b"Traceback" in complaint) == (0, False)
    finally:
        service.kill()


RANKS, MOST_HELD_S, ROUNDS = 16_384, 0.02, 5


def test_a_registration_of_16384_ranks_holds_others_for_20_ms_at_most(tmp_path: Path):
    """Nothing else is answered while the loop is held: by a callback, or by a thread that keeps the
    interpreter. What the machine gives to other processes does not count, so the process's own time
    does. The first report that names a node of the job is part of it.
    """
    stages = 2
    pipelines = RANKS // stages
    places = tuple(
        Place(rank, rank // stages, (rank % stages,), f"node{rank // 8}", f"GPU-{rank}")
        for rank in range(RANKS)
    )
    large = to_json(Registration("large", pipelines, frontier_file(), places))
    small = to_json(Registration("small", 1, frontier_file()))
    report = json.dumps({**SLOW, "scope": {"kind": "node", "value": "node7"}})

    async def longest_holds_s(service: Service) -> list[float]:
        app = create_app(service, Access(), Limits())
        transport = httpx.ASGITransport(app=app)
        json_type = {"Content-Type": "application/json"}
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=transport, base_url="http://localhost", headers=json_type, timeout=LONG_S
            ) as client,
        ):
            assert (await client.post("/v1/jobs", content=small)).status_code == 201  # plans it
            longest_s = []
            for _ in range(ROUNDS):
                held_s: list[float] = []
                probing = asyncio.create_task(probe(held_s))
                assert (await client.post("/v1/jobs", content=large)).status_code == 201
                reported = await client.post("/v1/jobs/large/reports", content=report)
                assert reported.status_code == 202
                probing.cancel()
                longest_s.append(max(held_s))
                assert (await client.delete("/v1/jobs/large")).status_code == 204
            return longest_s

    def check() -> None:
        with (
            TemporaryDirectory(dir=tmp_path) as folder,
            Storage(Path(folder, "service.sqlite")) as storage,
            Service(storage) as service,
        ):
            longest_s = asyncio.run(longest_holds_s(service))
        assert max(longest_s) < MOST_HELD_S, longest_s

    gc.freeze()  # as `serve` does with what is there when it begins
    gc.collect()  # nothing is left, so all that is new is soon looked through
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(server._SWITCH_S)
    try:
        # Again if it took longer: beside other work on its core all computes slower.
        calmly(check)
    finally:
        sys.setswitchinterval(interval_s)
        gc.unfreeze()


async def probe(held_s: list[float]) -> None:
    """Note for how long the loop is held whenever it is."""
    while True:
        wall_s, own_s = time.monotonic(), time.process_time()
        await asyncio.sleep(0.001)
        waited_s = time.monotonic() - wall_s - 0.001
        held_s.append(min(waited_s, time.process_time() - own_s))
