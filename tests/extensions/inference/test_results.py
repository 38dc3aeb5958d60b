"""What other load generators measured becomes rows, and nothing in their files is taken for
something else without a word.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from commands import refusal, run
from inference_cases import VLLM
from refusals import refusal as refused

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.inference.results import read_results
from perseus_planner.extensions.inference.serving import ServedRow, save_served
from perseus_planner.extensions.inference.workload import Configuration, read_inference_profile

PROGRAMS = "AIPerf, GenAI-Perf, guidellm, `vllm bench serve` or SGLang's bench_serving"


def metric(unit: str, **values: float) -> dict[str, Any]:
    return {"unit": unit, **values}


GENAI_PERF: dict[str, Any] = {
    "request_throughput": metric("requests/sec", avg=2.0),
    "time_to_first_token": metric("ms", p50=90.0, p95=120.0),
    "inter_token_latency": metric("ms", p50=20.0, p95=25.0),
    "input_sequence_length": metric("tokens", avg=256.0),
    "output_sequence_length": metric("tokens", avg=100.0),
    "input_config": {"perf_analyzer": {"stimulus": {"concurrency": 8}}},
}
#: as AIPerf 0.13 writes it, as far as it is read
AIPERF: dict[str, Any] = {
    **GENAI_PERF,
    "schema_version": "1.4",
    "aiperf_version": "0.13.0",
    "request_count": metric("requests", avg=100.0),
    "input_config": {
        "phases": [
            {"name": "warmup", "kind": "warmup", "type": "concurrency", "concurrency": 1},
            {"name": "profiling", "kind": "profiling", "type": "concurrency", "concurrency": 8},
        ]
    },
    "is_complete": True,
    "nvidia_average_gpu_power": metric("W", avg=300.0),
    "nvidia_total_gpu_energy": metric("J", avg=15000.0),
}
GUIDELLM: dict[str, Any] = {
    "benchmarks": [
        {
            "config": {"strategy": {"type_": "concurrent", "streams": 8}},
            "metrics": {
                "request_totals": {"successful": 100, "errored": 0, "incomplete": 3, "total": 103},
                "requests_per_second": {"successful": {"mean": 2.0}},
                "request_concurrency": {"successful": {"mean": 7.6}},
                "prompt_token_count": {"successful": {"mean": 256.0}},
                "output_token_count": {"successful": {"mean": 100.0}},
                "time_to_first_token_ms": {"successful": {"percentiles": {"p50": 90, "p95": 120}}},
                "inter_token_latency_ms": {"successful": {"percentiles": {"p50": 20, "p95": 25}}},
            },
        }
    ]
}


def changed(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a copy with other values; None removes one, and "a__b" is b in a."""
    content = deepcopy(content)
    for path, value in changes.items():
        part: Any = content
        *within, name = (int(key) if key.isdigit() else key for key in path.split("__"))
        for key in within:
            part = part[key]
        if value is None:
            part.pop(name, None)
        else:
            part[name] = value
    return content


@pytest.fixture
def read(folder: Path) -> Callable[..., tuple[list[ServedRow], list[str]]]:
    """Read contents as JSON lines; return the rows, and what is said."""

    def reading(*contents: object, **options: Any) -> tuple[list[ServedRow], list[str]]:
        path = Path("a.json")
        path.write_text("\n".join(map(json.dumps, contents)))
        said: list[str] = []
        rows = read_results(path, 1410, 1, **options, tell=said.append)
        return rows, said

    return reading


@pytest.mark.parametrize("result", [VLLM, GENAI_PERF, AIPERF, GUIDELLM])
def test_results_of_other_load_generators_are_rows(
    read: Callable[..., tuple[list[ServedRow], list[str]]], result: dict[str, Any]
):
    (row,), said = read(result, power_w=300.0)
    assert said == []
    assert (row.input, row.output, row.concurrency, row.rate_per_s) == (256, 100, 8, None)
    assert (row.energy_j, row.tokens_per_s) == (150.0, 712.0)
    assert (row.ttft_p50_s, row.ttft_s, row.tbt_p50_s, row.tbt_s) == (0.09, 0.12, 0.02, 0.025)
    save_served([row], "clock", "read", Path("inference.csv"))
    profile = read_inference_profile(Path("inference.csv"))
    assert [
        cell.energy_j for cell in profile.feasible(profile.classes[0], Configuration(1, 1410))
    ] == [150]


