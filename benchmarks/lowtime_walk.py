"""lowtime 0.3.0, the solver published with Perseus, walking down the frontier of an iteration.

lowtime fits an exponential to the effective energy of each computation, counts time in whole units
(rounded down), and walks down from the slowest iteration a unit at a time; each computation then
gets the slowest clock whose rounded time fits its planned one (Perseus artifact and Zeus'
`run_optimization.py`). It is loaded when it is first used.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.profiles.keys import Key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import networkx as nx

    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.schedules.dag import PipelineDag

LOWTIME_VERSION = "0.3.0"
_REMEDY = f"install it with: pip install lowtime=={LOWTIME_VERSION} scipy"


@dataclass(frozen=True, eq=False)
class Fits:
    """A profile as lowtime models it.

    Attributes:
        unit_s: lowtime's step in time, seconds.
        blocking_power_w: power subtracted from every option's energy, watts; or one number for each
            stage.
        options: lowtime's CandidateExecutionOptions.
        models: lowtime's ExponentialModel: units of time -> effective joules.
    """

    unit_s: float
    blocking_power_w: float | tuple[float, ...]
    options: Mapping[Key, Any]
    models: Mapping[Key, Any]


def load_lowtime() -> None:
    """Load lowtime and limit its logging to errors.

    Raises:
        UsageError: If it cannot be loaded, or is another version.
    """
    try:
        import lowtime.cost_model
        import lowtime.solver
    except ImportError as error:
        raise UsageError(f"lowtime cannot be loaded ({error}); {_REMEDY}") from error
    if lowtime.__version__ != LOWTIME_VERSION:
        raise UsageError(
            f"lowtime {lowtime.__version__} is installed, not {LOWTIME_VERSION}; {_REMEDY}"
        )
    logging.getLogger("lowtime").setLevel(logging.ERROR)


def fit(profile: Profile, unit_s: float, *, filter_first: bool = False) -> Fits:
    """Fit a cost model to the options of every (stage, kind), as lowtime's users do.

    Args:
        profile: the measurements.
        unit_s: lowtime's step in time, seconds.
        filter_first: remove dominated options before the blocking energy is subtracted, as the
            Perseus artifact does, instead of afterwards, as Zeus does.

    Raises:
        UsageError: If lowtime cannot be loaded, or cannot fit the measurements of a computation.
    """
    load_lowtime()
    from lowtime.cost_model import ExponentialModel

    options, models = {}, {}
    for key, measurements in profile.measurements.items():
        options[key] = _candidates(measurements, unit_s, profile.blocking_w(key[0]), filter_first)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # overflows in fits that are then discarded
                models[key] = ExponentialModel(options[key], search_strategy="best")
        except (
            ValueError,
            TypeError,
            RuntimeError,
        ) as error:  # a failed search, or fewer points than parameters
            raise UsageError(
                f"lowtime finds no exponential through the {len(options[key].options)} options of "
                f"{key.name} on stage {key.stage} at steps of {unit_s:g} s ({error}); give it a "
                "finer step, or leave it out"
            ) from error
    return Fits(unit_s, profile.blocking_power_w, options, models)


def _candidates(
    measurements: Sequence[Measurement], unit_s: float, power_w: float, filter_first: bool
) -> Any:
    from lowtime.operation import CandidateExecutionOptions, ExecutionOption

    options = [ExecutionOption(m.time_s, unit_s, m.energy_j, m.clock_mhz) for m in measurements]

    def subtract_blocking() -> None:
        for option in options:
            option.cost -= power_w * option.quant_time * unit_s

    if not filter_first:
        subtract_blocking()
    candidates = CandidateExecutionOptions(options)
    if len(candidates.options) <= 3:  # too few to fit: use its soft filter
        candidates = CandidateExecutionOptions(options, noise_factor=0.95)
    if filter_first:
        subtract_blocking()
    return candidates


class Walk:
    """lowtime's walk along a frontier. Iterating yields the iteration time that it claims for each
    step, slowest first.

    Args:
        fits: the profile as lowtime models it.
        dag: the iteration.
        keys: the key of each of `dag.computations`.
    """

    def __init__(self, fits: Fits, dag: PipelineDag, keys: Sequence[Key]) -> None:
        from lowtime.solver import PhillipsDessouky

        graph = _graph(fits, dag, keys)
        self._operations = [graph.nodes[place + 2]["op"] for place in range(len(keys))]
        self._steps = PhillipsDessouky(graph).run()

    def __iter__(self) -> Iterator[float]:
        for step in self._steps:
            yield step.real_time

    @property
    def clocks(self) -> list[int]:
        """The clock of each of `dag.computations` at the last step, MHz."""
        return [operation.assigned_knob for operation in self._operations]


def _graph(fits: Fits, dag: PipelineDag, keys: Sequence[Key]) -> nx.DiGraph[int]:
    """Build lowtime's graph of `dag`: computation k is node k + 2, node 0 is the source and node
    1 the sink.
    """
    import networkx as nx
    from lowtime.graph_utils import add_sink_node, add_source_node
    from lowtime.operation import Operation, OperationSpec

    specs = {key: OperationSpec(fits.options[key], fits.models[key]) for key in fits.options}
    graph = nx.DiGraph(source_node=0, sink_node=1)
    for place, key in enumerate(keys):
        graph.add_node(place + 2, op=Operation(specs[key]))
    for place, before in enumerate(dag.predecessors):
        graph.add_edges_from((other + 2, place + 2) for other in before)
    add_source_node(graph, 0)
    add_sink_node(graph, 1)
    return graph
