"""Inference profiles, traces and rates are read as documented, and what is wrong in them is
named.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from inference_cases import PROFILE, RATES

from perseus_planner.base.errors import PlannerError, ProfileError, UsageError
from perseus_planner.extensions.inference.workload import (
    Cell,
    Configuration,
    Load,
    Objectives,
    RequestClass,
    periods_of,
    read_inference_profile,
    read_rates,
    read_trace,
)


def text_file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal_of(error: type[PlannerError], read: object, *arguments: object) -> str:
    with pytest.raises(error) as refused:
        read(*arguments)
    return str(refused.value)


def test_a_profile_in_words_and_watt_hours(tmp_path: Path):
    text = (
        "input,output,tensor_degree,clock_mhz,energy_wh\nshort,long,2,1200,0.5\nlong,long,2,1200,\n"
    )
    profile = read_inference_profile(text_file(tmp_path / "a.csv", text), load_tokens_per_s=650)
    first, second = profile.classes
    assert (first, first.name) == (RequestClass(256, math.inf, ""), "short/long")
    assert profile.feasible(first, Configuration(2, 1200)) == (Cell(650.0, 1800.0),)
    assert profile.feasible(second, Configuration(2, 1200)) == ()
    assert (profile.control, profile.assumed_load) == ("clock", True)


def test_a_profile_in_tokens_with_loads_latencies_and_power_limits(tmp_path: Path):
    text = (
        "input,output,tensor_degree,power_limit_w,tokens_per_s,energy_j,ttft_s,tbt_s,idle_w\n"
        "256,100,4,250,2000,61.5,0.2,0.03,80\n256,100,4,250,1000,70,0.1,,80\n256,100,4,250,3000,60,0.3,0.03,80\n"
        "256,100,4,250,500,60,0.1,0.2,80\n"
    )
    profile = read_inference_profile(text_file(tmp_path / "a.csv", text))
    at = Configuration(4, 250)
    assert [cell.tokens_per_s for cell in profile.feasible(profile.classes[0], at)] == [1000, 2000]
    assert (profile.control, profile.idle_w(at), profile.assumed_load) == (
        "power-limit",
        80.0,
        False,
    )
    loose = read_inference_profile(tmp_path / "a.csv", Objectives((0.5,), 0.5))
    assert [cell.tokens_per_s for cell in loose.feasible(loose.classes[0], at)] == [
        500,
        1000,
        2000,
        3000,
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "",
            ": is empty; write the header input,output,tensor_degree,clock_mhz,energy_j and a row "
            "for each measurement",
        ),
        (
            "input,output,clock_mhz,energy_j\n",
            ", line 1: no column 'tensor_degree' in the header 'input,output,clock_mhz,energy_j'; "
            "write input,output,tensor_degree,clock_mhz,energy_j, separated by commas",
        ),
        (
            "input,output,tensor_degree,clock_mhz,energy_j,energy_wh\n",
            ", line 1: has the columns 'energy_j' and 'energy_wh'; keep one of them",
        ),
        (
            "input,output,tensor_degree,clock_mhz,energy_j\n",
            ": has no rows; write one for each class, tensor degree and clock_mhz",
        ),
        (
            "input,output,tensor_degree,clock_mhz,energy_j\ntiny,long,2,1200,3\n",
            ", line 2, column 'input': 'tiny' is not a class of requests; write short, medium or "
            "long, or the most tokens of the class, such as 256",
        ),
        (
            "input,output,tensor_degree,clock_mhz,energy_j\nshort,long,2,1200,0\n",
            ", line 2, column 'energy_j': '0' is not an energy: write a number above 0, or "
            "nothing where it is too slow",
        ),
        (
            "input,output,tensor_degree,clock_mhz,energy_j\nshort,long,2,1200,3\nshort,long,2,1200,4\n",
            ", line 3: short/long at tensor degree 2, 1200 MHz and 2000 tokens/s is there twice; "
            "keep one of them",
        ),
        (
            "input,output,tensor_degree,clock_mhz,energy_j\nshort,100,2,1200,3\n256,100,4,1200,4\n",
            ": short/100 and 256/100 are one class; write it in one way",
        ),
    ],
)
def test_a_wrong_profile_is_refused(tmp_path: Path, text: str, expected: str):
    path = text_file(tmp_path / "a.csv", text)
    assert refusal_of(ProfileError, read_inference_profile, path) == f"{path}{expected}"


@pytest.mark.parametrize(
    "rows",
    [
        ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:05.2299600"),
        ("2024-05-10T23:59:59.500000+00:00", "2024-05-11T00:00:00.750000+00:00"),
        ("2024-05-10 23:59:59.5Z", "2024-05-11 01:00:00.75+01:00"),
        ("12.5", "13.75"),
    ],
    ids=["Azure 2023", "Azure 2024", "time zones", "seconds"],
)
def test_traces_are_read_in_several_forms_of_time(tmp_path: Path, rows: tuple[str, str]):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + "".join(
        f"{row},4808,10\r\n" for row in rows
    )
    trace = read_trace(text_file(tmp_path / "t.csv", text))
    assert trace.times_s == pytest.approx([0.0, 1.25], abs=1e-6)
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([4808, 4808], [10, 10])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "when,input_tokens,output_tokens\n",
            ", line 1: no column 'time or TIMESTAMP or time_s or time_ms or time_us or time_ns' in "
            "the header "
            "'when,input_tokens,output_tokens'; write time,input_tokens,output_tokens, separated "
            "by commas",
        ),
        ("time,input_tokens,output_tokens\n", ": has no requests; write a row for each"),
        (
            "time,input_tokens,output_tokens\n5,1,1\n2.5,1,1\n",
            ", line 3: is 2.5 s before the row above; sort the rows by time",
        ),
        (
            "time,input_tokens,output_tokens\n16/11/2023 18:17,1,1\n",
            ", line 2, column 'time': '16/11/2023 18:17' is not a time: write seconds such as "
            "12.5, or a date such as 2023-11-16 18:17:03.979",
        ),
        (
            "time,input_tokens,output_tokens\n2023-13-16 18:17:03,1,1\n",
            ", line 2, column 'time': '2023-13-16 18:17:03' is not a time: write seconds such as "
            "12.5, or a date such as 2023-11-16 18:17:03.979",
        ),
        (
            "time,input_tokens,output_tokens\n1,1,1\n2023-11-16 18:17:03,1,1\n",
            ", line 3, column 'time': '2023-11-16 18:17:03' is another kind of time than before; "
            "write one",
        ),
        (
            "time,input_tokens,output_tokens\n1,-4,1\n",
            ", line 2, column 'input_tokens': '-4' is not a number of tokens: write a whole number "
            "of 0 or more",
        ),
        (
            "time,input_tokens,output_tokens\n1,1,1\n2,1,1\n1e15,1,1\n",
            ": its requests span 1000000000000000 s, more than a year; the longest gap, "
            "1000000000000000 s, is before "
            "request 3: correct its time",
        ),
    ],
)
def test_a_wrong_trace_is_refused(tmp_path: Path, text: str, expected: str):
    path = text_file(tmp_path / "t.csv", text)
    assert refusal_of(UsageError, read_trace, path) == f"{path}{expected}"


@pytest.mark.parametrize(
    ("column", "scale", "offset"),
    [
        ("time", 1, 0),
        ("time_s", 1, 0),
        ("time_ms", 1e3, 0),
        ("time_us", 1e6, 0),
        ("time_ns", 1e9, 0),
        ("time", 1, 1.7e9),
        ("time_ms", 1e3, 1.7e12),
    ],
)
def test_a_column_says_the_unit_of_its_times(
    tmp_path: Path, column: str, scale: float, offset: float
):
    rows = "".join(f"{offset + 0.5 * each * scale:.3f},1,1\n" for each in range(100))
    path = text_file(tmp_path / "t.csv", f"{column},input_tokens,output_tokens\n{rows}")
    assert read_trace(path).times_s == pytest.approx(np.arange(100) / 2, abs=1e-6)


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e9])
@pytest.mark.parametrize("between_s", [0.02, 0.3, 4.0])
def test_times_that_cannot_be_seconds_are_asked_about(
    tmp_path: Path, scale: float, between_s: float
):
    rows = "".join(f"{each * between_s * scale:.0f},1,1\n" for each in range(12031))
    path = text_file(tmp_path / "t.csv", f"time,input_tokens,output_tokens\n{rows}")
    text = refusal_of(UsageError, read_trace, path)
    assert text.startswith(f"{path}, column 'time': as seconds, these are 12,031 requests in ")
    assert re.search(r"; call the column time_[mun]s if that is its unit, or time_s if these", text)


@pytest.mark.parametrize(
    "rows",
    [
        [f"{each * 300},1,1" for each in range(8)],  # too few to tell
        ["2026-05-01 00:00:00,1,1"],
        [f"2026-05-{1 + each:02} 00:00:00,1,1" for each in range(30)],  # dates have no unit
        [f"{each * 9},1,1" for each in range(50)],
    ],
)
def test_plausible_times_are_not_asked_about(tmp_path: Path, rows: list[str]):
    text = "\n".join(["time,input_tokens,output_tokens", *rows, ""])
    assert len(read_trace(text_file(tmp_path / "t.csv", text)).times_s) == len(rows)


def test_whole_numbers_are_read_as_pandas_writes_them(tmp_path: Path):
    text = (
        "input,output,tensor_degree,clock_mhz,concurrency,energy_j\n"
        "256.0,100.0,2.0,1410.0,8.0,3\n4096,100,2,1410,,4\n"
    )
    profile = read_inference_profile(text_file(tmp_path / "a.csv", text))
    assert profile.configurations == [Configuration(2, 1410)]
    assert [of.input_tokens for of in profile.classes] == [256, 4096]


def test_the_demand_of_a_trace_has_its_busiest_minute_and_long_prompts_in_the_longest_class(
    tmp_path: Path,
):
    profile = read_inference_profile(text_file(tmp_path / "a.csv", PROFILE))
    rows = [(second, 256, 44) for second in range(0, 120, 2)] + [
        (120 + second, 100_000, 0) for second in range(60)
    ]
    text = "".join(f"{time},{inputs},{outputs}\n" for time, inputs, outputs in rows)
    trace = read_trace(text_file(tmp_path / "t.csv", f"time,input_tokens,output_tokens\n{text}"))
    short, long = profile.classes
    ((start_s, length_s, demand),) = periods_of(trace, profile, 180.0)
    assert (start_s, length_s) == (0.0, pytest.approx(179.0, rel=1e-6))
    assert demand[short] == pytest.approx(
        Load(60 / length_s, 18000 / length_s, 1.5, 15360 / length_s), rel=0.02
    )
    assert demand[long] == pytest.approx(
        Load(60 / length_s, 6e6 / length_s, 3.0, 6e6 / length_s), rel=0.02
    )
    assert [list(period[2]) for period in periods_of(trace, profile, 60.0)] == [
        [short],
        [short],
        [long],
    ]


def test_idle_hours_have_no_period_and_one_request_has_one(tmp_path: Path):
    profile = read_inference_profile(text_file(tmp_path / "a.csv", PROFILE))
    text = "time,input_tokens,output_tokens\n0,10,10\n7200,10,10\n"
    trace = read_trace(text_file(tmp_path / "t.csv", text))
    assert [start_s for start_s, _, _ in periods_of(trace, profile, 600.0)] == [0.0, 6600.0]
    single = read_trace(
        text_file(tmp_path / "s.csv", "time,input_tokens,output_tokens\n99,10,10\n")
    )
    ((_, _, demand),) = periods_of(single, profile, 600.0)
    assert demand == {profile.classes[0]: pytest.approx(Load(1.0, 20.0, 1.0, 10.0))}


def test_a_trace_needs_a_class_of_the_profile(tmp_path: Path):
    text = "input,output,tensor_degree,clock_mhz,energy_j\n256,100,1,1200,5\n1024,500,1,1200,5\n"
    profile = read_inference_profile(text_file(tmp_path / "a.csv", text))
    trace = read_trace(
        text_file(tmp_path / "t.csv", "time,input_tokens,output_tokens\n0,10,10\n1,20,300\n")
    )
    assert refusal_of(UsageError, trace.classes, profile) == (
        "request 2 of the trace has 20 input and 300 output tokens, but the profile has no such "
        "class, only 256/100, 1024/500; measure it"
    )


def test_rates_are_read_by_class(tmp_path: Path):
    profile = read_inference_profile(text_file(tmp_path / "a.csv", PROFILE))
    rates = read_rates(text_file(tmp_path / "r.csv", RATES), profile)
    assert rates == dict(zip(profile.classes, (Load(20.0, 4000.0), Load(2.0, 5000.0)), strict=True))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            "256,200,1,1",
            "256/200 is no class of the profile, which has 256/100, 4096/100; correct the row",
        ),
        ("256,100,0,5", "has requests without tokens, or tokens without requests; correct the row"),
        ("256,100,x,5", None),
    ],
)
def test_wrong_rates_are_refused(tmp_path: Path, row: str, expected: str | None):
    profile = read_inference_profile(text_file(tmp_path / "a.csv", PROFILE))
    path = text_file(tmp_path / "r.csv", f"input,output,requests_per_s,tokens_per_s\n{row}\n")
    wrong = (
        ", column 'requests_per_s': 'x' is not a rate: write a number of 0 or more in a "
        "second, such as 12.5"
    )
    place = f"{path}, line 2"
    assert refusal_of(UsageError, read_rates, path, profile) == (
        f"{place}: {expected}" if expected else place + wrong
    )


def test_objectives_are_for_each_input_class(tmp_path: Path):
    path = text_file(tmp_path / "a.csv", PROFILE)
    assert [
        read_inference_profile(path).ttft_s(of) for of in read_inference_profile(path).classes
    ] == [0.25, 2.0]
    given = read_inference_profile(path, Objectives((0.3, 0.5)))
    assert np.array([given.ttft_s(of) for of in given.classes]) == pytest.approx([0.3, 0.5])
    assert refusal_of(UsageError, read_inference_profile, path, Objectives((0.1, 0.2, 0.3))) == (
        "--ttft: has 3 times for 2 input classes; give one each, or one"
    )
