"""Measured iteration times of GPT models on A100s, from the tables in `../shared/data/iteration_times`."""

from __future__ import annotations

import csv
from pathlib import Path

from perseus_planner.estimate.configuration import Configuration
from perseus_planner.estimate.transformer import Transformer, split_layers


def measured(path: Path) -> list[tuple[Configuration, float]]:
    """Return the configurations of a table of measured iterations, and their seconds."""
    found = []
    with path.open() as file:
        for row in csv.DictReader(file):
            size = {key: float(value) for key, value in row.items()}
            hidden, heads, layers, tensor, data, micro = (
                int(size[key])
                for key in ("hidden", "heads", "layers", "tensor_parallel", "data_parallel", "microbatch")
            )
            shape = Transformer(
                layers,
                hidden,
                heads,
                heads,
                head_size=hidden // heads,
                ffn=4 * hidden,
                # Heads of one GPU take as if their vocabulary were not padded on 2 to 8 GPUs.
                vocabulary=50257 if tensor == 1 and data <= 8 else -(-50257 // (128 * tensor)) * 128 * tensor,
                sequence=int(size["sequence"]),
                microbatch=micro,
                tensor_degree=tensor,
                recomputation="none" if size["gpus"] <= 8 else "full",  # assumed
                attention="plain",
            )
            split = split_layers(layers, int(size["pipeline_parallel"]))
            job = Configuration(shape, split, data, int(size["global_batch"]) // (micro * data))
            found.append((job, size["iteration_s"]))
    return found
