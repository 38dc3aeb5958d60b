"""The clock of a server is chosen while it serves: by what its metrics say, within its objectives,
and reset whatever happens.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from commands import refusal
from fake_nvml import StandIn
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import free_port
from serving_cases import CLOCKS, SETTINGS, at_fixed, online
from waiting import LONG_S, eventually

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.inference.metrics import (
    Histogram,
    MetricsReader,
    ServerState,
    parse_state,
)
from perseus_planner.extensions.inference.online import ServerClock, check_alone
from perseus_planner.extensions.inference.serving import Server
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.emulated import open_emulated

GPU = "emulated:a100-sxm/72?slower=10"
SERVER = Path(__file__).parents[2] / "support" / "completions_server.py"
PLANNER = [sys.executable, "-m", "perseus_planner"]
LEARNS = "planner: would set 1410 MHz (learning)"
KEEP = ["--gpu", GPU, "--ttft", "2s", "--tbt", "500ms"]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(0.001, 4.9), min_size=1, max_size=30),
    most=st.sampled_from([0.1, 0.3, 0.4, 1.0]),
)
def test_a_histogram_tells_what_was_above_as_far_as_it_can(values: list[float], most: float):
    bounds = (0.1, 0.25, 0.5, 1.0, 5.0, float("inf"))
    counts = tuple(float(sum(value <= bound for value in values)) for bound in bounds)
    found = Histogram(bounds, counts, sum(values)).above(most)
    around = next(place for place, bound in enumerate(bounds) if bound > most)
    low = bounds[around - 1] if around else 0.0
    assert sum(value > bounds[around] for value in values) <= found + 1e-9
    assert found <= sum(value > low for value in values) + 1e-9
    if len(values) == 1:
        assert found == (values[0] > most)


def test_metrics_of_both_servers_are_read_and_engines_added_up():
    vllm = "\n".join(
        f'vllm:{name}{{engine="{engine}"}} {value}'
        for engine in (0, 1)
        for name, value in (
            ("num_requests_running", 2), ("num_requests_waiting", 1), ("prompt_tokens_total", 100),
            ("generation_tokens_total", 1e3), ("time_to_first_token_seconds_sum", 0.5),
            ("inter_token_latency_seconds_sum", 10.0),
        )
    )  # fmt: skip
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        for bound, count in (("0.25", 1), ("+Inf", 2)):
            vllm += f'\nvllm:{name}_bucket{{engine="0",le="{bound}"}} {count}'
    sglang = vllm.replace("vllm:num_requests_running", "sglang:num_running_reqs")
    sglang = sglang.replace("vllm:num_requests_waiting", "sglang:num_queue_reqs")
    for text in (vllm, sglang.replace("vllm:", "sglang:")):
        state = parse_state(text, 1.0, "here")
        ttft, tbt = (Histogram((0.25, float("inf")), (1, 2), total) for total in (1.0, 20.0))
        assert state == ServerState(1.0, 4, 2, 200, 2e3, ttft, tbt)
    name = "vllm:request_time_per_output_token_seconds"
    told = f'{vllm}\n{name}_bucket{{engine="0",le="+Inf"}} 3\n{name}_sum{{engine="0"}} 0.5'
    assert parse_state(told, 1.0, "here").tpot == Histogram((float("inf"),), (3,), 0.5)
    with pytest.raises(UsageError, match=r"^here: has no vllm:num_requests_waiting or sglang:num_"):
        parse_state(vllm.replace("num_requests_waiting", "waiting"), 1.0, "here")


def metrics_text(program: str, *lines: str) -> str:
    """Return the least that the metrics of a server have, and some lines more."""
    running, waiting = ("num_requests_running", "num_requests_waiting")
    if program == "sglang":
        running, waiting = ("num_running_reqs", "num_queue_reqs")
    least = [
        f"{running} 1",
        f"{waiting} 0",
        "prompt_tokens_total 1000",
        "generation_tokens_total 5",
    ]
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        least += [f'{name}_bucket{{le="+Inf"}} 2', f"{name}_sum 1"]
    return "\n".join(f"{program}:{line}" for line in [*least, *lines])


@pytest.mark.parametrize(
    ("program", "lines", "computed", "cached"),
    [
        ("vllm", (), 1000, 0),
        (
            "vllm",
            (
                'prompt_tokens_by_source_total{engine="0",source="local_compute"} 100',
                'prompt_tokens_by_source_total{engine="1",source="local_compute"} 150',
                'prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 700',
                'prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 50',
            ),
            250,
            750,
        ),
        ("vllm", ('prompt_tokens_by_source_total{source="local_cache_hit"} 1000',), 0, 1000),
        (
            "sglang",
            (
                'cached_tokens_total{cache_source="device"} 600',
                'cached_tokens_total{cache_source="host"} 150',
            ),
            250,
            750,
        ),
        ("sglang", ("cached_tokens_total 5000",), 0, 1000),
    ],
)
def test_input_tokens_are_those_that_were_computed(
    program: str, lines: tuple[str, ...], computed: float, cached: float
):
    state = parse_state(metrics_text(program, *lines), 1.0, "here")
    assert (state.input_tokens, state.cached_tokens) == (computed, cached)


@pytest.mark.parametrize("program", ["vllm", "sglang"])
def test_the_time_per_output_token_of_requests_is_read_from_either_server(program: str):
    name = "request_time_per_output_token_seconds"
    lines = (f'{name}_bucket{{le="+Inf"}} 3', f"{name}_sum 0.5")
    assert parse_state(metrics_text(program), 1.0, "here").tpot is None
    tpot = parse_state(metrics_text(program, *lines), 1.0, "here").tpot
    assert tpot == Histogram((float("inf"),), (3,), 0.5)


def test_a_metric_that_is_no_number_is_refused():
    text = metrics_text("vllm").replace("total 1000", "total many")
    with pytest.raises(UsageError, match=r"^here: vllm:prompt_tokens_total is 'many', which is no"):
        parse_state(text, 1.0, "here")


@pytest.mark.parametrize("kind", ["busy", "idle", "code"])
def test_less_energy_is_needed_and_no_more_is_late_than_agreed(kind: str):
    full = at_fixed(kind, 120.0, CLOCKS[0])
    kept, chooser = online(kind, 120.0)
    assert full.late <= SETTINGS[kind].late
    assert kept.energy_j < (0.65 if kind == "idle" else 0.9) * full.energy_j
    assert chooser.late <= SETTINGS[kind].late * chooser.requests + 5
    assert chooser.slow <= SETTINGS[kind].late * chooser.ended + 5


def busy_state(time_s: float, waiting: float = 0.0) -> ServerState:
    """Return the state of a server that computes 200 iterations of 5 ms a second."""
    done = 200 * time_s
    tbt = Histogram((0.01, float("inf")), (8 * done, 8 * done), 8 * done * 0.005)
    ttft = Histogram((0.1, float("inf")), (done / 20, done / 20), done / 20 * 0.03)
    return ServerState(time_s, 8.0, waiting, 50 * done, 8 * done, ttft, tbt)


def test_a_day_in_time_earns_no_hour_of_late_requests():
    chooser, tbt = ServerClock(CLOCKS, SETTINGS["busy"]), Histogram((0.1, float("inf")), (0, 0), 0)

    def state(time_s: float, early: float, late: float) -> ServerState:
        ttft = Histogram((0.1, float("inf")), (early, early + late), 0.05 * early + 60.0 * late)
        return ServerState(time_s, 4, 0, 1e5, 1e5, ttft, tbt)

    for second in range(2001):
        chooser.observe(state(float(second), 10.0 * second, 0.0), 100.0 * second)
    chooser.observe(state(2001.0, 20010.0, 80.0), 2e5)  # 1 % of 20,000 are 200
    assert not chooser.is_overdrawn
    chooser.observe(state(2002.0, 20020.0, 130.0), 2e5)
    assert chooser.is_overdrawn


def test_requests_in_the_batch_without_a_token_count_as_waiting():
    chooser = ServerClock(CLOCKS, SETTINGS["busy"])
    now_s, ended = 0.0, Histogram((float("inf"),), (0.0,), 0.0)

    def at(running: float, decoding: float, aborted: float = 0.0) -> int:
        nonlocal now_s
        now_s += 0.05
        state = busy_state(now_s)
        count = state.ttft.seen - decoding - aborted
        tpot = ended._replace(counts=(count,), total=0.005 * count)
        return chooser.observe(state._replace(running=running, tpot=tpot), 300.0 * now_s)

    while now_s < 10.0:
        at(8, 8)
    assert at(8, 8) < CLOCKS[0]
    assert at(500, 8) == CLOCKS[0]
    assert at(8, 8) < CLOCKS[0]
    assert at(8, 8, aborted=1e3) < CLOCKS[0]  # clients that left after the first token
    assert at(500, 8, aborted=1e3) == CLOCKS[0]


def test_clocks_are_full_in_doubt():
    chooser = ServerClock(CLOCKS, SETTINGS["busy"])
    now_s = 0.0
    while now_s < 10.0:
        now_s += 0.05
        assert chooser.observe(busy_state(now_s), 300.0 * now_s) == CLOCKS[0] or now_s > 3.0
    assert chooser.clock_mhz < CLOCKS[0]
    assert chooser.observe(busy_state(now_s + 0.05, waiting=1e4), 300 * now_s) == CLOCKS[0]
    chooser.observe(busy_state(now_s + 0.1), 300 * now_s)
    chooser.fail()
    assert (chooser.clock_mhz, chooser.reason) == (CLOCKS[0], "no answer")


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[str, subprocess.Popen[str]]]]:
    """Start servers, and return their addresses and processes."""
    processes: list[subprocess.Popen[str]] = []

    def started(*options: str) -> tuple[str, subprocess.Popen[str]]:
        command = [sys.executable, str(SERVER), GPU, *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return process.stdout.readline().strip(), process

    yield started
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def locked_mhz() -> int | None:
    with open_emulated(GPU.removeprefix("emulated:")) as gpu:
        return gpu._chip.locked_mhz


class Load:
    """Requests at random moments, until it is left."""

    def __init__(self, address: str) -> None:
        self._server, self._drawn = Server(address), Random(1)
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(3)]

    def _run(self) -> None:
        while not self._is_over.wait(self._drawn.expovariate(10)):
            self._server.complete(self._drawn.randint(8, 32), self._drawn.randint(8, 24))

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self._server.close()


def test_a_server_is_slowed_while_it_serves_and_reset_when_the_planner_is_killed(
    serve: Callable[..., tuple[str, subprocess.Popen[str]]],
):
    address, server = serve()
    with Load(address):
        for end in (signal.SIGTERM, signal.SIGKILL):
            command = [*PLANNER, "inference", "attach", address, *KEEP, "--json"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as planner:
                eventually(locked_mhz)
                planner.send_signal(end)
                text, _ = planner.communicate()
            if end == signal.SIGTERM:
                assert planner.returncode == 0
                result = json.loads(text)
                assert result["requests"] > 0
                assert result["late"] <= 0.01 * result["requests"] + 3
                assert result["changes"] > 0
            eventually(lambda: locked_mhz() is None)
    assert server.poll() is None


def test_a_command_is_run_and_its_clocks_are_kept_until_it_ends(tmp_path: Path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [*PLANNER, "inference", "run", "--url", url, *KEEP, "--dry-run", "--json", "--"]
    server = [sys.executable, str(SERVER), GPU, f"port={port}"]
    with subprocess.Popen(
        [*command, *server], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as planner:
        assert planner.stderr is not None
        while not (line := planner.stderr.readline()).startswith(LEARNS):
            assert line, "the command has ended"
        with Load(url):
            eventually(lambda: has_served(url))
        planner.send_signal(signal.SIGTERM)
        text, _ = planner.communicate()
    assert json.loads(text)["requests"] > 0, text
    assert locked_mhz() is None
    assert planner.returncode == 128 + signal.SIGTERM
    assert not is_there(url)


def is_there(url: str) -> bool:
    try:
        with closing(MetricsReader(url, 1.0)) as reader:
            return reader.read().running >= 0
    except OSError:
        return False


def has_served(url: str) -> bool:
    with closing(MetricsReader(url, LONG_S)) as reader:
        return reader.read().ttft.seen > 3


def test_what_cannot_be_kept_is_refused_before_anything_is_set(
    serve: Callable[..., tuple[str, subprocess.Popen[str]]],
):
    other, _ = serve("metrics=other")
    without, _ = serve("metrics=no")
    kept = " ".join(KEEP)
    for address, problem in (
        (other, "has no vllm:num_requests_running or sglang:num_running_reqs; give the address of"),
        (without, "answers 404; start the server with its metrics (vLLM has them, SGLang with"),
        ("http://127.0.0.1:9", "does not answer (ConnectionRefusedError"),
        ("http://127.0.0.1:99999", "'http://127.0.0.1:99999' is no address of a server; write"),
        ("http://me:secret@127.0.0.1:80", "127.0.0.1:8000, without a user"),
    ):
        status, _, text = refusal(f"inference attach {address} {kept}")
        assert status == 2
        assert text.startswith("Error: ")
        assert problem in text
        assert text.count("\n") == 1
    assert locked_mhz() is None
    with subprocess.Popen(
        [*PLANNER, "inference", "attach", serve()[0], *KEEP], stderr=subprocess.PIPE, text=True
    ) as first:
        assert first.stderr is not None
        first.stderr.readline()  # its first line: it keeps the clocks
        status, _, text = refusal(f"inference attach {serve()[0]} {kept}")
        assert status == 2
        assert str(first.pid) in text
        first.send_signal(signal.SIGTERM)


def test_a_server_beside_another_program_on_its_gpu_is_refused(
    serve: Callable[..., tuple[str, subprocess.Popen[str]]], nvml: StandIn, tmp_path: Path
):
    address, server = serve()
    (tmp_path / "nvidia-cuda-mps-server").symlink_to("/bin/sleep")
    mps = [str(tmp_path / "nvidia-cuda-mps-server"), "1000"]
    shared = subprocess.Popen(mps, start_new_session=True)
    limits = "--ttft 1s --tbt 1s --gpu nvml:1"
    other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with (
        open_gpu("nvml:1") as gpu,
        closing(SimpleNamespace(close=other.kill)),
        closing(SimpleNamespace(close=shared.kill)),
    ):
        for own in (f"{server.pid}", f"{server.pid} {shared.pid}"):
            nvml.set("computing", own, gpu=1)
            check_alone([gpu], address)
        nvml.set("computing", f"{server.pid} {other.pid}", gpu=1)
        for command in (f"attach {address} {limits}", f"run {limits} -- sleep 1"):
            status, _, text = refusal(f"inference {command}")
            assert status == 2
            assert "computes on it too, and one clock cannot keep two servers; stop it, or" in text
        check_alone([gpu], "http://192.0.2.1:9")  # of which nothing is known
        nvml.set("computing", other.pid, gpu=1)
        check_alone([gpu], address)  # what listens may pass on to a server in a container
    other.wait()
    shared.wait()
    assert nvml.locked_mhz(1) is None
