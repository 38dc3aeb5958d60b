"""Who may ask the service for what, and how large a request may be."""

from __future__ import annotations

import base64
import hmac
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_stand_in import StandIn, asking

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.service import access, calls
from perseus_planner.extensions.service.access import ROLES, Access, Limits, read_tokens

httpx = pytest.importorskip("httpx")

SECRETS = {role: f"{role}-0123456789abcdef" for role in ROLES}
LINES = "# who may come in\n\n" + "".join(
    f"{secret} {role} the-{role}-client\n" for role, secret in SECRETS.items()
)
HEALTH = ("/livez", "/readyz", "/healthz")
JOB = {"name": "gpt3", "frontier": base64.b64encode(b"PK").decode(), "pipelines": 2}
SLOW = {"source": "ops", "scope": {"kind": "pipeline", "value": 1}, "slowdown": 1.2, "key": "r1"}
#: method, path, body, the least role that may
REQUESTS = [
    ("GET", "/v1/jobs", None, "read"),
    ("GET", "/v1/jobs/gpt3", None, "read"),
    ("GET", "/v1/jobs/gpt3/reports", None, "read"),
    ("GET", "/v1/jobs/gpt3/plans", None, "read"),
    ("GET", "/v1/jobs/gpt3/frontier", None, "read"),
    ("GET", "/v1/jobs/gpt3/pipelines", None, "read"),
    ("GET", "/v1/jobs/gpt3/history", None, "read"),
    ("GET", "/v1/totals", None, "read"),
    ("GET", "/v1/power", None, "read"),
    ("GET", "/metrics", None, "read"),
    ("POST", "/v1/jobs/gpt3/reports", SLOW, "report"),
    ("DELETE", "/v1/jobs/gpt3/reports/r1", None, "report"),
    ("POST", "/v1/alerts", {"alerts": []}, "report"),
    ("POST", "/v1/jobs/gpt3/taken", {"version": 1, "iteration": 1}, "report"),
    ("POST", "/v1/jobs/gpt3/telemetry", {"run": "a", "iterations": 1, "time_s": 1.0}, "report"),
    ("POST", "/v1/jobs", JOB, "operate"),
    ("PUT", "/v1/jobs/gpt3/deadline", {"deadline_s": 1.0}, "operate"),
    ("PUT", "/v1/jobs/gpt3/power", {"power_w": 1e3}, "operate"),
    ("PUT", "/v1/power", {"power_w": 1e3}, "operate"),
    ("DELETE", "/v1/jobs/gpt3", None, "operate"),
]


def tokens():
    return access.read_tokens(None, {access.TOKENS_VARIABLE: LINES})


def bearing(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRETS[role]}"}


@pytest.fixture
def ask():
    with asking(StandIn()) as ask:
        yield ask


@pytest.fixture
def guarded():
    """Asks a service that has a token for each role."""
    with asking(StandIn(), access=Access(tokens())) as ask:
        yield ask


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_do_its_own_and_what_those_before_it_may(guarded, role):
    assert guarded("POST", "/v1/jobs", json=JOB, headers=bearing("operate")).status_code == 201
    guarded("POST", "/v1/jobs/gpt3/reports", json=SLOW, headers=bearing("report"))
    for method, path, body, least in REQUESTS:
        content = {} if body is None else {"json": body}
        answer = guarded(method, path, headers=bearing(role), **content)
        allowed = ROLES.index(role) >= ROLES.index(least)
        assert (answer.status_code < 300) == allowed, (method, path)
        if not allowed:
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


