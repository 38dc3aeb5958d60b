"""Decoder-only transformers: their dimensions, and models by name: published ones, YAML files, and
`config.json`s of Hugging Face.

    format: perseus-planner/transformer
    version: 1
    layers: 24
    hidden: 2048
    heads: 16
    vocabulary: 50304
    sequence: 2048

A file may contain the other attributes of `Transformer` as well. By default there are as many key
and value heads as heads, heads divide the hidden width, and the feed-forward block is four times as
wide as the hidden width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType

from perseus_planner.base.documents import read_document
from perseus_planner.base.errors import UsageError, did_you_mean, shown
from perseus_planner.base.fields import Checked
from perseus_planner.base.files import read_text
from perseus_planner.base.units import COUNT, Count

CHOICES = {
    "positions": ("learned", "rotary", "alibi"),
    "recomputation": ("none", "selective", "full"),
    "attention": ("plain", "flash", "flash-causal"),
    "precision": ("bf16", "fp16", "fp8"),
}
"""Values of the text attributes of a `Transformer`."""


@dataclass(frozen=True)
class Transformer(Checked):
    """A decoder, the size of a microbatch, and how the GPUs of a stage share a layer.

    Raises:
        UsageError: If the values contradict each other; the text begins with the attribute's name.
    """

    layers: Count  #: Decoder layers
    hidden: Count  #: Width of the residual stream
    heads: Count  #: Attention heads
    kv_heads: Count  #: Heads of keys and values; fewer than `heads` with grouped queries
    head_size: Count  #: Width of a head
    ffn: Count  #: Inner width of the feed-forward block
    #: Size of the vocabulary; give the padded size if the training framework pads. The GPUs of a
    #: tensor group share it, rounded up.
    vocabulary: Count
    sequence: Count  #: Tokens of a sequence; with learned positions also the number of positions
    microbatch: Count = 1  #: Sequences of a microbatch
    #: Whether the feed-forward block has three matrices (SwiGLU) instead of two.
    gated: bool = False
    biases: bool = True  #: Whether linear layers and norms have biases (LayerNorm, not RMSNorm)
    tied: bool = True  #: Whether the language-model head uses the matrix of the embedding
    embedding_norm: bool = False  #: Whether a norm follows the embedding
    positions: str = "learned"  #: "learned", "rotary" or "alibi"
    #: Number of GPUs that share each layer as in Megatron: heads, feed-forward block and vocabulary
    #: are divided.
    tensor_degree: Count = 1
    #: Whether these GPUs divide norms and residuals too, by tokens (Korthikanti et al., 2022).
    sequence_parallel: bool = False
    #: Whether what these GPUs send is sent in pieces during the layers' matrix products.
    overlap_traffic: bool = False
    #: What the backward recomputes (Korthikanti et al., "Reducing activation recomputation in large
    #: transformer models", 2022): "none", "selective" (the products of scores and values) or "full"
    #: (the layers).
    recomputation: str = "none"
    #: "plain" writes the scores of all pairs of tokens to memory; "flash" keeps them on the chip,
    #: and recomputes them in the backward (Dao et al., "FlashAttention", 2022); "flash-causal" also
    #: skips the pairs that a causal mask hides.
    attention: str = "flash-causal"
    element_bytes: Count = 2  #: Bytes of an activation, 2 in bf16
    #: Of the layers' products with weights; "fp8" leaves attention and head in bf16.
    precision: str = "bf16"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in fields(self):
            value = getattr(self, field.name)
            if value not in CHOICES.get(field.name, (value,)):
                choices = " or ".join(CHOICES[field.name])
                raise UsageError(f"{field.name}: {shown(value)} is unknown; give {choices}")
            if field.type == "bool" and not isinstance(value, bool):
                raise UsageError(
                    f"{field.name}: {shown(value)} is neither true nor false; give one of them"
                )
        self._check_shares()

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.sequence * self.microbatch

    @property
    def heads_per_gpu(self) -> int:
        """Attention heads of one GPU."""
        return self.heads // self.tensor_degree

    @property
    def kv_heads_per_gpu(self) -> int:
        """Heads of keys and values of one GPU; if there are fewer heads than GPUs, each GPU has
        a copy of one.
        """
        return max(1, self.kv_heads // self.tensor_degree)

    @property
    def ffn_per_gpu(self) -> int:
        """Inner width of the feed-forward block on one GPU."""
        return self.ffn // self.tensor_degree

    @property
    def vocabulary_per_gpu(self) -> int:
        """Size of the vocabulary on one GPU, rounded up."""
        return -(-self.vocabulary // self.tensor_degree)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model on all GPUs."""
        embedding = self.vocabulary * self.hidden * (1 if self.tied else 2)
        embedding += self.sequence * self.hidden if self.positions == "learned" else 0
        norm = self.hidden * (2 if self.biases else 1)
        return (
            self.layers * self._layer_parameters
            + embedding
            + norm * (2 if self.embedding_norm else 1)
        )

    @property
    def _layer_parameters(self) -> int:
        inner = (self.heads + 2 * self.kv_heads) * self.head_size
        wide = self.ffn * (2 if self.gated else 1)
        weights = self.hidden * (inner + self.heads * self.head_size + wide + self.ffn)
        if not self.biases:
            return weights + 2 * self.hidden
        return weights + 4 * self.hidden + inner + wide + 2 * self.hidden

    def _check_shares(self) -> None:
        for name in ("heads", "ffn"):
            if getattr(self, name) % self.tensor_degree:
                raise UsageError(
                    f"tensor_degree: {self.tensor_degree} GPUs cannot share {name} of "
                    f"{getattr(self, name)}; choose a degree that divides it"
                )
        if self.heads % self.kv_heads:
            raise UsageError(
                f"kv_heads: {self.kv_heads} does not divide heads of {self.heads}; choose one that "
                "does"
            )
        if self.kv_heads % self.tensor_degree and self.tensor_degree % self.kv_heads:
            raise UsageError(
                f"tensor_degree: {self.tensor_degree} GPUs cannot share kv_heads of "
                f"{self.kv_heads}; choose a degree that divides it, or a multiple of it"
            )


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, as even as possible; the first stages have one
    more if needed.

    Raises:
        UsageError: If `stages` is not a whole number from 1 to `layers`.
    """
    if COUNT.accept(stages) is None or stages > layers:
        raise UsageError(
            f"stages is {shown(stages)}; give a whole number from 1 to the {layers} layers of the "
            "model"
        )
    per_stage, more = divmod(layers, stages)
    return tuple(per_stage + (stage < more) for stage in range(stages))


def check_split(transformer: Transformer, stages: int | Sequence[int]) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    Args:
        transformer: The model.
        stages: Number of stages, which share the layers evenly, or the number of layers of each.

    Raises:
        UsageError: If the layers cannot be split in this way.
    """
    if isinstance(stages, int):
        return split_layers(transformer.layers, stages)
    for layers in stages:
        if COUNT.accept(layers) is None:
            raise UsageError(
                f"layers: {shown(layers)} is not a number of layers; give a whole number from 1"
            )
    if sum(stages) != transformer.layers:
        raise UsageError(
            f"layers: the stages have {sum(stages)} in total, but the model has "
            f"{transformer.layers}; change the stages so that the sums agree"
        )
    return tuple(stages)


