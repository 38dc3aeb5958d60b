"""Whole: a service, two pipelines of two stages on emulated GPUs, a straggler that is reported, and
a power limit.

Energies are simulated: an emulated GPU says what its model draws.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

import pytest
from commands import done
from launching import Ended, ranks
from serving import Serving
from waiting import LONG_S, eventually

from perseus_planner import Frontier, Run, solve
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.model import CATALOG
from perseus_planner.profiles.groups import within_power_limit
from perseus_planner.runs import Account
from perseus_planner.views.run import summarize_run

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("fastapi")

RANKS = 4
MODEL = "a100-sxm"
GPU = f"{MODEL}?slower=400000"  #: of the ranks
SLOW = 1.3  #: how many times as long pipeline 1 takes


class Job:
    """A training job that runs in other processes, and what it has written so far."""

    def __init__(self, folder: Path, ended: Future[list[Ended]]) -> None:
        self._folder, self._ended = folder, ended

    def rows(self, rank: int) -> list[dict[str, float]]:
        """What a rank wrote of its iterations."""
        file = self._folder / f"rows-{rank}"
        return [
            json.loads(line)
            for line in (file.read_text().split("\n") if file.exists() else [])[:-1]
        ]

    def ran(self) -> int:
        """How many iterations all ranks have written."""
        return min(len(self.rows(rank)) for rank in range(RANKS))

    def runs(self, count: int) -> int:
        """Let it run so many iterations more; `ran` then."""
        enough = self.ran() + count
        self.eventually(lambda: self.ran() >= enough)
        return enough

    def eventually(self, holds: Callable[[], Any]) -> Any:
        """Wait for what nothing tells of."""

        def found() -> Any:
            assert not self._ended.done(), self._ended.result()
            return holds()

        return eventually(found)

    def slow(self, wait_s: float | None) -> None:
        """Let pipeline 1 wait so long for its data in every iteration, or no more."""
        file = self._folder / "slow"
        if wait_s is None:
            file.unlink()
        else:
            (self._folder / "slow.new").write_text(str(wait_s))
            (self._folder / "slow.new").rename(file)

    def said(self) -> list[dict[str, Any]]:
        """End it; what its ranks said."""
        (self._folder / "stop").touch()
        ended = self._ended.result(LONG_S)
        assert [each.code for each in ended] == [0] * RANKS, [each.stderr for each in ended]
        return [json.loads(each.stdout.splitlines()[-1]) for each in ended]

    def joules(self, first: int, last: int) -> float:
        """Of an iteration of all ranks, from the end of one to the end of the next: the least of
        iterations, as a busy machine prolongs computations.

        Without what GPUs draw in any case while they wait, as a busy machine prolongs that too.
        """
        everyone = [
            [
                each["energy_j"] - CATALOG[MODEL].blocking_power_w * each["read_s"]
                for each in self.rows(rank)
            ]
            for rank in range(RANKS)
        ]
        return min(sum(gpu[i + 1] - gpu[i] for gpu in everyone) for i in range(first, last))


@contextmanager
def training(engine: str, address: str, folder: Path) -> Iterator[Job]:
    imports, arguments = (
        ["deepspeed.pipe"] if engine == "deepspeed" else [],
        (engine, address, str(folder / "state")),
    )
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(
            ranks, "service_programs:train", RANKS, folder, *arguments, imports=imports
        )
        try:
            yield Job(folder, started)
        finally:
            (folder / "stop").touch()


class Server(Serving):
    """`planner serve`, asked as by hand."""

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
        """What it answers to curl."""
        url = f"{self.address}/v1/jobs{path}"
        if shutil.which("curl") is None:
            data = None if body is None else json.dumps(body).encode()
            with urlopen(
                Request(url, data, {"Content-Type": "application/json"}, method=method)
            ) as response:
                return json.loads(response.read() or "null")
        sent = (
            [] if body is None else ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        )
        said = subprocess.run(
            ["curl", "-sS", "-X", method, *sent, url], capture_output=True, text=True, check=True
        )
        return json.loads(said.stdout or "null")


@pytest.fixture
def server(tmp_path: Path):
    found = Server(tmp_path)
    found.start()
    yield found
    found.end(signal.SIGTERM)


def taken(job: Job, server: Server, version: int) -> int:
    """The iteration since which the job runs by that version, once it has said so."""
    return int(job.eventually(lambda: _taken(server, version))["iteration"])


def _taken(server: Server, version: int) -> Any:
    status = server("GET", "/e2e")
    found = status.get("taken")  # before it is registered there is an error
    return found if found is not None and found["version"] == version else None


def first_by(job: Job, rank: int, plan_s: float) -> int:
    """The first iteration of a rank that ran by the plan of that time."""
    return [row["plan_s"] for row in job.rows(rank)].index(plan_s)


@pytest.mark.parametrize("engine", ["torch", pytest.param("deepspeed", marks=pytest.mark.soak)])
def test_a_straggler_that_is_reported_lets_the_others_save_what_was_promised_and_back(
    engine: str, server: Server, tmp_path: Path
):
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    with training(engine, server.address, tmp_path) as job:
        taken(job, server, 1)
        own_s = job.rows(0)[-1]["plan_s"]
        job.slow((SLOW - 1) * own_s)
        begin = job.runs(2)
        before_j = job.joules(begin, job.runs(5) - 1)
        answer = server(
            "POST",
            "/e2e/reports",
            {
                "source": "data",
                "key": "k",
                "scope": {"kind": "pipeline", "value": "1"},
                "slowdown": SLOW,
                "cause": "data",
            },
        )
        assert (answer["version"], answer["changed"]) == (2, True)
        since = taken(job, server, 2)
        proposed_s = float((tmp_path / "proposed").read_text())
        job.runs(6)
        # All ranks at one iteration, at most three after that which runs when the version is
        # proposed.
        slowed_s = job.rows(0)[-1]["plan_s"]
        assert own_s < slowed_s <= SLOW * own_s
        assert [
            first_by(job, rank, slowed_s)
            for rank in range(RANKS)
            if job.rows(rank)[-1]["plan_s"] == slowed_s
        ] == [since, since]
        assert sum(proposed_s < row["begin_s"] for row in job.rows(0)[:since]) <= 3
        promised_j = answer["expected_saving_w"] * SLOW * own_s

        def saves() -> bool:
            saved_j = before_j - job.joules(since + 1, job.ran() - 1)
            return 0.6 * promised_j < saved_j < 1.4 * promised_j

        job.eventually(saves)  # a busy host sets clocks of some iterations late

        _kill_and_start_again(job, server)

        assert server("DELETE", "/e2e/reports/k")["version"] == 3
        job.slow(None)
        back = taken(job, server, 3)
        job.eventually(lambda: job.ran() > back)
        assert {job.rows(rank)[back]["plan_s"] for rank in range(RANKS)} == {own_s}
        _check_telemetry(job, server)
        everyone = job.said()
        _check_clocks(everyone, since, back)
        assert server("GET", "")["jobs"] == []
        with urlopen(f"{server.address}/v1/totals") as answer:
            (ended,) = json.loads(answer.read())["jobs"]
        _check_record(job, tmp_path, ended["telemetry"])


def _kill_and_start_again(job: Job, server: Server) -> None:
    """Training goes on meanwhile by the plans it has, and the service knows all it knew."""
    before = server("GET", "/e2e")
    # The last seconds of these may be lost, until the job sends more.
    latest = ("telemetry", "verdict", "state", "saves_w", "time_over_planned")
    for name in latest:
        del before[name]
    server.end(signal.SIGKILL)
    plans = {job.rows(rank)[-1]["plan_s"] for rank in range(RANKS)}
    job.runs(4)
    assert {row["plan_s"] for rank in range(RANKS) for row in job.rows(rank)[-3:]} == plans
    server.start()
    after = server("GET", "/e2e")
    for name in latest:
        del after[name]
    assert after == before


def _check_telemetry(job: Job, server: Server) -> None:
    """What the service says was taken and saved is what the ranks wrote, also of when it was
    away.
    """
    ran = job.ran()
    job.eventually(
        lambda: (
            (found := server("GET", "/e2e")["telemetry"]) is not None and found["iterations"] >= ran
        )
    )
    found = server("GET", "/e2e")["telemetry"]
    assert found["energy_is"] == "simulated"
    assert found["between_s"] < found["gpu_s"] == pytest.approx(RANKS * found["time_s"], rel=0.02)


def _check_record(job: Job, folder: Path, telemetry: dict[str, Any]) -> None:
    """What the service, `planner show` and `planner report` say of the run is one account, and it
    has the joules that its GPUs used.
    """
    run = Run.load(folder / "run")
    some = sum(
        (
            Account.of(row, is_first=rank.rank == 0)
            for rank in run.ranks
            for row in rank.iterations
            if row.iteration <= telemetry["last_iteration"]
        ),
        Account(),
    )
    for name, value in vars(some).items():
        expected = value if value is None or isinstance(value, str) else pytest.approx(value)
        assert telemetry[name] == expected, name
    total = run.total
    used_j = sum(rows[-1]["energy_j"] - rows[0]["begin_j"] for rows in map(job.rows, range(RANKS)))
    assert total.energy_j + total.pause_j == pytest.approx(used_j, rel=0.005)
    files = f"{folder / 'run'} {folder / 'frontier.npz'}"
    report = json.loads(done(f"report --json {files} -o {folder / 'report.html'}"))
    shown = json.loads(done(f"show --json {folder / 'run'}"))
    assert shown["total"]["energy_j"] == total.energy_j
    assert shown["total"]["saved_j"] == total.saved_j
    # On a very busy host iterations are like those of another machine: no saving is stated then.
    if summarize_run(run).unlike_plan is not None:
        assert report["savings"] == []
        return
    saving = report["savings"][0]
    assert saving["saved_share"] == pytest.approx(total.saved_share)
    assert saving["energy_j"] * total.iterations == pytest.approx(total.energy_j, rel=1e-3)
    (current,) = [plan for plan in shown["plans"] if plan["version"] == shown["version"]]
    assert saving["time_s"] == pytest.approx(current["time_s"])
    assert saving["window_s"] * total.iterations == pytest.approx(total.gpu_s / RANKS)
    where = report["where"]["iterations"][-1]
    watts = [
        use["computing_j"] / busy_s
        for use, busy_s in zip(where["ranks"], where["busy_s"], strict=True)
    ]
    assert min(watts) > CATALOG[MODEL].blocking_power_w


def _check_clocks(everyone: list[dict[str, Any]], since: int, back: int) -> None:
    """Each rank asked for other clocks in the very iteration with which its plan changed, and they
    were in force soon after.
    """
    for said in everyone:
        assert said["problem"] is None
        versions = [version for version, *_ in said["ran"]]
        changed = [i for i, (one, other) in enumerate(pairwise(versions), 1) if one != other]
        assert changed[-2:] == [since, back]
        assert all(is_as_planned for _, is_as_planned, *_ in said["ran"])
    warnings = [text for said in everyone for text in said["warnings"]]
    assert len(warnings) == 2, warnings
    away, again = [text.partition(": ")[2] for text in warnings]
    assert away.startswith("there is no answer from the service at http")
    assert again.endswith(" answers again")
    for said in everyone:
        if said["pipeline"] == 0:
            clocks, achieved = ([each[place] for each in said["ran"]] for place in (2, 3))
            before, slowed, after = (
                median(part) for part in (clocks[1:since], clocks[since:back], clocks[back:])
            )
            assert slowed < 0.9 * before
            assert after == pytest.approx(before, rel=0.1)
            between = (slowed + before) / 2
            assert clocks[since] < between < clocks[back]  # of those very iterations most
            # A busy host may set some clocks of the first such iterations late.
            assert min(achieved[since : since + 3]) < between
            assert median(achieved[since:back]) == pytest.approx(slowed, rel=0.1)


def test_a_power_limit_that_a_site_sets_has_the_job_planned_again_within_it(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    with training("torch", server.address, tmp_path) as job:
        taken(job, server, 1)
        own_s = job.rows(0)[-1]["plan_s"]
        frontier = Frontier.load(tmp_path / "frontier.npz")
        powers_w = [
            row.energy_j / row.time_s
            for rows in frontier.profile.measurements.values()
            for row in rows
        ]
        limit_w = float(int(0.6 * max(powers_w)))
        with open_gpu(f"emulated:{GPU.replace('?', '/3?')}") as gpu:
            gpu.set_power_limit_w(limit_w)
            limited = within_power_limit(frontier.profile, limit_w)
            slower_s = solve(limited, frontier.schedule).baseline_time_s
            assert slower_s > 1.002 * own_s
            job.eventually(lambda: job.rows(0)[-1]["plan_s"] == pytest.approx(slower_s, rel=1e-3))
            assert server("GET", "/e2e")["job"]["gpu_power_limit_w"] == limit_w
            gpu.reset_power_limit()
            job.eventually(lambda: job.rows(0)[-1]["plan_s"] == own_s)
        warned = [text for each in job.said() for text in each["warnings"]]
        assert any(
            f"the power limit of this GPU is {limit_w:g} W, below its default" in text
            for text in warned
        )
