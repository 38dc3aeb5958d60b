"""The client sends what the service's API has, reads what it answers, and turns every failure
into one clear error.
"""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from commands import done, refusal
from http_stand_in import StandIn, stand_in
from launching import free_port
from service_answers import ANSWER, KEPT, STATUS, api, refused

from perseus_planner.base.errors import ServiceAway, ServiceRefusal, UsageError
from perseus_planner.extensions.service import commands as budgets
from perseus_planner.extensions.service.client import Client
from perseus_planner.extensions.service.models import (
    Decision,
    Place,
    Registration,
    ReportRequest,
    Scope,
    Taken,
    Target,
)


@pytest.fixture(scope="module")
def service():
    with stand_in(api) as found:
        yield found


@pytest.fixture
def client(service: StandIn):
    service.asked.clear()
    with Client(service.address, "s3cret") as found:
        yield found


def test_every_endpoint_has_a_method_that_reads_its_answer(service: StandIn, client: Client):
    request = ReportRequest(
        "ops", Scope("stage", "2", 3), slowdown=1.2, in_s=10.0, cause="compute", key="k1"
    )
    job = Registration(
        "gpt3", 2, b"\x00\xff", (Place(0, 0, (0, 1), "node07", "GPU-1"),), max_changes=8
    )
    registered = client.register(job)
    assert (registered.version, registered.is_new) == (1, True)
    assert client.report("gpt3", request) == ANSWER
    assert client.reports("gpt3") == (KEPT,)
    without = replace(ANSWER, report=None)
    assert client.clear("gpt3", "k/1") == without
    assert client.set_deadline("gpt3", 5.2) == without
    assert client.set_power(5000.0, "gpt3") == (without,)
    assert client.set_power(None) == ()
    assert client.plans("gpt3", after=7, wait_s=0.5) is None
    client.taken("gpt3", 7, 120)
    client.end("gpt3")
    assert client.metrics() == "planner_jobs 1\n"
    client.check()
    assert {each.authorization for each in service.asked} == {"Bearer s3cret"}
    bodies = {each.path: each.body for each in service.asked if each.body is not None}
    assert bodies == {
        "/v1/jobs": {
            "name": "gpt3",
            "frontier": "AP8=",
            "pipelines": 2,
            "places": [
                {"rank": 0, "pipeline": 0, "stages": [0, 1], "node": "node07", "gpu": "GPU-1"}
            ],
            "max_changes": 8,
        },
        "/v1/jobs/gpt3/reports": {
            "source": "ops",
            "scope": {"kind": "stage", "value": "2", "pipeline": 3},
            "slowdown": 1.2,
            "in_s": 10.0,
            "cause": "compute",
            "key": "k1",
        },
        "/v1/jobs/gpt3/taken": {"version": 7, "iteration": 120},
        "/v1/jobs/gpt3/deadline": {"deadline_s": 5.2},
        "/v1/jobs/gpt3/power": {"power_w": 5000.0, "schedule": []},
        "/v1/power": {"power_w": None, "schedule": []},
    }
    assert "/v1/jobs/gpt3/plans?after=7&wait_s=0.5" in [each.path for each in service.asked]


def test_a_status_is_read_whole(client: Client):
    (status,) = client.jobs()
    assert status == client.status("gpt3")
    assert (status.job.name, status.job.pipelines, status.job.ranks, status.job.power_w) == (
        "gpt3",
        2,
        4,
        5000.0,
    )
    assert status.taken == Taken(6, 120, 9.0)
    assert status.reports == (KEPT,)
    assert status.decision == Decision(
        (Target(1.2), Target(1.0, {1: 1.5}, 900.0)),
        (0, 1),
        1.2,
        {1: "k1"},
        5.0,
        math.inf,
        "pipeline 1 takes 1.2 times as long",
    )


