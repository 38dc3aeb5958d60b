"""Profiling inside a training script, with torch's schedules on real ranks;
test_every_schedule.py has that it does not change the training.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launching import ranks

from perseus_planner.base.errors import UsageError

pytest.importorskip("torch")


def test_recording_keeps_the_inputs_of_one_microbatch_and_never_the_output_of_a_stage(
    tmp_path: Path,
) -> None:
    for each in ranks("memory", 2, tmp_path):
        assert each.code == 0, each.stderr
        held, cloned, inputs = json.loads(each.stdout)
        assert held <= inputs == cloned


@pytest.mark.parametrize("cache", [True, False])
def test_stages_are_measured_in_the_precision_of_the_training(cache: bool, tmp_path: Path) -> None:
    for rank, each in enumerate(ranks("autocast", 2, tmp_path, str(cache))):
        assert each.code == 0, each.stderr
        trained, profiled = json.loads(each.stdout)
        assert trained[0] == [f"(torch.bfloat16, True, {cache}, (False, True))"]
        assert trained[1] == ["(torch.bfloat16, True)"] * rank
        assert profiled == trained


def test_stages_that_cannot_be_measured_end_the_profiling_and_not_the_training(
    tmp_path: Path,
) -> None:
    problem = (
        "rank 1: a stage is sharded by FullyShardedDataParallel, which keeps its place in the "
        "iteration and reduces gradients in every backward, so that none can be repeated; shard "
        "it with fully_shard, or profile it without sharding"
    )
    first, second = ranks("sharded", 2, tmp_path)
    assert [each.code for each in (first, second)] == [0, 0], (first.stderr, second.stderr)
    assert [json.loads(each.stdout) for each in (first, second)] == [[True, problem, False]] * 2
    assert [problem in each.stderr for each in (first, second)] == [True, False]


STUCK = (
    r"rank 1 repeats one computation for over 3 s \(rank 1 at .*rank_programs\.py:\d+ forward.*"
    r"\); a stage whose computations wait for another stage cannot be measured; if they only take "
    r"long, allow more with SweepSettings\(repetition_s=\)\n"
)


def test_a_repetition_that_takes_too_long_ends_the_profiling_and_not_the_training(
    tmp_path: Path,
) -> None:
    first, second = ranks("stuck", 2, tmp_path, "long")
    assert (first.code, second.code) == (0, 0), (first.stderr, second.stderr)
    assert first.stdout == second.stdout
    assert re.fullmatch(STUCK, first.stdout), first.stdout
    assert first.stderr == f"the pipeline was not profiled: {first.stdout}"


def test_a_repetition_that_never_comes_back_ends_the_training_and_never_hangs(
    tmp_path: Path,
) -> None:
    first, second = ranks("stuck", 2, tmp_path, "for ever")
    assert first.code == 2
    assert re.fullmatch(STUCK, first.stderr), first.stderr
    assert second.code in (1, 2), "it never leaves, or the rank that left has closed its connection"


def test_a_block_without_an_iteration_gives_one_message(tmp_path: Path) -> None:
    first, second = ranks("idle", 2, tmp_path)
    assert (first.code, second.code) == (0, 0)
    assert first.stdout == second.stdout
    assert first.stdout.endswith(
        "did not run inside the block of profile_pipeline; run one whole training iteration there\n"
    )
    assert first.stderr == f"the pipeline was not profiled: {first.stdout}"


FAULTS = {
    "in the training": [
        "engines.recording:copy_tensors",
        "engines.recording:ComputeModes.current",
        "engines.recording:_mark",
        "engines.recording:_mark#5",  # at the begin of a backward, and at its end
        "engines.recording:_mark#6",
        "engines.recording:_elapsed_s",
        "engines.recording:followed_module",
        "engines.recording:Recording.__init__",
    ],
    "after it": [
        "engines.recording:Recording.stages",
        "engines.torch_pipelining:TorchPipeline.iteration",
        "profiler.pipeline:refusal",
        "profiler.ranks.measure:StageGroup.__init__",
        "profiler.ranks.measure:open_gpu",
        "profiler.ranks.neighbours:Neighbour.block",
        "profiler.ranks.measure:with_one_power",
        "profiler.ranks.measure:assemble_profile",
        "profiler.ranks.measure:delete_rows",
        "profiles.profiles:Profile.save",
    ],
    "while measuring": [
        "profiler.torch_stage:count_op_cost",
        "engines.microbatch:Microbatch.backward",
        "profiler.sweep:RowFile.write",
        "profiler.sweep:_Sweep._next_setting",
        "profiler.sweep:_Sweep._conditions",
        "profiler.row_meter:RowMeter.heat",
        "profiler.row_meter:RowMeter.measure_row",
        "gpu.simulated.gpu:SimulatedGpu.set_clock_mhz",
        "gpu.simulated.gpu:SimulatedGpu.temperature_c",
        "gpu.simulated.gpu:SimulatedGpu.reset_clocks",
    ],
}


@pytest.mark.parametrize("when", FAULTS)
def test_a_fault_on_any_rank_ends_the_profiling_of_all_and_no_training(
    when: str, tmp_path: Path
) -> None:
    for each in ranks("faulty", 2, tmp_path, *FAULTS[when]):
        assert each.code == 0, each.stderr
        found = json.loads(each.stdout)
        assert {result["name"] for result in found if result["hit"]} == set(FAULTS[when])
        for result in found:
            assert result["equal"], result
            assert len(set(result["problems"])) == 1, result
            # A fault in a function that its rank does not call changes nothing.
            assert ("ZeroDivisionError: injected" in result["problems"][0]) == result["hit"], result
            assert result["profiled"] == (not result["hit"]), result


def test_an_object_that_is_not_an_engine_is_refused() -> None:
    from perseus_planner.profiler.pipeline import profile_pipeline

    with pytest.raises(UsageError) as error, profile_pipeline(object()):
        pass
    assert str(error.value) == (
        "profile_pipeline was given a object; give it a DeepSpeed PipelineEngine, the chunks of a "
        "Megatron-core model, or a schedule of torch.distributed.pipelining"
    )
