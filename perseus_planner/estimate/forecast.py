"""What a training run takes: hours, energy, money, emissions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perseus_planner.estimate.explore import Row
    from perseus_planner.estimate.system import System

_J_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Prices:
    """What energy costs."""

    #: Energy of the data center for each joule of its computers (power usage effectiveness).
    pue: float = 1.2
    per_kwh: float = 0.10  #: Price of a kWh at the meter, in any currency
    g_per_kwh: float = 400.0  #: CO2e of a kWh at the meter, grams


@dataclass(frozen=True)
class Forecast:
    """A whole training run."""

    tokens: float  #: Tokens to train on
    hours: float  #: Time
    gpu_kwh: float  #: Energy of the GPUs
    meter_kwh: float  #: Energy at the meter: with the rest of the nodes and the data center's share
    cost: float  #: Price of that energy
    co2e_kg: float  #: Emissions of that energy, kilograms
    node_overhead_w: float  #: What was assumed for each node beside its GPUs, watts
    pue: float  #: What was assumed for the data center


def node_overhead_w(gpus: int, system: System) -> float:
    """Return the power of the nodes of so many GPUs beside the GPUs, watts; parts of a node
    count as such.
    """
    return system.node_overhead_w * gpus / system.gpus_per_node


def forecast(row: Row, tokens: float, system: System, prices: Prices) -> Forecast:
    """Return what training on `tokens` tokens takes in the configuration of a row."""
    job = row.candidate.job
    seconds = tokens / row.tokens_per_s
    gpu_kwh = tokens * row.j_per_token / _J_PER_KWH
    beside_kwh = seconds * node_overhead_w(job.gpus, system) / _J_PER_KWH
    meter_kwh = (gpu_kwh + beside_kwh) * prices.pue
    return Forecast(
        tokens=tokens,
        hours=seconds / 3600,
        gpu_kwh=gpu_kwh,
        meter_kwh=meter_kwh,
        cost=meter_kwh * prices.per_kwh,
        co2e_kg=meter_kwh * prices.g_per_kwh / 1e3,
        node_overhead_w=system.node_overhead_w,
        pue=prices.pue,
    )
