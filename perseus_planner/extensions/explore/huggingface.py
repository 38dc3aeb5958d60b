"""The dimensions of decoder-only transformers from `config.json`s of Hugging Face, for the kinds in
`_KINDS`.

What a `config.json` says and `Transformer` cannot say is refused: a kind that is not known, and any
key about experts, latents, windows or chunks that the kind is not known to have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from perseus_planner.base.errors import UsageError, shown
from perseus_planner.base.files import read_text
from perseus_planner.base.units import COUNT, INDEX

_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "ffn": "intermediate_size",
    "vocabulary": "vocab_size",
    "sequence": "max_position_embeddings",
}
_EXPERTS = {
    "experts": "num_local_experts",
    "experts_used": "num_experts_per_tok",
    "expert_ffn": "intermediate_size",
}
_LATENTS = {
    "kv_latent": "kv_lora_rank",
    "query_latent": "q_lora_rank",
    "rotary_size": "qk_rope_head_dim",
    "head_size": "qk_nope_head_dim",
    "experts": "n_routed_experts",
    "expert_ffn": "moe_intermediate_size",
    "experts_used": "num_experts_per_tok",
    "dense_layers": "first_k_dense_replace",
    "routed_nodes": "topk_group",  # groups are nodes in their training
    "shared_experts": "n_shared_experts",
    "expert_every": "moe_layer_freq",
    "value_size": "v_head_dim",
}
_WINDOW = {"window": "sliding_window"}
_LLAMA = {"gated": True, "biases": False, "tied": False, "positions": "rotary"}
_OLDER = {"gated": False, "biases": True, "tied": False, "positions": "rotary"}
_GEMMA3 = {"heads": 8, "kv_heads": 4, "head_size": 256, "vocabulary": 262208, "sequence": 131072}


class _Kind(NamedTuple):
    """How the `config.json` of a kind of models is read."""

    keys: Mapping[str, str]  #: attribute -> key, beside or instead of those of `_SIZES`
    unsaid: Mapping[str, Any]  #: attribute -> what the kind has without saying so


_KINDS: Mapping[str, _Kind] = {
    "llama": _Kind({}, _LLAMA),
    "mistral": _Kind(_WINDOW, _LLAMA),
    "qwen2": _Kind({}, _LLAMA),
    "qwen3": _Kind({}, _LLAMA),
    "mixtral": _Kind(_WINDOW | _EXPERTS, _LLAMA),
    "deepseek_v2": _Kind(_LATENTS, _LLAMA),
    "deepseek_v3": _Kind(_LATENTS, _LLAMA),
    "qwen3_moe": _Kind(
        {
            **_EXPERTS,
            "experts": "num_experts",
            "expert_ffn": "moe_intermediate_size",
            "expert_every": "decoder_sparse_step",
        },
        _LLAMA,
    ),
    "gpt_oss": _Kind(_WINDOW | _EXPERTS, {**_LLAMA, "biases": True, "global_every": 2}),
    "llama4_text": _Kind(
        {
            **_EXPERTS,
            "shared_ffn": "intermediate_size",
            "ffn": "intermediate_size_mlp",
            "window": "attention_chunk_size",
            "global_every": "no_rope_layer_interval",
            "expert_every": "interleave_moe_layer_step",
        },
        {**_LLAMA, "chunked": True, "global_every": 4, "expert_every": 1},
    ),
    "gemma2": _Kind(_WINDOW, {**_LLAMA, "tied": True, "global_every": 2}),
    "gemma3_text": _Kind(
        _WINDOW | {"global_every": "sliding_window_pattern"},
        {**_LLAMA, **_GEMMA3, "tied": True, "global_every": 6},
    ),
    "phi": _Kind({}, _OLDER),
    "phi3": _Kind(_WINDOW, _LLAMA),
    "gpt_neox": _Kind({}, _OLDER),
    "opt": _Kind({"ffn": "ffn_dim"}, {**_OLDER, "tied": True, "positions": "learned"}),
    "falcon": _Kind(
        {"kv_heads": "num_kv_heads", "ffn": "ffn_hidden_size"},
        {**_OLDER, "biases": False, "tied": True, "sequence": 2048},
    ),
}
#: keys that may change what is computed, so they are refused where they are not known
_UNSAID = re.compile("expert|moe|lora_rank|sliding|window|chunk|topk_group|mlp_only")
#: of these keys, those that do not
_HARMLESS = re.compile("router|aux|max_window|experts_per_token|moe_layers|^_")
_MAX_SEQUENCE = 8192  #: models with longer contexts are mostly trained on shorter sequences


def read_dimensions(path: Path) -> dict[str, Any]:
    """Return the attributes of `Transformer` that a `config.json` says, with sequences of at most
    8,192 tokens.

    Raises:
        UsageError: If the file cannot be read, is not valid, or says what `Transformer` cannot.
    """
    config = _read_json(path)
    # Kinds differ in what they do without saying so, so an unknown one is refused.
    name: Any = config.get("model_type") if isinstance(config, dict) else None
    if name not in _KINDS:
        raise UsageError(
            f"{path}: a model_type of {shown(name)} is not known; give one of {', '.join(_KINDS)}, "
            "or a .yaml file with the dimensions"
        )
    kind = _KINDS[name]
    keys = {**_SIZES, **kind.keys}
    if config.get("use_sliding_window") is False:  # Qwen: the width stands there all the same
        config.pop("sliding_window", None)
    _refuse_unknown(config, keys, path)
    if name == "falcon":
        config = _with_derived(config)
    found = _sizes_of(config, keys, kind.unsaid, path)
    _refuse_unequal(found, config, keys, path)
    found.pop("value_size", None)
    return {
        "kv_heads": found["heads"],
        "head_size": found["hidden"] // found["heads"],
        **_with_windows(_with_experts(found), config, path),
        "tied": config.get("tie_word_embeddings", found["tied"]) is True,
        "positions": "alibi" if config.get("alibi") else found["positions"],
        "sequence": min(found["sequence"], _MAX_SEQUENCE),
    }


def _read_json(path: Path) -> Any:
    """Return the content of a `config.json`, of a model of text and pictures that of its text
    model.
    """
    text = read_text(path, UsageError, "a config.json")
    try:
        config = json.loads(text)
    except RecursionError:
        raise UsageError(
            f"{path}: nests lists or objects too deeply; give the config.json of a model"
        ) from None
    except ValueError as error:
        raise UsageError(f"{path}: is not JSON: {error}; give the config.json of a model") from None
    if not isinstance(config, dict) or not isinstance(config.get("text_config"), dict):
        return config
    # The tower of pictures is not trained with the text model here.
    outer = {key: value for key, value in config.items() if key == "tie_word_embeddings"}
    inner = f"{config.get('model_type')}".removesuffix("_text") + "_text"
    return {**outer, **config["text_config"], "model_type": inner}


def _refuse_unknown(config: Mapping[str, Any], keys: Mapping[str, str], path: Path) -> None:
    """Refuse keys that the kind is not known to have and that may change what is computed."""
    known = set(keys.values())
    for key, value in config.items():
        is_unsaid = _UNSAID.search(key) and not _HARMLESS.search(key)
        if value and key not in known and is_unsaid:
            raise UsageError(
                f"{path}: {key} of {shown(value)} is not known of a model_type of "
                f"{config['model_type']!r}; give a .yaml file with the dimensions"
            )


def _with_derived(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with what Falcon derives from other keys: its width, and its heads of keys
    and values.
    """
    derived = dict(config)
    hidden: Any = config.get("hidden_size")
    # Another value than a number is refused later, with its key.
    if COUNT.accept(hidden) is not None:
        derived.setdefault("ffn_hidden_size", 4 * hidden)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        derived["num_kv_heads"] = 1
    return derived


