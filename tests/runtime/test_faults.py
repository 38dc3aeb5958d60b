"""Whatever fails in setting clocks, training under a plan goes on to the same results, or is
refused at the start.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_nvml import StandIn
from gpu_owners import files, planner_processes
from launching import Results, results_of
from waiting import eventually

pytest.importorskip("torch")


def warnings_of(everyone: Results, name: str) -> list[str]:
    """Return the warnings of the whole job in one training, without the rank."""
    return [text.partition(": ")[2] for each in everyone for text in each[name]["warnings"]]


# On the way in


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("refused")
    everyone = results_of("runtime_runs:refusals", 2, folder)
    assert files(folder / "state") == []
    return everyone


ORDER = "is not what torch.distributed.pipelining runs on rank {} of the pipeline: computation {}"


@pytest.mark.parametrize(
    ("name", "errors", "text"),
    [
        (
            "schedule of rank 1",
            "RankError PlanError",
            ORDER.format(1, "2 is 1B0 there and 1F1 in the plan; solve for"),
        ),
        ("microbatches", "PlanError PlanError", ORDER.format("{}", "")),
        (
            "ranks",
            "PlanError PlanError",
            "the plan is for pipelines of 4 ranks, and torch.distributed.pipelining runs",
        ),
        (
            "gpu",
            "PlanError PlanError",
            "the plan is for the GPU 'NVIDIA A100-SXM4-80GB', and this rank has 'simulated",
        ),
        ("damaged", "PlanError RankError", "damaged.yaml, line 3, key 'digest': does not match"),
        ("folder", "PlanError RankError", ".: is a folder; name the file in it"),
        (
            "a gpu that cannot be on rank 1",
            "RankError GpuError",
            "'simulated:a10000': there is no simulated GPU",
        ),
        ("missing", "PlanError RankError", "absent.yaml: no such file; check the path"),
        (
            "missing after a restart",
            "PlanError RankError",
            "absent.yaml: no such file; check the path",
        ),
        (
            "missing for a pipeline",
            "PlanError RankError",
            "absent.yaml: no such file; check the path",
        ),
        (
            "gpu of rank 1",
            "RankError PlanError",
            "and this rank has 'simulated a100-pcie' (emulated:a100-pcie/1)",
        ),
        ("no gpu on rank 1", "RankError UsageError", "GPU 'cuda:0': torch computes on cpu here"),
        (
            "no engine on rank 1",
            "RankError UsageError",
            "planner_runtime was given a Linear; give it a DeepSpeed",
        ),
    ],
)
def test_what_a_user_can_correct_is_refused_on_all_ranks_at_once(
    refused: Results, name: str, errors: str, text: str
):
    result = [rank[name] for rank in refused]
    assert [each["error"] for each in result] == errors.split()
    for number, each in enumerate(result):
        assert text.format(number) in each["text"]
        assert each["locked_mhz"] is None
        if each["error"] == "RankError":
            assert each["text"] == f"rank {1 - number} does not begin: {result[1 - number]['text']}"


def test_after_refusals_a_job_may_begin(refused: Results):
    assert [rank["entered at last"]["error"] for rank in refused] == ["NoneType"] * 2
    assert [rank["warnings"] for rank in refused] == [[], []]


@pytest.fixture(scope="module")
def unclocked(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("runtime_runs:without", 2, tmp_path_factory.mktemp("without"))


@pytest.mark.parametrize(
    ("name", "plan", "problem", "text"),
    [
        (
            "not permitted",
            True,
            "does not let this process set anything",
            "no clock can be set: simulated a100-sxm",
        ),
        (
            "no such GPU",
            True,
            "it fell off the bus",
            "no clock can be set: simulated a100-sxm is lost",
        ),
        (
            "no controller",
            True,
            "could not be started: it ended without any output",
            "no clock can be set: the clock",
        ),
        (
            "no records",
            True,
            "name another folder in PLANNER_STATE_DIR",
            "no clock can be set: /proc/none: cannot be",
        ),
    ],
)
def test_training_begins_without_clocks_with_one_warning(
    unclocked: Results, name: str, plan: bool, problem: str | None, text: str
):
    for result in (rank[name] for rank in unclocked):
        assert (result["equal"], result["plan"]) == (True, plan)
        assert (result["problem"] is None) if problem is None else (problem in result["problem"])
    (warning,) = warnings_of(unclocked, name)
    assert warning.startswith(text)


def test_a_rank_that_does_not_join_is_waited_for_once_and_training_begins(unclocked: Results):
    name = "a rank that does not come"
    here, _ = (rank[name] for rank in unclocked)
    assert (here["plan"], here["problem"], here["equal"]) == (True, None, True)
    assert warnings_of(unclocked, name) == [
        "rank 1 had not joined within 0.3 s; training begins without waiting longer"
    ]


# While training


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("survived")
    everyone = results_of("runtime_faults:no_clocks_any_more", 2, folder)
    eventually(lambda: not planner_processes(str(folder / "state")))
    assert files(folder / "state") == []
    return everyone


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "killed",
            "the clock controller of this node has ended, and ",
        ),
        ("stopped", "the clock controller gave no sign of life for 0.5 s and is killed"),
        ("lost", "simulated a100-sxm is lost: it fell off the bus, as its fault says"),
        (
            "fault",
            "a fault of the planner, please report it at https://github.com/perseus-planner/",
        ),
    ],
)
def test_whatever_fails_training_goes_on_to_the_same_results_without_clocks_with_one_warning(
    survived: Results, name: str, text: str
):
    everyone = [rank[name] for rank in survived]
    for result in everyone:
        assert result["equal"]
        assert result["problem"] is not None
        # A lost GPU cannot be reset, and is locked unless it was lost between two iterations.
        assert result["locked_mhz"] is None or name == "lost"
    (warning,) = warnings_of(survived, name)
    assert warning.startswith(text)
    assert warning.endswith(
        "; training goes on at the GPU's default clocks until clocks can be set again"
    )


def test_where_clock_changes_cannot_keep_up_training_goes_on_with_fewer(tmp_path: Path):
    everyone = results_of("runtime_faults:fewer_changes", 2, tmp_path)
    for result in everyone:
        assert result["slow"]["equal"]
        assert result["slow"]["problem"] is None
        assert result["slow"]["locked_mhz"] is None
    (warning,) = warnings_of(everyone, "slow")
    assert warning.startswith(
        "clock changes cannot keep up, so this rank follows its plan with at most "
    )


def test_a_gpu_that_was_lost_is_reset_when_the_next_job_begins(survived: Results):
    assert [rank["lost"]["locked_mhz later"] for rank in survived] == [None, None]


def test_after_its_controller_was_killed_twice_a_job_has_its_clocks_again(tmp_path: Path):
    everyone = results_of("runtime_faults:clocks_come_back", 2, tmp_path)
    assert [each["equal"] for each in everyone] == [True, True]
    assert [each["locked_mhz"] for each in everyone] == [None, None]
    texts = [text.partition(": ")[2] for each in everyone for text in each["warnings"]]
    *resumed, first, second = sorted(texts)
    assert resumed == ["clocks are set again"] * 2
    for text in (first, second):
        assert text.startswith("the clock controller of this node has ended, and ")
        assert "reset" in text
    eventually(lambda: not planner_processes(str(tmp_path / "state")))
    assert files(tmp_path / "state") == []


def test_a_driver_that_sets_no_more_clocks_ends_them_on_all_ranks(nvml: StandIn, tmp_path: Path):
    everyone = results_of(
        "runtime_faults:no_permission_any_more",
        2,
        tmp_path,
        json.dumps(dict(nvml.environment())),
        str(nvml.script),
    )
    assert all("NVML returns 'Insufficient Permissions'" in rank["problem"] for rank in everyone)
    assert len([text for rank in everyone for text in rank["warnings"]]) == 1
    assert [nvml.locked_mhz(gpu) for gpu in range(2)] == [None, None]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("runtime_faults:clocks_go_on", 2, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        (
            "trace removed",
            ["removed: recording stops: No such file or directory; training goes on"],
        ),
        ("trace full", ["full: recording stops: No space left on device; training goes on"]),
        ("left early", []),
        ("forked", []),
        ("suspended", []),
    ],
)
def test_what_fails_beside_or_leaves_takes_no_clock_from_the_others(
    undisturbed: Results, name: str, texts: list[str]
):
    for result in (rank[name] for rank in undisturbed):
        assert (result["problem"], result["locked_mhz"]) == (None, None)
    found = [
        text.removesuffix(" without recording").rpartition("/")[2]  # without the folder
        for text in warnings_of(undisturbed, name)
    ]
    # Either of two files is written first; the one that is larger than the limit has another error.
    assert [text.replace("File too large", "No space left on device") for text in found] == texts


def test_without_the_store_training_goes_on_by_its_plan_and_no_new_one_is_taken(tmp_path: Path):
    everyone = results_of("runtime_faults:store_gone", 2, tmp_path)
    assert [(rank["problem"], rank["locked_mhz"]) for rank in everyone] == [(None, None)] * 2
    assert all("the job's store can no longer be used" in rank["refused"] for rank in everyone)
    assert [len(rank["warnings"]) for rank in everyone] == [1, 0]