def loops() -> list[tuple[dict[str, Any], int | None, float | None]]:
    """Results, and the requests in flight and the rate that they were measured with."""
    phases = "input_config__phases__1"
    rate = {"kind": "profiling", "name": "a", "type": "poisson", "rate": 3.5, "concurrency": 64}
    strategy = "benchmarks__0__config__strategy"
    return [
        (changed(VLLM, max_concurrency=None, request_rate=2), None, 2.0),
        (changed(VLLM, request_rate=float("inf")), 8, None),  # as SGLang writes it
        (changed(VLLM, request_rate=None), 8, None),
        (changed(AIPERF, **{phases: rate}), None, 3.5),
        (changed(AIPERF, **{f"{phases}__concurrency": None}), 1, None),
        (changed(AIPERF, input_config={"loadgen": {"concurrency": 8}}), 8, None),
        (changed(AIPERF, input_config={"loadgen": {"request_rate": 3.5}}), None, 3.5),
        (changed(GENAI_PERF, input_config={"concurrency": 8}), 8, None),
        (
            changed(GENAI_PERF, input_config__perf_analyzer__stimulus={"request_rate": 3.5}),
            None,
            3.5,
        ),
        (changed(GUIDELLM, **{strategy: {"type_": "synchronous"}}), 1, None),
        (changed(GUIDELLM, **{strategy: {"type_": "poisson", "rate": 3.5}}), None, 3.5),
        (changed(GUIDELLM, **{strategy: {"type_": "throughput", "max_concurrency": 8}}), 8, None),
    ]


@pytest.mark.parametrize(("result", "concurrency", "rate_per_s"), loops())
def test_the_loop_is_read_wherever_a_version_has_it(
    read: Callable[..., tuple[list[ServedRow], list[str]]],
    result: dict[str, Any],
    concurrency: int | None,
    rate_per_s: float | None,
):
    (row,), said = read(result, power_w=300.0)
    assert (row.concurrency, row.rate_per_s, said) == (concurrency, rate_per_s, [])


ROW = changed(VLLM, p95_ttft_ms=None, p95_tpot_ms=None)  # only what vLLM states by default
ROW |= {"p99_ttft_ms": 180.0, "p99_tpot_ms": 31.0}


def notes() -> list[tuple[dict[str, Any], str]]:
    """Results, and what is said of each."""
    phases = "input_config__phases"
    failed = (
        "a.json: 40 of 50 requests failed; latencies are those of the 10 that completed, which "
        "bear the energy of all"
    )
    percentile = (
        "; the 99th is taken, which is no shorter (`vllm bench serve` has --metric-percentiles 95)"
    )
    both = (
        "a.json: has no 95th percentile of the time to the first token and the time between tokens"
    )
    one = "a.json: has no 95th percentile of the time between tokens"
    return [
        (changed(VLLM, failed=40), failed),
        (changed(VLLM, num_prompts=50), failed),  # older versions do not count those that failed
        (
            changed(
                AIPERF, request_count__avg=10.0, error_request_count=metric("requests", avg=40)
            ),
            failed,
        ),
        (
            changed(AIPERF, request_count=None, error_request_count=metric("requests", avg=40)),
            "a.json: 40 requests failed; latencies are those of the ones that completed, which "
            "bear the energy of all",
        ),
        (
            changed(
                GUIDELLM,
                benchmarks__0__metrics__request_totals={"successful": 10, "errored": 40},
            ),
            failed.replace("a.json:", "a.json, benchmarks 1:"),
        ),
        (ROW, both + percentile),
        (changed(VLLM, p95_tpot_ms=None, p99_tpot_ms=31.0), one + percentile),
        (
            changed(ROW, **{"p95_ttft_ms": 150.0, "p99_tpot_ms": None, "p99.9_tpot_ms": 40.0}),
            one + percentile.replace("99th", "99.9th"),
        ),
        (
            changed(VLLM, max_concurrency=None),
            "a.json: all 10 requests were sent at once, which is a burst and no steady load; "
            "measure with --max-concurrency or --request-rate",
        ),
        (
            changed(VLLM, duration=50.0),
            "a.json: 2 requests/s in 50 s are not the 10 that completed; the first is taken",
        ),
        (
            changed(AIPERF, usage_prompt_cache_read_tokens=metric("tokens", avg=192.0)),
            "a.json: 192 of 256 input tokens of a request came from a cache, which cost nothing; "
            "without it, requests cost more",
        ),
        (changed(AIPERF, was_cancelled=True), "a.json: was ended before it was complete"),
        (changed(AIPERF, is_complete=False), "a.json: was ended before it was complete"),
        (
            changed(AIPERF, nvidia_average_gpu_power__avg=500.0),
            "a.json: says 500 W where 300 W were given; these are taken",
        ),
        (
            changed(
                AIPERF,
                nvidia_average_gpu_power__avg=7874.4,
                nvidia_total_gpu_power=metric("W", avg=300.0),
            ),
            "a.json: its GPUs drew 300 W by their sensors and 7874 W by their energy counters, "
            "which AIPerf may read long before the first request; the first is taken",
        ),
        (
            changed(GUIDELLM, benchmarks__0__config__strategy={"type_": "throughput"}),
            "a.json, benchmarks 1: all requests were sent at once; 8 were in flight on average",
        ),
        (changed(AIPERF, **{f"{phases}__0": {"name": "warmup", "type": "x"}}), ""),
    ]


