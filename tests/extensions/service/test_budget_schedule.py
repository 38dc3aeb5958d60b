"""Power budgets in time: their file, and the service that follows them by its clock."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path

import pytest
from services import NOW_S, PIPELINES, Clock, at_once, frontier_file, job, planned

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.service.commands import read_budgets, replaced
from perseus_planner.extensions.service.models import PowerRequest, PowerStep, split_at
from perseus_planner.extensions.service.service import Service
from perseus_planner.extensions.service.store import Storage


def written(folder: Path, text: str) -> Path:
    (folder / "b.csv").write_text(text)
    return folder / "b.csv"


def test_a_file_has_powers_or_a_signal_and_a_target(tmp_path: Path):
    at_s = datetime(2026, 11, 22, 17, tzinfo=timezone.utc).timestamp()
    powers = read_budgets(
        written(tmp_path, "start,power\n# night\n7,500\n2026-11-22T18:00+01:00,30kW\n1.8e9,none\n")
    )
    assert powers == (PowerStep(7.0, 500.0), PowerStep(at_s, 30000.0), PowerStep(1.8e9, None))
    assert read_budgets(
        written(tmp_path, "price,start\n0.1,2026-11-22T17:00Z\n-0.02,1.8e9\n"), 4.0
    ) == (
        PowerStep(at_s, 40000.0),
        PowerStep(1.8e9, None),  # energy that costs nothing needs no budget
    )
    assert read_budgets(written(tmp_path, "start,carbon\n0,250\n"), 10.0) == (
        PowerStep(0.0, 40000.0),
    )
    assert split_at(powers, 6.0) == (None, powers)
    assert split_at(powers, at_s) == (powers[1], powers[2:])


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        (
            "",
            None,
            "{b}: has the columns of no header; write start and one of power, price and carbon",
        ),
        (
            "start,watts\n",
            None,
            "{b}, line 1: has the columns start, watts; write start and one of power, price and",
        ),
        (
            "start,price,carbon\n",
            1.0,
            "{b}, line 1: has the columns start, price, carbon; write start and one of",
        ),
        (
            "start,power\n",
            None,
            "{b}: has no row; write one for each budget, such as 2026-11-22T18:00,30kW",
        ),
        ("start,power\n5,1kW\n6\n", None, "{b}, line 3: has 1 cells where the header has 2"),
        (
            "start,power\nnoon,1kW\n",
            None,
            "{b}, line 2, column 'start': 'noon' is not a moment: write such as 2026-",
        ),
        (
            "start,power\n5,1kW\n5,2kW\n",
            None,
            "{b}, line 3, column 'start': '5' is not after the row before; sort",
        ),
        (
            "start,power\n5,-1\n",
            None,
            "{b}, line 2, column 'power': '-1' is not a power: write watts above 0, or a",
        ),
        (
            "start,price\n5,cheap\n",
            1.0,
            "{b}, line 2, column 'price': 'cheap' is not a price: write money for a kWh",
        ),
        (
            "start,carbon\n5,200\n",
            None,
            "--target: give what an hour may cost, for carbon, as {b} has the column",
        ),
        (
            "start,power\n5,200\n",
            1.0,
            "--target: do not give one for powers, as {b} has the column 'power'",
        ),
    ],
)
def test_a_bad_file_is_one_error_with_line_and_column(
    text: str, target: float | None, message: str, tmp_path: Path
):
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as raised:
        read_budgets(path, target)
    assert str(raised.value).startswith(message.format(b=path))
    assert "\n" not in str(raised.value)


def test_a_file_that_is_replaced_is_seen_once_each_time(tmp_path: Path):
    path, looks = written(tmp_path, "start,power\n0,1kW\n"), iter(range(9))
    edits = {2: "start,power\n0,2kW\n", 5: "start,power\n0,30kW\n"}

    def wait() -> None:
        look = next(looks)
        if look == 1:
            path.rename(tmp_path / "aside")  # gone for a moment
        if look in edits:
            (tmp_path / "new").write_text(edits[look])
            os.replace(tmp_path / "new", path)

    changes = replaced(path, wait)
    for text in edits.values():
        next(changes)
        assert path.read_text() == text
    with pytest.raises(RuntimeError):  # nothing is seen until the looks are over
        next(changes)


def test_the_service_follows_a_schedule_by_its_clock_also_after_a_restart(tmp_path: Path):
    clock = Clock()

    def service_of(storage: Storage) -> Service:
        return Service(storage, now_s=clock, run=at_once)

    with Storage(tmp_path / "db") as storage, service_of(storage) as service:
        service.register(job(), frontier_file())
        full_w = service.status("gpt").expected.power_w
        steps = (
            PowerStep(NOW_S + 10, 0.9 * full_w),
            PowerStep(NOW_S + 20, 1.0),
            PowerStep(NOW_S + 30, None),
        )
        service.set_power("gpt", None, steps).result()
        service.set_power(None, 2 * full_w, (PowerStep(NOW_S + 25, 3 * full_w),)).result()
        planned(service)
        status = service.status("gpt")
        assert (status.job.power_w, status.job.next_power) == (None, steps[0])
        assert service.tick() == service.next_tick_s() == NOW_S + 10
        clock.now_s += 10
        assert service.tick() == NOW_S + 20
        planned(service)
        within = service.status("gpt")
        assert (within.job.power_w, within.job.next_power) == (0.9 * full_w, steps[1])
        assert within.expected.power_w <= 0.9 * full_w
        assert within.version > status.version
    clock.now_s += 10
    with Storage(tmp_path / "db") as storage, service_of(storage) as service:
        assert service.tick() == NOW_S + 25
        planned(service)
        least = service.status("gpt")
        assert least.job.power_w is not None
        assert (
            1.0 < least.job.power_w < 0.9 * full_w
        )  # 1 W cannot be met, so that it is the least that can
        assert service.power_budget.schedule == (PowerStep(NOW_S + 25, 3 * full_w),)
        clock.now_s += 5
        service.tick()
        assert (service.power_budget.power_w, service.power_budget.schedule) == (3 * full_w, ())
        service.set_power("gpt", 0.95 * full_w).result()  # by hand, which ends the schedule
        clock.now_s += 100
        service.tick()
        assert (service.status("gpt").job.power_w, service.status("gpt").job.next_power) == (
            0.95 * full_w,
            None,
        )
        assert len(service.pipelines("gpt")[1]) == PIPELINES


def test_a_schedule_out_of_order_is_refused():
    with pytest.raises(UsageError, match=r"^schedule: 5 is not after 5; sort its moments$"):
        PowerRequest(None, (PowerStep(5.0, 1.0), PowerStep(5.0, 2.0)))
