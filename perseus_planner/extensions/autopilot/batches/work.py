"""The work of microbatches: one number or a few for each, such as its tokens and the sum of its
squared lengths, which tell how long its computations take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from perseus_planner.base.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.runtime.options import WorkFunction

    Floats = NDArray[np.float64]

_MOST = 8  #: numbers of a microbatch
_CUMULATED = ("cu_seqlens", "cu_seqlens_q")
_POSITIONS = ("position_ids", "positions")  #: the second by torchtitan


def sequence_work(microbatch: Any) -> tuple[float, float]:
    """Return the tokens of a microbatch and the sum of its squared lengths, for
    `planner_runtime(..., work=sequence_work)`.

    Lengths are those of `cu_seqlens` or `cu_seqlens_q`, or of the runs of `position_ids` or
    `positions` that each begin with 0, or the sums of the rows of a two-dimensional
    `attention_mask`; the first of these that the microbatch has, in it or in the tuples, lists and
    mappings that it consists of. One that is None counts as absent.

    Raises:
        UsageError: If it has none of them, or they are on a GPU, where reading them would wait.
    """
    found: dict[Any, Any] = {}
    # What a microbatch has is found wherever it lies in tuples, lists and mappings.
    _find(microbatch, found)
    # Cumulated lengths count from 0, so the sequences lie between neighbours.
    for name in _CUMULATED:
        if name in found:
            return _sums(np.diff(np.ravel(_on_cpu(found[name], name))))
    # A position of 0 begins a sequence, so lengths are the distances between zeros.
    for name in _POSITIONS:
        if name in found:
            positions = np.atleast_2d(_on_cpu(found[name], name))
            starts = positions == 0
            starts[..., 0] = True  # a row is at least one sequence
            return _sums(np.diff(np.append(np.flatnonzero(starts), positions.size)))
    if "attention_mask" in found:
        # A mask tells padding, so each row has as many tokens as are not masked.
        mask = np.asarray(_on_cpu(found["attention_mask"], "attention_mask"))
        if mask.ndim != 2:
            raise UsageError(
                f"the microbatch has an attention_mask of {mask.ndim} dimensions, which tells no "
                "lengths; give work= a function of yours"
            )
        return _sums((mask != 0).sum(axis=1))
    raise UsageError(
        "the microbatch has no cu_seqlens, position_ids, positions or attention_mask to tell its "
        "lengths by; give work= a function of yours"
    )


def load_work(text: str, where: str) -> WorkFunction:
    """Import a function that returns the work of a microbatch, "package.module:function".

    Args:
        text: Its name.
        where: What gave it, for the error.

    Raises:
        UsageError: If there is no such function, or its module cannot be imported.
    """
    name, colon, attribute = text.partition(":")
    if not (name and colon and attribute):
        raise UsageError(
            f"{where} {text!r}: does not name a function; write package.module:function"
        )
    try:
        module = import_module(name)
    except Exception as error:  # of the caller's code
        raise UsageError(
            f"{where} {text!r}: importing {name} raised {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UsageError(f"{where} {text!r}: {name} has no function {attribute!r}; name another")
    found: WorkFunction = function
    return found


def work_of(microbatches: Iterable[Any], function: WorkFunction | None) -> Floats:
    """Return the work of microbatches: (microbatches, numbers).

    Args:
        microbatches: Of a batch, or the work of each.
        function: Returns the work of one; None if it is given.

    Raises:
        UsageError: If the function raises, or work is not finite numbers of 0 or more, as many for
            each microbatch; says what.
    """
    rows: list[Any] = []
    # The function is the caller's, so an error of it names the microbatch and not this package.
    for microbatch in _each_of(microbatches):
        try:
            rows.append(microbatch if function is None else function(microbatch))
        except Exception as error:  # of the caller's code
            raise UsageError(
                f"work= raised {type(error).__name__} for microbatch {len(rows)}: {error}"
            ) from error
    try:
        arrays = [np.atleast_1d(np.asarray(row, dtype=np.float64)) for row in rows]
    except (TypeError, ValueError) as error:
        raise UsageError(f"the work of a microbatch is not a number or a few: {error}") from error
    # One odd row would make laws of another number of features.
    for number, row in enumerate(arrays):
        if row.ndim != 1 or not 1 <= len(row) <= _MOST or len(row) != len(arrays[0]):
            raise UsageError(
                f"the work of microbatch {number} has the shape {row.shape}; give 1 to {_MOST} "
                "numbers, as many for each microbatch"
            )
        if not (np.isfinite(row).all() and (row >= 0.0).all()):
            raise UsageError(
                f"the work of microbatch {number} is {row.tolist()}; give finite numbers of 0 or "
                "more"
            )
    if not arrays:
        raise UsageError("the work of no microbatch is given; give a number for each")
    return np.stack(arrays)


def _each_of(microbatches: Iterable[Any]) -> Iterator[Any]:
    try:
        yield from microbatches
    except UsageError:
        raise
    except Exception as error:  # of where the batch comes from, which training meets again
        raise UsageError(f"reading the batch raised {type(error).__name__}: {error}") from error


def _find(value: Any, found: dict[Any, Any]) -> None:
    """Add what mappings in a value hold, by name, the first of a name that is not None."""
    if isinstance(value, (tuple, list)):
        for each in value:
            _find(each, found)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            # Collators write None for what a microbatch does not have.
            if each is not None:
                found.setdefault(name, each)
            _find(each, found)


def _on_cpu(value: Any, name: str) -> Any:
    if not getattr(value, "is_cpu", True):
        raise UsageError(
            f"the {name} of the microbatch is on a GPU, where reading it would wait; give its "
            "work by runtime.batch(work=...), counted before it is moved there"
        )
    return value


def _sums(lengths: NDArray[Any]) -> tuple[float, float]:
    whole = lengths.tolist()  # whose squares are exact
    return float(sum(whole)), float(sum([length * length for length in whole]))
