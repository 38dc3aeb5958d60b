"""The energy of a host is right however often its counters begin again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_planner import Monitor
from perseus_planner.base.errors import GpuError, GpuNotSupported
from perseus_planner.gpu.host import MOST_W, HostCounter, host_counters

RANGE_UJ = 262_143_328_850  #: of common Xeons


class Zone:
    """A zone of powercap in a folder, and the clock by which it is read."""

    def __init__(
        self, folder: Path, range_uj: int | None = RANGE_UJ, name: str = "package-0"
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.range_uj = range_uj or RANGE_UJ
        self.now_s = 0.0
        self._used_uj = 0
        (folder / "name").write_text(f"{name}\n")
        if range_uj is not None:
            (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
        self.use(0.0, 0.0)

    def use(self, time_s: float, power_w: float) -> None:
        self.now_s += time_s
        self._used_uj += int(1e6 * time_s * power_w)
        (self.folder / "energy_uj").write_text(f"{self._used_uj % self.range_uj}\n")

    def counter(self, monkeypatch: pytest.MonkeyPatch) -> HostCounter:
        monkeypatch.setattr(HostCounter, "now_s", lambda _: self.now_s)
        return HostCounter("cpu", [self.folder])


Spans = st.lists(st.tuples(st.floats(1.0, 5000.0), st.floats(0.0, MOST_W)), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(Spans, st.sampled_from([RANGE_UJ, 65_532_610_987]))
def test_any_number_of_turns_is_counted(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[float, float]], range_uj: int
):
    with pytest.MonkeyPatch.context() as monkeypatch:
        zone = Zone(tmp_path_factory.mktemp("powercap") / "intel-rapl:0", range_uj)
        counter = zone.counter(monkeypatch)
        begin_j = counter.energy_j()
        used_j = 0.0
        for long_s, power_w in spans:
            left_s = long_s
            while left_s > 0:
                step_s = min(left_s, counter.period_s)
                zone.use(step_s, power_w)
                used_j += step_s * power_w
                counter.energy_j()  # what the background does
                left_s -= step_s
        assert counter.unread_until_s is None
        assert counter.energy_j() - begin_j == pytest.approx(used_j, abs=1e-6 * 1e3, rel=1e-9)


def test_three_turns_are_not_fifteen_joules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    zone = Zone(tmp_path / "intel-rapl:0")
    counter = zone.counter(monkeypatch)
    begin_j = counter.energy_j()
    for _ in range(3):
        for _ in range(100):
            zone.use(RANGE_UJ / 1e6 / 250 / 100, 250)
            counter.energy_j()
    zone.use(15 / 250, 250)
    assert counter.energy_j() - begin_j == pytest.approx(786_445, abs=0.1)


def test_a_window_in_which_it_was_not_read_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    zone = Zone(tmp_path / "intel-rapl:0")
    monkeypatch.setattr(HostCounter, "now_s", lambda _: zone.now_s)
    monkeypatch.setenv("PLANNER_POWERCAP", str(tmp_path))
    with Monitor("emulated:a100-sxm/74", host=True) as monitor:
        stopped = monitor.window("stopped").begin()
        zone.use(1000, 250)  # nothing ran in this process
        with pytest.raises(
            GpuError, match=r"^cpu: its energy is unknown: its counter begins again"
        ):
            stopped.end()
        with monitor.window("after") as after:
            zone.use(10, 250)
    assert after.gpus[-1].energy_j == pytest.approx(2500)


def test_the_background_reads_often_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A whole turn takes longer than four readings, even at more than any processor draws."""
    counter = Zone(tmp_path / "intel-rapl:0").counter(monkeypatch)
    assert 4 * counter.period_s * MOST_W <= RANGE_UJ / 1e6
    assert counter.period_s > 1


def test_zones_that_cannot_be_followed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLANNER_POWERCAP", str(tmp_path))
    zone = Zone(tmp_path / "intel-rapl:0", range_uj=None)
    said = r"^cpu: .*max_energy_range_uj does not say after how much energy .* leave host=True out$"
    with pytest.raises(GpuNotSupported, match=said):
        host_counters()
    (zone.folder / "max_energy_range_uj").write_text("0\n")
    with pytest.raises(GpuNotSupported, match=said):
        host_counters()
    (zone.folder / "max_energy_range_uj").write_text("262143328850\n")
    (zone.folder / "energy_uj").write_text("none\n")
    with pytest.raises(GpuError, match=r"energy_uj has 'none', which is no number"):
        host_counters()


def test_a_zone_that_is_shown_twice_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLANNER_POWERCAP", str(tmp_path))
    Zone(tmp_path / "intel-rapl:0").use(10, 100)
    Zone(tmp_path / "intel-rapl-mmio:0").use(10, 100)
    Zone(tmp_path / "intel-rapl:1", name="package-1").use(10, 100)
    Zone(tmp_path / "intel-rapl:0:0", name="dram").use(10, 10)
    assert [counter.energy_j() for counter in host_counters()] == [2000, 100]
