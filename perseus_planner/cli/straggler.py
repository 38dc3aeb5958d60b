"""`planner straggler`: report to the service that part of a job is slow, or has recovered."""

from __future__ import annotations

import getpass
import socket
import sys
from typing import Any

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import asking, console

_WAIT_S = 5.0  #: for plans, so that the answer can say what they save
_CAUSES = ("compute", "communication", "data", "unknown")


@click.command(
    epilog=console.examples(
        "planner straggler --job gpt3 --pipeline 3 --slowdown 1.2 --in 10s --ttl 30m",
        "planner straggler --job gpt3 --node node07 --score 0.83 --cause compute --source dcgm",
        "planner straggler --job gpt3 --pipeline 3 --slowdown 1",
        "planner straggler --job gpt3 --clear 5f0c",
        "tail -F train.log | planner straggler --job gpt3 --megatron-log --ttl 10m",
    )
)
@asking.job
@click.option(
    "--pipeline",
    type=click.IntRange(0),
    metavar="N",
    help="Number of a data-parallel pipeline that is slow, from 0.",
)
@click.option(
    "--stage",
    type=click.IntRange(0),
    metavar="N",
    help="Number of a slow stage, from 0; with --pipeline if there are several.",
)
@click.option("--rank", type=click.IntRange(0), metavar="N", help="A slow rank of the job.")
@click.option("--gpu", metavar="UUID", help="UUID of a slow GPU, as nvidia-smi -L prints it.")
@click.option("--node", metavar="NAME", help="Host name of a slow node.")
@click.option(
    "--slowdown",
    type=console.SLOWDOWN,
    help="Time over normal time, 1 or more; 1 means that it has recovered.",
)
@click.option(
    "--score", type=float, metavar="SHARE", help="Or its performance over normal performance."
)
@click.option("--in", "in_s", type=console.LAG, help="It begins after this time.  [default: now]")
@click.option(
    "--ttl", "ttl_s", type=console.LAG, help="How long it lasts.  [default: until it is cleared]"
)
@click.option(
    "--cause",
    type=click.Choice(_CAUSES),
    default="unknown",
    show_default=True,
    help="What is slow.",
)
@click.option(
    "--source",
    metavar="NAME",
    help="Who reports: a later report of a source replaces its earlier one.  [default: user@host]",
)
@click.option(
    "--key",
    metavar="KEY",
    help="Identifies the report, so that it counts once however often it is sent.",
)
@click.option("--clear", metavar="KEY", help="Withdraw the report with that key.")
@click.option(
    "--megatron-log",
    is_flag=True,
    help="Read the log of a Megatron job from standard input, and report the ranks that its "
    "StragglerDetector names.",
)
@asking.service
@console.as_json
def straggler(
    job: str,
    clear: str | None,
    megatron_log: bool,
    service: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Report that a part of a training job is slow.

    The other pipelines then run no faster than needed, which saves energy. Write times as 30s, 30m
    or 2h.
    """
    if clear is not None and megatron_log:
        raise UsageError("--clear: withdraws one report; leave out --megatron-log")
    with asking.open_client(service) as client:
        if clear is not None:
            _refuse(given, "--clear")
            answer = client.clear(job, clear)
        elif megatron_log:
            _refuse({**given, "ttl_s": None}, "--megatron-log")
            from perseus_planner.service.client.sources import Feed, megatron_reports

            feed = Feed(client, job, megatron_reports, ttl_s=given["ttl_s"])
            for line in sys.stdin:
                if answers := feed(line):
                    asking.print_answers(answers)
            return
        else:
            answer = client.report(job, _request(given), wait_s=_WAIT_S)
    if as_json:
        asking.print_json(answer)
    else:
        asking.print_answers([answer])


def _refuse(given: dict[str, Any], beside: str) -> None:
    names = [
        name
        for name, value in given.items()
        if value is not None and (name, value) != ("cause", "unknown")
    ]
    if names:
        option = {"in_s": "in", "ttl_s": "ttl"}.get(names[0], names[0]).replace("_", "-")
        raise UsageError(f"--{option}: is for a new report; leave it out beside {beside}")


def _request(given: dict[str, Any]) -> Any:
    from perseus_planner.service.schemas import ReportRequest

    return ReportRequest(
        source=given["source"] or f"{getpass.getuser()}@{socket.gethostname()}",
        scope=_scope(
            **{name: given[name] for name in ("pipeline", "stage", "rank", "gpu", "node")}
        ),
        slowdown=given["slowdown"],
        score=given["score"],
        in_s=given["in_s"],
        ttl_s=given["ttl_s"],
        cause=given["cause"],
        key=given["key"],
    )


def _scope(pipeline: int | None, **others: Any) -> Any:
    from perseus_planner.service.model import Scope

    named: dict[Any, Any] = {kind: value for kind, value in others.items() if value is not None}
    if pipeline is not None and not named:
        return Scope("pipeline", str(pipeline))
    if len(named) != 1 or (pipeline is not None and "stage" not in named):
        raise UsageError(
            "name what is slow in one way: --pipeline, --stage, --rank, --gpu or --node"
        )
    ((kind, value),) = named.items()
    return Scope(kind, str(value), pipeline)