def test_a_refusal_says_what_the_service_says(service: StandIn):
    with Client(service.address) as client, pytest.raises(ServiceRefusal) as error:
        client.status("other")
    assert (
        str(error.value)
        == f"the service at {service.address} refused: there is no such job; see `planner status`"
    )
    assert (error.value.status, error.value.code) == (404, "a_code")


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (
            (401, {"code": "x", "detail": "no token"}),
            ServiceRefusal,
            "no token; put a token of",
        ),
        (
            (503, {"code": "x", "detail": "its database"}),
            ServiceAway,
            "could not answer /v1/jobs: its da",
        ),
        (
            (429, {"code": "x", "detail": "too many"}),
            ServiceAway,
            "could not answer /v1/jobs: too many",
        ),
        (
            (404, "<html>nginx</html>"),
            ServiceAway,
            "is not a planner's service of this version: 'HTTP 404 <html>nginx",
        ),
        ((200, "hello"), ServiceAway, "is not a planner's service of this version: 'hello'"),
        (
            (200, {"jobs": [{"job": 1}]}),
            ServiceAway,
            "answered what this planner does not understand",
        ),
        (
            (200, {"jobs": None}),
            ServiceAway,
            "use the same version of perseus-planner on both sides",
        ),
        ((200, None), ServiceAway, "is not a planner's service"),
        ((200, '{"jobs": ' + "[" * 100_000), ServiceAway, "is not a planner's service"),
    ],
)
def test_an_answer_of_something_else_is_one_clear_error(
    answer: tuple[int, Any], kind: type[Exception], text: str
):
    with (
        stand_in(lambda *_: answer) as found,
        Client(found.address) as client,
        pytest.raises(kind) as error,
    ):
        client.jobs()
    assert text in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", [{"version": 2, "plans": ["x"], "of_pipeline": [0]}, {"version": 2, "plans": [1]}]
)
def test_what_is_no_plan_is_one_clear_error(content: Any):
    with (
        stand_in(lambda *_: (200, content)) as found,
        Client(found.address) as client,
        pytest.raises(ServiceAway),
    ):
        client.plans("gpt3")


def test_a_service_that_is_away_says_how_to_start_one():
    address = f"http://127.0.0.1:{free_port()}"
    with (
        Client(address) as client,
        pytest.raises(
            ServiceAway, match=r"no answer from the service at .* start it with `planner serve`"
        ),
    ):
        client.jobs()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # httpcore leaves a socket open
def test_a_service_that_is_silent_is_not_waited_for_for_ever(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            Client(address, timeout_s=0.05) as client,
            pytest.raises(ServiceAway, match="did not answer /v1/jobs in"),
        ):
            client.jobs()
    with (
        Client(f"unix:{tmp_path}/none.sock") as client,
        pytest.raises(ServiceAway, match="No such file"),
    ):
        client.jobs()


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host:80",
        "ftp://host",
        "http://",
        "http://host/path",
        "http://a b",
        "http://host:x",
        "unix:",
        "http://[",
        "http://user@host:80",
    ],
)
def test_what_is_no_address_is_refused(address: str):
    if not address:  # means the one that is usual
        assert Client(address).address == "http://127.0.0.1:8400"
        return
    with pytest.raises(UsageError, match="is malformed; write http://host:port"):
        Client(address)


def test_address_and_token_come_from_the_environment(
    service: StandIn, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PLANNER_SERVICE", service.address)
    monkeypatch.setenv("PLANNER_TOKEN", "from-there\n")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with Client() as client:
        client.check()
    assert service.asked[-1].authorization == "Bearer from-there"
    with pytest.raises(
        UsageError, match="PLANNER_TOKEN holds a blank or a letter that is not ASCII"
    ):
        Client(token="two words")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "give a slowdown, an iteration time or a score, and not none"),
        ({"slowdown": 1.2, "score": 0.5}, "and not slowdown and score"),
        ({"slowdown": 0.9}, "slowdown 0.9 is not a number of 1 or more"),
        ({"slowdown": math.nan}, "slowdown nan is not"),
        ({"score": 0.0}, "score 0 is not above 0 and at most 1"),
        ({"score": 1.01}, "score 1.01 is not above 0"),
        ({"slowdown": 1.2, "in_s": 1.0, "at_iteration": 3}, "give one of the two"),
    ],
)
def test_a_report_that_says_nothing_or_two_things_is_refused(fields: dict[str, Any], text: str):
    with pytest.raises(UsageError, match=text):
        ReportRequest("ops", Scope("rank", "1"), **fields)


# The commands


def sent(service: StandIn, command: str) -> Any:
    """What a command sends; it must be done."""
    service.asked.clear()
    done(f"{command} --service {service.address}")
    return service.asked[0].body


@pytest.mark.parametrize(
    ("options", "scope", "rest"),
    [
        (
            "--pipeline 3 --slowdown 1.2 --in 10s --ttl 30m",
            {"kind": "pipeline", "value": "3"},
            {"slowdown": 1.2, "in_s": 10.0, "ttl_s": 1800.0},
        ),
        (
            "--stage 2 --pipeline 3 --slowdown 1.5 --cause data",
            {"kind": "stage", "value": "2", "pipeline": 3},
            {"slowdown": 1.5, "cause": "data"},
        ),
        (
            "--rank 17 --score 0.8 --key k",
            {"kind": "rank", "value": "17"},
            {"score": 0.8, "key": "k"},
        ),
        (
            "--node node07 --slowdown 1",
            {"kind": "node", "value": "node07"},
            {"slowdown": 1.0},
        ),
        (
            "--gpu GPU-8f6b --slowdown 2x",
            {"kind": "gpu", "value": "GPU-8f6b"},
            {"slowdown": 2.0},
        ),
    ],
)
def test_straggler_sends_what_its_options_say(
    service: StandIn, options: str, scope: dict[str, Any], rest: dict[str, Any]
):
    body = sent(service, f"straggler --job gpt3 --source ops {options}")
    assert body == {"source": "ops", "scope": scope, **rest}