_FORMAT = "perseus-planner/transformer"
_VERSION = 1
_REQUIRED = ("layers", "hidden", "heads", "vocabulary", "sequence")
_YAML_SUFFIXES = (".yaml", ".yml")
_CONFIG_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_CONFIG_KEYS = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
    "intermediate_size": "ffn",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "sequence",
}
_MAX_CONFIG_SEQUENCE = 8192  # models with longer contexts are mostly trained on shorter sequences


def _gpt3(layers: int, hidden: int, heads: int) -> Transformer:
    """Brown et al., "Language models are few-shot learners" (2020), table 2.1: layers, width,
    heads, 2048 tokens.

    The feed-forward block is four times as wide (section 2.1); the vocabulary is GPT-2's.
    """
    return Transformer(
        layers,
        hidden,
        heads,
        heads,
        head_size=hidden // heads,
        ffn=4 * hidden,
        vocabulary=50257,
        sequence=2048,
    )


def _llama3(layers: int, hidden: int, heads: int, ffn: int) -> Transformer:
    """Llama team, "The Llama 3 herd of models" (2024), table 3: layers, width, FFN width, heads, 8
    key/value heads.

    The vocabulary is that of the released checkpoints, 128256 (config.json); most of the training
    uses sequences of 8192 tokens (section 3.4.1).
    """
    return Transformer(
        layers,
        hidden,
        heads,
        kv_heads=8,
        head_size=hidden // heads,
        ffn=ffn,
        vocabulary=128256,
        sequence=8192,
        gated=True,
        biases=False,
        tied=False,
        positions="rotary",
    )