@pytest.mark.parametrize(("result", "note"), notes())
def test_what_is_to_be_known_of_a_result_is_said(
    read: Callable[..., tuple[list[ServedRow], list[str]]], result: dict[str, Any], note: str
):
    rows, said = read(result, power_w=300.0)
    assert said == ([note] if note else [])
    assert rows[0].energy_j == 150.0


def test_the_95th_percentile_is_that_of_the_requests_where_they_are_listed(
    read: Callable[..., tuple[list[ServedRow], list[str]]],
):
    # Twenty requests of five tokens; two of no tokens have failed.
    ttfts_s = [0.01 * number for number in range(1, 21)] + [9.0, 0.0]
    itls_s = [[0.001 * number] * 4 for number in range(1, 21)] + [[], []]
    listed = {"ttfts": ttfts_s, "itls": itls_s, "output_lens": [5] * 20 + [0, 0]}
    (row,), said = read(ROW | listed)
    assert said == []
    assert row.ttft_s == pytest.approx(0.1905)
    assert row.tbt_s == pytest.approx(0.01905)


def test_an_answer_of_one_token_has_no_time_between_tokens(
    read: Callable[..., tuple[list[ServedRow], list[str]]],
):
    (row,), said = read(changed(VLLM, total_output_tokens=10, median_tpot_ms=0.0, p95_tpot_ms=None))
    assert (row.output, row.tbt_p50_s, row.tbt_s, said) == (1, None, None, [])


def test_json_lines_are_a_row_each_and_lines_in_which_nothing_completed_are_left_out(
    read: Callable[..., tuple[list[ServedRow], list[str]]],
):
    fast = changed(VLLM, max_concurrency=16, request_throughput=3.0)
    rows, said = read(VLLM, fast, changed(VLLM, completed=0, failed=10), power_w=300.0)
    assert [(row.concurrency, row.energy_j) for row in rows] == [(8, 150.0), (16, 100.0)]
    assert said == [
        "a.json, line 3: no request completed (10 failed); see why in the output of the load "
        "generator, and measure again; it is left out"
    ]
    assert [row.concurrency for row in read([VLLM, fast])[0]] == [8, 16]


def test_the_power_of_a_result_is_taken_where_none_is_given(
    read: Callable[..., tuple[list[ServedRow], list[str]]],
):
    assert read(AIPERF)[0][0].energy_j == 150.0
    assert read(AIPERF, power_w=290.0)[0][0].energy_j == 145.0
    assert read(changed(AIPERF, nvidia_average_gpu_power=None))[0][0].energy_j is None
    kilowatts = changed(AIPERF, nvidia_average_gpu_power=metric("kW", avg=0.3))
    assert read(kilowatts)[0][0].energy_j == 150.0
    gpus = {"endpoints": {"localhost:9400": {"gpus": {"gpu_0": {}, "gpu_1": {}}}}}
    node = changed(AIPERF, telemetry_data=gpus)
    assert read(node, power_w=300.0)[0][0].energy_j == 150.0
    assert refused(UsageError, read, node) == (
        "a.json: has the power of 2 GPUs, and the server has 1; give --degree 2, or the power of "
        "the server's as MHZ@WATTS"
    )


