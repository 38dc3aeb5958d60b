"""Every schedule equals what its engine runs: the engine itself where it is installed, its
golden file everywhere.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from schedule_engines import (
    GOLDEN,
    TORCH,
    Golden,
    Rows,
    deepspeed,
    megatron,
    megatron_refuses,
    read_by_torch,
    torch_dump,
    torch_rows,
    torch_zero_bubble_of_one_stage,
)

from perseus_planner.base.errors import ScheduleError
from perseus_planner.schedules import (
    Schedule,
    generate,
    interleaved_1f1b,
    load_grid,
    one_f_one_b,
    save_grid,
    zb_h1,
)

SIZES = [(ranks, microbatches) for ranks in range(1, 7) for microbatches in (*range(1, 11), 12, 16)]
# What importing and asking an engine warns of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def torch() -> None:
    pytest.importorskip(
        "torch.distributed.pipelining",
        reason="torch is not installed; the golden files stand for it",
    )


@pytest.fixture(scope="module")
def with_deepspeed() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    pytest.importorskip(
        "deepspeed", reason="deepspeed is not installed; the golden files stand for it"
    )


@pytest.fixture(scope="module")
def with_megatron() -> None:
    pytest.importorskip(
        "megatron.core", reason="megatron-core is not installed; the golden files stand for it"
    )


def rows(schedule: Schedule) -> Rows:
    return [[str(each) for each in rank] for rank in schedule.ranks]


def as_torch(name: str, ranks: int, virtual_stages: int, microbatches: int) -> Schedule:
    """Ours, with microbatches in groups of the size that torch takes."""
    if name == "interleaved-1f1b":
        return interleaved_1f1b(
            ranks, virtual_stages, microbatches, microbatches // max(1, microbatches // ranks)
        )
    return generate(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.path.stem)
def test_the_golden_files_are_our_schedules(golden: Golden):
    found = load_grid(golden.path).one_by_one  # torch's DualPipeV has pairs
    if golden.group:
        assert (
            found.ranks
            == interleaved_1f1b(
                golden.ranks, golden.virtual_stages, golden.microbatches, golden.group
            ).ranks
        )
    else:
        size = {
            "ranks": golden.ranks,
            "microbatches": golden.microbatches,
            "virtual_stages": golden.virtual_stages,
        }
        assert found.ranks == generate(golden.name, **size).ranks


def test_no_golden_file_is_forgotten():
    assert {file.name for file in GOLDEN[0].path.parent.glob("*.csv")} == {
        golden.path.name for golden in GOLDEN
    }


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.path.stem)
def test_the_golden_files_are_those_of_the_installed_engines(
    golden: Golden, request: pytest.FixtureRequest, tmp_path: Path
):
    request.getfixturevalue(
        {"1f1b": "with_deepspeed", "interleaved-1f1b": "with_megatron"}.get(golden.name, "torch")
    )
    assert golden.path.read_bytes().decode() == golden.text(tmp_path)


@pytest.mark.usefixtures("with_deepspeed")
def test_1f1b_is_the_train_schedule_of_deepspeed():
    for ranks, microbatches in SIZES:
        assert rows(one_f_one_b(ranks, microbatches)) == deepspeed(ranks, microbatches), (
            ranks,
            microbatches,
        )


@pytest.mark.usefixtures("with_megatron")
def test_1f1b_is_the_order_of_megatron():
    for ranks, microbatches in SIZES:
        ours = rows(interleaved_1f1b(ranks, 1, microbatches))
        assert ours == rows(one_f_one_b(ranks, microbatches))
        assert ours == megatron(ranks, 1, microbatches, ranks), (ranks, microbatches)


@pytest.mark.usefixtures("with_megatron")
@pytest.mark.parametrize("virtual_stages", [2, 3, 4, 7])
def test_interleaved_1f1b_is_the_order_of_megatron(virtual_stages: int):
    compared = 0
    for ranks in range(2, 7):  # Megatron does not pipeline on one rank
        for microbatches in (*range(ranks, 14), 24):
            for group in range(ranks, microbatches + 1):
                if 0 < microbatches % group < ranks:  # which Megatron refuses
                    with pytest.raises(ScheduleError, match="leave a last group"):
                        interleaved_1f1b(ranks, virtual_stages, microbatches, group)
                    continue
                ours = rows(interleaved_1f1b(ranks, virtual_stages, microbatches, group))
                assert ours == megatron(ranks, virtual_stages, microbatches, group), (
                    ranks,
                    microbatches,
                    group,
                )
                compared += 1
    assert compared > 200


@pytest.mark.usefixtures("with_megatron")
def test_interleaved_1f1b_refuses_the_groups_that_megatron_refuses():
    """Also groups larger than the number of microbatches, for which it has a table of the schedule,
    but raises before it runs it.
    """
    refused = accepted = 0
    for ranks in (2, 3, 4):
        for microbatches in range(ranks, 13):
            for group in range(1, microbatches + 6):
                sizes = (ranks, 2, microbatches, group)
                if megatron_refuses(*sizes):
                    refused += 1
                    with pytest.raises(ScheduleError):
                        interleaved_1f1b(*sizes)
                else:
                    accepted += 1
                    interleaved_1f1b(*sizes)
    assert refused > 100
    assert accepted > 90


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("name", [name for name in TORCH if name != "1f1b"])
def test_a_schedule_is_that_of_torch(name: str):
    """Where torch refuses a size, so do we; its group sizes for interleaved 1F1B are always ours
    too.
    """
    compared = 0
    for ranks, microbatches in SIZES:
        for virtual_stages in (
            (2, 3, 4)
            if name.startswith(("interleaved", "looped"))
            else (1,)
            if name == "gpipe"
            else (2,)
        ):
            try:
                theirs = torch_rows(TORCH[name], ranks, microbatches, virtual_stages)
            except ValueError:
                if name != "interleaved-1f1b":  # Megatron allows groups that torch does not
                    with pytest.raises(ScheduleError):
                        as_torch(name, ranks, virtual_stages, microbatches)
                continue
            assert rows(as_torch(name, ranks, virtual_stages, microbatches)) == theirs, (
                ranks,
                microbatches,
            )
            compared += 1
    assert compared >= (len(SIZES) if name in ("gpipe", "zbv") else 30)


@pytest.mark.usefixtures("torch")
def test_zb_h1_is_interleaved_zero_bubble_of_torch_with_one_stage_per_rank():
    """Torch has no ZB-H1, and its class refuses one stage; asked for the order itself, it gives
    that of ZB-H1.
    """
    for ranks, microbatches in SIZES:
        assert rows(zb_h1(ranks, microbatches)) == torch_zero_bubble_of_one_stage(
            ranks, microbatches
        )


@pytest.mark.usefixtures("torch")
def test_1f1b_is_that_of_torch_but_for_the_last_rank_where_torch_lists_one_microbatch_too_many():
    """torch 2.13 lists F1 to FM there where it runs F0 to FM-1; when it no longer does, drop
    this exception.
    """
    for ranks, microbatches in SIZES:
        if microbatches < ranks:  # which torch refuses
            continue
        ours, theirs = (
            rows(one_f_one_b(ranks, microbatches)),
            torch_rows("1F1B", ranks, microbatches),
        )
        assert theirs[:-1] == ours[:-1], (ranks, microbatches)
        last = ranks - 1
        shifted = [f"{last}F{m + 1}" for m in range(microbatches)]
        assert [cell for cell in theirs[-1] if "F" in cell] == shifted
        assert [cell for cell in theirs[-1] if "B" in cell] == [
            cell for cell in ours[-1] if "B" in cell
        ]
        assert ["F" in cell for cell in theirs[-1]] == ["F" in cell for cell in ours[-1]]


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("name", [name for name in TORCH if name not in ("gpipe", "1f1b")])
@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(1, 4), (2, 4), (3, 6), (3, 7), (4, 8), (4, 16), (8, 24)]
)
def test_the_file_that_torch_dumps_is_read_and_torch_reads_ours(
    name: str, ranks: int, microbatches: int, tmp_path: Path
):
    if name.startswith("interleaved") and microbatches == 7:
        microbatches = 8  # torch refuses 7 on 3 ranks
    theirs, ours = tmp_path / "theirs.csv", tmp_path / "ours.csv"
    theirs.write_bytes(torch_dump(TORCH[name], ranks, microbatches, 2, tmp_path / "part").encode())
    schedule = load_grid(theirs)
    save_grid(schedule, ours)
    assert load_grid(ours) == replace(schedule, name="ours")
    assert rows(schedule.one_by_one) == torch_rows(TORCH[name], ranks, microbatches, 2)
    cells = [[schedule.text_of(each) for each in rank] for rank in schedule.ranks]
    assert read_by_torch(ours, ranks, 2, microbatches) == cells
