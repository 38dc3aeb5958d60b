"""What a rank has observed of one iteration, as bytes for the job's store."""

from __future__ import annotations

import math
import struct
from array import array
from dataclasses import dataclass

from perseus_planner.runtime.autopilot.observations import ComputationObservation, RankObservation

_HEAD = struct.Struct("<IIqqdddHH")
_CHANGE = struct.Struct("<di")


@dataclass(frozen=True)
class Frame:
    """One iteration of one rank. Times are seconds from its begin, by the rank's clock.

    Attributes:
        rank: Rank in the whole job.
        order: Number of the order of computations that the rank runs; 0 if it is not known yet.
        iteration: Number of the iteration.
        decision: `Decision.version` of its program; 0 if it ran at full clocks.
        time_s: How long it took.
        spans_s: Begin and end of each computation, one after the other; empty if nothing can be learnt of them.
        changes: When clocks came into force, and which (MHz); the first is the one at its begin, with a time of 0. A
            clock of 0 is not known.
        energy_j: Energy of the GPU; None if it is not known.
        throttled_s: Seconds in which the GPU was throttled.
    """

    rank: int
    order: int
    iteration: int
    decision: int
    time_s: float
    spans_s: tuple[float, ...] = ()
    changes: tuple[tuple[float, int], ...] = ()
    energy_j: float | None = None
    throttled_s: float = 0.0

    def pack(self) -> bytes:
        """Return the frame as bytes."""
        energy_j = math.nan if self.energy_j is None else self.energy_j
        head = (self.rank, self.order, self.iteration, self.decision, self.time_s, energy_j, self.throttled_s)
        changes = b"".join(_CHANGE.pack(*change) for change in self.changes)
        return _HEAD.pack(*head, len(self.spans_s), len(self.changes)) + array("d", self.spans_s).tobytes() + changes

    @classmethod
    def unpack(cls, data: bytes) -> Frame:
        """Return the frame that `pack` wrote.

        Raises:
            ValueError: If it is not exactly that.
        """
        if len(data) < _HEAD.size:
            raise ValueError("it is cut off")
        rank, order, iteration, decision, time_s, energy_j, throttled_s, spans, changes = _HEAD.unpack_from(data)
        middle = _HEAD.size + 8 * spans
        if len(data) != middle + _CHANGE.size * changes:
            raise ValueError("it is cut off")
        return cls(
            rank,
            order,
            iteration,
            decision,
            time_s,
            tuple(array("d", data[_HEAD.size : middle])),
            tuple((at_s, clock) for at_s, clock in _CHANGE.iter_unpack(data[middle:])),
            None if math.isnan(energy_j) else energy_j,
            throttled_s,
        )

    def observation(self, pipeline: int, rank: int, gpus: int, energy_step_s: float) -> RankObservation:
        """Return what the autopilot is told.

        Args:
            pipeline: The rank's pipeline.
            rank: The rank in its pipeline.
            gpus: How many GPUs like this one the rank of the pipeline has.
            energy_step_s: How old a reading of the energy counter can be, in seconds.
        """
        return RankObservation(
            pipeline,
            rank,
            self.iteration,
            self.decision,
            self.time_s,
            tuple(
                self._computation(begin_s, end_s)
                for begin_s, end_s in zip(self.spans_s[0::2], self.spans_s[1::2], strict=True)
            ),
            None if self.energy_j is None else gpus * self.energy_j,
            energy_step_s,
            self.throttled_s,
        )

    def _computation(self, begin_s: float, end_s: float) -> ComputationObservation:
        before = [clock for at_s, clock in self.changes if at_s <= begin_s]
        inside = [change for change in self.changes if begin_s < change[0] < end_s]
        if not before or not before[-1] or len(inside) > 1 or not all(clock for _, clock in inside):
            return ComputationObservation(begin_s, end_s, None)
        return ComputationObservation(begin_s, end_s, before[-1], *(inside[0] if inside else (None, None)))


def iteration_of(data: bytes) -> tuple[int, int]:
    """Return the iteration of a packed frame, and the number of its order; decodes nothing else."""
    _, order, iteration, *_ = _HEAD.unpack_from(data)
    return iteration, order