def refusals() -> list[tuple[dict[str, Any], str]]:
    """Results that cannot be read, and why."""
    strategy = "benchmarks__0__config__strategy"
    phases = [{"name": "a", "type": "concurrency"}, {"name": "b", "type": "concurrency"}]
    return [
        ({}, "has no request_throughput, input_config or benchmarks"),
        (changed(VLLM, total_input_tokens=None), "has no total_input_tokens"),
        (
            changed(VLLM, total_output_tokens=0),
            "total_output_tokens: 0 is not a number of tokens above 0",
        ),
        (
            changed(VLLM, completed="ten"),
            "completed: 'ten' is not a number of requests of 0 or more",
        ),
        (VLLM | {"completed": None}, "completed: None is not a number of requests of 0 or more"),
        (
            changed(VLLM, request_throughput=float("inf"), duration=0.0),
            "request_throughput: inf is not a rate: write requests per second above 0, such as 2.5",
        ),
        (
            changed(VLLM, median_ttft_ms=float("nan")),
            "median_ttft_ms: nan is not a latency: a number of 0 or more",
        ),
        (
            changed(VLLM, median_ttft_ms=0.0, p95_ttft_ms=0.0),
            "its time to the first token is 0, so answers were not streamed",
        ),
        (
            changed(ROW, p99_ttft_ms=None) | {"p90_ttft_ms": 100.0},
            "has no 95th percentile of ttft, nor one above it; measure with --metric-percentiles "
            "95",
        ),
        (
            changed(VLLM, ramp_up_strategy="linear"),
            "its rate rises (ramp_up_strategy), so that it is not one load",
        ),
        (
            changed(AIPERF, time_to_first_token=None),
            "has no time_to_first_token; measure with --streaming",
        ),
        (
            changed(AIPERF, time_to_first_token__unit="min"),
            "the unit 'min' is not one of s, sec, ms, us, ns",
        ),
        (
            changed(AIPERF, time_to_first_token__p95=None),
            "has no 95th percentile, nor one above it",
        ),
        (
            changed(AIPERF, input_config__phases=phases),
            "has 2 measured phases, and one figure for all",
        ),
        (
            changed(AIPERF, input_config__phases__1={"name": "a", "type": "fixed_schedule"}),
            "requests of the type 'fixed_schedule' are not one load",
        ),
        (changed(GENAI_PERF, input_config={}), "has no concurrency or request_rate"),
        (
            changed(GUIDELLM, **{strategy: {"type_": "trace"}}),
            "requests of the type 'trace' are not one load",
        ),
        (
            {"metadata": {"session_num": 3}, "metrics": {"a": 1}},
            "has a line for each request; its summary is profile_export_aiperf.json",
        ),
    ]


@pytest.mark.parametrize(("result", "problem"), refusals())
def test_what_is_wrong_in_a_result_is_named(
    read: Callable[..., tuple[list[ServedRow], list[str]]], result: dict[str, Any], problem: str
):
    text = refused(UsageError, read, result)
    assert f": cannot be read as a result of {PROGRAMS}: {problem}; give the file that" in text
    assert text.startswith("a.json")


