"""What `planner inference` prints: plans of pools, and replays of traces, as tables, JSON and a figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.inference.plan import BASELINE, POLICIES, Epoch, InferencePlan
from perseus_planner.profiles.csv_file import unit_of
from perseus_planner.quantities import si
from perseus_planner.views.columns import Sheet, column, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.inference.pools import Pool

_MOST_EPOCHS = 3  #: whose pools are printed


@dataclass(frozen=True)
class PoolView:
    """A pool.

    Attributes:
        classes: names of the classes that it serves, shortest first.
        instances: how many it has.
        tensor_degree: GPUs of an instance.
        setting: clock in MHz, or power limit in watts.
        gpus: GPUs of all instances.
        tokens_per_s: input and output tokens that are planned, of all instances.
    """

    classes: tuple[str, ...]
    instances: int
    tensor_degree: int
    setting: int
    gpus: int
    tokens_per_s: float


@dataclass(frozen=True)
class EpochView:
    """A period with one set of pools.

    Attributes:
        start_s: when it begins, seconds.
        length_s: how long it is, seconds.
        power_w: mean power, watts, without changes.
        change_j: energy of the changes since the period before, joules.
        energy_j: energy, joules, changes included.
        bound_j: no pools need less, joules.
        pools: the pools.
    """

    start_s: float
    length_s: float
    power_w: float
    change_j: float
    energy_j: float
    bound_j: float
    pools: tuple[PoolView, ...]


@dataclass(frozen=True)
class PolicyView:
    """One way to choose configurations.

    Attributes:
        policy: its name.
        description: in words.
        energy_j: energy of all periods, joules; None if it cannot meet the objectives.
        saved_share: saving against the baseline, relative; None if one of the two cannot.
        gpus: most GPUs in use.
    """

    policy: str
    description: str
    energy_j: float | None
    saved_share: float | None
    gpus: int


@dataclass(frozen=True)
class InferencePlanView:
    """A plan of pools, for JSON.

    Attributes:
        gpus: how many there are.
        control: "clock" or "power-limit".
        baseline: name of the policy that savings are against.
        energy_j: energy of all periods, joules.
        saved_share: saving against the baseline, relative; None if that cannot meet the objectives.
        gap: how far a period's energy is above its bound at most, relative.
        policies: the plan and other ways to choose configurations.
        epochs: the periods.
    """

    gpus: int
    control: str
    baseline: str
    energy_j: float
    saved_share: float | None
    gap: float
    policies: tuple[PolicyView, ...]
    epochs: tuple[EpochView, ...]


def plan_view(plan: InferencePlan) -> InferencePlanView:
    """Return what is printed of a plan."""
    policies = tuple(
        PolicyView(name, POLICIES[name], total.energy_j, plan.saved_share(name), total.gpus)
        for name, total in plan.policies.items()
    )
    return InferencePlanView(
        gpus=plan.gpus,
        control=plan.control,
        baseline=BASELINE,
        energy_j=plan.energy_j,
        saved_share=plan.saved_share(),
        gap=plan.gap,
        policies=policies,
        epochs=tuple(map(_epoch_view, plan.epochs)),
    )


def _epoch_view(epoch: Epoch) -> EpochView:
    plan = epoch.plan
    pools = tuple(map(_pool_view, plan.pools))
    return EpochView(
        epoch.start_s, epoch.length_s, plan.power_w, plan.change_j, plan.energy_j, plan.bound_j, pools
    )  # fmt: skip


def _pool_view(pool: Pool) -> PoolView:
    names = tuple(of.name for of in pool.serves)
    return PoolView(
        names, pool.instances, pool.at.tensor_degree, pool.at.setting, pool.gpus, sum(pool.serves.values())
    )  # fmt: skip


def plan_text(view: InferencePlanView) -> str:
    """Return the tables of a plan."""
    parts = []
    for epoch in view.epochs[:_MOST_EPOCHS]:
        gpus = sum(pool.gpus for pool in epoch.pools)
        changes = f", {si(epoch.change_j, 'J')} of changes" if epoch.change_j else ""
        parts.append(
            f"From {epoch.start_s / 60:.0f} min, for {epoch.length_s / 60:.0f} min: {gpus} GPUs, "
            f"{si(epoch.power_w, 'W')}{changes}\n\n{_pool_table(epoch.pools, view.control)}"
        )
    if len(view.epochs) > _MOST_EPOCHS:
        parts.append(f"{len(view.epochs) - _MOST_EPOCHS} more periods are in the file.")
    rows = view.policies
    columns = [
        ["chosen how", *(row.description for row in rows)],
        column("energy kWh", [_kwh(row.energy_j) for row in rows]),
        column("saved %", [_percent(row.saved_share) for row in rows]),
        column("GPUs", [str(row.gpus) for row in rows]),
    ]
    notes = [
        f"Savings are against {POLICIES[BASELINE]}, for all classes. The plan is "
        + (f"at most {100 * view.gap:.2g} % above its bound." if view.gap > 1e-6 else "proved to be the best.")
    ]
    for row in rows:
        if row.energy_j is None:
            notes.append(f"{row.description}: violates the latency objective of a class.")
        elif row.gpus > view.gpus:
            notes.append(f"{row.description}: needs {row.gpus} GPUs, more than there are.")
    text = Sheet(f"Pools for inference on {view.gpus} GPUs", "", columns, "\n".join(notes)).text()
    return "\n\n".join([*parts, text])


def _pool_table(pools: Sequence[PoolView], control: str) -> str:
    return table(
        [
            ["classes", *(", ".join(pool.classes) for pool in pools)],
            column("instances", [str(pool.instances) for pool in pools]),
            column("TP", [str(pool.tensor_degree) for pool in pools]),
            column(unit_of(control), [str(pool.setting) for pool in pools]),
            column("GPUs", [str(pool.gpus) for pool in pools]),
            column("tokens/s", [f"{pool.tokens_per_s:.0f}" for pool in pools]),
        ]
    )


def _kwh(energy_j: float | None) -> str:
    return "-" if energy_j is None else f"{energy_j / 3.6e6:.4g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
