"""Read and write frontier files: NumPy archives (.npz) of arrays with a JSON header and a digest
of everything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perseus_planner.base.errors import FrontierError, PlannerError
from perseus_planner.base.fields import restore, rules
from perseus_planner.base.files import reading, replacing, sha256
from perseus_planner.profiles.measurement import Evidence, Measurement
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules import Computation, Schedule
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.iteration import Iteration, parse_operation
from perseus_planner.schedules.pipeline import parse_stage_kind
from perseus_planner.solver.network import UNLIMITED, Guides, Integers

if TYPE_CHECKING:
    from numpy.typing import NDArray


_FORMAT = "perseus-planner/frontier"
_VERSION = 2
_AGAIN = "make it again with `planner solve`"

Parts = tuple[PipelineDag, tuple[Integers, Integers], Guides]
"""The parts of a frontier: the graph, (times, powers), and the guides."""


def write_frontier(
    path: str | os.PathLike[str], dag: PipelineDag, curve: tuple[Integers, Integers], guides: Guides
) -> None:
    """Write the parts of a frontier to `path`; `curve` holds its times and powers.

    Raises:
        FrontierError: If the file cannot be written.
    """
    waits = [(before, place) for place, others in enumerate(dag.predecessors) for before in others]
    lags_s = [lag_s for place_waits in dag.iteration.waits for _, lag_s in place_waits]
    arrays = {
        "header": np.frombuffer(json.dumps(_header(dag)).encode(), dtype=np.uint8),
        "waits": np.array(waits, dtype=np.int64).reshape(-1, 2),
        "lags_s": np.array(lags_s if dag.iteration.lags_s else (), dtype=np.float64),
        "times": curve[0],
        "powers": curve[1],
        **{f"guide_{name}": values for name, values in guides._asdict().items()},
    }
    rows = [row.evidence for points in dag.profile.measurements.values() for row in points]
    if any(rows):
        evidence = [
            [getattr(row, name) if row else np.nan for name in rules(Evidence)] for row in rows
        ]
        arrays["evidence"] = np.array(evidence, dtype=np.float64)
    arrays["digest"] = np.frombuffer(_digest(arrays).encode(), dtype=np.uint8)
    with replacing(path, FrontierError) as file:
        np.savez_compressed(file, **arrays)


def read_frontier(path: str | os.PathLike[str]) -> Parts:
    """Read a file that `write_frontier` wrote.

    Raises:
        FrontierError: If the file cannot be read, or is not exactly what was written.
    """
    path = Path(path)
    with reading(path, FrontierError), path.open("rb") as file:
        archived = file.read(2) == b"PK"
        file.seek(0)
        try:
            with np.load(file, allow_pickle=False) if archived else nullcontext({}) as archive:
                arrays = {name: np.asarray(archive[name]) for name in archive}
        except Exception as error:  # NumPy and zipfile have no common error for damaged bytes
            raise FrontierError(f"{path}: is damaged or cut short ({error}); {_AGAIN}") from error
    _check(path, arrays)
    with checking_frontier(path):
        return _parts(arrays)


@contextmanager
def checking_frontier(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise a FrontierError that names the file for any error that its content causes in the
    block.
    """
    try:
        yield
    except (
        PlannerError,
        ArithmeticError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
    ) as error:
        raise FrontierError(f"{os.fspath(path)}: is not a frontier: {error}; {_AGAIN}") from error


def _header(dag: PipelineDag) -> dict[str, Any]:
    profile = dag.profile
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "profile": profile.rest(),
        "measurements": {
            f"{stage}{kind}": [(point.clock_mhz, point.time_s, point.energy_j) for point in points]
            for (stage, kind), points in profile.measurements.items()
        },
        "schedule": dag.schedule.name,
        "ranks": [" ".join(map(str, rank)) for rank in dag.schedule.ranks],
        "kinds": dag.iteration.kinds,
        "operations": [
            (str(operation), operation.rank, operation.time_s, operation.energy_j)
            for operation in dag.iteration.operations
        ],
    }


def _check(path: Path, arrays: dict[str, Any]) -> None:
    try:
        header = json.loads(arrays["header"].tobytes())
        format_version = header["format"], header["version"]
        digest = arrays["digest"].tobytes().decode()
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise FrontierError(
            f"{path}: is not a frontier file; name one that `planner solve` wrote"
        ) from error
    if format_version[0] != _FORMAT:
        raise FrontierError(
            f"{path}: holds {format_version[0]!r}, not a frontier; name a file that `planner "
            "solve` wrote"
        )
    if format_version[1] != _VERSION:
        raise FrontierError(
            f"{path}: is of version {format_version[1]!r} and this planner reads version "
            f"{_VERSION}; "
            f"{_AGAIN}"
        )
    if digest != _digest(arrays):
        raise FrontierError(
            f"{path}: its digest does not match its content, so it was changed; {_AGAIN}"
        )


