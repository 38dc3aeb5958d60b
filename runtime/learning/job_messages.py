"""What rank 0 tells the autopilot's process: the job, and what ranks have observed of an iteration."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from perseus_planner.runtime.learning.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_OBSERVED = struct.Struct("<qqI")
_SIZE = struct.Struct("<I")


@dataclass(frozen=True)
class JobDescription:
    """What rank 0 says of the job.

    Attributes:
        settings: As for `AutopilotSettings`.
        places: Rank in the whole job -> its pipeline, and its rank there; of ranks that observe.
        pipelines: Number of pipelines.
        gpus_per_stage: How many ranks have the same place.
        told: Rank in the whole job -> what it runs and its GPU, as `Observer` writes it; of the first pipeline.
        sets_clocks: Whether clocks are set; otherwise only full clocks can be observed.
        state: File of what is learnt; None for none.
    """

    settings: Mapping[str, Any]
    places: Mapping[int, tuple[int, int]]
    pipelines: int
    gpus_per_stage: int
    told: Mapping[int, Mapping[str, Any]]
    sets_clocks: bool
    state: str | None

    def dumps(self) -> bytes:
        """Return the description as bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def loads(cls, data: bytes) -> JobDescription:
        """Return what `dumps` wrote."""
        values = json.loads(data)
        places = {int(rank): (pipeline, place) for rank, (pipeline, place) in values["places"].items()}
        told = {int(rank): each for rank, each in values["told"].items()}
        return cls(**{**values, "places": places, "told": told})


def observed_message(iteration: int, since: int, frames: Iterable[bytes]) -> bytes:
    """Return the message with the packed frames of an iteration; a program proposed now begins with `since`."""
    packed = list(frames)
    return _OBSERVED.pack(iteration, since, len(packed)) + b"".join(_SIZE.pack(len(each)) + each for each in packed)


def read_observed(data: bytes) -> tuple[int, list[Frame]]:
    """Return what `observed_message` wrote: the iteration that programs begin with, and the frames.

    Raises:
        ValueError: If it is not exactly that.
    """
    _, since, count = _OBSERVED.unpack_from(data)
    at, frames = _OBSERVED.size, []
    for _ in range(count):
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size
        frames.append(Frame.unpack(data[at : at + size]))
        at += size
    return since, frames
