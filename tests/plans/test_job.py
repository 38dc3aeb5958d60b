"""A job file means the same as the options and the Python calls that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from strategies import smooth_profile

from perseus_planner import Profile, schedules
from perseus_planner.base.file_kinds import kind_of
from perseus_planner.plans.job import Job, ReplicaSettings, Settings, read_settings
from perseus_planner.profiles.groups import on_each_gpu, slowed, stage_by_stage, tensor_group
from perseus_planner.profiles.measurement import ClockChange, Measurement
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.pipeline import FixedOperation, Transfer, Variant

FOUR = smooth_profile(4, step_mhz=150)
PLAIN = {"profile": "four.yaml", "schedule": "1f1b", "microbatches": 6}


def one_stage(scale: float, power_w: float = 70.0) -> Profile:
    """A profile of a single stage, of a GPU that is `scale` times as slow."""
    rows = {
        kind: tuple(
            Measurement(m.clock_mhz, scale * m.time_s, m.energy_j)
            for m in FOUR.measurements[0, kind]
        )
        for kind in "FB"
    }
    return Profile({(0, kind): points for kind, points in rows.items()}, power_w, gpu="other")


@pytest.fixture
def work(folder: Path) -> Path:
    """A working folder with profiles and, in another folder, room for a job file."""
    FOUR.save("four.yaml")
    on_each_gpu(FOUR, 2).save("pair.yaml")
    smooth_profile(8, step_mhz=150).save("eight.yaml")
    for name, scale in (("fast", 1.0), ("slow", 1.3)):
        one_stage(scale).save(f"{name}.yaml")
    (folder / "jobs").mkdir()
    return folder


def write(path: str = "job.yaml", **keys: Any) -> str:
    text = yaml.safe_dump({"format": "perseus-planner/job", "version": 1, **keys}, sort_keys=False)
    Path(path).write_text(text)
    return path


def only(job: Job) -> PipelineDag:
    (dag,) = job.dags()
    return dag


def plain(profile: Profile = FOUR, microbatches: int = 6, **extras: Any) -> PipelineDag:
    return PipelineDag.from_schedule(
        profile, schedules.one_f_one_b(profile.stages, microbatches), **extras
    )


def test_profile_schedule_and_microbatches_are_a_job(work: Path):
    job = Job.load(write(**PLAIN))
    assert (job.schedule, job.counts) == (schedules.one_f_one_b(4, 6), (1,))
    assert only(job) == plain()


SYNCED = Profile(
    {**FOUR.measurements, **{(s, "B.sync"): FOUR.measurements[s, "B"][:2] for s in range(4)}}, 83.64
)
KEYS: dict[str, tuple[dict[str, Any], Callable[[], PipelineDag]]] = {
    "blocking power": (
        {"blocking_power_w": 50},
        lambda: plain(replace(FOUR, blocking_power_w=50.0)),
    ),
    "blocking power of each stage": (
        {"blocking_power_w": [50, 51, 52, 53]},
        lambda: plain(replace(FOUR, blocking_power_w=(50.0, 51.0, 52.0, 53.0))),
    ),
    "tensor parallel": ({"tensor_parallel": 4}, lambda: plain(on_each_gpu(FOUR, 4))),
    "tensor parallel, as measured": (
        {"profile": "pair.yaml", "tensor_parallel": 2},
        lambda: plain(on_each_gpu(FOUR, 2)),
    ),
    "transfer": (
        {"transfer": {"forward_s": 0.002, "backward_s": [0.001, 0.002, 0.003]}},
        lambda: plain(transfer=Transfer(0.002, (0.001, 0.002, 0.003))),
    ),
    "operations": (
        {
            "operations": [
                {"name": "load", "when": "before F", "time_s": 0.002, "where": [0]},
                {"name": "optimizer", "when": "end", "time_s": 0.05, "energy_j": 3},
            ]
        },
        lambda: plain(
            operations=[
                FixedOperation("load", "before F", 0.002, None, (0,)),
                FixedOperation("optimizer", "end", 0.05, 3.0),
            ]
        ),
    ),
    "slow stages": (
        {"slow_stages": {1: 1.15, 3: 2}},
        lambda: plain(slowed(FOUR, {1: 1.15, 3: 2.0})),
    ),
    "jitter": ({"jitter": 0.03}, lambda: plain(replace(FOUR, jitter=0.03))),
    "overhead": ({"overhead_s": -0.05}, lambda: plain(replace(FOUR, overhead_s=-0.05))),
    "clock change": (
        {"clock_change": {"call_s": 0.006, "gpus_per_node": 2}},
        lambda: plain(replace(FOUR, clock_change=ClockChange(0.006, 0.0, 2))),
    ),
    "variants": (
        {
            "profile": "synced.yaml",
            "variants": [
                {"kind": "B.sync", "microbatches": "last"},
                {"kind": "B.sync", "microbatches": [0, 2], "stages": [1]},
            ],
        },
        lambda: plain(
            SYNCED, variants=[Variant("B.sync", "last"), Variant("B.sync", (0, 2), (1,))]
        ),
    ),
    "a profile for each stage": (
        {"profile": ["fast.yaml", "slow.yaml", "fast.yaml"], "blocking_power_w": [60, 61, 62]},
        lambda: plain(
            stage_by_stage([one_stage(1.0, 60.0), one_stage(1.3, 61.0), one_stage(1.0, 62.0)])
        ),
    ),
    "a profile for each GPU": (
        {"profile": [["fast.yaml", "slow.yaml"], ["fast.yaml", "fast.yaml"]], "tensor_parallel": 2},
        lambda: plain(
            stage_by_stage(
                [tensor_group([one_stage(1.0), one_stage(1.3)]), on_each_gpu(one_stage(1.0), 2)]
            )
        ),
    ),
}


@pytest.mark.parametrize(("keys", "wanted"), KEYS.values(), ids=KEYS)
def test_each_key_is_the_call_that_it_stands_for(
    work: Path, keys: dict[str, Any], wanted: Callable[[], PipelineDag]
):
    SYNCED.save("synced.yaml")
    dag, expected = only(Job.load(write(**{**PLAIN, **keys}))), wanted()
    assert (dag, dag.profile.digest) == (expected, expected.profile.digest)
    assert dag != plain()


def test_paths_are_relative_to_the_job_file(work: Path, monkeypatch: pytest.MonkeyPatch):
    schedules.save_grid(schedules.gpipe(4, 3), "jobs/order.csv")
    write("jobs/job.yaml", profile="../four.yaml", schedule="order.csv")
    monkeypatch.chdir("/")
    job = Job.load(work / "jobs" / "job.yaml")
    assert job.schedule.ranks == schedules.gpipe(4, 3).ranks
    assert [path.resolve() for path in job.files] == [
        work / name for name in ("jobs/job.yaml", "jobs/order.csv", "four.yaml")
    ]


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"schedule": "zb-h1"}, lambda: schedules.zb_h1(4, 8)),
        ({"schedule": "zbv"}, lambda: schedules.zbv(2, 8)),
        ({"schedule": "interleaved-1f1b", "ranks": 2}, lambda: schedules.interleaved_1f1b(2, 2, 8)),
        (
            {"schedule": "interleaved-1f1b", "virtual_stages": 2},
            lambda: schedules.interleaved_1f1b(2, 2, 8),
        ),
        (
            {"schedule": "interleaved-1f1b", "virtual_stages": 2, "ranks": 2, "stages": 4},
            lambda: schedules.interleaved_1f1b(2, 2, 8),
        ),
        ({"schedule": "gpipe", "stages": 4}, lambda: schedules.gpipe(4, 8)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_ranks_follow_from_the_stages_of_the_profile(
    work: Path, keys: dict[str, Any], wanted: Callable[[], schedules.Schedule]
):
    assert Job.load(write(**{**PLAIN, "microbatches": 8, **keys})).schedule == wanted()


def test_a_number_of_replicas_is_one_kind_of_pipeline(work: Path):
    job = Job.load(write(**PLAIN, replicas=16))
    assert (job.counts, only(job)) == ((16,), plain())


def test_replicas_that_are_alike_are_one_kind_and_their_own_keys_win(work: Path):
    FOUR.save("same.yaml")
    entries = [
        {"count": 2},
        {"count": 1, "slow_stages": {0: 1.5}},
        {"count": 1, "profile": "same.yaml"},
        {"count": 4, "blocking_power_w": 40, "slow_stages": {}},
    ]
    job = Job.load(write(**PLAIN, slow_stages={3: 1.1}, replicas=entries))
    wanted = (slowed(FOUR, {3: 1.1}), slowed(FOUR, {0: 1.5}), replace(FOUR, blocking_power_w=40.0))
    assert (job.counts, job.profiles) == ((3, 1, 4), wanted)
    assert [dag.profile for dag in job.dags()] == list(wanted)


def test_a_python_argument_replaces_a_key(work: Path):
    path = write(**PLAIN, slow_stages={3: 1.1}, stages=4)
    assert Job.load(path, microbatches=2, slow_stages={}).dags() == (plain(microbatches=2),)


def test_settings_need_no_file(work: Path):
    settings = Settings(
        profile=Path("four.yaml"), schedule="1f1b", microbatches=6, replicas=(ReplicaSettings(2),)
    )
    assert Job.of(settings) == Job.load(write(**PLAIN, replicas=2))


def test_the_format_of_a_file_tells_a_job_from_a_profile(work: Path):
    write(**PLAIN)
    assert kind_of(Path("job.yaml")) == "job"
    for name in ("four.yaml", "four.csv"):
        assert kind_of(Path(name)) == "profile"


def test_reading_settings_reads_nothing_that_they_name(folder: Path):
    settings = read_settings(Path(write(profile="absent.yaml", schedule="absent.csv")))
    assert (settings.profile, settings.schedule) == (Path("absent.yaml"), Path("absent.csv"))
