"""Trains with torchtitan and the planner; takes the options of torchtitan's own training script.

PLAN=plan.yaml torchrun --nproc-per-node 8 examples/train_torchtitan.py --module llama3 --config
llama3_8b
"""

from __future__ import annotations

import os

from perseus_planner.runtime import planner_runtime


def train(trainer, **options) -> None:
    """Train by a plan, or without one if `options` of `planner_runtime` have none."""
    with planner_runtime(trainer.pp_schedule, **options):
        trainer.train()


def main() -> None:
    """Build torchtitan's trainer from the command line, and train."""
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger

    init_logger()
    config = ConfigManager().parse_args()
    if hasattr(config, "build"):  # torchtitan 0.3
        trainer = config.build()
    else:
        from torchtitan.train import Trainer

        trainer = Trainer(config)
    try:
        train(trainer, plan=os.environ.get("PLAN"))
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
