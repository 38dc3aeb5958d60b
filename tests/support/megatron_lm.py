"""Runs `pretrain()` of Megatron-LM on the CPU; like every training script, it knows nothing of the
planner.

As a script it is one rank: FOLDER of Megatron-LM (core_v0.16.1), and the FILE to write the losses
to. Two stages train for 6 iterations of 4 microbatches, and evaluate after every second one. All
that is replaced here is CUDA."""
# ruff: noqa: TID253 - the process in which this runs is there for torch and Megatron

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

sys.path[:0] = [sys.argv[1], str(Path(__file__).resolve().parents[2] / "examples")]

SEQUENCE, VOCABULARY = 8, 16
OPTIONS = f"""
--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE}
--micro-batch-size 1 --global-batch-size 4 --train-iters 6 --lr 0.01 --min-lr 0.001 --clip-grad 0 --log-interval 1
--pipeline-model-parallel-size 2 --distributed-backend gloo --eval-iters 1 --eval-interval 2 --rerun-mode disabled
--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer --dataloader-type cyclic
--num-workers 0 --split 8,1,1 --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion
--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
"""  # noqa: E501


class Stream:
    """A CUDA stream or event that does nothing."""

    def __getattr__(self, _: str) -> Any:
        return lambda *args, **kwargs: None


def replace_cuda() -> None:
    """Let Megatron-LM find a GPU that is the CPU."""
    gpu = SimpleNamespace(name="CPU", major=8, minor=0, total_memory=2**34)
    names = ("set_device", "synchronize", "manual_seed", "empty_cache", "reset_peak_memory_stats")
    replaced: dict[str, Any] = {
        name: lambda *args: None for name in names
    }  # torch wants a function of its own for each
    names = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    replaced |= {name: lambda *args: 0 for name in names}
    replaced |= {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "memory_stats": lambda *args: defaultdict(int),
        "get_device_capability": lambda *args: (8, 0),
        "get_device_properties": lambda *args: gpu,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "Stream": lambda *args, **kwargs: Stream(),
        "Event": lambda *args, **kwargs: Stream(),
        "current_stream": lambda *args: Stream(),
        "stream": lambda stream: nullcontext(),
        "IntTensor": lambda values: torch.tensor(values, dtype=torch.int),
        "FloatTensor": lambda values: torch.tensor(values, dtype=torch.float),
        "LongTensor": lambda values: torch.tensor(values, dtype=torch.long),
        "DoubleTensor": lambda values: torch.tensor(values, dtype=torch.double),
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    initialize = dist.init_process_group
    dist.init_process_group = lambda *args, device_id=None, **kwargs: initialize(
        *args, **{**kwargs, "backend": "gloo"}
    )
    for name in ("six", "regex"):  # of tokenizers that are not used
        if find_spec(name) is None:
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(vars(re) if name == "regex" else {})
    sys.modules["megatron.core.transformer.custom_layers.batch_invariant_kernels"] = (
        mock.MagicMock()
    )  # needs triton


class Tokens(torch.utils.data.Dataset[Any]):
    """Random tokens."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, number: int) -> Any:
        return torch.randint(
            VOCABULARY, (SEQUENCE,), generator=torch.Generator().manual_seed(number)
        )


def main() -> None:
    from megatron.core import tensor_parallel
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import get_args, initialize, pretrain, training
    from megatron.training.arguments import core_transformer_config_from_args

    tensor_parallel.model_parallel_cuda_manual_seed = lambda *args, **kwargs: torch.manual_seed(1)
    initialize._compile_dependencies = lambda: None
    training.set_jit_fusion_options = lambda *args, **kwargs: None
    losses: list[float] = []

    def model_provider(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        config = config or core_transformer_config_from_args(get_args())
        config.batch_p2p_sync = False
        return GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=False,
            vp_stage=vp_stage,
        )

    def loss_of(output: Any) -> Any:
        loss = output.float().mean()
        losses.append(loss.item())
        return loss, {"lm loss": loss.detach().clone().view(1)}

    def forward_step(batches: Any, model: Any) -> Any:
        tokens = next(batches)
        places = torch.arange(SEQUENCE).expand_as(tokens)
        hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        return model(tokens, places, hidden, labels=tokens), loss_of

    def datasets(_: Any, **__: Any) -> Any:
        return Tokens(), Tokens(), Tokens()

    pretrain(datasets, model_provider, ModelType.encoder_or_decoder, forward_step)
    Path(f"{sys.argv[0]}-{dist.get_rank()}").write_text(json.dumps(losses))
    dist.barrier()


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    replace_cuda()
    sys.argv = [sys.argv[2], *OPTIONS.split()]
    import megatron_cpu

    with megatron_cpu.cpu_only():
        main()
