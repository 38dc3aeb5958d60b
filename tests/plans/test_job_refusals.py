"""Every malformed job file is refused, with its line and the remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from strategies import smooth_profile

from perseus_planner import Profile, schedules
from perseus_planner.base.errors import JobError, PlannerError
from perseus_planner.plans.job import Job
from perseus_planner.profiles.groups import on_each_gpu

JOB = (
    "format: perseus-planner/job\nversion: 1\nprofile: two.yaml\nschedule: 1f1b\nmicrobatches: 3\n"
)
KNOWN = (
    "blocking_power_w, clock_change, correction, format, gpu, gpu_power_limit_w, gpu_spread, "
    "jitter, jitter_common, jitter_tail, layout, microbatch_group, microbatches, "
    "operations, overhead_s, profile, ranks, "
    "replicas, samples_per_iteration, schedule, slow_stages, stage, stages, tensor_parallel, "
    "tokens_per_iteration, transfer, variants, version, virtual_stages"
)
COUNT = "a whole number of at least 1"
WAIT = "a wait: give finite seconds of 0 or more, such as 0.002"
POWER = "a power: give finite watts of 0 or more, such as 83.64"
STAGE = "a stage number: write 0 for the first stage, 1 for the next, and so on"
SOURCE = (
    "is not a profile: name a file; or a list of files, one for each stage; or a list of lists, "
    "one for each stage, with a file for each of its GPUs, equally many"
)
NUMBERS = "is not a list of numbers; write one such as [0, 2]"

# What is added to JOB, or what of it is replaced by what; the message.
BAD: dict[str, tuple[str | tuple[str, str], str]] = {
    "no profile": (("profile: two.yaml\n", ""), "job.yaml: has no key 'profile'; add it"),
    "later version": (
        ("version: 1", "version: 2"),
        "job.yaml, line 2, key 'version': 2 cannot be read: this planner reads version 1; use the "
        "planner that wrote the file, or write it again with this one",
    ),
    "layout of other stages": (
        "layout: Et|t|tL\n",
        "job.yaml, line 6, key 'layout': layout 'Et|t|tL': has 3 stages, but the pipeline has 2; "
        "correct one",
    ),
    "misspelt key": ("transfers: 1\n", "job.yaml, line 6: unknown key 'transfers'; did you mean "
    "'transfer'?"),
    "unknown key": ("zebra: 1\n", "job.yaml, line 6: unknown key 'zebra'; remove it; known keys "
    f"are {KNOWN}"),
    "misspelt key inside": (
        "transfer:\n  forward_s: 1\n  backwards_s: 2\n",
        "job.yaml, line 8: unknown key 'backwards_s' of transfer; did you mean 'backward_s'?",
    ),
    "misspelt key in a list": (
        "operations:\n- {name: a, when: end, time_s: 1}\n- name: b\n  when: end\n  time: 1\n",
        "job.yaml, line 10: unknown key 'time' of operations; did you mean 'time_s'?",
    ),
    "unknown key of a variant": (
        "variants:\n- kind: B.sync\n  zebra: 1\n",
        "job.yaml, line 8: unknown key 'zebra' of variants; remove it; known keys are kind, "
        "microbatches, stages",
    ),
    "misspelt key of a replica": (
        "replicas:\n- count: 2\n- counts: 1\n",
        "job.yaml, line 8: unknown key 'counts' of replicas; did you mean 'count'?",
    ),
    "key twice inside": (
        "transfer:\n  forward_s: 1\n  forward_s: 2\n",
        "job.yaml, line 8: key 'forward_s' stands on line 7 too; keep one",
    ),
    "stage twice": (
        "slow_stages:\n  1: 1.1\n  1: 1.2\n",
        "job.yaml, line 8: key '1' stands on line 7 too; keep one",
    ),
    "missing key inside": (
        "operations:\n- {name: a, when: end, time_s: 1}\n- name: b\n",
        "job.yaml, line 8, operations: has no key 'time_s', 'when'; add it",
    ),
    "alias": ("stages: &a 2\nranks: "
    "*a\n", "job.yaml, line 7: uses the alias *a; write the value "
    "itself"),
    "no count": (("microbatches: 3", "microbatches: 0"), "job.yaml, line 5, key 'microbatches': 0 "
    f"is not {COUNT}"),
    "count as text": ("ranks: '2'\n", f"job.yaml, line 6, key 'ranks': '2' is not {COUNT}"),
    "profile a number": (("two.yaml", "7"), f"job.yaml, line 3, key 'profile': 7 {SOURCE}"),
    "profile an empty list": (("two.yaml", "[]"), f"job.yaml, line 3, key 'profile': [] {SOURCE}"),
    "groups of unlike size": (
        ("two.yaml", "[[a, b], [c]]"),
        f"job.yaml, line 3, key 'profile': [['a', 'b'], ['c']] {SOURCE}",
    ),
    "groups and files": (("two.yaml", "[[a], b]"), "job.yaml, line 3, key 'profile': [['a'], 'b'] "
    f"{SOURCE}"),
    "schedule a number": (
        ("1f1b", "1"),
        "job.yaml, line 4, key 'schedule': 1 is not one line of text; write one",
    ),
    "power as text": ("blocking_power_w: "
    "low\n", "job.yaml, line 6, key 'blocking_power_w': 'low' "
    f"is not {POWER}"),
    "one power negative": (
        "blocking_power_w: [1, -1]\n",
        f"job.yaml, line 6, key 'blocking_power_w': -1 is not {POWER}",
    ),
    "transfer a number": (
        "transfer: 0.1\n",
        "job.yaml, line 6, key 'transfer': 0.1 is not a mapping; write it with the keys forward_s, "
        "backward_s",
    ),
    "negative transfer": (
        "transfer:\n  backward_s: -1\n",
        f"job.yaml, line 7, key 'backward_s' of transfer: -1 is not {WAIT}",
    ),
    "operations no list": (
        "operations: {name: a}\n",
        "job.yaml, line 6, key 'operations': {'name': 'a'} is not a list; begin each of its "
        "entries with a hyphen",
    ),
    "clock change a number": (
        "clock_change: 5\n",
        "job.yaml, line 6, key 'clock_change': 5 is not a mapping; write it with the keys call_s, "
        "settle_s, gpus_per_node",
    ),
    "an operation no mapping": (
        "operations:\n- a\n",
        "job.yaml, line 7, key 'operations': 'a' is not a mapping; write it with the keys name, "
        "when, time_s, energy_j, where",
    ),
    "operation in capitals": (
        "operations:\n- {name: Load, when: end, time_s: 1}\n",
        "job.yaml, line 7, key 'name' of operations: 'Load' is not the name of an operation: "
        "write lower-case letters, hyphens",
    ),
    "operation of no time": (
        "operations:\n- {name: load, when: end, time_s: 0}\n",
        "job.yaml, line 7, key 'time_s' of operations: 0 is not a time: write finite seconds above "
        "0, such as 0.0512",
    ),
    "operation at no point": (
        "operations:\n- name: load\n  when: now\n  time_s: 1\n",
        "job.yaml, line 8, key 'when' of operations: operation load, when: 'now' is unknown; "
        "write start, end, or before or after and a kind, such as before F",
    ),
    "where a number": (
        "operations:\n- {name: load, when: end, time_s: 1, where: 0}\n",
        f"job.yaml, line 7, key 'where' of operations: 0 {NUMBERS}",
    ),
    "operation on no rank": (
        "operations:\n- {name: load, when: end, time_s: 1, where: [2]}\n",
        "operation load, where: rank 2 does not exist; ranks are 0 to 1",
    ),
    "operation of no computation": (
        "operations:\n- {name: load, when: after W, time_s: 1}\n",
        "operation load, when: schedule 1f1b, 2 stages x 3 microbatches has no W; name a kind that "
        "it has",
    ),
    "variant without suffix": (
        "variants:\n- {kind: B, microbatches: last}\n",
        "job.yaml, line 7, key 'kind' of variants: variant: 'B' is not a kind with a suffix; write "
        "one, such as B.sync",
    ),
    "variant of unknown microbatches": (
        "variants:\n- {kind: B.sync, microbatches: late}\n",
        "job.yaml, line 7, key 'microbatches' of variants: variant B.sync, microbatches: 'late' "
        "is unknown; write first, last, all or a list of numbers",
    ),
    "variant not profiled": (
        "variants:\n- {kind: B.sync, microbatches: last}\n",
        "the profile has no B.sync of stage 0, which 0B2 needs; measure it, or leave that variant "
        "out",
    ),
    "slow stages a list": (
        "slow_stages: [1.1]\n",
        "job.yaml, line 6, key 'slow_stages': [1.1] is not a mapping; write entries such as 3: "
        "1.15, stage and slowdown",
    ),
    "slow stage by name": (
        "slow_stages:\n  last: 1.1\n",
        f"job.yaml, line 7, key 'last' of slow_stages: 'last' is not {STAGE}",
    ),
    "slow by nothing": (
        "slow_stages:\n  1: 0\n",
        "job.yaml, line 7, key '1' of slow_stages: 0 is not a slowdown: give how many times as "
        "long it takes, above 0, such as 1.15",
    ),
    "slow stage that is not": ("slow_stages: {2: "
    "1.1}\n", "slow stage 2: does not exist; stages "
    "are 0 to 1"),
    "overhead as text": (
        "overhead_s: much\n",
        "job.yaml, line 6, key 'overhead_s': 'much' is not an overhead: write finite seconds, such "
        "as 0.12",
    ),
    "overhead yes": (
        "overhead_s: yes\n",
        "job.yaml, line 6, key 'overhead_s': True is not an overhead: write finite seconds, such "
        "as 0.12",
    ),
    "clock change without call": (
        "clock_change:\n  settle_s: 0.01\n",
        "job.yaml, line 7, clock_change: has no key 'call_s'; add it",
    ),
    "nodes of no GPU": (
        "clock_change: {call_s: 0.01, gpus_per_node: 0}\n",
        f"job.yaml, line 6, key 'gpus_per_node' of clock_change: 0 is not {COUNT}",
    ),
    "no replicas": (
        "replicas: []\n",
        "job.yaml, line 6, key 'replicas': is empty; give how many pipelines there are, or an "
        "entry for each kind of them",
    ),
    "replicas of no count": (
        "replicas:\n- {count: 0}\n",
        f"job.yaml, line 7, key 'count' of replicas: 0 is not {COUNT}",
    ),
    "a replica that lacks a variant": (
        "variants: [{kind: B.sync, microbatches: last}]\nreplicas:\n- {count: 1}\n- {count: 1, "
        "slow_stages: {1: 2}}\n",
        "pipelines of kind 0: the profile has no B.sync of stage 0, which 0B2 needs; measure it, "
        "or leave that variant out",
    ),
    "a replica that does not fit": (
        "replicas:\n- {count: 1}\n- {count: 1, slow_stages: {7: 2}}\n",
        "replicas, entry 1: slow stage 7: does not exist; stages are 0 to 1",
    ),
    "groups of other size": (
        ("two.yaml", "[[one.yaml, one.yaml]]\ntensor_parallel: 4"),
        "tensor_parallel is 4, but the profile names 2 GPUs for each stage; correct one",
    ),
    "groups of other size than measured": (
        ("two.yaml", "pair.yaml\ntensor_parallel: 4"),
        "tensor_parallel is 4, but the profile was measured with 2 GPUs for each stage; correct "
        "one",
    ),
    "a stage that is no function": (
        "stage: package.module\n",
        "job.yaml, line 6, key 'stage': 'package.module' is not a function: write "
        "package.module:function",
    ),
    "a gpu that is no text": ("gpu: 0\n", "job.yaml, line 6, key 'gpu': 0 is not one line of text; "
    "write one"),
    "powers for other stages": (
        ("two.yaml", "[one.yaml, one.yaml]\nblocking_power_w: [1, 2, 3]"),
        "blocking_power_w has 3 numbers for 2 profiles; give one for each, or one for all",
    ),
    "no schedule": (
        ("schedule: 1f1b\n", ""),
        "no schedule is given; give --schedule, or schedule in a job file: "
        f"{', '.join(schedules.NAMES)}, or a text grid",
    ),
    "no microbatches": (
        ("microbatches: 3\n", ""),
        "the number of microbatches of an iteration is missing; give --microbatches, or "
        "microbatches in a job file",
    ),
    "other stages": (
        "stages: 2\nranks: 4\n",
        "stages is 2, but schedule 1f1b, 4 stages x 3 microbatches has 4; correct one",
    ),
    "stages that ranks cannot share": (
        ("1f1b", "zbv\nstages: 3"),
        "3 stages cannot be shared by ranks of 2 stages each; give the number of ranks",
    ),
    "grid of other microbatches": (
        ("1f1b", "order.csv"),
        "microbatches is 3, but schedule order, 2 stages x 5 microbatches has 5; correct one",
    ),
    "transfer for other boundaries": (
        "transfer: {forward_s: [0.1, 0.2]}\n",
        "transfer, forward_s: has 2 numbers for 1 boundaries between stages; give one for each, or "
        "one for all",
    ),
    "profile not there": (("two.yaml", "absent.yaml"), "absent.yaml: no such file; check the path"),
}  # fmt: skip


@pytest.fixture
def work(folder: Path) -> Path:
    """A working folder with profiles and a text grid."""
    smooth_profile(2, step_mhz=150).save("two.yaml")
    smooth_profile(1, step_mhz=150).save("one.yaml")
    on_each_gpu(smooth_profile(2, step_mhz=150), 2).save("pair.yaml")
    two = smooth_profile(2, step_mhz=150)
    Profile({**two.measurements, (0, "F.x"): two.measurements[0, "F"]}, 83.64).save("named.yaml")
    schedules.save_grid(schedules.gpipe(2, 5), "order.csv")
    return folder


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_bad_job_is_refused_with_its_remedy(
    work: Path, change: str | tuple[str, str], message: str
):
    text = JOB + change if isinstance(change, str) else JOB.replace(*change)
    assert text != JOB
    Path("job.yaml").write_text(text)
    with pytest.raises(PlannerError) as caught:
        Job.load("job.yaml").dags()
    assert str(caught.value) == message
    assert not message.startswith("job.yaml") or isinstance(caught.value, JobError)


def test_the_job_that_these_are_made_of_is_good(work: Path):
    Path("job.yaml").write_text(JOB)
    assert [dag.schedule for dag in Job.load("job.yaml").dags()] == [schedules.one_f_one_b(2, 3)]


WHOLE = {
    "profile": "named.yaml",
    "schedule": "1f1b",
    "microbatches": 3,
    "ranks": 2,
    "virtual_stages": 1,
    "stages": 2,
    "tensor_parallel": 2,
    "transfer": {"forward_s": 0.1, "backward_s": [0.1]},
    "operations": [
        {"name": "load", "when": "before F", "time_s": 0.1, "energy_j": 3, "where": [0]}
    ],
    "variants": [{"kind": "F.x", "microbatches": [0], "stages": [0]}],
    "slow_stages": {1: 1.1},
    "blocking_power_w": [50, 50],
    "overhead_s": 0.1,
    "clock_change": {"call_s": 0.01, "settle_s": 0.01, "gpus_per_node": 8},
    "tokens_per_iteration": 4096,
    "samples_per_iteration": 2,
    "stage": "package.module:build_stage",
    "gpu": "nvml:0",
    "replicas": [
        {"count": 1, "profile": "named.yaml", "blocking_power_w": 50, "slow_stages": {0: 1.1}}
    ],
}
ODD = (
    None,
    True,
    -1,
    0,
    10**400,
    0.5,
    math.nan,
    math.inf,
    "",
    "x",
    "\n",
    "\x00",
    [],
    [None],
    [[]],
    {},
    {1: 2},
    {None: None},
)


def places(value: object) -> Iterator[tuple[object, ...]]:
    """The path of every value inside `value`."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inside:
        yield (key,)
        yield from ((key, *rest) for rest in places(each))


def with_one(value: Any, path: tuple[object, ...], odd: object) -> Any:
    """A copy of `value` with `odd` at `path`."""
    if not path:
        return odd
    copy = value.copy()
    copy[path[0]] = with_one(value[path[0]], path[1:], odd)
    return copy


def said_of(keys: dict[str, Any]) -> str | None:
    """The refusal of a job of these keys; None where there is none."""
    Path("job.yaml").write_text(
        yaml.safe_dump({"format": "perseus-planner/job", "version": 1, **keys})
    )
    try:
        Job.load("job.yaml").dags()
    except PlannerError as error:
        return str(error)
    return None


@pytest.mark.parametrize("path", list(places(WHOLE)), ids=str)
def test_whatever_stands_in_a_job_is_taken_or_refused_in_one_line(
    work: Path, path: tuple[object, ...]
):
    assert said_of(WHOLE) is None
    messages = [said_of(with_one(WHOLE, path, odd)) for odd in ODD]
    assert not any("\n" in message for message in messages if message is not None)
    assert messages.count(None) < len(ODD) // 2
