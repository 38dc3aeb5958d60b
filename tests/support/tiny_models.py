"""Chunks of tiny models of Megatron-core, as its model providers build them."""
# ruff: noqa: TID253 - for ranks, which are there for torch and Megatron

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

SEQUENCE, ROWS, VOCABULARY = 8, 1, 16


@dataclass(frozen=True)
class Place:
    """Where a chunk is in its pipeline.

    Attributes:
        rank: Rank of the pipeline.
        ranks: The number of ranks.
        number: Number of the chunk on its rank, from 0.
        virtual: The number of chunks on each rank; None if the model is not cut into chunks.
    """

    rank: int
    ranks: int
    number: int
    virtual: int | None

    @property
    def vp_stage(self) -> int | None:
        return None if self.virtual is None else self.number

    @property
    def is_first(self) -> bool:
        return self.rank == 0 and self.number == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.ranks - 1 and self.number == (self.virtual or 1) - 1


def chunk_of(model: str, config: Any, place: Place, groups: Any) -> Any:
    """Return a chunk of one of `MODELS`, on these process groups or those of Megatron's state."""
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_sequence_length": SEQUENCE,
        "pre_process": place.is_first,
        "post_process": place.is_last,
        "share_embeddings_and_output_weights": False,
        "vp_stage": place.vp_stage,
    }
    if groups is not None:
        options["pg_collection"] = groups
    return MODELS[model](config, place, options)


def _gpt(config: Any, place: Place, options: dict[str, Any]) -> Any:
    layer = get_gpt_layer_local_spec(config.num_moe_experts)
    if config.mtp_num_layers:
        options["mtp_block_spec"] = get_gpt_mtp_block_spec(
            config, layer, use_transformer_engine=False, vp_stage=place.vp_stage
        )
    return GPTModel(config, layer, **options)


def _gpt_without_attention(config: Any, place: Place, options: dict[str, Any]) -> Any:
    """A GPT whose layers are its MLPs: attention over parts of a sequence needs a GPU."""
    layer = get_gpt_layer_local_spec(config.num_moe_experts)
    layer.submodules.self_attention = IdentityOp
    layer.submodules.self_attn_bda = IdentityFuncOp
    return GPTModel(config, layer, **options)


def _hybrid(config: Any, place: Place, options: dict[str, Any]) -> Any:
    """A HybridModel of attention and MLP layers: its other kinds of layers need a GPU, and the
    layers of its own specification need Transformer Engine.
    """
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    parts = get_gpt_layer_local_spec().submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=parts.input_layernorm,
        self_attention=parts.self_attention,
        self_attn_bda=parts.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda
    )
    stack = ModuleSpec(
        module=hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )
    stages = place.ranks * (place.virtual or 1)
    each = config.num_layers // stages
    pattern = "|".join([("*-" * each)[:each]] * stages)
    with mock.patch.object(hybrid_block, "TENorm", WrappedTorchNorm):
        return HybridModel(config, stack, hybrid_layer_pattern=pattern, **options)


MODELS: dict[str, Callable[[Any, Place, dict[str, Any]], Any]] = {
    "gpt": _gpt,
    "gpt without attention": _gpt_without_attention,
    "hybrid": _hybrid,
}
