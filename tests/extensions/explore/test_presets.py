"""Models are read from a `config.json` of Hugging Face, and what is wrong with one is said in a
sentence.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.explore.transformer import (
    PRESETS,
    Transformer,
    name_of,
    named_transformer,
)

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def write(path: Path, **changes: object) -> str:
    path.write_text(
        json.dumps({key: value for key, value in {**LLAMA, **changes}.items() if value != "absent"})
    )
    return str(path)


def test_a_config_is_the_model_that_it_describes(tmp_path: Path):
    path = tmp_path / "config.json"
    assert named_transformer(write(path)) == PRESETS["llama3-8b"]
    assert name_of(str(path)) == name_of(str(tmp_path)) == tmp_path.name
    assert named_transformer(str(tmp_path)) == PRESETS["llama3-8b"]
    short = write(
        path,
        num_key_value_heads=None,
        head_dim=256,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    wanted = replace(PRESETS["llama3-8b"], kv_heads=32, head_size=256, sequence=4096, tied=True)
    assert named_transformer(short) == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba"},
            ": a model_type of 'mamba' is not known; give one of llama, mistral, qwen2, qwen3, "
            "mixtral, deepseek_v2, deepseek_v3, qwen3_moe, gpt_oss, llama4_text, gemma2, "
            "gemma3_text, phi, phi3, gpt_neox, opt, falcon, or a .yaml file with the dimensions",
        ),
        (
            {"num_local_experts": 8},
            ": num_local_experts of 8 is not known of a model_type of 'llama'; give a .yaml file "
            "with the dimensions",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096},
            ": use_sliding_window of True is not known of a model_type of 'qwen2'; give a .yaml "
            "file with the dimensions",
        ),
        ({"vocab_size": "absent"}, ": has no vocab_size; add it"),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 0},
            ": decoder_sparse_step of 0 is not a whole number of at least 1",
        ),
        (
            {"model_type": "falcon", "hidden_size": {"text": 64}},
            ": hidden_size of {'text': 64} is not a whole number of at least 1",
        ),
        ({"hidden_size": 0}, ": hidden_size of 0 is not a whole number of at least 1"),
        (
            {"num_key_value_heads": 5},
            ", kv_heads: 5 does not divide heads of 32; choose one that does",
        ),
    ],
)
def test_a_config_that_is_no_dense_model_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
):
    path = tmp_path / "config.json"
    with pytest.raises(UsageError) as refusal:
        named_transformer(write(path, **changes))
    assert str(refusal.value) == f"{path}{message}"


def test_a_file_that_is_not_json_is_refused(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(
        UsageError, match=r"config\.json: is not JSON: .*; give the config\.json of a model$"
    ):
        named_transformer(str(path))


_COMMON = {"max_position_embeddings": 32768, "vocab_size": 32000}
PUBLISHED = {
    # what config.json says, and the parameters of the released checkpoints in billions, with norms
    # and biases that are not counted as tolerance; for multi-token prediction without its module
    "mixtral-8x7b": (
        {
            **_COMMON,
            "model_type": "mixtral",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        46.70,
    ),
    "deepseek-v3": (
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "n_group": 8,
            "topk_group": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
        },
        671.03,
    ),
    "qwen3-30b-a3b": (
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
            "max_window_layers": 48,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
        },
        30.53,
    ),
    "gpt-oss-120b": (
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 36,
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "experts_per_token": 4,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
        },
        116.83,
    ),
    "llama4-scout": (
        {
            "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text",
                "num_hidden_layers": 48,
                "hidden_size": 5120,
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 8192,
                "intermediate_size_mlp": 16384,
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 1,
                "attention_chunk_size": 8192,
                "vocab_size": 202048,
                "max_position_embeddings": 10485760,
            },
        },
        107.77,
    ),
    "gemma2-9b": (
        {
            "model_type": "gemma2",
            "num_hidden_layers": 42,
            "hidden_size": 3584,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "intermediate_size": 14336,
            "sliding_window": 4096,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
        },
        9.24,
    ),
    "gemma3-27b": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "num_hidden_layers": 62,
                "hidden_size": 5376,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 128,
                "intermediate_size": 21504,
                "sliding_window": 1024,
            },
        },
        27.01,
    ),
    "phi-2": (
        {
            "model_type": "phi",
            "num_hidden_layers": 32,
            "hidden_size": 2560,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 10240,
            "vocab_size": 51200,
            "max_position_embeddings": 2048,
        },
        2.78,
    ),
    "gpt-neox-20b": (
        {
            "model_type": "gpt_neox",
            "num_hidden_layers": 44,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "intermediate_size": 24576,
            "vocab_size": 50432,
            "max_position_embeddings": 2048,
        },
        20.55,
    ),
    "opt-6.7b": (
        {
            "model_type": "opt",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "ffn_dim": 16384,
            "word_embed_proj_dim": 4096,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
        },
        6.66,
    ),
    "falcon-7b": (
        {
            "model_type": "falcon",
            "num_hidden_layers": 32,
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "multi_query": True,
            "new_decoder_architecture": False,
            "vocab_size": 65024,
        },
        6.92,
    ),
}


@pytest.mark.parametrize(("config", "billions"), PUBLISHED.values(), ids=PUBLISHED)
def test_a_config_has_the_published_parameters(
    tmp_path: Path, config: dict[str, object], billions: float
):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert named_transformer(str(path)).parameters == pytest.approx(1e9 * billions, rel=2e-3)


def test_windows_and_experts_are_read(tmp_path: Path):
    def read(name: str) -> Transformer:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(PUBLISHED[name][0]))
        return named_transformer(str(path))

    oss, scout, gemma, deep = map(
        read, ("gpt-oss-120b", "llama4-scout", "gemma3-27b", "deepseek-v3")
    )
    assert (oss.window, oss.global_every, oss.chunked) == (128, 2, False)
    assert (scout.window, scout.global_every, scout.chunked) == (8192, 4, True)
    assert (gemma.window, gemma.global_every, gemma.sequence) == (1024, 6, 8192)
    assert (deep.routed_nodes, deep.dense_layers, deep.shared_ffn) == (4, 3, 2048)