def test_straggler_says_what_follows(service: StandIn):
    command = f"straggler --job gpt3 --pipeline 3 --slowdown 1.2 --service {service.address}"
    assert done(command) == (
        "Job gpt3: version 7 of its plans is taken at the next iteration; extra beside "
        "stragglers: 812.5 W, by the bound of its frontier\n"
        "pipeline 3 takes 1.2 times as long\nReport k1\n"
    )
    said = json.loads(done(f"{command} --json"))
    assert (said["version"], said["report"]["expires_s"], said["report"]["scope"]["value"]) == (
        7,
        None,
        "2",
    )
    assert service.asked[-1].body["source"].count("@") == 1


def test_straggler_clears(service: StandIn):
    service.asked.clear()
    assert done(f"straggler --job gpt3 --clear k/1 --service {service.address}").startswith(
        "Job gpt3: version 7"
    )
    assert service.asked[0][:2] == ("DELETE", "/v1/jobs/gpt3/reports/k%2F1")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "straggler --job j --slowdown 1.2",
            "name what is slow in one way: --pipeline, --stage, --rank, --gpu or --node",
        ),
        (
            "straggler --job j --rank 1 --pipeline 2 --slowdown 1.2",
            "name what is slow in one way: --pipeline, --stage, --rank, --gpu or --node",
        ),
        (
            "straggler --job j --rank 1",
            "a report says how slow in one way: give a slowdown, an iteration time or a score, and "
            "not none",
        ),
        (
            "straggler --job j --rank 1 --slowdown 0.5",
            "slowdown 0.5 is not a number of 1 or more; 1 means recovered",
        ),
        (
            "straggler --job j --clear k --rank 1",
            "--rank: is for a new report; leave it out beside --clear",
        ),
        (
            "straggler --job j --rank 1 --slowdown 1.2 --ttl 3w",
            "--ttl: '3w' is not a duration: write seconds of 0 or more, or a number with us, ms, "
            "s, m, h or d, such as 1.5ms or 30m",
        ),
        ("budget --job j", "give --power, --deadline or both of them; none removes what is set"),
        ("budget --power 3kW --watch", "--watch: is for a schedule; name its file with --schedule"),
        (
            "budget --schedule b.csv --power none",
            "--schedule: has the power; leave out --power and --deadline",
        ),
        ("budget --deadline 5s", "--deadline: is for one job; name it with --job"),
        (
            "status j --service host",
            "the service's address 'host' is malformed; write http://host:port, https://host:port "
            "or unix:/path/of/socket, such as http://127.0.0.1:8400",
        ),
    ],
)
def test_commands_refuse_what_says_nothing(command: str, message: str):
    assert refusal(command) == (2, "", f"Error: {message}\n")


def test_commands_refuse_as_the_service_does(service: StandIn):
    code, stdout, stderr = refusal(f"status other --service {service.address}")
    assert (code, stdout) == (2, "")
    assert stderr.endswith("refused: there is no such job; see `planner status`\n")


def test_budget_sets_power_and_deadline(service: StandIn):
    said = done(f"budget --job gpt3 --power 40kW --deadline 5.2s --service {service.address}")
    assert [each[1:3] for each in service.asked[-2:]] == [
        ("/v1/jobs/gpt3/deadline", {"deadline_s": 5.2}),
        ("/v1/jobs/gpt3/power", {"power_w": 40000.0, "schedule": []}),
    ]
    assert said.count("Job gpt3: version 7") == 2
    assert sent(service, "budget --power none") == {"power_w": None, "schedule": []}
    assert sent(service, "budget --power 1.2kW") == {"power_w": 1200.0, "schedule": []}
    done(f"budget --job gpt3 --power none --deadline none --service {service.address} --json")
    assert [each.body for each in service.asked[-2:]] == [
        {"deadline_s": None},
        {"power_w": None, "schedule": []},
    ]


