"""A small GPT that trains as Megatron-LM's `pretrain` does; like the script that runs it, it knows
no planner.

`megatron.training` is not part of megatron-core. What follows has the structure of its `train`,
`train_step` and `evaluate` (core 0.16): the model stays inside, one schedule function is taken at
the start of training and another for each evaluation, and the timers of the config are those of a
global variable, dropped while it evaluates."""
# ruff: noqa: TID253 - the process in which this runs is there for torch and Megatron

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.timers import Timers
from megatron.core.transformer import TransformerConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import megatron_cpu

SEQUENCE, ROWS, VOCABULARY, MICROBATCHES = 8, 1, 16, 4

GLOBALS: Any = ModuleType("megatron.training.global_vars")
GLOBALS._GLOBAL_TIMERS = Timers(0, "minmax")  # at this level those of computations do nothing


class MegatronTraining:
    """1F1B of Megatron-core."""

    def __init__(self) -> None:
        sys.modules[GLOBALS.__name__] = GLOBALS
        dist.init_process_group("gloo")
        ranks = dist.get_world_size()
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
        self._cpu = megatron_cpu.cpu_only()
        self._cpu.__enter__()  # until the process ends
        self._config = TransformerConfig(
            num_layers=ranks,
            hidden_size=8,
            num_attention_heads=2,
            pipeline_model_parallel_size=ranks,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            batch_p2p_sync=False,
            hidden_dropout=0.1,
        )
        torch.manual_seed(dist.get_rank())
        chunk = GPTModel(
            self._config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
        )
        self._model = [chunk]
        self._optimizer = torch.optim.AdamW(chunk.parameters(), lr=0.01)
        self._config.timers = GLOBALS._GLOBAL_TIMERS
        self._train = get_forward_backward_func()

    def step(self) -> list[Any]:
        losses = self._run(self._train, forward_only=False)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return losses

    def evaluate(self) -> list[Any]:
        evaluate = get_forward_backward_func()
        with torch.no_grad():
            self._config.timers = None
            losses = self._run(evaluate, forward_only=True)
            self._config.timers = GLOBALS._GLOBAL_TIMERS
        return losses

    def weights(self) -> list[Any]:
        return list(self._model[0].parameters())

    def _run(self, forward_backward: Any, *, forward_only: bool) -> list[Any]:
        data = torch.randint(
            VOCABULARY, (MICROBATCHES, ROWS, SEQUENCE), generator=torch.Generator().manual_seed(7)
        )
        found: list[Any] = forward_backward(
            forward_step_func=_forward_step,
            data_iterator=iter(data),
            model=self._model,
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=ROWS,
            decoder_seq_length=None,
            forward_only=forward_only,
        )
        return found


def _forward_step(batches: Any, model: Any) -> Any:
    tokens = next(batches)
    places = torch.arange(SEQUENCE).expand_as(tokens)
    hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return model(tokens, places, hidden, labels=tokens), lambda losses: (
        losses.mean(),
        losses.mean().detach(),
    )
