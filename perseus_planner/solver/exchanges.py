"""A local search over the one clock of each rank, where iterations take uncertain times.

A move gives one rank a slower clock, or one a slower and another a faster one, where that saves
energy. Replays of all cases are dear, and most moves are late. But each replay tells the longest
path of each case, and an iteration is never shorter than any of its paths, whatever its clocks. So
a move that is late by a path of a replay before needs no replay of its own (as the cuts of Benders'
decomposition): of thousands of moves, ten are replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from perseus_planner.solver.network import Floats

_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  #: options away that a move takes a rank (by hand)
_MOST_MOVES = 16_384  #: the larger steps are left out where there are more (by hand)
_BATCH = 256  #: moves that are compared with paths together
_MOST_REPLAYS = 60  #: a guard: 13 were the most (`python benchmarks/run.py --only 52`)

_Move = tuple[tuple[int, int], ...]  #: (rank, its option) of each rank that changes


class Path(NamedTuple):
    """The longest path of each case in one replay."""

    other_s: Floats  #: (cases,) seconds on it that no option changes
    option_s: list[Floats]  #: of each rank, the (options, cases) seconds on it

    def seconds(self, chosen: Sequence[int]) -> Floats:
        """Return the (cases,) seconds on the path at an option for each rank."""
        seconds = self.other_s.copy()
        for of_rank, option in zip(self.option_s, chosen, strict=True):
            seconds += of_rank[option]
        return seconds

    def moved_s(self, chosen: Sequence[int], moves: Sequence[_Move]) -> Floats:
        """Return the (moves, cases) seconds on the path after each move."""
        seconds = np.repeat(self.seconds(chosen)[None], len(moves), axis=0)
        for row, move in zip(seconds, moves, strict=True):
            for rank, option in move:
                row += self.option_s[rank][option] - self.option_s[rank][chosen[rank]]
        return seconds


class Replay(NamedTuple):
    """An iteration at one option for each rank."""

    is_on_time: bool
    path: Path


def exchange(
    chosen: Sequence[int],
    options_j: Sequence[Sequence[float]],
    replay: Callable[[Sequence[int]], Replay],
    are_on_time: Callable[[Floats], npt.NDArray[np.bool_]],
) -> list[int]:
    """Return the option of each rank after moves that are on time, the one that saves most first
    each time, until none saves.

    Args:
        chosen: the option of each rank to begin with, on time.
        options_j: of each rank, the effective joules of its options, the highest clock first.
        replay: replays the iteration.
        are_on_time: tells of (moves, cases) seconds which moves are on time.
    """
    now = list(chosen)
    paths = [replay(now).path]
    while True:
        move = _best_in_time(now, _moves(now, options_j), paths, replay, are_on_time)
        if move is None:
            return now
        now = _moved(now, move)


def _best_in_time(
    chosen: Sequence[int],
    moves: Sequence[_Move],
    paths: list[Path],
    replay: Callable[[Sequence[int]], Replay],
    are_on_time: Callable[[Floats], npt.NDArray[np.bool_]],
) -> _Move | None:
    """Return the first move that is on time, if there is one; each replay adds a path."""
    for first in range(0, len(moves), _BATCH):
        batch = moves[first : first + _BATCH]
        least_s = np.max([path.moved_s(chosen, batch) for path in paths], axis=0)
        left: list[int] = np.flatnonzero(are_on_time(least_s)).tolist()
        while left and len(paths) <= _MOST_REPLAYS:
            move = batch[left[0]]
            replayed = replay(_moved(chosen, move))
            paths.append(replayed.path)
            if replayed.is_on_time:
                return move
            # What made this move late makes others late too.
            left = left[1:]
            path_s = replayed.path.moved_s(chosen, [batch[i] for i in left])
            least_s[left] = np.maximum(least_s[left], path_s)
            fits = are_on_time(least_s[left]).tolist()
            left = [i for i, is_in_time in zip(left, fits, strict=True) if is_in_time]
    return None


def _moves(chosen: Sequence[int], options_j: Sequence[Sequence[float]]) -> list[_Move]:
    """Return the moves that save energy, the best first."""
    ranks = range(len(chosen))
    moves = list[tuple[float, _Move]]()
    # Pairs grow with the square of the steps, so the largest steps go until they are few enough.
    for count in range(len(_STEPS), 0, -1):
        # Joules that the options near each rank's present one add.
        slower_j, faster_j = (
            [
                {
                    option: of_rank[option] - of_rank[now]
                    for option in (now + sign * step for step in _STEPS[:count])
                    if 0 <= option < len(of_rank)
                }
                for now, of_rank in zip(chosen, options_j, strict=True)
            ]
            for sign in (1, -1)
        )
        slower = [(j, rank, option) for rank in ranks for option, j in slower_j[rank].items()]
        faster = [(j, rank, option) for rank in ranks for option, j in faster_j[rank].items()]
        moves = [(j, ((rank, option),)) for j, rank, option in slower if j < 0.0]
        moves += [
            (saved_j + cost_j, ((slow, to_slow), (fast, to_fast)))
            for saved_j, slow, to_slow in slower
            for cost_j, fast, to_fast in faster
            if fast != slow and saved_j + cost_j < 0.0
        ]
        if len(moves) <= _MOST_MOVES:
            break
    return [move for _, move in sorted(moves)]


def _moved(chosen: Sequence[int], move: _Move) -> list[int]:
    """Return the options after a move."""
    changed = dict(move)
    return [changed.get(rank, option) for rank, option in enumerate(chosen)]
