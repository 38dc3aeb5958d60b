"""What the engines themselves say that they run, as rows of cells such as 3F17; the oracles of the
schedules.

`python tests/support/schedule_engines.py` writes `tests/schedules/golden/` anew from the engines
that are installed."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

Rows = list[list[str]]

FOLDER = Path(__file__).parents[1] / "schedules" / "golden"


class Golden(NamedTuple):
    """A golden file: the engine's order for one size, and the name and size of ours that must
    equal it.
    """

    name: str  #: of ours
    ranks: int
    virtual_stages: int
    microbatches: int
    group: int | None = None

    @property
    def path(self) -> Path:
        group = f"_group{self.group}" if self.group else ""
        return (
            FOLDER
            / f"{self.name}_{self.ranks}x{self.virtual_stages}x{self.microbatches}{group}.csv"
        )

    def text(self, scratch: Path) -> str:
        """As the engine says; torch needs a folder to write to."""
        if self.name == "1f1b":
            return joined(deepspeed(self.ranks, self.microbatches))
        if self.name == "interleaved-1f1b":
            group = self.group or self.ranks
            return joined(megatron(self.ranks, self.virtual_stages, self.microbatches, group))
        if self.name == "gpipe":
            return joined(torch_rows("GPipe", self.ranks, self.microbatches))
        return torch_dump(
            TORCH[self.name], self.ranks, self.microbatches, self.virtual_stages, scratch / "part"
        )


TORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-1f1b": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}  #: our name -> torch's

GOLDEN = (
    *(
        Golden(name, *size)
        for name in ("gpipe", "1f1b")
        for size in ((2, 1, 4), (4, 1, 8), (3, 1, 2))
    ),
    *(
        Golden("interleaved-1f1b", *size)
        for size in ((2, 2, 4), (4, 2, 8), (4, 3, 10, 5), (2, 2, 5, 3), (3, 4, 9))
    ),
    *(Golden("interleaved-zb", *size) for size in ((2, 2, 4), (4, 2, 8), (3, 3, 8), (4, 2, 2))),
    *(Golden("zbv", *size) for size in ((2, 2, 4), (4, 2, 8), (3, 2, 2))),
    *(Golden("dualpipe-v", *size) for size in ((2, 2, 4), (4, 2, 8), (3, 2, 7))),
    *(Golden("looped-bfs", *size) for size in ((2, 2, 4),)),
)


def joined(rows: Rows) -> str:
    return "".join(",".join(row) + "\n" for row in rows)


def deepspeed(stages: int, microbatches: int) -> Rows:
    """DeepSpeed's TrainSchedule; it names buffers, not microbatches, so those are counted."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

    rows = []
    for stage in range(stages):
        row, counts = [], {ForwardPass: 0, BackwardPass: 0}
        for step in TrainSchedule(microbatches, stages, stage).steps():
            for command in step:
                kind = type(command)
                if kind in counts:
                    row.append(f"{stage}{'F' if kind is ForwardPass else 'B'}{counts[kind]}")
                    counts[kind] += 1
        rows.append(row)
    return rows


def megatron(ranks: int, virtual_stages: int, microbatches: int, group: int) -> Rows:
    """Megatron-core's schedule table and number of warm-up forwards on each rank; plain 1F1B for
    one virtual stage.
    """
    from megatron.core.pipeline_parallel.schedules import (
        get_pp_rank_microbatches,
        get_schedule_table,
    )

    table = get_schedule_table(microbatches, virtual_stages, group)
    rows = []
    for rank in range(ranks):
        here = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank),
            virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
        )
        warmup = get_pp_rank_microbatches(
            microbatches, virtual_stages, group, p2p_communicator=here
        )[2]
        forwards = [f"{chunk * ranks + rank}F{microbatch}" for microbatch, chunk in table]
        backwards = [
            f"{(virtual_stages - 1 - chunk) * ranks + rank}B{microbatch}"
            for microbatch, chunk in table
        ]
        row = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            row += [forward, backward]
        rows.append(row + backwards[len(forwards) - warmup :])
    return rows