def test_every_address_is_in_the_table_above(ask):
    paths = ask("GET", "/openapi.json").json()["paths"]
    documented = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    tried = {
        (
            method,
            path.replace("gpt3", "{job}").replace("r1", "{key}"),
        )
        for method, path, *_ in REQUESTS
    }
    assert documented - tried == {("GET", path) for path in (*HEALTH, "/v1/me")}
    assert tried <= documented


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer wrong-0123456789abcdef"},
        {"Authorization": f"Basic {SECRETS['operate']}"},
        {"Authorization": SECRETS["operate"]},
        {"Authorization": f"Bearer {SECRETS['operate']}x"},
        {"Authorization": f"Bearer {SECRETS['operate'][:-1]}"},
        {"Authorization": b"Bearer \xff\xfe"},
    ],
)
def test_without_a_valid_token_nothing_is_told_but_that_the_service_lives(guarded, headers):
    for method, path, *_ in [
        *REQUESTS,
        ("GET", "/openapi.json"),
        ("GET", "/elsewhere"),
    ]:
        answer = guarded(method, path, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    for path in HEALTH:
        assert guarded("GET", path, headers=headers).status_code == 200
        assert guarded("HEAD", path, headers=headers).status_code == 200


@pytest.mark.parametrize(("role", "status"), [(None, 401), ("read", 403), ("report", 403)])
def test_who_may_not_send_a_body_is_refused_before_it_is_read(guarded, role, status):
    def unread():
        raise AssertionError("the body was asked for")
        yield b""

    async def body():
        for part in unread():
            yield part

    headers = {"Content-Type": "application/json", **(bearing(role) if role else {})}
    assert guarded("POST", "/v1/jobs", content=body(), headers=headers).status_code == status


@pytest.mark.parametrize(
    ("role", "path", "most"),
    [
        ("report", "/v1/jobs", 10),
        ("operate", "/v1/jobs", 30),
        ("read", "/v1/alerts", 10),
        ("report", "/v1/alerts", 20),
    ],
)
def test_how_large_a_body_may_be_depends_on_the_role(role, path, most):
    limits = Limits(body_bytes=10, alerts_bytes=20, registration_bytes=30)
    with asking(StandIn(), access=Access(tokens()), limits=limits) as ask:
        answer = ask("POST", path, content=b" " * 31, headers=bearing(role))
        assert answer.json()["detail"] == f"the body is larger than {most} bytes; send less"
        assert ask("POST", path, content=b" " * most, headers=bearing(role)).status_code != 413


def test_a_large_body_is_parsed_by_a_thread_and_taken_or_refused_as_a_small_one_is(monkeypatch):
    threads, read_registration = [], calls.read_registration

    def parsed(text):
        threads.append(threading.current_thread())
        return read_registration(text)

    monkeypatch.setattr(calls, "read_registration", parsed)
    places = [
        {"rank": number, "pipeline": number % 2, "stages": [0], "node": "node" * 9}
        for number in range(2000)
    ]
    service = StandIn()
    with asking(service) as ask:

        def sent(**changes):
            body = {**JOB, "places": places, **changes}
            return ask("POST", "/v1/jobs", json=body)

        assert sent().status_code == 201
        assert len(service.kept["gpt3"].places) == 2000
        for changes, problem in (
            (
                {"pipelines": 0},
                "body.pipelines: Input should be greater than or equal to 1; /openapi.json",
            ),
            ({"frontier": "?"}, "body.frontier: Data should be valid base64"),
        ):
            answer = sent(**changes)
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
            assert answer.json()["detail"].startswith(problem)
        large = {
            "content": b"[" * 65_536 + b" " * 9,
            "headers": {"Content-Type": "application/json"},
        }
        assert "the body is not JSON: " in ask("POST", "/v1/jobs", **large).json()["detail"]
        as_form = {"content": b"{" * 70_000, "headers": {"Content-Type": "text/plain"}}
        assert ask("POST", "/v1/jobs", **as_form).status_code == 422
    assert len(threads) == 4
    assert threading.main_thread() not in threads


def test_a_token_is_compared_with_all_by_digest_and_in_constant_time(monkeypatch):
    compared = []

    compare_digest = hmac.compare_digest

    def compare(one, other):
        compared.append((len(one), len(other)))
        return compare_digest(one, other)

    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    allowed = Access(tokens())
    for secret in (*SECRETS.values(), "", "x", "y" * 10_000):
        compared.clear()
        allowed.bearer(f"Bearer {secret}")
        assert compared == [(32, 32)] * len(SECRETS)
    assert not any(secret in repr(allowed) for secret in SECRETS.values())


@given(st.text(max_size=40))
def test_any_header_that_is_not_a_token_is_nobodys(text):
    assert Access(tokens()).bearer(text) is None


def test_tokens_come_from_a_file_or_from_the_environment(tmp_path: Path):
    file = tmp_path / "tokens.txt"
    file.write_text(LINES)
    assert read_tokens(file, {}) == tokens()
    assert [(token.role, token.name) for token in tokens()] == [
        (role, f"the-{role}-client") for role in ROLES
    ]
    assert read_tokens(None, {}) == ()
    assert read_tokens(file, {access.TOKENS_VARIABLE: "short read x"}) == tokens()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "short read me\n",
            "tokens.txt, line 1: is not a token of 16 characters or more, a role and a name",
        ),
        (
            "\n0123456789abcdef read\n",
            "tokens.txt, line 2: is not a token of 16 characters or more, a role and a name",
        ),
        (
            "0123456789abcdef write me\n",
            "tokens.txt, line 1: the role is not one of read, report, operate;",
        ),
        ("0123456789abcdef read a/b\n", "tokens.txt, line 1: is not a token"),
        ("0123456789abcdef read a\n0123456789abcdef operate b", "tokens.txt: has a token twice"),
        ("# none\n", "tokens.txt: has no token; write lines of token, role and name"),
    ],
)
def test_a_file_of_tokens_that_is_none_is_refused_and_shows_no_secret(folder, text, complaint):
    Path("tokens.txt").write_text(text)
    with pytest.raises(UsageError) as refused:
        read_tokens(Path("tokens.txt"), {})
    assert str(refused.value).startswith(complaint)
    assert "0123456789abcdef" not in str(refused.value)


