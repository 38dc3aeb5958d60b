"""Requests are measured under traffic over clocks, input and output tokens apart; what they cost
becomes an inference profile.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from statistics import fmean

import pytest
from waiting import LONG_S, calmly

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.inference.metrics import MetricsReader
from perseus_planner.extensions.inference.serving import (
    ServedRow,
    Server,
    ServingSettings,
    Shape,
    measure_serving,
    save_served,
)
from perseus_planner.extensions.inference.workload import Configuration, read_inference_profile
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.emulated import open_emulated

GPU = "emulated:a100-sxm/70?slower=10"
SERVER = Path(__file__).parents[2] / "support" / "completions_server.py"
SHORT, LONG = Shape(64, 1), Shape(64, 8)


@pytest.fixture(autouse=True, scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def serve(state: None) -> Iterator[Callable[..., str]]:
    """Start servers with options, each once, and return their addresses."""
    with ExitStack() as stack:

        @cache
        def started(*options: str, gpu: str = GPU) -> str:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(SERVER), gpu, *options], stdout=subprocess.PIPE, text=True
                )
            )
            stack.callback(process.terminate)
            assert process.stdout is not None
            return process.stdout.readline().strip()

        yield started


def test_a_server_is_measured_at_several_clocks(serve: Callable[..., str], tmp_path: Path):
    rows = calmly(lambda: measured_at_two_clocks(serve()))
    by = {(row.setting, row.concurrency, (row.input, row.output)): row for row in rows}
    with open_emulated(GPU.removeprefix("emulated:")) as after:
        assert after.clock_mhz() == 1410  # it is reset

    save_served(rows, "clock", "simulated", tmp_path / "inference.csv")
    comment, header, first, *_ = (tmp_path / "inference.csv").read_text().splitlines()
    assert comment == "# simulated by planner inference profile"
    assert header.startswith("input,output,tensor_degree,clock_mhz,tokens_per_s,energy_j,ttft_s,")
    assert first.startswith("64,1,1,1410,")
    profile = read_inference_profile(tmp_path / "inference.csv")
    (cell,) = profile.feasible(profile.classes[1], Configuration(1, 1410))
    assert cell.concurrency is None  # closed loops have no bursts
    assert cell.input_token_j == pytest.approx(by[1410, None, LONG].input_token_j, rel=1e-4)


def measured_at_two_clocks(address: str) -> list[ServedRow]:
    """Return the rows of a server, and check them."""
    settings = ServingSettings((LONG, SHORT), (1, 4), (4.0,), "clock", (1410, 705), 0.4)
    steps: list[tuple[int, int]] = []
    with open_gpu(GPU) as gpu, closing(Server(address)) as target:
        rows = list(measure_serving(target, [gpu], settings, lambda *step: steps.append(step)))
    assert [
        (row.setting, row.concurrency, row.rate_per_s, (row.input, row.output)) for row in rows
    ] == [
        (clock, *loop, shape)
        for clock in (1410, 705)
        for loop in ((1, None), (4, None), (None, 4.0))
        for shape in (SHORT, LONG)
    ]
    assert steps == [(1, 2), (2, 2)]
    by = {(row.setting, row.concurrency, (row.input, row.output)): row for row in rows}
    fast, slow = by[1410, 1, LONG], by[705, 1, LONG]
    # The prefill is arithmetic, so half the clock makes it slower; it also needs less energy.
    assert slow.ttft_p50_s > 1.2 * fast.ttft_p50_s
    assert slow.energy_j < fast.energy_j
    for row in (fast, slow, by[1410, 4, LONG], by[705, 4, LONG]):
        first_j, after_j = 64 * row.input_token_j, 7 * row.output_token_j
        # An output token costs nothing where, by noise, the prefill alone took more than both.
        assert first_j + after_j == pytest.approx(max(row.energy_j, first_j))
        first_s, after_s = 64 * row.input_token_s, 7 * row.output_token_s
        assert first_s + after_s == pytest.approx(max(1 / row.requests_per_s, first_s))
    # In the open loop the GPU also waits.
    assert by[1410, None, LONG].energy_j > by[1410, 1, LONG].energy_j
    assert all(row.energy_error_j < 0.1 * row.energy_j for row in rows)
    return rows


@pytest.mark.parametrize("options", [(), ("burst=3",), ("empty=1",), ("key=secret",)])
def test_tokens_are_those_that_the_server_counts(
    serve: Callable[..., str], options: tuple[str, ...]
):
    for kind in ({}, {"text": True}, {"chat": True}):
        with closing(Server(serve(*options), key="secret", **kind)) as server:
            calmly(partial(check_tokens, server, options))


def check_tokens(server: Server, options: tuple[str, ...]) -> None:
    first, second = (server.complete(64, 8) for _ in range(2))
    assert (first.input_tokens, first.output_tokens, second.output_tokens) == (64, 8, 8)
    assert len(first.times_s) <= 8 if not options or options[0] != "burst=3" else 4
    # 64 input tokens take 20 ms; an event without text comes at once, and is no token
    assert first.ttft_s > 0.015
    assert first.tbt_s is not None
    assert 0 < first.tbt_s < first.ttft_s


def test_tokens_without_text_end_when_the_answer_does(serve: Callable[..., str]):
    for kind in ({}, {"chat": True}):
        with closing(Server(serve("texts=0"), **kind)) as server:
            answer = server.complete(64, 1)
        assert (answer.output_tokens, len(answer.times_s)) == (1, 1)
        assert answer.ttft_s > 0.015
        with closing(Server(serve("texts=2"), **kind)) as server:
            answer = server.complete(64, 8)
        assert len(answer.times_s) == 3
        # 64 input tokens take 24 ms, and each iteration after that 2 ms
        assert answer.times_s[-1] - answer.begin_s > 0.034


@pytest.mark.parametrize(
    "options",
    [(), ("thoughts=9",), ("field=refusal",), ("field=reasoning_content",), ("field=tool",)],
)
def test_whatever_field_the_text_is_in_its_times_are_those_of_the_server(
    serve: Callable[..., str], options: tuple[str, ...]
):
    # A token takes about 20 ms, so that a busy machine changes little.
    address = serve(*options, gpu="emulated:a100-sxm/69?slower=100")
    with closing(Server(address, chat=True)) as server:
        server.complete(64, 12)
        with closing(MetricsReader(address, LONG_S)) as reader:
            calmly(partial(check_times, server, reader))


def check_times(server: Server, reader: MetricsReader) -> None:
    before = reader.read()
    answers = [server.complete(64, 12) for _ in range(2)]
    after = reader.read()
    assert {answer.events for answer in answers} == {12}
    assert before.tpot is not None
    assert after.tpot is not None
    ttft, tpot = after.ttft.since(before.ttft), after.tpot.since(before.tpot)
    assert fmean(answer.tbt_s or 0.0 for answer in answers) == pytest.approx(tpot.total / 2, 0.05)
    assert fmean(answer.ttft_s for answer in answers) == pytest.approx(ttft.total / 2, rel=0.05)


def test_tokens_that_no_event_showed_are_said(serve: Callable[..., str]):
    settings = ServingSettings((Shape(64, 24),), settings=(1410,), window_s=0.2)
    problems = []
    for options in ((), ("hidden=12",)):
        with open_gpu(GPU) as gpu, closing(Server(serve(*options))) as target:
            problems += [row.problem for row in measure_serving(target, [gpu], settings)]
    assert problems == [
        None,
        "answers of 24 tokens had 12 events with text: if the server joins tokens (speculative "
        "decoding, a stream interval), latencies are right; if it hides thoughts, the time to the "
        "first token is that of the first one shown, and the time between tokens is too short",
    ]


@pytest.mark.parametrize("options", [("cached=256",), ("cached=256", "said=1", "metrics=no")])
def test_input_tokens_from_a_cache_cost_nothing(
    serve: Callable[..., str], options: tuple[str, ...]
):
    settings = ServingSettings((Shape(512, 8),), settings=(1410,), window_s=0.5)

    def check() -> None:
        rows = []
        for each in ((), options):
            with open_gpu(GPU) as gpu, closing(Server(serve(*each))) as target:
                rows += list(measure_serving(target, [gpu], settings))
        full, part = rows
        assert (full.cached_tokens, part.cached_tokens) == (0.0, pytest.approx(256.0, rel=0.1))
        assert part.input_token_j == pytest.approx(full.input_token_j, rel=0.2)

    calmly(check)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            ("burst=3", "usage=0"),
            r"sent 4 events for 8 tokens, and does not say how many tokens they have "
            r"\(stream_options.include_usage\); start the server, and give the address",
        ),
        (
            ("early=2",),
            r"the server ended a request after 2 of 8 tokens, 2 events of which had text \(no "
            r"reason given\); let it ignore the end of a text",
        ),
    ],
)
def test_an_answer_that_cannot_be_counted_is_refused(
    serve: Callable[..., str], options: tuple[str, ...], problem: str
):
    with closing(Server(serve(*options))) as server, pytest.raises(UsageError, match=problem):
        server.complete(64, 8)


def test_a_server_that_cannot_be_measured_is_refused(serve: Callable[..., str]):
    address = serve("key=secret")
    with pytest.raises(UsageError, match=r"has no model 'huge'; choose one of: tiny$"):
        Server(address, "huge")
    with (
        closing(Server(address)) as server,
        pytest.raises(UsageError, match=r"answers 401: .*; check the address, the key and the"),
    ):
        server.complete(4, 1)
    with pytest.raises(
        UsageError, match=r"does not answer as OpenAI's API does \(.*\); start the server, and give"
    ):
        Server("http://127.0.0.1:9")
    for wrong in ("serving:f", "http://localhost:80x", "http://localhost:99999", "http://[::1"):
        with pytest.raises(UsageError, match=r" is no address of a server; write one such as http"):
            Server(wrong)


def answering(*parts: bytes, ends: bool) -> str:
    """Answer one request for models, and one completion with these bytes; return the address."""
    listening = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listening:
            connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            models = json.dumps({"data": [{"id": "tiny"}]}).encode()
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(models))
            connection.sendall(models)
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for part in parts:
                connection.sendall(b"%x\r\n%s\r\n" % (len(part), part))
            if not ends:
                while connection.recv(1 << 16):  # until the client gives up
                    pass

    threading.Thread(target=run, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


EVENT = b'data: {"choices": [{"text": " a"}]}\n\n'


@pytest.mark.parametrize(
    ("parts", "ends", "problem"),
    [
        (
            (EVENT,),
            True,
            r"does not answer as OpenAI's API does \((IncompleteRead|ConnectionReset)",
        ),
        ((EVENT,), False, r"sent nothing for 0\.2 s; start the server"),
        ((EVENT[:20], EVENT[20:], b"data: {\n\n"), False, r"does not answer .*DecodeError"),
        ((b'data: {"error": {"message": "full"}}\n\n',), False, r"ended a request with .*full"),
    ],
)
def test_what_breaks_off_is_refused(parts: tuple[bytes, ...], ends: bool, problem: str):
    server = Server(answering(*parts, ends=ends), limit_s=LONG_S)
    if "sent nothing" in problem:  # and no other answer is late on a busy machine
        server._limit_s = 0.2
        for connection in server._free:
            connection.sock.settimeout(server._limit_s)
    with closing(server), pytest.raises(UsageError, match=problem):
        server.complete(4, 2)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"control": "observed", "settings": (1410,)},
            "control='observed' sets nothing; leave out the settings",
        ),
        (
            {"concurrencies": ()},
            "there is nothing to measure; give a class of requests, and a concurrency or rate",
        ),
    ],
)
def test_settings_that_fit_nothing_are_refused(settings: dict[str, object], problem: str):
    with pytest.raises(UsageError, match=f"^{problem}$"):
        ServingSettings((LONG,), **settings)  # type: ignore[arg-type]


def test_a_clock_that_the_gpu_lacks_is_refused(serve: Callable[..., str]):
    with (
        open_gpu(GPU) as gpu,
        closing(Server(serve())) as target,
        pytest.raises(
            UsageError, match=r"^clock 1000 MHz: the GPU does not have it; the nearest is 1005 MHz$"
        ),
    ):
        list(measure_serving(target, [gpu], ServingSettings((LONG,), settings=(1000,))))