@pytest.mark.parametrize(
    ("result", "place"),
    [
        (changed(VLLM, completed=0), "a.json: no request completed"),
        (changed(VLLM, completed=0, failed=10), "a.json: no request completed (10 failed)"),
        (changed(AIPERF, request_count__avg=0.0), "a.json: no request completed"),
        (changed(AIPERF, request_throughput=None), "a.json: no request completed"),
        (
            changed(GUIDELLM, benchmarks__0__metrics__request_totals={"successful": 0}),
            "a.json, benchmarks 1: no request completed",
        ),
    ],
)
def test_a_result_in_which_nothing_completed_is_refused(
    folder: Path, result: dict[str, Any], place: str
):
    Path("a.json").write_text(json.dumps(result))
    assert refusal("inference read 1410@312W=a.json -o r.csv") == (
        2,
        "",
        f"Error: {place}; see why in the output of the load generator, and measure again\n",
    )
    assert not Path("r.csv").exists()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", f"is empty; give the file that {PROGRAMS} wrote"),
        (b"\xef\xbb\xbf\n \n", f"is empty; give the file that {PROGRAMS} wrote"),
        (b"\x1f\x8b\x08\x00\xff", f"is not UTF-8 text; give the file that {PROGRAMS} wrote"),
        (
            b"a,b\n1,2\n",
            "is not JSON (Expecting value: line 1 column 1 (char 0)); give the file as it was "
            "written",
        ),
        (
            json.dumps(VLLM, indent=1).encode()[:-20],
            "is not JSON (Unterminated string starting at: line 11",
        ),
        (b"[" * 100_000, "is not JSON (maximum recursion depth exceeded"),
        (b"[]", "has no results; measure some load"),
        (b'{"benchmarks": []}', "has no results; measure some load"),
        (b"3", f"cannot be read as a result of {PROGRAMS}: 3 is not an object of JSON"),
    ],
)
def test_a_file_that_is_no_result_is_refused(folder: Path, data: bytes, problem: str):
    Path("a.json").write_bytes(data)
    assert refused(UsageError, read_results, Path("a.json"), 1410, 1).startswith(
        f"a.json: {problem}"
    )


def test_a_line_that_is_cut_off_is_named(folder: Path):
    Path("a.json").write_text(f"{json.dumps(VLLM)}\n\n{json.dumps(VLLM)[:-9]}")
    text = refused(UsageError, read_results, Path("a.json"), 1410, 1)
    assert text.startswith("a.json, line 3: is cut off, or not JSON (Unterminated string starting")
    assert text.endswith("); remove the line, or measure again")


def test_an_error_quotes_little_of_a_file_and_no_control_characters(folder: Path):
    evil = changed(VLLM, completed="\x1b[2J\u202e" + "x" * 10_000)
    Path("a.json").write_text(json.dumps(evil))
    status, _, text = refusal("inference read 1410=a.json -o r.csv")
    assert status == 2
    assert text.removesuffix("\n").isprintable()
    assert text.count("x") < 200


def test_a_byte_order_mark_and_a_clock_of_pandas_are_read(folder: Path):
    Path("a.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(VLLM).encode())
    result = run("inference read 1410.0@300W=a.json -o r.csv --json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert (found["rows"][0]["setting"], found["notes"]) == (1410, [])


@pytest.fixture
def cases() -> Path:
    """The folder of small files that were read wrongly once."""
    beside = Path(__file__).resolve().parents[4] / "shared" / "cases"
    path = Path(os.environ.get("PLANNER_CASES", beside)) / "benchmarks"
    if not path.is_dir():
        pytest.skip(f"no cases: {path} is not there; name the folder above it in PLANNER_CASES")
    return path


def test_kept_cases(cases: Path, folder: Path):
    def read(name: str, setting: str = "1410@312W") -> tuple[int, list[dict[str, Any]], str]:
        result = run(f"inference read {setting}={cases / name} -o r.csv --json")
        rows = json.loads(result.stdout)["rows"] if result.stdout else []
        return result.exit_code, rows, result.stderr

    assert read("vb_zero.json") == (
        2,
        [],
        f"Error: {cases / 'vb_zero.json'}: no request completed; see why in the output of the load "
        "generator, and measure again\n",
    )
    status, rows, _ = read("vb_lines.json")
    assert (status, [row["rate_per_s"] for row in rows]) == (0, [2.0, 4.0])
    status, rows, said = read("vb_failed.json")
    assert (status, len(rows)) == (0, 1)
    assert "40 of 100 requests failed; latencies are those of the 60 that completed" in said
    status, rows, said = read("profile_export_aiperf.json", "1410")
    (row,) = rows
    assert (status, said) == (0, "")
    assert (row["concurrency"], row["input"], row["output"], row["energy_j"]) == (8, 512, 128, 90.0)
    assert (row["ttft_s"], row["tbt_s"]) == (0.14, 0.015)