def megatron_refuses(ranks: int, virtual_stages: int, microbatches: int, group: int) -> bool:
    """Return whether Megatron-core's interleaved schedule raises because of these sizes."""
    from megatron.core.pipeline_parallel import schedules
    from torch import nn

    class Accepted(Exception):
        pass

    model = nn.Module()
    model.model_type = None
    model.config = mock.Mock(
        timers=None,
        no_sync_func=None,
        grad_sync_func=None,
        param_sync_func=None,
        finalize_model_grads_func=None,
        moe_paged_stash=False,
        overlap_p2p_comm=False,
        microbatch_group_size_per_vp_stage=group,
        hidden_size=8,
    )
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    pipeline = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
    try:
        # It computes the warm-up after it has checked the sizes; a tensor before is for a GPU.
        with (
            mock.patch.object(schedules, "get_pp_rank_microbatches", side_effect=Accepted),
            mock.patch.object(schedules.torch, "zeros"),
        ):
            schedules.forward_backward_pipelining_with_interleaving(
                forward_step_func=None,
                data_iterator=[],
                model=[model] * virtual_stages,
                num_microbatches=microbatches,
                seq_length=8,
                micro_batch_size=1,
                p2p_communicator=SimpleNamespace(pp_group=pipeline, config=model.config),
                pg_collection=SimpleNamespace(
                    tp=one, cp=one, pp=pipeline, dp_cp=one, embd=None, pos_embd=None
                ),
            )
    except Accepted:
        return False
    except (ValueError, RuntimeError) as error:
        if "contiguous micro-batches" in str(error):
            return True
        raise
    raise AssertionError("the schedule has neither refused the sizes nor used them")


#: For torch, too, which makes a mocked stage for every schedule: making it takes longer than all
#: that is asked of it. Whoever gets the one that is there sets all that is read of it.
_autospec = cache(mock.create_autospec)


@cache
def _actions(
    name: str, ranks: int, microbatches: int, virtual_stages: int | None
) -> list[list[Any]]:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    with mock.patch.object(mock, "create_autospec", _autospec):
        return get_schedule_ops(name, ranks, microbatches, virtual_stages)


def torch_rows(name: str, ranks: int, microbatches: int, virtual_stages: int | None = None) -> Rows:
    """The computations of a schedule class of torch.distributed.pipelining; overlapped pairs in
    their parts' order.
    """
    rows = []
    for actions in _actions(name, ranks, microbatches, virtual_stages):
        leaves = [
            leaf
            for action in actions
            if action is not None
            for leaf in action.sub_actions or (action,)
        ]
        rows.append([str(leaf) for leaf in leaves if leaf.is_compute_op])
    return rows


def torch_zero_bubble_of_one_stage(ranks: int, microbatches: int) -> Rows:
    """The order that torch's interleaved zero bubble works out; as its class refuses one stage,
    without an object.
    """
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

    sizes = SimpleNamespace(
        n_local_stages=1,
        microbatches_per_round=microbatches,
        pp_group_size=ranks,
        _n_microbatches=microbatches,
    )
    order = ScheduleInterleavedZeroBubble._calculate_single_rank_operations
    return [
        [str(action) for action in order(sizes, rank) if action is not None]
        for rank in range(ranks)
    ]


def torch_dump(
    name: str, ranks: int, microbatches: int, virtual_stages: int | None, path: Path
) -> str:
    """What torch writes to a file as the compute-only CSV of one of its classes, and reads
    itself.
    """
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    order = dict(enumerate(_actions(name, ranks, microbatches, virtual_stages)))
    _PipelineScheduleRuntime._dump_csv(
        SimpleNamespace(pipeline_order=order), str(path), format="compute_only"
    )
    text = path.read_bytes().decode()
    path.unlink()
    return text


def read_by_torch(path: Path, ranks: int, virtual_stages: int, microbatches: int) -> Rows:
    """The rows that torch's own loader takes from `path`, after it has checked them and added
    its communication.
    """
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    from torch.distributed.pipelining.stage import PipelineStage

    stage = _autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages = 0, ranks, ranks * virtual_stages
    stage.submod = None
    runtime = _PipelineScheduleRuntime([stage] * virtual_stages, microbatches)
    runtime._load_csv(str(path), format="compute_only")
    with_comms = runtime.pipeline_order_with_comms
    return [
        [str(action) for action in with_comms[rank] if action.is_compute_op]
        for rank in range(ranks)
    ]


def write() -> None:
    """Write every golden file."""
    FOLDER.mkdir(exist_ok=True)
    for golden in GOLDEN:
        text = golden.text(FOLDER)
        golden.path.write_bytes(text.encode())
        sys.stdout.write(f"{golden.path.name}: {text.count(chr(10))} ranks\n")


if __name__ == "__main__":
    write()
