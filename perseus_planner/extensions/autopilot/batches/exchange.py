"""What ranks tell each other of a batch through the job's store, and how long they wait for it; and
how long computations take by the work of their microbatch, learnt at full clocks.

The first rank of each pipeline knows the work of its microbatches. It writes its pipeline's own
time at full clocks; that of pipeline 0 writes the longest of them back. Then it sends its pipeline
the work and the clocks. So each rank takes a handful of operations for an iteration, and only one
rank reads a number for each pipeline.

Keys of the store:

- `batch/profile`: the profile that rank 0 has loaded, written before training.
- `batch/I/time/P`: an `OwnTime` of pipeline P for iteration I. `batch/I/slowest`: a `Slowest`.
- `batch/I/P`: a `Batch`, for the ranks of pipeline P.
- `batch/laws/P/R`: the `RankLaws` of rank R of pipeline P.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from perseus_planner.base.errors import RankError
from perseus_planner.base.wires import Record, decode, encode, read_key
from perseus_planner.extensions.autopilot.batches.solver import Law
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.profiles import Profile
from perseus_planner.runtime.sending import Runs, pack, read, unpack
from perseus_planner.schedules import Computation

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed import Store

    Floats = NDArray[np.float64]

ITERATIONS = 10
"""So many iterations at full clocks tell the laws."""
_AGAIN = (2, 4, 8)  #: so many times as many tell them better; then they stay
_SAMPLES = 8  #: computations for each number of a law
_ROUNDS = 20  #: of reweighting
_TUNING = 1.345  #: standard deviations from which a time counts less (Huber)
_UNVARIED = 1e-6  #: relative spread of work below which a slope cannot be told
_STIFFNESS = 1e-6  #: keeps slopes of work that varies alike small


def fit_law(work: Floats, time_s: Floats) -> Law:
    """Return the affine law that times follow, robustly: by Huber's weights, reweighted.

    Where work does not vary, its slope is 0; where two numbers vary alike, they share the slope.
    The residuals tell its standard error.

    Args:
        work: (n, numbers) work of the microbatch of each computation.
        time_s: (n,) what each took, seconds.
    """
    # Numbers are standardised, so that one stiffness fits units as different as tokens and squares.
    mean = work.mean(axis=0)
    spread = work.std(axis=0)
    # A number that does not vary has no slope that could be told.
    varied = spread > _UNVARIED * np.maximum(np.abs(mean), 1e-300)
    scaled = (work[:, varied] - mean[varied]) / spread[varied]
    design = np.column_stack([np.ones(len(work)), scaled])
    # Numbers that vary alike share the slope instead of making the system singular.
    penalty = _STIFFNESS * len(work) * np.eye(design.shape[1])
    # The constant is the mean time, which is not near zero, so it is not shrunk.
    penalty[0, 0] = 0.0
    weight: Floats = np.ones(len(work))
    found: Floats = np.zeros(design.shape[1])
    noise = 0.0
    for _ in range(_ROUNDS):
        weighted = design * weight[:, None]
        found = np.asarray(np.linalg.solve(design.T @ weighted + penalty, weighted.T @ time_s))
        missed = np.abs(time_s - design @ found)
        # The median absolute miss is robust; 1.4826 makes it the standard deviation of normal
        # errors.
        noise = 1.4826 * float(np.median(missed))
        before = weight
        # Huber's weights: what misses by more counts less, in inverse proportion.
        weight = np.minimum(1.0, _TUNING * noise / np.maximum(missed, 1e-300))
        # Exact data have no noise to weigh by, and weights that have settled change nothing more.
        if noise == 0.0 or np.abs(weight - before).max() < 1e-3:
            break
    slopes: Floats = np.zeros(work.shape[1])
    slopes[varied] = found[1:] / spread[varied]
    fixed_s = float(found[0] - slopes @ mean)
    # Of a linear fit: the mean square error of what it says of its samples is the noise's variance
    # times the share of numbers in samples.
    error = noise / float(time_s.mean()) * math.sqrt(design.shape[1] / len(work))
    return Law(fixed_s, tuple(map(float, slopes)), error)


class LawLearner:
    """Learns the laws of the computations of one rank."""

    def __init__(self) -> None:
        self._samples: dict[Key, list[tuple[Floats, float]]] = {}
        self._iterations = 0
        self._due = [ITERATIONS, *(ITERATIONS * times for times in _AGAIN)]
        self.laws: Mapping[Key, Law] | None = None  #: None before they are known

    @property
    def is_done(self) -> bool:
        """Whether nothing more is learnt: what takes longer from now on is slow, not large."""
        return not self._due

    def add(self, seen: Sequence[tuple[Key, Floats, float]]) -> bool:
        """Learn from computations of one more iteration that ran at full clocks.

        Args:
            seen: key, work of the microbatch, and seconds of each.

        Returns:
            Whether there are new laws.
        """
        if not seen or self.is_done:
            return False
        for key, work, time_s in seen:
            samples = self._samples.setdefault(key, [])
            if samples and len(samples[0][0]) != len(work):  # the function has changed
                samples.clear()
            samples.append((work, time_s))
        self._iterations += 1
        # A law has one number for each feature and a constant, and needs samples of each.
        numbers = 1 + len(seen[0][1])
        fewest = min(map(len, self._samples.values()))
        # The rarest computation decides, as all laws are told together.
        if self._iterations < self._due[0] or fewest < _SAMPLES * numbers:
            return False
        # Iterations may have passed several dates while samples were too few.
        while self._due and self._due[0] <= self._iterations:
            del self._due[0]
        self.laws = {
            key: fit_law(
                np.array([work for work, _ in samples]), np.array([time_s for _, time_s in samples])
            )
            for key, samples in self._samples.items()
        }
        return True


_KEPT = 16  #: iterations whose messages are kept
_PROFILE = "batch/profile"
# Between two looks: a few of a computation
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.008
_LOOKS_PER_S = 40_000.0  #: at the store by all ranks: half of what one serves


@dataclass(frozen=True)
class Seat:
    """Where a rank sits."""

    pipeline: int  #: Number of its pipeline
    rank: int  #: Rank there
    ranks: int  #: Ranks of a pipeline
    pipelines: int  #: Number of pipelines
    is_first: bool = True  #: Whether it is the first of the ranks that share its seat
    has_followers: bool = False  #: Whether pipelines have more ranks than the one that leads

    @property
    def leads(self) -> bool:
        """Whether it has the batch of its pipeline, and decides its clocks."""
        return self.rank == 0 and self.is_first


class OwnTime(Record, frozen=True, array_like=True):
    """What a pipeline tells the others of an iteration."""

    time_s: float = 0.0  #: Seconds that it takes at full clocks; 0 if that is not known
    pays: bool = False  #: Whether all pipelines are to run at full clocks
    work: tuple[float, ...] = ()  #: Of its batch, without a pipeline; else empty
    #: Number and seconds of its last iterations, had they run at full clocks as they came.
    came: tuple[tuple[int, float], ...] = ()
    ordered_s: float = 0.0  #: As `time_s`, in the best order of microbatches; 0 if not looked at


class Slowest(Record, frozen=True, array_like=True):
    """The pipeline that takes longest at full clocks."""

    time_s: float = 0.0  #: The longest time that was told in time, seconds; 0 for none
    is_whole: bool = False  #: Whether all pipelines have told theirs
    pays: bool = False  #: Whether one has told that all are to run at full clocks
    work: tuple[float, ...] = ()  #: What the slowest has told of its work
    #: Number of iterations, and the longest that was told, of those that all have told.
    came: tuple[tuple[int, float], ...] = ()
    mean_s: float = 0.0  #: Mean time of those that were told
    ordered_s: float = 0.0  #: The longest in the best orders; 0 if one has not looked
    #: How long the iteration may take, as a multiple of `time_s`, for a budget or a deadline.
    slowdown: float = 1.0


class RankPlan(Record, frozen=True, array_like=True):
    """What a rank of a pipeline is told of an iteration; times are from its start."""

    clocks: Runs[int] = ()  #: Empty for full clocks
    #: When its first computation starts and its last one ends at full clocks, microseconds.
    full_us: tuple[int, int] = (0, 0)
    first_us: int = 0  #: When its first computation starts at those clocks
    #: When each of its computations must end; empty as above, and if it keeps its clocks
    latest_us: tuple[int, ...] = ()


class Batch(Record, frozen=True, array_like=True):
    """What the ranks of a pipeline are told of an iteration."""

    work: tuple[tuple[float, ...], ...] = ()  #: Of each microbatch; empty if it is not known
    time_s: float = 0.0  #: Expected time of the iteration, seconds; 0 if it is not known
    ranks: tuple[RankPlan, ...] = ()  #: For each rank; empty before laws are known


class RankLaws(Record, frozen=True, array_like=True):
    """What a rank runs, and how long that takes by work."""

    #: Stage, kind and microbatch of its computations, for each number of microbatches.
    orders: tuple[tuple[tuple[int, str, int], ...], ...]
    #: Stage, kind, seconds without work, and seconds for each unit of each number of work.
    #: Then the standard error of what they say, as a share.
    laws: tuple[tuple[int, str, float, tuple[float, ...], float], ...]

    @classmethod
    def of(cls, orders: Iterable[Sequence[Computation]], laws: Mapping[Key, Law]) -> RankLaws:
        """Return what a rank tells."""
        told = tuple(
            (stage, kind, law.fixed_s, law.per_work_s, law.error)
            for (stage, kind), law in laws.items()
        )
        plain = (tuple((c.stage, c.kind, c.microbatch) for c in order) for order in orders)
        return cls(tuple(plain), told)

    def by_microbatches(self) -> dict[int, tuple[Computation, ...]]:
        """Return number of microbatches -> order of computations."""
        orders = (tuple(Computation(*each) for each in order) for order in self.orders)
        return {1 + max(c.microbatch for c in order): order for order in orders}

    def by_key(self) -> dict[Key, Law]:
        """Return the law of each stage and kind."""
        return {
            Key(stage, kind): Law(fixed_s, slopes_s, error)
            for stage, kind, fixed_s, slopes_s, error in self.laws
        }


class Exchange:
    """One rank's part. All methods are called by one thread, and raise the store's RuntimeError
    when it is gone.

    Args:
        store: The job's store, through a connection that no other thread uses.
        seat: Where this rank sits.
    """

    def __init__(self, store: Store, seat: Seat) -> None:
        self._store = store
        self._seat = seat

    def slowest(
        self, iteration: int, own: OwnTime, timeout_s: float, slowdown: float = 1.0
    ) -> Slowest:
        """Return what all pipelines have told; if it is not known in time, what this one tells.

        Args:
            iteration: Number of the iteration.
            own: What this pipeline tells.
            timeout_s: How long the others are waited for, seconds.
            slowdown: How long it may take; what pipeline 0 says counts for all.
        """
        seat = self._seat
        store = self._store
        key = f"batch/{iteration}/slowest"
        is_whole = seat.pipelines == 1 and own.time_s > 0.0
        # What this pipeline knows alone; it also answers where the others are too late.
        alone = Slowest(own.time_s, is_whole, own.pays, own.work, mean_s=own.time_s)
        if seat.pipelines == 1:
            return replace(alone, came=own.came, ordered_s=own.ordered_s, slowdown=slowdown)
        keys = [f"batch/{iteration}/time/{pipeline}" for pipeline in range(seat.pipelines)]
        store.set(keys[seat.pipeline], encode(own))
        # Pipeline 0 reads all and writes one answer, so that others read one key each.
        if seat.pipeline == 0:
            # Whoever is late is left out, because waiting for it would cost all of them time.
            if not self._wait(keys, timeout_s):
                keys = [each for each in keys if store.check([each])]
            told = [decode(each, OwnTime) for each in store.multi_get(keys)]
            # Work breaks ties, so that the answer does not depend on who wrote first.
            last = max(told, key=lambda each: (each.time_s, each.work))
            # Unless all know their time, the longest that was told may not be the longest.
            is_whole = len(told) == seat.pipelines and min(each.time_s for each in told) > 0.0
            times_s = [each.time_s for each in told if each.time_s]
            ordered_s = [each.ordered_s for each in told]
            slowest = Slowest(
                last.time_s,
                is_whole,
                any(each.pays for each in told),
                last.work,
                self._came(told),
                fmean(times_s) if times_s else 0.0,
                # A best order counts only if all have looked, as the slowest of the orders is not
                # known before.
                max(ordered_s) if is_whole and min(ordered_s) > 0.0 else 0.0,
                slowdown,
            )
            store.set(key, encode(slowest))
            return slowest
        # Pipeline 0 waits for others first, so its answer is given twice the time.
        if not self._wait([key], 2.0 * timeout_s):
            return alone
        slowest = decode(store.get(key), Slowest)
        # Pipeline 0 did not see this one's time, which is the longest of all as far as is known
        # here.
        if own.time_s > slowest.time_s:  # this one was late
            slowest = replace(slowest, time_s=own.time_s, work=own.work)
        return slowest

    def _came(self, told: Sequence[OwnTime]) -> tuple[tuple[int, float], ...]:
        """Return the longest time of each iteration that all pipelines have told."""
        times_s: dict[int, list[float]] = {}
        for iteration, time_s in (each for own in told for each in own.came):
            times_s.setdefault(iteration, []).append(time_s)
        pipelines = self._seat.pipelines
        return tuple((i, max(each)) for i, each in times_s.items() if len(each) == pipelines)

    def send(self, iteration: int, batch: Batch) -> None:
        """Send the pipeline's ranks what they are told of an iteration, and forget an old one.

        Raises:
            PlanError: If it is too long.
        """
        seat = self._seat
        old = iteration - _KEPT
        if seat.has_followers:
            self._store.set(f"batch/{iteration}/{seat.pipeline}", pack(encode(batch)))
        if old >= 0:
            keys = [f"batch/{old}/{seat.pipeline}", f"batch/{old}/time/{seat.pipeline}"]
            for key in [*keys, f"batch/{old}/slowest"][: None if seat.pipeline == 0 else 2]:
                self._store.delete_key(key)

    def batch(self, iteration: int, timeout_s: float) -> Batch | None:
        """Return what this rank is told of an iteration; None if it is not told in time.

        Raises:
            PlanError: If what was sent cannot be read.
        """
        key = f"batch/{iteration}/{self._seat.pipeline}"
        if not self._wait([key], timeout_s):
            return None
        return read(unpack(self._store.get(key)), Batch)

    def tell_laws(self, laws: RankLaws) -> None:
        """Tell the first rank of the pipeline what this one has learnt."""
        self._store.set(self._laws_key(self._seat.rank), encode(laws))

    def laws(self) -> tuple[RankLaws, ...] | None:
        """Return what the ranks of the pipeline have learnt; None if one has not told it yet."""
        keys = list(map(self._laws_key, range(self._seat.ranks)))
        if not self._store.check(keys):
            return None
        return tuple(decode(each, RankLaws) for each in self._store.multi_get(keys))

    def _laws_key(self, rank: int) -> str:
        return f"batch/laws/{self._seat.pipeline}/{rank}"

    def _wait(self, keys: list[str], timeout_s: float) -> bool:
        """Return whether all keys are there, within so many seconds.

        This looks again and again, because torch prints two lines for each `wait` that ends by its
        timeout.
        """
        until_s = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        ranks = self._seat.ranks * self._seat.pipelines
        longest_s = max(_LONGEST_PAUSE_S, ranks / _LOOKS_PER_S)
        while not self._store.check(keys):
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2.0 * pause_s, longest_s)
        return True


def send_profile(store: Store, path: Path) -> None:
    """Load a profile on rank 0, and write it for all ranks.

    Raises:
        ProfileError: If it cannot be read.
    """
    store.set(_PROFILE, encode(Profile.load(path).texts()))


def sent_profile(store: Store) -> Profile:
    """Return what `send_profile` has written before this rank was told its part.

    Raises:
        RankError: If it is not there.
    """
    data = read_key(store, _PROFILE)
    if data is None:
        raise RankError("rank 0 has no work=, and this rank has; give planner_runtime work= on all")
    table, text = decode(data, tuple[str, str])
    with tempfile.TemporaryDirectory(prefix="planner-profile-") as folder:
        Path(folder, "profile.csv").write_text(table)
        Path(folder, "profile.yaml").write_text(text)
        return Profile.load(Path(folder, "profile.yaml"))