def _sizes_of(
    config: Mapping[str, Any], keys: Mapping[str, str], unsaid: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """Return attribute -> what the keys say of it, or what the kind has without saying so."""
    found = dict(unsaid)
    for name, key in keys.items():
        value = config.get(key)
        # Sizes are at least 1, and the others may be 0.
        rule = COUNT if name in _SIZES or name == "expert_every" else INDEX
        if value is not None:
            if rule.accept(value) is None:
                raise UsageError(f"{path}: {key} of {shown(value)} is not {rule.wanted}")
            found[name] = value
        elif name in _SIZES and name not in (*unsaid, "kv_heads", "head_size"):
            raise UsageError(f"{path}: has no {key}; add it")
    return found


def _refuse_unequal(
    found: Mapping[str, Any], config: Mapping[str, Any], keys: Mapping[str, str], path: Path
) -> None:
    """Refuse pairs that differ and for which `Transformer` has one number."""
    for name, key in (("value_size", "qk_nope_head_dim"), ("hidden", "word_embed_proj_dim")):
        if name in found and config.get(key, found[name]) != found[name]:
            raise UsageError(
                f"{path}: {keys.get(name)} and {key} differ, which cannot be said; give another "
                "model"
            )


def _with_experts(found: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes with those of experts as `Transformer` has them; without them, if there
    are no experts.
    """
    shared = found.pop("shared_experts", 0)
    # A model may have experts in every so many-th layer, which counts as fewer layers with experts.
    every = found.pop("expert_every", 1)
    if not found.get("experts"):
        unused = ("experts_used", "expert_ffn", "shared_ffn", "dense_layers", "routed_nodes")
        return {name: value for name, value in found.items() if name not in unused}
    layers = found["layers"]
    first = found.get("dense_layers", 0)
    found["dense_layers"] = layers - (layers - first) // every
    return found | ({"shared_ffn": shared * found["expert_ffn"]} if shared else {})


def _with_windows(found: dict[str, Any], config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the attributes with how often a layer has no window, as `layer_types` says."""
    if not found.get("window"):
        return {name: v for name, v in found.items() if name not in ("global_every", "chunked")}
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return found
    # Windows are said by how often a layer has none, which a list says only if it is regular.
    whole = kinds.count("full_attention")
    every = found["layers"] // whole if whole else 0
    if len(kinds) != found["layers"] or (every and found["layers"] // every != whole):
        raise UsageError(
            f"{path}: layer_types of {len(kinds)} layers with {whole} of full attention cannot be "
            "said; give a .yaml file with the dimensions"
        )
    return found | {"global_every": every}
