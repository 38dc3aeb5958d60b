"""Fine-tunes with NeMo Automodel and the planner; takes the options of Automodel's own recipe.

PLAN=plan.yaml torchrun --nproc-per-node 8 examples/train_automodel.py --config llama3_1_8b_pp.yaml
"""

from __future__ import annotations

import os

from perseus_planner.runtime import planner_runtime


def train(recipe, **options) -> None:
    """Train by a plan, or without one if `options` of `planner_runtime` have none."""
    with planner_runtime(recipe.pp.info.schedule, **options):
        recipe.run_train_validation_loop()


def main() -> None:
    """Set up Automodel's recipe from the command line, and train."""
    from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

    recipe = TrainFinetuneRecipeForNextTokenPrediction(parse_args_and_load_config())
    recipe.setup()
    train(recipe, plan=os.environ.get("PLAN"))


if __name__ == "__main__":
    main()
