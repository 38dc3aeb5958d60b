"""The clock controller as ranks see it: the real process, with the stand-in NVML library and
simulated GPUs.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from controller_ranks import (
    LONG_S,
    attached,
    awaited,
    eventually,
    has_ended,
    let_look,
    locked,
    process_of,
    served,
    set_clock,
)
from fake_nvml import UUIDS, StandIn
from gpu_owners import files

from perseus_planner.base.errors import (
    ControllerLost,
    GpuError,
    GpuInUse,
    GpuNotPermitted,
    GpuNotSupported,
)
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus
from perseus_planner.runtime.controller import rank
from perseus_planner.runtime.controller.client import Connection, start_controller
from perseus_planner.runtime.controller.protocol import (
    AttachRequest,
    ClockOverridden,
    ControlChange,
    ControlFailure,
    GpuSample,
    Overload,
    ToRank,
)
from perseus_planner.runtime.marks import NO_REQUEST, clock_request
from perseus_planner.runtime.modes import memory_modes

SIMULATED = "simulated:a100-sxm"


@pytest.fixture
def state(nvml: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv(
        "PYTHONPATH", str(Path(__file__).parents[1] / "support")
    )  # for ranks in other processes
    return tmp_path / "state"


def clocks_set(nvml: StandIn, gpu: int) -> list[int]:
    """Return the clock of each call that set a GPU; 0 for resets."""
    return [
        each.high for each in nvml.settings() if each.gpu == gpu and "LockedClocks" in each.function
    ]


def test_every_gpu_is_set_to_what_its_rank_asks_for_and_reset_when_it_leaves(
    nvml: StandIn, state: Path
):
    nvml.set("latency_us_nvmlDeviceSetGpuLockedClocks", 3000)
    with attached(["nvml:0", "nvml:1"]) as (first, second):
        process = process_of(first)
        changed = set_clock(first, 1200)
        assert (changed.position, changed.before_mhz) == (0, 1980)
        assert changed.seen_ns <= changed.begun_ns <= changed.ended_ns - 3_000_000
        assert set_clock(second, 900, place=7).position == 7
        assert set_clock(first, 1005, place=1).before_mhz == 1200
        assert locked(nvml) == [1005, 900]
        assert len(files(state)) == 2
        first.request[0] = NO_REQUEST
        assert awaited(first, ControlChange).value == 0
        assert locked(nvml) == [None, 900]
        set_clock(first, 1500)
        assert first.detach(LONG_S) is None
        assert locked(nvml) == [None, 900]
        assert second.detach(LONG_S) is None
        assert locked(nvml) == [None, None]
        assert files(state) == []
        eventually(lambda: has_ended(process))


def test_a_value_that_is_set_already_is_not_set_again(nvml: StandIn, state: Path):
    with attached(["nvml:0"]) as (connection,):
        before = len(clocks_set(nvml, 0))
        set_clock(connection, 1200, place=0)
        for place in (1, 2, 3, 0):
            connection.request[0] = clock_request(place, 1200)
            let_look(connection)
        set_clock(connection, 900, place=1)
        assert clocks_set(nvml, 0)[before:] == [1200, 900]


def test_a_gpu_whose_clock_another_program_sets_is_told(
    nvml: StandIn, state: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rank, "_SETTLED_NS", 0)
    with served("nvml:0") as connection:
        nvml.set("clock_mhz", 1980)  # whatever the controller sets
        for place, clock in enumerate((900, 1005, 900)):
            set_clock(connection, clock, place)
        connection.request[0] = clock_request(3, 1005)
        found = awaited(connection, ClockOverridden)
        assert (found.clock, found.text.partition(", so")[0]) == (
            "SM",
            "this GPU ran at 1980 MHz where 900 MHz was set",
        )


def test_a_dry_run_accuses_no_other_program(
    nvml: StandIn, state: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rank, "_SETTLED_NS", 0)
    with served("dry-run:nvml:0") as connection:
        nvml.set("clock_mhz", 1980)  # full clocks, as nothing is set
        came: list[object] = []
        for place, clock in enumerate((900, 1005) * 3):
            set_clock(connection, clock, place)
            came.extend(connection.messages())
        assert not [each for each in came if isinstance(each, ClockOverridden)]


def test_a_memory_clock_that_another_program_has_locked_is_told(nvml: StandIn, state: Path):
    nvml.set("memory_mhz", 1593)
    with served("nvml:0") as connection:
        found = awaited(connection, ClockOverridden)
        assert found.clock == "memory"
        assert found.text.startswith(f"nvml:{UUIDS[0]}: the memory clock is 1593 MHz and not 2619")
    with memory_modes("nvml:1", 1593) as modes, served("nvml:1") as connection:
        modes["mem-1593"]()
        came: list[object] = []

        def has_begun(iterations: int) -> bool:
            came.extend(connection.messages())
            return sum(isinstance(each, GpuSample) for each in came) > iterations

        for iteration in range(3):
            for place in (1, 0):
                connection.request[0] = clock_request(place, 900)
                let_look(connection)
            eventually(lambda: has_begun(iteration))  # noqa: B023 - called before the next
        assert not [each for each in came if isinstance(each, ClockOverridden)]


def test_the_rate_is_of_all_gpus_together(nvml: StandIn, state: Path):
    with attached(["nvml:0", "nvml:1"], max_changes_per_s=10.0) as (first, second):
        begin_ns = time.monotonic_ns()
        changes = [
            set_clock(each, clock) for clock in (1200, 900, 1500) for each in (first, second)
        ]
        assert (
            changes[-1].begun_ns - begin_ns >= 400_000_000
        )  # all but one for each GPU have to wait for their turn


def test_a_power_limit_is_set_and_put_back_to_what_it_was(nvml: StandIn, state: Path):
    with open_gpu("nvml:0") as gpu:
        gpu.set_power_limit_w(500.0)
    with attached(["nvml:0"], control="power-limit") as (connection,):
        set_clock(connection, 300)
        assert nvml.limit_w(0) == 300.0
        connection.request[0] = NO_REQUEST
        awaited(connection, ControlChange)
        assert nvml.limit_w(0) == 500.0
        set_clock(connection, 250)
        assert connection.detach(LONG_S) is None
        assert nvml.limit_w(0) == 500.0
        assert nvml.locked_mhz(0) is None


def test_readings_come_at_the_start_of_every_iteration_and_at_the_end(nvml: StandIn, state: Path):
    nvml.set("temperature_c", 61)
    nvml.fail("nvmlDeviceGetPowerUsage", 3)
    nvml.set("field_186_0 error", 3)
    with attached(["nvml:0"]) as (connection,):
        first = awaited(connection, GpuSample)
        set_clock(connection, 1200, place=0)
        set_clock(connection, 900, place=1)
        connection.request[0] = clock_request(0, 1200)
        second = awaited(connection, GpuSample)
        connection.detach(LONG_S)
        (last,) = [message for message in connection.messages() if isinstance(message, GpuSample)]
    assert first.now_ns < second.now_ns < last.now_ns
    assert first.energy_j < second.energy_j < last.energy_j
    assert second.seen_ns <= second.now_ns
    assert (last.temperature_c, last.clock_mhz, last.overtaken, last.dropped) == (61.0, 1200, 0, 0)


def test_a_reading_that_the_gpu_does_not_offer_is_none():
    faults = "&".join(
        f"fault=not-supported:{what}" for what in ("energy", "power", "temperature", "throttle")
    )
    with attached([f"{SIMULATED}?{faults}"]) as (connection,):
        reading = awaited(connection, GpuSample)
    assert (reading.energy_j, reading.power_w, reading.temperature_c, reading.throttled_s) == (
        None,
        None,
        None,
        {},
    )
    assert reading.clock_mhz == 210


@pytest.mark.parametrize(("gpu", "control"), [("dry-run:nvml:0", "clock"), ("nvml:0", "observed")])
def test_without_privilege_a_gpu_can_be_watched_and_nothing_is_set(
    nvml: StandIn, state: Path, gpu: str, control
):
    for function in ("SetGpuLockedClocks", "ResetGpuLockedClocks", "SetPowerManagementLimit"):
        nvml.fail(f"nvmlDevice{function}", 4)
    with attached([gpu], control=control) as (connection,):
        first = awaited(connection, GpuSample)
        for place in (0, 1, 0):
            connection.request[0] = clock_request(place, 1500)
            let_look(connection)
        second = awaited(connection, GpuSample)
        assert second.energy_j > first.energy_j
        if control == "clock":
            assert set_clock(connection, 1200, place=1).before_mhz == 1980
        assert connection.detach(LONG_S) is None
    assert nvml.settings() == []
    assert files(state) == []


def test_a_gpu_of_another_job_is_refused(nvml: StandIn, state: Path):
    with open_gpu("nvml:0") as gpu, lease_gpus([gpu]):
        gpu.set_clock_mhz(1500)
        with pytest.raises(GpuInUse, match="leased to process"), attached(["nvml:0"]):
            pytest.fail("not to be reached")
        assert nvml.locked_mhz(0) == (1500, 1500)


def test_a_second_controller_is_refused_what_the_first_one_has(nvml: StandIn, state: Path):
    with attached(["nvml:0"]) as (connection,):
        set_clock(connection, 1200)
        with (
            pytest.raises(GpuInUse, match=r"perseus_planner\.runtime\.controller"),
            attached(["nvml:0"]),
        ):
            pytest.fail("not to be reached")
        assert nvml.locked_mhz(0) == (1200, 1200)
        set_clock(connection, 900)


def test_ranks_that_share_a_gpu_are_refused_in_terms_of_ranks(nvml: StandIn, state: Path):
    address = start_controller(3, 100.0, LONG_S)
    with ExitStack() as stack:
        gpus = ("nvml:0", "nvml:1", "nvml:0")
        ranks = [
            stack.enter_context(Connection(address, AttachRequest(rank, gpu, "clock", None)))
            for rank, gpu in enumerate(gpus)
        ]
        for rank in (0, 2):
            with pytest.raises(
                GpuInUse,
                match=r"^ranks 0, 2 have the same GPU, GPU-1.*name another GPU for each rank",
            ):
                ranks[rank].attach(LONG_S)
        ranks[1].attach(LONG_S)
        set_clock(ranks[1], 1200)
        assert locked(nvml) == [None, 1200]


@pytest.mark.parametrize(
    ("gpu", "kind"),
    [
        (f"{SIMULATED}?fault=not-permitted", GpuNotPermitted),
        (f"{SIMULATED}?fault=not-supported:power-limit", GpuNotSupported),
        ("simulated:none", GpuError),
    ],
)
def test_a_gpu_that_cannot_be_had_is_refused_with_its_error(gpu: str, kind: type[GpuError]):
    with pytest.raises(GpuError) as caught, attached([gpu], control="power-limit"):
        pytest.fail("not to be reached")
    assert type(caught.value) is kind


def test_a_gpu_that_may_not_be_set_is_refused(nvml: StandIn, state: Path):
    nvml.fail("nvmlDeviceResetGpuLockedClocks", 4)
    with pytest.raises(GpuNotPermitted, match="setting needs root"), attached(["nvml:0"]):
        pytest.fail("not to be reached")
    assert files(state) == []


def test_one_rank_whose_gpu_cannot_be_opened_does_not_keep_the_others_from_theirs(
    nvml: StandIn, state: Path
):
    address = start_controller(2, 100.0, LONG_S)
    with (
        Connection(address, AttachRequest(0, "nvml:9", "clock", None)) as first,
        Connection(address, AttachRequest(1, "nvml:1", "clock", None)) as second,
    ):
        second.attach(LONG_S)
        with pytest.raises(GpuError, match="nvml:9"):
            first.attach(LONG_S)
        set_clock(second, 1200)
        with pytest.raises(ControllerLost):
            first.messages()


def test_a_gpu_failure_is_reported_once_and_the_others_go_on(nvml: StandIn, state: Path):
    with attached(["nvml:0", "nvml:1"]) as (first, second):
        set_clock(first, 1200)
        nvml.fail("nvmlDeviceSetGpuLockedClocks", 999, gpu=0)
        first.request[0] = clock_request(1, 900)
        failed = awaited(first, ControlFailure)
        assert "lock its SM clock at 900 MHz" in failed.text
        assert locked(nvml) == [None, None]
        nvml.heal()
        first.request[0] = clock_request(2, 1500)
        set_clock(second, 1005)
        set_clock(second, 1200, place=1)
        assert locked(nvml) == [None, 1200]
        assert first.messages() == []
        assert first.detach(LONG_S) is None


def test_a_lost_gpu_is_reported_with_the_failed_reset():
    with attached([f"{SIMULATED}?fault=lost@40calls", SIMULATED]) as (first, second):
        for place in range(40):
            first.request[0] = clock_request(place, 1200 + 15 * (place % 3))
            set_clock(second, 1200 + 15 * (place % 3), place)
        failed = awaited(first, ControlFailure)
        assert failed.text.count("is lost") == 2
        assert "; and it could not be reset: " in failed.text
        assert "is lost" in first.detach(LONG_S)
        set_clock(second, 900)


def test_a_clock_that_the_gpu_does_not_have_is_a_failure():
    with attached([SIMULATED]) as (connection,):
        connection.request[0] = clock_request(0, 1201)
        assert "the nearest supported clock is 1200 MHz" in awaited(connection, ControlFailure).text


def test_a_rank_whose_plan_is_too_fast_for_its_node_is_told_how_many_changes_can_be_made(
    nvml: StandIn, state: Path
):
    with attached(["nvml:0", "nvml:1"], max_changes_per_s=2.0) as (first, second):
        set_clock(second, 1200)
        told: list[ToRank] = []
        place = 0
        while not told:
            first.request[0] = clock_request(place % 4, 900 + 15 * (place % 2))
            place += 1
            told = [
                message
                for message in first.messages()
                if isinstance(message, Overload | ControlFailure)
            ]
        assert isinstance(told[0], Overload)
        assert told[0].kept in (0, 1)  # less than half of the four of this iteration
        assert locked(nvml)[0] in (900, 915)
        assert first.detach(LONG_S) is None
        last = [message for message in first.messages() if isinstance(message, GpuSample)][-1]
        assert last.overtaken > 32


def test_a_gpu_that_has_one_clock_and_cannot_be_set_in_time_is_given_up(nvml: StandIn, state: Path):
    with attached(["nvml:0", "nvml:1"], max_changes_per_s=2.0) as (first, second):
        set_clock(second, 1200)
        failed: list[ControlFailure] = []
        while not failed:
            for request in (clock_request(0, 900), NO_REQUEST):  # as in iterations that deviate
                first.request[0] = request
                failed += [
                    message for message in first.messages() if isinstance(message, ControlFailure)
                ]
        assert failed[0].text == (
            "GPU nvml:0: more than half of the last 64 changes of its clock were requested before "
            "the previous one had been made, although its iterations have one clock; allow more "
            "changes per second"
        )
        assert locked(nvml) == [None, 1200]
        assert first.detach(LONG_S) is None
        last = [message for message in first.messages() if isinstance(message, GpuSample)][-1]
        assert last.overtaken > 32
