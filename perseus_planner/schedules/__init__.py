"""Pipeline schedules: which computations each rank runs, and in what order.

A computation is written as in torch.distributed.pipelining: `3F17` is the forward (F) of microbatch
17 on stage 3. A schedule is one list of computations per rank. Generators make the schedules that
engines run, each also by its name on the command line; a text grid holds any other schedule. `dag`
joins a schedule and a profile to a `PipelineDag`, `pipeline` adds transfers, fixed operations and
variants.
"""

from perseus_planner.schedules.generators import (
    NAMES,
    combined_1f1b,
    dualpipe_v,
    generate,
    generate_for_stages,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    schedule_names,
    zb_h1,
    zbv,
)
from perseus_planner.schedules.schedule import (
    KINDS,
    WHOLE,
    Computation,
    Schedule,
    cell_of,
    check_pipeline,
    dependency_of,
    grid_text,
    load_grid,
    overlapped,
    parse_grid,
    save_grid,
)

__all__ = [
    "KINDS",
    "NAMES",
    "WHOLE",
    "Computation",
    "Schedule",
    "cell_of",
    "check_pipeline",
    "combined_1f1b",
    "dependency_of",
    "dualpipe_v",
    "generate",
    "generate_for_stages",
    "gpipe",
    "grid_text",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "load_grid",
    "looped_bfs",
    "one_f_one_b",
    "overlapped",
    "parse_grid",
    "save_grid",
    "schedule_names",
    "zb_h1",
    "zbv",
]
