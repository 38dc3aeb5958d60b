"""Training without a plan beside a service: it is registered with what it has learnt, and a
straggler that is reported comes back.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from commands import done
from launching import Ended, ranks
from serving import Serving

from perseus_planner.extensions.service.client import Client

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("fastapi")

RANKS, LONG_S = 4, 600.0


@contextmanager
def training(name: str, address: str, folder: Path) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Run a job; yields what waits for something while it runs. The job ends with the block."""
    folder.mkdir()

    def eventually(holds: Callable[[], Any]) -> Any:
        until_s = time.monotonic() + LONG_S
        while not (found := holds()):
            assert not ended.done(), ended.result()
            assert time.monotonic() < until_s, "it never came"
            time.sleep(0.05)  # between two looks
        return found

    with ThreadPoolExecutor(1) as pool:
        arguments = (str(folder / "state"), address, name)
        ended: Future[list[Ended]] = pool.submit(
            ranks, "autopilot_programs:served", RANKS, folder, *arguments
        )
        try:
            yield eventually
        finally:
            (folder / "stop").touch()
        everyone = ended.result(LONG_S)
    assert [each.code for each in everyone] == [0] * RANKS, [each.stderr for each in everyone]
    (folder / "stderr").write_text(everyone[0].stderr)


def clock(folder: Path, pipeline: int) -> float:
    """Mean clock that the ranks of a pipeline run by; 0 before the first program."""
    files = [folder / f"clock-{rank}" for rank in range(RANKS) if rank % 2 == pipeline]
    return (
        mean(float(file.read_text()) for file in files)
        if all(file.exists() for file in files)
        else 0.0
    )


# in real time: beside noise of the processors the autopilot tries few clocks, sometimes for minutes
@pytest.mark.soak
def test_a_job_in_autopilot_is_seen_at_the_service_and_moves_beside_a_straggler(tmp_path: Path):
    server, first = Serving(tmp_path), tmp_path / "first"
    server.start()
    try:
        with Client(server.address) as client, training("gpt", server.address, first) as eventually:
            eventually(lambda: [each.job.name for each in client.jobs()])

            def learning() -> Any:
                status = client.status("gpt")
                return (
                    status
                    if status.autopilot is not None
                    and status.autopilot.columns.get("saving") is not None
                    else None
                )

            status = eventually(learning)
            assert status.autopilot.phase in ("learning", "following", "audit", "paying")
            assert status.autopilot.reference_s > 0.0
            assert status.job.ranks == RANKS
            assert status.telemetry.iterations > 0
            assert "Autopilot: " in done(f"status gpt --service {server.address}")
            done(
                "straggler --job gpt --pipeline 1 --slowdown 1.3 --key slow --service "
                f"{server.address}"
            )
            eventually(lambda: 0.0 < clock(first, 0) < clock(first, 1) - 50.0)
            done(f"straggler --job gpt --clear slow --service {server.address}")
            eventually(lambda: abs(clock(first, 0) - clock(first, 1)) < 50.0)
            eventually(lambda: client.status("gpt").version > 2)
            eventually(
                lambda: len(client.frontier("gpt").times_s) > 2
            )  # it has grown with what was learnt
            assert eventually(lambda: client.status("gpt").taken).version > 1
        assert done(f"status --service {server.address}") == "No job runs.\n"
    finally:
        server.end(signal.SIGTERM)