PRESETS: Mapping[str, Transformer] = MappingProxyType(
    {
        # The table's 24 heads of 128 are wider than its 2048; 16 heads of 128 give the 1.3 billion
        # parameters.
        "gpt3-1.3b": _gpt3(24, 2048, 16),
        "gpt3-2.7b": _gpt3(32, 2560, 32),
        "gpt3-6.7b": _gpt3(32, 4096, 32),
        # The table's 5140 is not a multiple of its 40 heads of 128; 5120 is.
        "gpt3-13b": _gpt3(40, 5120, 40),
        "gpt3-175b": _gpt3(96, 12288, 96),
        "llama3-8b": _llama3(32, 4096, 32, 14336),
        "llama3-70b": _llama3(80, 8192, 64, 28672),
        "llama3-405b": _llama3(126, 16384, 128, 53248),
        # BigScience, "BLOOM: A 176B-parameter open-access multilingual language model" (2022),
        # table 3 and section 3.2: ALiBi, a norm after the embedding, a vocabulary of 250680 padded
        # to 250880.
        "bloom-176b": Transformer(
            layers=70,
            hidden=14336,
            heads=112,
            kv_heads=112,
            head_size=128,
            ffn=4 * 14336,
            vocabulary=250880,
            sequence=2048,
            embedding_norm=True,
            positions="alibi",
        ),
    }
)
"""Published models by name, with one sequence of the published length in a microbatch."""


def named_transformer(text: str) -> Transformer:
    """Return a published model, or the model in a YAML file, a `config.json` or a folder with one.

    Raises:
        UsageError: If there is no such model, or the file is not valid.
    """
    path = Path(text)
    if text in PRESETS:
        return PRESETS[text]
    if path.suffix.lower() in _YAML_SUFFIXES:
        return read_transformer(path)
    if (path / "config.json").exists():
        return read_config(path / "config.json")
    if path.suffix.lower() == ".json":
        return read_config(path)
    advice = (
        f"give its config.json, a .yaml file with its dimensions, or one of {', '.join(PRESETS)}"
    )
    if text and path.is_dir():
        raise UsageError(f"model {text!r}: is a folder without a config.json; {advice}")
    raise UsageError(
        f"model {text!r}: there is no such model; {did_you_mean(path.name, PRESETS) or advice}"
    )


def name_of(text: str) -> str:
    """Return the name of that model: the published one, or the file's without its ending, or its
    folder's.
    """
    path = Path(text).resolve()
    if text in PRESETS or path.is_dir():
        return path.name
    return path.parent.name if path.name == "config.json" else path.stem


def read_transformer(path: Path) -> Transformer:
    """Read the dimensions of a model from a YAML file.

    Raises:
        UsageError: If the file cannot be read or is not valid; the text names file and line.
    """
    optional = [field.name for field in fields(Transformer) if field.name not in _REQUIRED]
    document = read_document(path, _FORMAT, _VERSION, _REQUIRED, optional, UsageError)
    values = {
        key: value for key, value in document.values.items() if key not in ("format", "version")
    }
    hidden, heads = values["hidden"], values["heads"]
    if COUNT.accept(hidden) is not None and COUNT.accept(heads) is not None:
        if "head_size" not in values and hidden % heads:
            raise document.refusal(
                "heads", f"{heads} does not divide hidden of {hidden}; give head_size too"
            )
        values = {"kv_heads": heads, "head_size": hidden // heads, "ffn": 4 * hidden, **values}
    else:
        values = {
            "kv_heads": 1,
            "head_size": 1,
            "ffn": 1,
            **values,
        }  # Transformer reports which of the two is wrong
    try:
        return Transformer(**values)
    except UsageError as error:
        key = str(error).partition(":")[0]
        place = f"{path}, line {document.lines[key]}" if key in document.lines else f"{path}"
        raise UsageError(f"{place}, {error}") from None


def read_config(path: Path) -> Transformer:
    """Read the dimensions of a dense model like Llama from its `config.json`, with sequences of at
    most 8,192 tokens.

    Raises:
        UsageError: If the file cannot be read, is not valid, or is of another kind of model.
    """
    text = read_text(path, UsageError, "a config.json")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path}: is not JSON: {error}; give the config.json of a model") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in _CONFIG_TYPES:
        raise UsageError(
            f"{path}: a model_type of {shown(kind)} is not known; give one of "
            f"{', '.join(_CONFIG_TYPES)}, or a .yaml file with the dimensions"
        )
    for key, value in config.items():
        if key in _CONFIG_KEYS and value is not None and COUNT.accept(value) is None:
            raise UsageError(f"{path}: {key} of {shown(value)} is not {COUNT.wanted}")
    sizes = {name: config[key] for key, name in _CONFIG_KEYS.items() if config.get(key) is not None}
    optional = ("kv_heads", "head_size")
    for key, name in _CONFIG_KEYS.items():
        if name not in (*sizes, *optional):
            raise UsageError(f"{path}: has no {key}; add it")
    sizes = {"kv_heads": sizes["heads"], "head_size": sizes["hidden"] // sizes["heads"], **sizes}
    sizes["sequence"] = min(sizes["sequence"], _MAX_CONFIG_SEQUENCE)
    try:
        return Transformer(
            **sizes,
            gated=True,
            biases=False,
            tied=config.get("tie_word_embeddings") is True,
            positions="rotary",
        )
    except UsageError as error:
        raise UsageError(f"{path}, {error}") from None
