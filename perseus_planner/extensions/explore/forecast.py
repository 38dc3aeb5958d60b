"""What a training run takes in a configuration: hours, energy, money and emissions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perseus_planner.extensions.explore.operations import System
    from perseus_planner.extensions.explore.search import Row

_J_PER_KWH = 3.6e6


def forecast(
    row: Row, system: System, *, tokens: float, pue: float, price: float, carbon: float
) -> dict[str, Any]:
    """Return what training on `tokens` tokens takes in the configuration of a row.

    Energy at the meter, its price and its emissions are the least and the most: with the rest of
    the nodes and the data center's share.

    Args:
        row: The configuration.
        system: The GPUs.
        tokens: Tokens to train on.
        pue: Energy of the data center for each joule of its computers (power usage effectiveness).
        price: Price of a kWh at the meter, in any currency.
        carbon: CO2e of a kWh at the meter, grams.
    """
    job = row.candidate.job
    seconds = tokens / row.tokens_per_s
    gpu_kwh = tokens * row.j_per_token / _J_PER_KWH
    beside_w = system.node_overhead_w, system.node_overhead_most_w
    nodes = job.gpus / system.gpus_per_node  # parts of a node count as such
    # The power beside GPUs is known as least and most, so all that follows is too.
    kwh = [(gpu_kwh + w * nodes * seconds / _J_PER_KWH) * pue for w in beside_w]
    return {
        "tokens": tokens,
        "hours": seconds / 3600,
        "gpu_kwh": gpu_kwh,
        "meter_kwh": kwh,
        "cost": [meter_kwh * price for meter_kwh in kwh],
        "co2e_kg": [meter_kwh * carbon / 1e3 for meter_kwh in kwh],
        "node_overhead_w": beside_w,
        "pue": pue,
    }
