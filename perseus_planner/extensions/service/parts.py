"""The parts of a job that may be slow, and in which pipelines and stages each of them is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Literal

from pydantic import BeforeValidator, FailFast, Field, WithJsonSchema

from perseus_planner.base.errors import UsageError, shown
from perseus_planner.extensions.service.kinds import STRICT, Line, Number

ScopeKind = Literal["pipeline", "stage", "rank", "gpu", "node"]


def _text_of_number(value: object) -> object:
    return str(value) if type(value) is int and 0 <= value < 2**31 else value


_ScopeValue = Annotated[
    Line,
    BeforeValidator(_text_of_number),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "maxLength": 1024}, {"type": "integer", "minimum": 0}]},
        "validation",
    ),
]


@dataclass(frozen=True, slots=True)
class Place:
    """The location of one rank of a job."""

    __pydantic_config__ = STRICT

    rank: Number  #: Rank in the whole job, from 0.
    pipeline: Number  #: Data-parallel pipeline of the rank, from 0.
    #: Stages of that pipeline on this rank; [] if unknown.
    stages: Annotated[tuple[Number, ...], FailFast(), Field(max_length=4096)]
    node: Line = ""  #: Host name; empty if unknown.
    gpu: Line = ""  #: UUID of the GPU; empty if unknown.


MOST_PLACES = 2**17
"""Ranks of a job whose places are taken; some 400 bytes of memory each. The largest clusters have
fewer GPUs."""
MOST_PLACES_OF_A_PIPELINE = 1024
"""Ranks of one pipeline; the largest models are cut into some 16 stages of 8 to 64 GPUs each."""
Places = Annotated[tuple[Place, ...], FailFast(), Field(max_length=MOST_PLACES)]


@dataclass(frozen=True)
class Scope:
    """The part of a job that is slow: pipeline 3, stage 2 of `pipeline`, rank 17, GPU
    "GPU-8f6b…", node "node07".
    """

    __pydantic_config__ = STRICT

    kind: ScopeKind
    value: _ScopeValue  #: The number of the part, the UUID of the GPU or the node's name.
    pipeline: Number | None = None  #: The pipeline of that part; null for all that have it.

    @cached_property
    def part(self) -> tuple[str, str, int | None]:
        """All of it, to look it up."""
        return self.kind, self.value, self.pipeline


class Parts:
    """The parts of a job, found once for each scope."""

    def __init__(self, job: str, pipelines: int, places: tuple[Place, ...]) -> None:
        self._job = job
        self._pipelines = pipelines
        self._places = places
        self._known: dict[str, dict[str, list[Place]]] = {}
        self._found: dict[tuple[str, str, int | None], dict[int, frozenset[int]]] = {}

    def _of_kind(self, kind: str) -> dict[str, list[Place]]:
        """Return the places of each rank, GPU or node."""
        if kind not in self._known:
            places_of: dict[str, list[Place]] = {}
            for place in self._places:
                places_of.setdefault(str(getattr(place, kind)), []).append(place)
            self._known[kind] = places_of
        return self._known[kind]

    @cached_property
    def _nodes(self) -> dict[str, list[str]]:
        """Name of a node with all, a part or nothing of its domain -> nodes."""
        nodes: dict[str, list[str]] = {}
        for node in self._of_kind("node"):
            for name in _names(node):
                nodes.setdefault(name, []).append(node)
        return nodes

    def places_of(self, scope: Scope) -> list[Place]:
        """Return the places of a rank, GPU or node, which has its name with a domain or without."""
        values = {scope.value}
        # Monitors name nodes with or without their domain, whatever the job was registered with.
        if scope.kind == "node":
            values = {*_names(scope.value), *self._nodes.get(scope.value, ())}
        by_name = self._of_kind(scope.kind)
        return [place for value in values for place in by_name.get(value, ())]

    def of(self, scope: Scope) -> dict[int, frozenset[int]]:
        """Return the pipelines in `scope`, each with its stages in `scope`; no stages if they are
        unknown.

        If a rank, GPU or node belongs to several pipelines, `scope.pipeline` restricts it to one
        of them.

        Raises:
            UsageError: If the job has no such part.
        """
        parts = self._found.get(scope.part)
        if parts is None:
            parts = self._find(scope)
            self._found[scope.part] = parts
        return parts

    def check(self, scope: Scope, stages: int) -> None:
        """Check that a scope exists if pipelines have this many stages.

        Raises:
            UsageError: If it does not.
        """
        for stage in frozenset().union(*self.of(scope).values()):
            if stage >= stages:
                raise UsageError(f"scope: there is no stage {stage}; stages are 0 to {stages - 1}")

    def check_places(self, stages: int) -> None:
        """Check the places if pipelines have this many stages.

        Raises:
            UsageError: If a rank is listed twice, or its pipeline or stage does not exist.
        """
        if len({place.rank for place in self._places}) < len(self._places):
            raise UsageError("places: a rank is listed twice; list each rank once")
        for place in self._places:
            _check_numbers(f"rank {place.rank}, pipeline", [place.pipeline], self._pipelines)
            _check_numbers(f"rank {place.rank}, stage", place.stages, stages)

    def _find(self, scope: Scope) -> dict[int, frozenset[int]]:
        if scope.kind == "pipeline":
            parts = {self._pipeline(scope.value): frozenset[int]()}
        elif scope.kind == "stage":
            parts = {self._pipeline_of_stage(scope): frozenset({_number("stage", scope.value)})}
        else:
            parts = self._held_by(scope)
        if scope.pipeline is not None:
            parts = {
                pipeline: stages for pipeline, stages in parts.items() if pipeline == scope.pipeline
            }
        if not parts:
            raise UsageError(
                f"scope: {scope.kind} {shown(scope.value)} is not in pipeline {scope.pipeline} of "
                f"job {shown(self._job)}; correct one of them, or leave the pipeline out"
            )
        return parts

    def _held_by(self, scope: Scope) -> dict[int, frozenset[int]]:
        """Return the stages of the ranks in `scope` by pipeline; no stages for a pipeline in which
        a rank's are unknown.
        """
        places = self.places_of(scope) if scope.value else []
        if not places:
            raise UsageError(
                f"scope: job {shown(self._job)} has no known {scope.kind} "
                f"{shown(scope.value)}; register it with the places of its ranks, or report the "
                "pipeline"
            )
        held: dict[int, frozenset[int]] = {}
        for place in places:
            held[place.pipeline] = held.get(place.pipeline, frozenset()).union(place.stages)
        # A rank without known stages may be in any stage of its pipeline, so the others say nothing
        # about where it is slow.
        return held | {place.pipeline: frozenset() for place in places if not place.stages}

    def _pipeline_of_stage(self, scope: Scope) -> int:
        if scope.pipeline is not None:
            return self._pipeline(str(scope.pipeline))
        if self._pipelines > 1:
            raise UsageError(
                f"scope: stage {shown(scope.value)} is in each of {self._pipelines} pipelines; "
                "name the pipeline in which it is slow"
            )
        return 0

    def _pipeline(self, value: str) -> int:
        number = _number("pipeline", value)
        count = self._pipelines
        if number >= count:
            raise UsageError(
                f"scope: there is no pipeline {number}; pipelines are 0 to {count - 1}"
            )
        return number


@lru_cache(maxsize=2**16)
def _names(node: str) -> frozenset[str]:
    """Return the names of a node with all of its domain, with a part of it, and without it."""
    parts = node.split(".")
    whole = len(parts) if parts[-1].isdigit() else 1  # an address has no domain
    return frozenset(".".join(parts[:count]) for count in range(whole, len(parts) + 1))


def _number(kind: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and str(int(value)) == value):
        raise UsageError(
            f"scope: {kind} {shown(value)} is not a number; write 0 for the first one, 1 for the "
            "next"
        )
    return int(value)


def _check_numbers(what: str, numbers: Iterable[int], count: int) -> None:
    for number in numbers:
        if number not in range(count):
            raise UsageError(f"places: {what} {number}: does not exist; they are 0 to {count - 1}")
