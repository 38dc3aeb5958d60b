"""Models are read from a `config.json` of Hugging Face, and what is wrong with one is said in a
sentence.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perseus_planner.base.errors import UsageError
from perseus_planner.estimate.transformer import PRESETS, name_of, named_transformer

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
            {"model_type": "mixtral"},
            ": a model_type of 'mixtral' is not known; give one of llama, mistral, qwen2, qwen3, "
            "or a .yaml file with the dimensions",
        ),
        ({"vocab_size": "absent"}, ": has no vocab_size; add it"),
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
