"""Functions that run the computations of a schedule of torch, as a training may register them;
nothing here knows the planner.

As a script it is one rank, which trains by DualPipeV and overlaps the computations of each pair.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch.distributed as dist
from tiny_training import Torch
from torch.distributed.pipelining import schedules


class Functions:
    """Functions that run a schedule's actions, as a training may register them.

    Args:
        pipeline: The pipeline.
    """

    def __init__(self, pipeline: Torch) -> None:
        self._schedule = pipeline.engine
        self._stages = {stage.stage_index: stage for stage in pipeline.stages}

    def in_turn(self, action: Any, context: Any) -> None:
        """Run computations one after the other, by the methods of their stages."""
        for each in action.sub_actions or (action,):
            self._run(each, context)

    def at_once(self, action: Any, context: Any) -> None:
        """Run the two computations of a pair at the same time; the second begins in the first."""
        first, second = (
            threading.Thread(target=self._run, args=(each, context)) for each in action.sub_actions
        )
        first.start()
        second.start()
        first.join()
        second.join()

    def hidden(self, action: Any, context: Any) -> None:
        """Run computations one after the other, by other methods than those of their stages."""
        for each in action.sub_actions or (action,):
            self._run(each, context, is_hidden=True)

    def _run(self, action: Any, context: Any, *, is_hidden: bool = False) -> None:
        kind, number, microbatch = (
            action.computation_type.name,
            action.stage_index,
            action.microbatch_index,
        )
        schedule, stage = self._schedule, self._stages[number]
        run = (
            partial(type(stage).forward_one_chunk, stage) if is_hidden else stage.forward_one_chunk
        )
        if kind == "FORWARD":
            self._receive(schedule.fwd_recv_ops, number, microbatch)
            output = run(microbatch, context.arg_mbs[microbatch], context.kwarg_mbs[microbatch])
            schedule._maybe_compute_loss(stage, output, context.target_mbs, microbatch)
            if number + 1 in self._stages:
                self._stages[number + 1].set_local_fwd_input(output, microbatch)
            return
        self._receive(schedule.bwd_recv_ops, number, microbatch)
        loss = schedule._maybe_get_loss(stage, microbatch)
        is_whole = kind == "FULL_BACKWARD"
        is_last = False
        if is_whole:
            schedule.backward_counter[number] += 1
            is_last = schedule.backward_counter[number] == schedule._n_microbatches
        stage.backward_one_chunk(
            microbatch, loss=loss, full_backward=is_whole, last_backward=is_last
        )
        if number - 1 in self._stages:
            self._stages[number - 1].set_local_bwd_input(
                stage.get_local_bwd_output(microbatch), microbatch
            )

    @staticmethod
    def _receive(operations: Any, number: int, microbatch: int) -> None:
        for work in operations.pop((number, microbatch), ()):
            work.wait()


def main() -> None:
    pipeline = Torch("dualpipe-v", 6, has_shapes=True)
    pipeline.engine.register_custom_function(schedules.OVERLAP_F_B, Functions(pipeline).at_once)
    losses = [loss for _ in range(2) for loss in pipeline.step()]
    print("trained", len(losses))
    dist.barrier()  # no rank leaves while another one uses the store
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