def _digest(arrays: dict[str, Any]) -> str:
    parts = []
    for name in sorted(arrays):
        if name != "digest":
            parts += [
                f"{name} {arrays[name].dtype.str} {arrays[name].shape}".encode(),
                arrays[name].tobytes(),
            ]
    return sha256(*parts)


def _parts(arrays: dict[str, Any]) -> Parts:
    header = json.loads(arrays["header"].tobytes())
    _need(isinstance(header["schedule"], str), "schedule", "is not a name")
    evidence = iter(arrays["evidence"].tolist() if "evidence" in arrays else ())
    measurements = {
        parse_stage_kind(text): tuple(
            Measurement(clock, time_s, energy_j, _evidence(next(evidence, None)))
            for clock, time_s, energy_j in points
        )
        for text, points in header["measurements"].items()
    }
    profile = restore(Profile, header["profile"], measurements=measurements)
    ranks = tuple(tuple(map(Computation.parse, rank.split())) for rank in header["ranks"])
    operations = tuple(parse_operation(*fields) for fields in header["operations"])
    waits, lags = arrays["waits"].tolist(), arrays["lags_s"].tolist()
    before: list[list[int]] = [[] for _ in range(sum(map(len, ranks)) + len(operations))]
    if any(place < 0 for _, place in waits):
        raise ValueError("waits: a place is below 0")
    lags_s: list[list[float]] = [[] for _ in before]
    for (other, place), lag_s in zip(waits, lags or [0.0] * len(waits), strict=True):
        before[place].append(other)
        lags_s[place].append(lag_s)
    iteration = Iteration(
        Schedule(header["schedule"], ranks),
        tuple(map(tuple, before)),
        tuple(map(tuple, lags_s)) if lags else (),
        operations,
        tuple(header["kinds"]),
    )
    dag = PipelineDag(profile, iteration)
    guides = Guides(*(arrays[f"guide_{name}"] for name in Guides._fields))
    return dag, (arrays["times"], arrays["powers"]), guides


def _evidence(numbers: Sequence[float] | None) -> Evidence | None:
    """Return the evidence of a row without its throttle reasons, which no plan depends on; None
    if it has none.
    """
    if numbers is None or np.isnan(numbers).any():
        return None
    achieved_mhz, time_s, energy_j, windows, temperature_c = numbers
    return Evidence(achieved_mhz, time_s, energy_j, int(windows), temperature_c)


_MOST = 2**60  #: no time or flow is larger
_LARGE = 1e30  #: no second or watt is larger


def check_frontier(dag: PipelineDag, times: Integers, powers: Integers, guides: Guides) -> None:
    """Check that the curve is convex and falls, and that the guides are numbers of its iteration.

    Raises:
        FrontierError: If they are not; names the first field that is wrong.
    """
    for name, array in (("times", times), ("powers", powers)):
        _need(
            array.dtype == np.int64 and array.ndim == 1 and len(array) == len(times) > 0,
            name,
            "is not a list",
        )
    _need(_within(times, _MOST) and bool((times[1:] < times[:-1]).all()), "times", "do not fall")
    rising = (
        _within(powers[:-1], _MOST)
        and powers[-1] == UNLIMITED
        and bool((powers[1:] >= powers[:-1]).all())
    )
    _need(rising, "powers", "do not rise")
    count = len(guides.time_s)
    shaped = guides.time_s.dtype == np.float64 and guides.time_s.shape == (count,) and count > 0
    _need(shaped and bool((np.diff(guides.time_s) <= 0).all()), "guide_time_s", "does not fall")
    _need(_within(guides.time_s, _LARGE), "guide_time_s", "is not a time")
    for name, values in (("guide_end_s", guides.end_s), ("guide_price_w", guides.price_w)):
        shaped = values.dtype == np.float32 and values.shape == (count, len(dag.keys))
        _need(shaped and _within(values, _LARGE), name, "is not of this graph")


def _within(values: NDArray[Any], most: float) -> bool:
    return bool(((values >= 0) & (values <= most)).all())


def _need(is_right: bool, field: str, problem: str) -> None:
    if not is_right:
        raise FrontierError(f"{field}: {problem}")
