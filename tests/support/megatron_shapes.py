"""Shapes of pipelines that Megatron-core trains, each a row of what the adapter was judged by.

This module loads neither torch nor Megatron, so that tests name the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A pipeline of a tiny model.

    Attributes:
        name: What is special about it.
        ranks: The number of ranks of the job.
        virtual: Chunks on each rank; None if the model is not cut into chunks.
        group: Microbatches that run through one chunk before the next chunk runs.
        microbatches: Microbatches of an iteration.
        pipeline: Ranks of a pipeline; None if it spans the job.
        model: The model, as `tiny_models.MODELS` names it.
        has_state: Whether Megatron's parallel state is initialised; if not, the chunks have the
            groups of a HyperCommGrid.
        embeddings: Which ranks of a pipeline have word embeddings; None for Megatron's default.
        options: Further fields of the model's config.
    """

    name: str
    ranks: int
    virtual: int | None = None
    group: int | None = None
    microbatches: int = 4
    pipeline: int | None = None
    model: str = "gpt"
    has_state: bool = True
    embeddings: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def _layout(text: str, ranks: int) -> Shape:
    """Return a pipeline with a layout string: E embedding, t layer, m MTP, L loss, | next stage."""
    stages = text.count("|") + 1
    options: dict[str, Any] = {
        "pipeline_model_parallel_layout": text,
        "num_layers": text.count("t"),
    }
    embeddings = None
    if "m" in text:
        options["mtp_num_layers"] = text.count("m")
        # MTP has the embeddings as well.
        (mtp,) = [number for number, stage in enumerate(text.split("|")) if "m" in stage]
        embeddings = tuple(sorted({0, mtp % ranks}))
    virtual = stages // ranks
    return Shape(
        f"layout {text} on {ranks} ranks",
        ranks,
        virtual if virtual > 1 else None,
        embeddings=embeddings,
        options=options,
    )


_SPLITS = {
    "account_for_embedding_in_pipeline_split": True,
    "account_for_loss_in_pipeline_split": True,
}

SHAPES = (
    Shape("PP 1", 1),
    Shape("1F1B", 2),
    Shape("interleaved", 2, virtual=2),
    Shape("groups of 3 of 5", 2, virtual=2, group=3, microbatches=5),
    Shape("groups of 4 of 6", 2, virtual=2, group=4, microbatches=6),
    Shape("1F1B on 4 ranks", 4, microbatches=6),
    Shape("interleaved on 4 ranks", 4, virtual=2, microbatches=8),
    _layout("Et|tL", 2),
    _layout("Ettt|L", 2),
    _layout("E|t|t|L", 2),
    _layout("E|t|t|L", 4),
    _layout("Et|t|t|tL", 2),
    _layout("Et|t|t|tL", 4),
    _layout("Et||t|L", 2),
    _layout("Et|tmL", 2),
    _layout("Et|t|m|L", 2),
    Shape("account for embedding and loss", 2, options=_SPLITS | {"num_layers": 2}),
    Shape(
        "account for embedding and loss, interleaved",
        2,
        virtual=2,
        options=_SPLITS | {"num_layers": 2},
    ),
    Shape(
        "uneven first and last stage",
        4,
        options={
            "num_layers": 6,
            "num_layers_in_first_pipeline_stage": 1,
            "num_layers_in_last_pipeline_stage": 1,
        },
    ),
    Shape("MTP on the last stage", 2, options={"mtp_num_layers": 1}),
    Shape("experts without overlap", 4, pipeline=2, options={"num_moe_experts": 2}),
    Shape(
        "context parallel of 2, without attention",
        4,
        pipeline=2,
        model="gpt without attention",
        options={"context_parallel_size": 2},
    ),
    Shape(
        "hybrid context parallel, which a pipeline ignores",
        2,
        options={"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 8},
    ),
    Shape("HybridModel", 2, model="hybrid", options={"num_layers": 4}),
    Shape("HybridModel, interleaved", 2, virtual=2, model="hybrid", options={"num_layers": 4}),
    Shape(
        "process groups of the chunk, no parallel state",
        4,
        pipeline=2,
        has_state=False,
    ),
    Shape(
        "process groups of the chunk, no parallel state, interleaved",
        4,
        virtual=2,
        pipeline=2,
        has_state=False,
    ),
)