def test_budget_sends_a_schedule_from_the_budget_that_holds_now(service: StandIn, tmp_path: Path):
    (tmp_path / "budget.csv").write_text(
        "start,power\n1000,40kW\n2026-01-01T00:00Z,30kW\n4000000000,none\n"
    )
    said = done(f"budget --schedule {tmp_path}/budget.csv --service {service.address}")
    later = [{"start_s": 4e9, "power_w": None}]
    assert service.asked[-1][1:3] == ("/v1/power", {"power_w": 30000.0, "schedule": later})
    assert re.search(r"Next: no budget from 2096-10-0\d \d\d:06 \S+\.\n$", said)
    (tmp_path / "carbon.csv").write_text("start,carbon\n0,200\n4000000000,500\n")
    done(
        f"budget --job gpt3 --schedule {tmp_path}/carbon.csv --target 8 --service {service.address}"
    )
    later = [{"start_s": 4e9, "power_w": 16000.0}]
    assert service.asked[-1][1:3] == (
        "/v1/jobs/gpt3/power",
        {"power_w": 40000.0, "schedule": later},
    )


def test_a_schedule_that_is_replaced_is_sent_and_one_with_an_error_is_not(
    service: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, texts = (
        tmp_path / "budget.csv",
        ["start,power\n0,20kW\n", "start,power\n0,dear\n", "start,power\n0,30kW\n"],
    )

    def replaced(_: Path, __: object) -> Iterator[None]:
        for text in texts[1:]:
            path.write_text(text)
            yield

    monkeypatch.setattr(budgets, "replaced", replaced)
    path.write_text(texts[0])
    code, _, stderr = refusal(f"budget --schedule {path} --watch --service {service.address}")
    assert [each.body["power_w"] for each in service.asked[-2:]] == [20000.0, 30000.0]
    assert code == 0
    assert stderr == (
        f"{path}, line 2, column 'power': 'dear' is not a power: write watts above 0, or a number "
        "with W, kW or MW, such as 5kW; the schedule before it holds\n"
    )


def test_status_shows_what_the_service_knows(service: StandIn):
    short = done(f"status --service {service.address}").splitlines()
    assert short[0].split() == [
        "job",
        "pipelines",
        "plans",
        "slow",
        "target",
        "s",
        "now",
        "s",
        "saves",
        "W",
        "extra",
        "W",
        "state",
    ]
    assert "version 7, 8 is being planned, 6 taken since iteration 120" in short[1]
    whole = done(f"status gpt3 --service {service.address}")
    for text in (
        "2 pipelines, 4 ranks known",
        "at most 5000 W",
        "stage 2 of pipeline 3",
        "1.2x",
        "1: 1.5x",
        "cleared",
    ):
        assert text in whole
    assert whole.endswith("  pipeline 1 is slow\n")
    assert whole.count("  1 pipeline aims for 18.03 s\n") == 9
    assert (
        json.loads(done(f"status gpt3 --service {service.address} --json"))["decision"][
            "look_again_s"
        ]
        is None
    )
    assert (
        json.loads(done(f"status --service {service.address} --json"))["jobs"][0]["job"]["name"]
        == "gpt3"
    )


def test_a_name_cannot_direct_the_terminal(monkeypatch: pytest.MonkeyPatch):
    evil = "\x1b[2Jgpt\u202e\x07\u2066\x9b"
    monkeypatch.setitem(STATUS["decision"], "reason", evil)
    monkeypatch.setitem(STATUS, "state", {"name": "fine", "text": evil, "since_s": None})
    unknown = refused(404, f"no job {evil}")
    with stand_in(lambda *asked: unknown if "none" in asked[1] else api(*asked)) as found:
        for options in ("", " gpt3", " --json", " gpt3 --json", " --totals", " --totals --json"):
            if options == " --totals":
                monkeypatch.setitem(STATUS["job"], "name", evil)
            said = done(f"status{options} --service {found.address}")
            assert not set(said) & set(evil) - set("[2Jgpt")
            assert "\\u001b[2Jgpt\\u202e" in said
        for options in (" none", " gpt3"):
            code, _, said = refusal(f"status{options} --service {found.address}")
            assert code == 2
            assert not set(said) & set(evil) - set("[2Jgpt")


def test_status_is_watched_until_the_service_says_no_more(monkeypatch: pytest.MonkeyPatch):
    commands = import_module("perseus_planner.extensions.service.commands")
    monkeypatch.setattr(commands, "_LOOK_S", 0.0)
    told = iter([{**STATUS, "version": version} for version in (7, 7, 9)])

    def answers(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path.endswith("/history"):
            return api(method, path, body)
        status = next(told, None)
        return refused(404, "it has ended") if status is None else (200, status)

    with stand_in(answers) as found:
        code, stdout, stderr = refusal(f"status gpt3 --watch --service {found.address}")
    assert (code, stdout.count("Job gpt3: "), stdout.count("Plans: version 9")) == (2, 2, 1)
    assert stderr.endswith("refused: it has ended\n")