def test_a_file_of_tokens_that_is_not_there_is_refused(folder):
    with pytest.raises(UsageError, match="no such file"):
        read_tokens(Path("absent"), {})


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(("path", "most"), [("/v1/jobs", 3000), ("/v1/jobs/gpt3/reports", 1000)])
def test_a_body_is_refused_where_it_is_larger_than_it_may_be(declared, path, most):
    async def parts(size):
        for _ in range(size // 100):
            yield b" " * 100

    with asking(StandIn(), limits=Limits(body_bytes=1000, registration_bytes=3000)) as ask:
        for size, status in ((most, 422), (most + 100, 413)):
            content = b" " * size if declared else parts(size)
            answer = ask(
                "POST", path, content=content, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code == status
        assert answer.json()["detail"] == f"the body is larger than {most} bytes; send less"
        lying = ask("POST", path, content=b"{}", headers={"Content-Length": "9" * 30})
        assert lying.status_code == 413


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:8400", 200),
        ("127.8.0.1", 200),
        ("[::1]:8400", 200),
        ("LOCALHOST:1", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:8400", 421),
        ("evil.example@127.0.0.1", 421),
        ("10.0.0.1", 421),
        ("", 421),
    ],
)
def test_where_no_token_is_needed_a_web_page_with_a_name_of_its_own_gets_nothing(host, status):
    with asking(StandIn(), access=Access(loopback_only=True)) as ask:
        assert ask("GET", "/v1/jobs", headers={"Host": host}).status_code == status
    with asking(StandIn(), access=Access()) as ask:
        assert ask("GET", "/v1/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/jobs", 200), ("/v1/jobs/none", 404), ("/elsewhere", 404)]
)
def test_answers_are_neither_kept_nor_guessed_nor_framed(ask, path, status):
    answer = ask("GET", path)
    assert answer.status_code == status
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


@pytest.mark.parametrize("role", [*ROLES, None])
def test_everyone_may_ask_who_they_are(guarded, role):
    answer = guarded("GET", "/v1/me", headers={} if role is None else bearing(role))
    assert answer.json() == {"role": role, "name": role and f"the-{role}-client"}


def test_where_there_are_no_tokens_everyone_may_do_all(ask):
    assert ask("GET", "/v1/me").json() == {"role": "operate", "name": None}


@pytest.mark.parametrize(
    "path", ["/", "/static/main.js", "/static/charts.js", "/static/theme.css", "/static/icon.svg"]
)
def test_the_page_needs_no_token_and_may_load_and_ask_nothing_but_the_service(guarded, path):
    answer = guarded("GET", path)
    assert answer.status_code == 200
    policy = dict(
        each.split(maxsplit=1) for each in answer.headers["Content-Security-Policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[each] for each in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy["frame-ancestors"] == "'none'"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert guarded("POST", path).status_code == 405


@pytest.mark.parametrize(
    "name", ["none.js", "app.py", "__init__.py", "..%2fapp.py", "%2e%2e", "", "a/b"]
)
def test_no_other_file_is_served(guarded, name):
    assert guarded("GET", f"/static/{name}").status_code == 404


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (b"", 422),
        (b"text/plain", 422),
        (b"application/x-www-form-urlencoded", 422),
        (b"multipart/form-data; boundary=a", 422),
        (b"application/json;x=\xff", 202),
    ],
)
def test_what_a_form_of_another_page_can_send_is_not_taken(kind, status):
    service = StandIn()
    with asking(service) as ask:
        ask("POST", "/v1/jobs", json=JOB)
        headers = {b"Content-Type": kind} if kind else {}
        answer = ask("POST", "/v1/jobs/gpt3/reports", content=json.dumps(SLOW), headers=headers)
        assert answer.status_code == status
        assert (service.of_job["gpt3"] == {}) == (status == 422)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_may_change_nothing(site):
    service = StandIn()
    with asking(service) as ask:
        assert (
            ask("POST", "/v1/jobs", json=JOB, headers={"Sec-Fetch-Site": "same-origin"}).status_code
            == 201
        )
        for method, path, body, _ in REQUESTS:
            content = {} if body is None else {"json": body}
            answer = ask(method, path, headers={"Sec-Fetch-Site": site}, **content)
            assert (answer.status_code == 403) == (method != "GET"), (method, path)
        assert (
            ask("GET", "/", headers={"Sec-Fetch-Site": site}).status_code == 200
        )  # a link leads here
        assert (list(service.kept), service.of_job["gpt3"]) == (["gpt3"], {})
