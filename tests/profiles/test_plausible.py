"""Rows that cannot be true are refused, with their place and the likely cause; and no others."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from refusals import refusal
from strategies import smooth_profile, soaks

from perseus_planner import solve
from perseus_planner.base.errors import ProfileError
from perseus_planner.gpu.simulated.model import CATALOG, OpCost
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import ClockChange, Measurement
from perseus_planner.profiles.plausible import find_doubts, most_power_w
from perseus_planner.profiles.profiles import DOUBTS, Profile
from perseus_planner.schedules import generate_for_stages
from perseus_planner.solver.frontier import Frontier
from perseus_planner.views.frontier import frontier_text, summarize_frontier
from perseus_planner.views.plan import plan_text, summarize_plan, summarize_timeline

Table = dict[Key, dict[int, tuple[float, float]]]
"""(stage, kind) -> clock -> seconds and joules."""
WAITING_W = 85.0
HEADER = "stage,instruction,frequency,time,energy"
WORDS = {"F": "forward", "B": "backward"}
CLOCKS = tuple(range(1410, 899, -30))


@pytest.fixture(scope="module")
def cases(measured_data: Path) -> Path:
    folder = measured_data.parent / "cases" / "rows"
    if not folder.is_dir():
        pytest.skip(f"no cases: {folder} is not there")
    return folder


def made_rows(stages: int = 4) -> Table:
    """Return rows like those of an A100: 315 W at 1410 MHz, 165 W at 900 MHz."""
    rows: Table = {}
    for stage in range(stages):
        for kind, top_s in (("F", 0.06 + 0.002 * stage), ("B", 0.12 + 0.004 * stage)):
            rows[stage, kind] = {
                mhz: (top_s * (0.3 + 0.7 * 1410 / mhz), top_s * (65 + 250 * (mhz / 1410) ** 2))
                for mhz in CLOCKS
            }
    return rows


def write(rows: Table, path: Path = Path("p.csv"), column: str = "frequency") -> Path:
    lines = [HEADER.replace("frequency", column)]
    for (stage, kind), own in rows.items():
        word = WORDS[kind[0]] + kind[1:]
        lines += [f"{stage},{word},{mhz},{s!r},{j!r}" for mhz, (s, j) in own.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def scaled(rows: Table, keys: list[Key], *, time: float = 1.0, energy: float = 1.0) -> Table:
    """Return the rows with all times and energies of some computations multiplied."""
    return {
        key: {mhz: (s * time, j * energy) for mhz, (s, j) in own.items()} if key in keys else own
        for key, own in rows.items()
    }


def with_row(rows: Table, key: Key, mhz: int, row: tuple[float, float]) -> Table:
    return {**rows, key: {**rows[key], mhz: row}}


def refused(rows: Table, power_w: float = WAITING_W, column: str = "frequency") -> str:
    return refusal(ProfileError, Profile.load, write(rows, column=column), power_w)


CASES = {
    "energy_mJ": ("line 2, column 'energy'", "are these millijoules?"),
    "time_ms": ("line 2, column 'time'", "are these milliseconds?"),
    "zero_energy": ("line 7, column 'energy'", "the energy counter did not move in that time"),
    "frozen_stage0_nobackward": ("stage 0 has no backward", "give it a row of 0 s and 0 J"),
}


@pytest.mark.parametrize(("name", "texts"), CASES.items(), ids=CASES)
def test_a_case_that_failed_is_refused(cases: Path, name: str, texts: tuple[str, str]):
    message = refusal(ProfileError, Profile.load, cases / f"{name}.csv", WAITING_W)
    assert texts[0] in message
    assert texts[1] in message


def test_a_cut_case_is_read_and_said(cases: Path):
    profile = Profile.load(cases / "trunc_number.csv", WAITING_W)
    assert "the file ends inside this row" in profile.conditions[DOUBTS]
    assert any("the file ends inside this row" in remark for remark in profile.remarks)


def test_a_frozen_case_is_solved(cases: Path):
    profile = Profile.load(cases / "frozen_stage0_zero.csv", WAITING_W)
    assert not profile.has_work((0, "B"))
    assert solved(profile).plan_for(1e3, on_time=None).saving_j > 0


def solved(profile: Profile, microbatches: int = 4) -> Frontier:
    return solve(profile, generate_for_stages("1f1b", profile.stages, microbatches=microbatches))


ALL = list(made_rows())
BAD = {
    "millijoules": (scaled(made_rows(), ALL, energy=1e3), "are these millijoules?"),
    "microjoules": (scaled(made_rows(), ALL, energy=1e6), "are these microjoules?"),
    "milliseconds": (scaled(made_rows(), ALL, time=1e3), "are these milliseconds?"),
    "microseconds": (scaled(made_rows(), ALL, time=1e6), "are these microseconds?"),
    "kilojoules": (scaled(made_rows(), ALL, energy=1e-3), "kilojoules, or watt-hours?"),
    "watt-hours": (scaled(made_rows(), ALL, energy=1 / 3600), "kilojoules, or watt-hours?"),
    "one stage in millijoules": (
        scaled(made_rows(), [(2, "F"), (2, "B")], energy=1e3),
        "are these millijoules?",
    ),
    "one kind in milliseconds": (
        scaled(made_rows(), [key for key in ALL if key[1] == "B"], time=1e3),
        "are these milliseconds?",
    ),
    "a counter that stood still": (
        with_row(made_rows(), (1, "B"), 1200, (0.14, 0.0)),
        "the energy counter did not move in that time",
    ),
    "a counter that wrapped": (
        with_row(made_rows(), (1, "B"), 1200, (0.14, 4.0)),
        "did the counter stand still, or wrap?",
    ),
    "a counter that jumped": (
        with_row(made_rows(), (1, "B"), 1200, (0.14, 900.0)),
        "did the counter wrap?",
    ),
    "a counter that lost half": (
        with_row(made_rows(), (3, "F"), 1410, (0.066, 10.0)),
        "did the counter wrap, or is a digit wrong?",
    ),
    "a digit too few in a time": (
        with_row(made_rows(), (0, "F"), 1200, (0.0067, 17.0)),
        "did the counter wrap, or is a digit wrong?",
    ),
}


@pytest.mark.parametrize(("rows", "cause"), BAD.values(), ids=BAD)
def test_rows_that_cannot_be_true_are_refused(folder: Path, rows: Table, cause: str):
    message = refused(rows)
    assert message.startswith("p.csv, line ")
    assert cause in message


def test_the_wrong_row_is_named_and_not_its_neighbour(folder: Path):
    for mhz in (1410, 1380, 1140, 900):
        rows = with_row(made_rows(), (0, "B"), mhz, (0.13, 9.0))
        line = 2 + len(CLOCKS) + CLOCKS.index(mhz)
        assert refused(rows).startswith(f"p.csv, line {line}, ")


@pytest.mark.parametrize(
    ("unit", "cause"),
    [(1_000, "are these kHz?"), (1_000_000, "are these Hz?"), (10, "write whole")],
)
def test_clocks_of_another_unit_are_refused(folder: Path, unit: int, cause: str):
    rows = {key: {mhz * unit: row for mhz, row in own.items()} for key, own in made_rows().items()}
    message = refused(rows)
    assert message.startswith(f"p.csv, line 2, column 'frequency': {1410 * unit} MHz is no clock")
    assert cause in message


def test_clocks_in_ghz_are_asked_about(folder: Path):
    Path("p.csv").write_text(f"{HEADER}\n0,forward,1.41,0.06,18.9\n")
    assert refusal(ProfileError, Profile.load, "p.csv", 85.0).endswith("such as 1410; is it GHz?")


def test_a_clock_that_lost_a_digit_is_refused(folder: Path):
    rows = made_rows()
    own = dict(rows[1, "F"])
    own[141] = own.pop(1410)
    assert "is a digit wrong?" in refused({**rows, (1, "F"): own})


def test_power_limits_in_milliwatts_are_refused(folder: Path):
    rows = {
        key: {limit * 1000: (0.06 + 2 / limit, 18.0) for limit in (400, 350, 300)} for key in ALL
    }
    message = refused(rows, column="power_limit")
    assert "is no power limit of a GPU" in message
    assert message.endswith("are these milliwatts?")


def test_a_field_of_the_yaml_says_what_a_gpu_may_draw(folder: Path):
    rows = scaled(made_rows(), ALL, energy=4.0)  # 1260 W
    yaml = "format: perseus-planner/profile\nversion: 1\nmeasurements: p.csv\n"
    write(rows)
    Path("p.yaml").write_text(f"{yaml}blocking_power_w: 340.0\n")
    Profile.load("p.yaml")
    Path("p.yaml").write_text(f"{yaml}blocking_power_w: 340.0\ngpu: NVIDIA A100-SXM4-80GB\n")
    message = refusal(ProfileError, Profile.load, "p.yaml")
    assert message.startswith("p.csv, line 2, column 'energy': ")
    assert "1260 W for one GPU, which draws 600 W at most; is this the energy of several" in message
    Path("p.yaml").write_text(
        f"{yaml}blocking_power_w: 340.0\ngpu: NVIDIA A100-SXM4-80GB\ngpus_per_stage: 4\n"
    )
    assert Profile.load("p.yaml").gpus_per_stage == 4


def test_a_blocking_power_in_milliwatts_is_refused(folder: Path):
    write(made_rows())
    wrong = "85 kW for one GPU, which draws 3000 W at most; are these milliwatts?"
    assert refused(made_rows(), 85_000.0) == f"blocking_power_w: {wrong}"
    yaml = "format: perseus-planner/profile\nversion: 1\nmeasurements: p.csv\n"
    Path("p.yaml").write_text(f"{yaml}blocking_power_w: 85000.0\n")
    message = refusal(ProfileError, Profile.load, "p.yaml")
    assert message == f"p.yaml, line 4, blocking_power_w: {wrong}"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("\n", None),
        ("", "the file ends inside this row"),
        ("\r\n", None),
    ],
)
def test_a_last_row_without_its_end_is_said(folder: Path, end: str, said: str | None):
    text = write(made_rows(1)).read_text().removesuffix("\n")
    Path("p.csv").write_bytes((text + end).encode())
    doubts = Profile.load("p.csv", 85.0).conditions.get(DOUBTS)
    assert (doubts is None) if said is None else said in str(doubts)


@pytest.mark.parametrize("left", [3, 8, 12])
def test_a_last_row_that_is_cut_is_refused_as_such(folder: Path, left: int):
    text = write(made_rows(1)).read_text()
    last = text.splitlines()[-1]
    Path("p.csv").write_text(text.removesuffix(f"{last}\n") + last[:left])
    assert "the file ends inside this row" in refusal(ProfileError, Profile.load, "p.csv", 85.0)


# A kind without work.


@pytest.mark.parametrize(
    "idle", [[(0, "F"), (0, "B")], *soaks([(0, "B")], [(2, "F"), (2, "B")])], ids=str
)
def test_a_kind_without_work_is_solved_planned_and_written(folder: Path, idle: list[Key]):
    rows = made_rows() | {key: {1410: (0.0, 0.0)} for key in idle}
    profile = Profile.load(write(rows), WAITING_W)
    assert [row.clock_mhz for row in profile.measurements[idle[0]]] == list(CLOCKS)
    profile.save("again.yaml")
    assert Profile.load("again.yaml") == profile
    frontier = solved(profile)
    assert len(frontier.dag.points[idle[0]]) == 1
    for limits in ({"on_time": None}, {}, {"max_changes": 4}):
        plan = frontier.plan_for(frontier.baseline_time_s, **limits)
        assert plan.saving_j > 0.0
        assert plan.time_s <= plan.deadline_s
    # No clock is changed for what has no work.
    stage = idle[0][0]
    busy = [c for c in plan.schedule.ranks[stage] if (stage, c.kind) not in idle]
    if not busy:
        assert plan.changes[stage] == 0
    plan.save("plan.yaml")
    assert type(plan).load("plan.yaml").clocks == plan.clocks
    frontier.save("f.npz")
    assert type(frontier).load("f.npz").profile == profile


def test_clock_changes_that_cost_time_are_planned_around_a_kind_without_work(folder: Path):
    rows = made_rows() | {(0, "B"): {1410: (0.0, 0.0)}}
    profile = replace(Profile.load(write(rows), WAITING_W), clock_change=ClockChange(0.005, 0.003))
    frontier = solved(profile)
    plan = frontier.plan_for(frontier.baseline_time_s * 1.05, max_changes=4, on_time=None)
    assert plan.time_s <= plan.deadline_s


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ((0.0, 20.0), "is not a time"),
        ((0.0, 0.0), "takes 0 s at 1410 MHz and 0."),
    ],
)
def test_work_at_some_clocks_only_is_refused(folder: Path, row: tuple[float, float], problem: str):
    assert problem in refused(with_row(made_rows(), (0, "B"), 1410, row))


def test_a_stage_that_was_not_measured_at_full_clocks_is_said(folder: Path):
    rows = made_rows()
    rows[2, "F"] = {mhz: row for mhz, row in rows[2, "F"].items() if mhz <= 1260}
    frontier = solved(Profile.load(write(rows), WAITING_W))
    plan = frontier.plan_for(frontier.baseline_time_s, on_time=None)
    said = "Stage 2 forward was not measured above 1260 MHz, others up to 1410 MHz"
    assert said in frontier_text(summarize_frontier(frontier))
    assert said in plan_text(summarize_plan(plan))
    plan.save("plan.yaml")
    again = type(plan).load("plan.yaml")
    assert said in plan_text(summarize_timeline(again))
    assert again.baseline == "the highest measured clocks"
    assert "compared with the highest measured clocks" in plan_text(summarize_plan(again))
    full = solved(Profile.load(write(made_rows()), WAITING_W))
    assert full.baseline_plan.baseline == "all clocks at maximum"
    assert not full.baseline_plan.remarks


# Properties: what is changed by a factor is caught, and nothing else.


def simulated(seed: int) -> tuple[Profile, str]:
    """Return a profile of a drawn GPU, number of stages and model, with noise."""
    rng = random.Random(seed)
    name = rng.choice(sorted(CATALOG))
    model = CATALOG[name]
    gpus = rng.choice([1, 1, 1, 2, 8])
    every = list(model.clocks_mhz)
    lowest = rng.choice([0.15, 0.4, 0.6])
    usable = [mhz for mhz in every if mhz >= lowest * every[0]]
    step = max(1, len(usable) // rng.choice([4, 12, 40]))
    clocks = sorted({*usable[::step], every[0]}, reverse=True)
    noise = rng.choice([0.0, 0.003, 0.02])
    rows: dict[Key, tuple[Measurement, ...]] = {}
    for stage in range(rng.choice([1, 2, 4, 8])):
        size = rng.uniform(0.3, 3.0)
        bytes_share = rng.choice([0.0, 0.2, 0.6])  # of the time at the top clock
        for kind, work in (("F", 1.0), ("B", 2.0)):
            top_s = 0.1 * size * work
            cost = OpCost(
                flops=top_s * (1 - bytes_share) * model.flops_per_cycle * every[0] * 1e6,
                bytes=top_s * bytes_share * model.bytes_per_s * model.memory_share,
            )
            load = model.load(cost)
            rows[stage, kind] = tuple(
                Measurement(
                    mhz,
                    load.time_s(mhz) * rng.gauss(1, noise),
                    gpus * load.energy_j(mhz) * rng.gauss(1, noise),
                )
                for mhz in clocks
            )
    gpu = rng.choice([None, f"simulated {name}"])
    return Profile(rows, gpus * model.blocking_power_w, gpu=gpu, gpus_per_stage=gpus), name


@pytest.mark.parametrize("seed", [*range(10), *soaks(*range(10, 100))])
def test_no_simulated_profile_is_doubted(seed: int):
    profile, name = simulated(seed)
    assert profile.doubts() == [], name


@pytest.mark.parametrize("gpu", [None, "NVIDIA A100-SXM4-80GB"])
@pytest.mark.parametrize(
    ("name", "power_w"),
    [("gpt3-175b+a100_sxm_bf16.csv", 83.64), ("bloom+a40_bf16.csv", 70.38)],
)
def test_no_measured_profile_is_doubted(
    measured_data: Path, name: str, power_w: float, gpu: str | None
):
    profile = Profile.load(measured_data / "perseus_sosp24" / "stage_profile" / name, power_w)
    doubts = find_doubts(profile.measurements, profile.control, 1, profile.blocking_w, gpu)
    assert doubts == []
    assert not profile.remarks


FACTORS = (10.0, 11.7, 60.0, 1e3, 3600.0, 1e6)


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 99),
    column=st.sampled_from(["time", "energy", "clock"]),
    unit=st.sampled_from(["row", "kind", "stage", "computation", "all"]),
    factor=st.sampled_from(FACTORS),
    is_up=st.booleans(),
    place=st.integers(0, 2**30),
)
def test_whatever_is_changed_by_a_factor_is_caught(
    seed: int, column: str, unit: str, factor: float, is_up: bool, place: int
):
    profile, name = simulated(seed)
    changed = changed_profile(profile, column, unit, factor if is_up else 1 / factor, place)
    if changed is not None:
        assert changed.doubts(), (name, profile, changed)


def changed_profile(
    profile: Profile, column: str, unit: str, factor: float, place: int
) -> Profile | None:
    """Return the profile with one quantity of some rows changed; None if it is no profile then."""
    keys = list(profile.measurements)
    changed = keys[place % len(keys)]
    own = profile.measurements[changed]
    row = own[place % len(own)]

    def is_changed(key: Key, each: Measurement) -> bool:
        return {
            "row": key == changed and each is row,
            "computation": key == changed,
            "stage": key.stage == changed.stage,
            "kind": key.kind == changed.kind,
            "all": True,
        }[unit]

    if column == "clock" and unit not in ("row", "all"):
        return None
    rows: dict[Key, tuple[Measurement, ...]] = {}
    for key, of_key in profile.measurements.items():
        new = []
        for each in of_key:
            clock, time_s, energy_j = each.clock_mhz, each.time_s, each.energy_j
            if is_changed(key, each):
                time_s *= factor if column == "time" else 1.0
                energy_j *= factor if column == "energy" else 1.0
                scaled_clock = clock * factor if column == "clock" else float(clock)
                if round(scaled_clock) < 1:
                    return None  # refused before: it is not a whole number
                clock = round(scaled_clock)
            new.append(Measurement(clock, time_s, energy_j))
        if len({each.clock_mhz for each in new}) < len(new):
            return None  # refused before: a clock is there twice
        rows[key] = tuple(new)
    return Profile(
        rows, profile.blocking_power_w, gpu=profile.gpu, gpus_per_stage=profile.gpus_per_stage
    )


def test_limits_of_gpus_are_found_by_their_names():
    assert most_power_w("NVIDIA A100-SXM4-80GB") == 600.0
    assert most_power_w("NVIDIA A100 80GB PCIe") == 450.0
    assert most_power_w("NVIDIA GB200") == 1800.0
    assert most_power_w("NVIDIA X9000") == most_power_w(None) == 3000.0


def test_what_training_learnt_beside_other_work_is_said_and_not_refused(tmp_path: Path) -> None:
    """A state that the autopilot wrote is read again, whatever noise its rows have."""
    measured = smooth_profile(2)
    rows = dict(measured.measurements)
    first, second, *others = measured.measurements[0, "F"]
    slower = replace(second, time_s=2.0 * second.time_s, energy_j=2.0 * second.energy_j)
    rows[0, "F"] = (first, slower, *others)
    learnt = replace(measured, measurements=rows, conditions={"learnt": "while training"})
    learnt.save(tmp_path / "learnt.yaml")
    doubts = Profile.load(tmp_path / "learnt.yaml").conditions["doubts"]
    assert "do not go with" in doubts
    replace(learnt, conditions={}).save(tmp_path / "measured.yaml")
    with pytest.raises(ProfileError, match="do not go with"):
        Profile.load(tmp_path / "measured.yaml")


@settings(max_examples=60)
@given(factors=st.lists(st.floats(0.3, 1.1), min_size=6, max_size=6))
@example(factors=[0.7, 0.9, 1.0, 0.65, 0.62, 0.42])  # the last row is wrong, its neighbour fits it
def test_a_row_that_jumps_is_shown_beside_one_that_it_does_not_go_with(factors: list[float]):
    measured = smooth_profile(2).measurements
    rows = measured[0, "F"][:6]
    changed = tuple(
        replace(row, time_s=factor * row.time_s, energy_j=factor * row.energy_j)
        for row, factor in zip(rows, factors, strict=True)
    )
    jumps = [
        re.search(r" at (\d+) MHz do not go with .* at (\d+) MHz;", doubt.problem)
        for doubt in find_doubts({**measured, (0, "F"): changed}, "clock", 1, lambda _: 83.64)
    ]
    assert all(said[1] != said[2] for said in jumps if said is not None)
