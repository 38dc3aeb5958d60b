"""Decoder-only transformers: their dimensions, and models by name: published ones, YAML files, and
`config.json`s of Hugging Face (`huggingface.py`).

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perseus_planner.base.documents import read_document
from perseus_planner.base.errors import UsageError, did_you_mean, shown
from perseus_planner.base.fields import Checked
from perseus_planner.base.units import COUNT, INDEX, Count, Index
from perseus_planner.extensions.explore.huggingface import read_dimensions

CHOICES = {
    "positions": ("learned", "rotary", "alibi"),
    "recomputation": ("none", "selective", "full"),
    "attention": ("plain", "flash", "flash-causal"),
    "precision": ("bf16", "fp16", "fp8", "mxfp8", "nvfp4"),
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
    #: Inner width of the feed-forward block, in models with experts of that of layers without.
    ffn: Count
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
    #: Of the layers' products with weights; "fp8", "mxfp8" and "nvfp4" leave attention, router and
    #: head in bf16.
    precision: str = "bf16"
    #: Bytes of the sum of a weight's gradients: 4 in float32, 2 in bf16.
    gradient_bytes: Count = 4
    #: Latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1): width of the latent of keys
    #: and values; 0 for other attention.
    kv_latent: Index = 0
    query_latent: Index = 0  #: Width of the latent of queries; 0 for none
    rotary_size: Index = 0  #: Width of the rotary part of a head, beside `head_size`
    #: Tokens that a token attends to, itself included; 0 for all before it. Only "flash-causal"
    #: attention skips the others.
    window: Index = 0
    global_every: Index = 0  #: Every how many layers one has no window; 0 for none
    chunked: bool = False  #: Whether windows are chunks that do not slide
    experts: Index = 0  #: Experts of a layer; 0 for a dense model
    experts_used: Index = 0  #: Experts that a token is sent to
    expert_ffn: Index = 0  #: Inner width of an expert
    shared_ffn: Index = 0  #: Inner width of the shared experts together
    dense_layers: Index = 0  #: Layers without experts, in a model with some
    #: Nodes that the experts of a token are on at most; 0 for any number.
    routed_nodes: Index = 0
    #: Number of GPUs that share the tokens of a sequence, with as many pairs for each.
    context_degree: Count = 1
    #: Number of GPUs that share the experts, of those that share tokens, sequences or layers.
    expert_degree: Count = 1

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
        """Tokens of a microbatch on a GPU."""
        return self.sequence * self.microbatch // self.context_degree

    @property
    def stream_degree(self) -> int:
        """GPUs that divide norms and residuals."""
        return self.tensor_degree if self.sequence_parallel else 1

    @property
    def narrow_bytes(self) -> float | None:
        """Bytes of a factor of the products that `precision` makes narrow; None for none. Scales
        of blocks of 32 and 16 are counted (OCP Microscaling Formats, v1.0; NVFP4).
        """
        return {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}.get(self.precision)

    @property
    def expert_share(self) -> float:
        """Share of the layers that have experts."""
        return (1 - self.dense_layers / self.layers) if self.experts else 0.0

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
            round(self.layers * self.layer_parameters)
            + embedding
            + norm * (2 if self.embedding_norm else 1)
        )

    @property
    def linear_widths(self) -> tuple[tuple[float, float, float], ...]:
        """Outputs, inputs and number of the products of a layer with weights that a tensor group
        shares, but for those of experts; of layers that differ the mean.
        """
        # Outputs of all heads, and twice the width for gated blocks.
        inner = self.heads * self.head_size
        wide = 2 if self.gated else 1
        # Layers with experts have the shared ones only, so both kinds count by their share.
        dense = 1 - self.expert_share
        blocks = ((self.ffn, dense), (self.shared_ffn, self.expert_share))
        return (
            *self._query_key_value_widths,
            (self.hidden, inner, 1),
            *(
                product
                for width, number in blocks
                if width and number
                for product in ((wide * width, self.hidden, number), (self.hidden, width, number))
            ),
        )

    @property
    def _query_key_value_widths(self) -> tuple[tuple[float, float, float], ...]:
        heads = self.heads
        hidden = self.hidden
        rotary = self.rotary_size
        # Without latents, queries, keys and values are one product.
        if not self.kv_latent:
            return (((heads + 2 * self.kv_heads) * self.head_size, hidden, 1),)
        # Queries may pass through a latent of their own.
        queries = heads * (self.head_size + rotary)
        narrow = self.query_latent
        return (
            *(((narrow, hidden, 1), (queries, narrow, 1)) if narrow else ((queries, hidden, 1),)),
            # Keys and values come from one latent, beside the rotary part that all heads share.
            (self.kv_latent + rotary, hidden, 1),
            (2 * heads * self.head_size, self.kv_latent, 1),
        )

    @property
    def expert_parameters(self) -> float:
        """Parameters of all experts of a layer; of layers that differ the mean."""
        return (
            self.expert_share
            * self.experts
            * (3 if self.gated else 2)
            * self.hidden
            * self.expert_ffn
        )

    @property
    def layer_parameters(self) -> float:
        """Parameters of a layer; of layers that differ the mean."""
        weights = sum(n * k * number for n, k, number in self.linear_widths)
        weights += self.expert_parameters + self.expert_share * self.experts * self.hidden
        weights += self.query_latent + self.kv_latent  # their norms
        if not self.biases:
            return weights + 2 * self.hidden
        return weights + 4 * self.hidden + sum(n * number for n, _, number in self.linear_widths)

    def _check_shares(self) -> None:
        # Heads and the inner width are divided evenly in a tensor group.
        for name in ("heads", "ffn"):
            if getattr(self, name) % self.tensor_degree:
                raise UsageError(
                    f"tensor_degree: {self.tensor_degree} GPUs cannot share {name} of "
                    f"{getattr(self, name)}; choose a degree that divides it"
                )
        # Each head of keys and values serves as many queries.
        if self.heads % self.kv_heads:
            raise UsageError(
                f"kv_heads: {self.kv_heads} does not divide heads of {self.heads}; choose one that "
                "does"
            )
        # Fewer heads of keys and values than GPUs are copied, so one must divide the other.
        if self.kv_heads % self.tensor_degree and self.tensor_degree % self.kv_heads:
            raise UsageError(
                f"tensor_degree: {self.tensor_degree} GPUs cannot share kv_heads of "
                f"{self.kv_heads}; choose a degree that divides it, or a multiple of it"
            )
        # Each GPU of a context group needs two parts of a sequence, for as many pairs on each.
        if (2 if self.context_degree > 1 else 1) * self.context_degree > self.sequence or (
            self.sequence % self.context_degree
        ):
            raise UsageError(
                f"context_degree: {self.context_degree} GPUs cannot share sequences of "
                f"{self.sequence} tokens, two parts each; choose a degree that divides it and is "
                "at most half of it"
            )
        if not 0 <= self.dense_layers < self.layers:
            raise UsageError(
                f"dense_layers: {self.dense_layers} of {self.layers} layers have no experts; give "
                "less, or leave experts out"
            )
        # A model with experts must say how many a token is sent to, and how wide they are.
        if self.experts and not (1 <= self.experts_used <= self.experts and self.expert_ffn):
            raise UsageError(
                f"experts: {self.experts} experts need experts_used, from 1 to {self.experts}, and "
                "expert_ffn; give both"
            )
        if max(1, self.experts) % self.expert_degree:
            raise UsageError(
                f"expert_degree: {self.expert_degree} GPUs cannot share {self.experts} experts; "
                "choose a degree that divides it"
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
    for layers in dict.fromkeys(stages):
        if INDEX.accept(layers) is None:
            raise UsageError(
                f"layers: {shown(layers)} is not a number of layers; give a whole number from 0"
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


def transformer_of(values: Mapping[str, Any]) -> Transformer:
    """Return the model of these attributes, with what follows from others where it is left out: as
    many key and value heads as heads, which divide the hidden width, and a feed-forward block four
    times as wide.
    """
    hidden = values["hidden"]
    heads = values["heads"]
    derived = {"kv_heads": 1, "head_size": 1, "ffn": 1, "layers": 1}
    if COUNT.accept(hidden) is not None and COUNT.accept(heads) is not None:
        derived |= {"kv_heads": heads, "head_size": hidden // heads, "ffn": 4 * hidden}
    # else Transformer reports which of the two is wrong
    return Transformer(**{**derived, **values})


def _gpt3(layers: int, hidden: int, heads: int) -> Transformer:
    """Brown et al., "Language models are few-shot learners" (2020), table 2.1: layers, width,
    heads, 2048 tokens.

    The feed-forward block is four times as wide (section 2.1); the vocabulary is GPT-2's.
    """
    shape = {"layers": layers, "hidden": hidden, "heads": heads}
    return transformer_of({**shape, "vocabulary": 50257, "sequence": 2048})


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
        "bloom-176b": replace(
            _gpt3(70, 14336, 112), vocabulary=250880, embedding_norm=True, positions="alibi"
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
    hidden = values["hidden"]
    heads = values["heads"]
    # Without a size of heads, they divide the hidden width.
    counts = COUNT.accept(hidden) is not None and COUNT.accept(heads) is not None
    if counts and "head_size" not in values and hidden % heads:
        raise document.refusal(
            "heads", f"{heads} does not divide hidden of {hidden}; give head_size too"
        )
    # The error names an attribute, and the file has it on a line.
    try:
        return transformer_of(values)
    except UsageError as error:
        key = str(error).partition(":")[0]
        where = f"{path}, line {document.lines[key]}" if key in document.lines else f"{path}"
        raise UsageError(f"{where}, {error}") from None


def shared_by(model: Transformer, tensor_degree: int, **changes: Any) -> Transformer:
    """Return the model on a tensor group as frameworks share it: the vocabulary padded so that each
    share aligns, and norms divided where the sequences can be.
    """
    padding = 128 * tensor_degree
    return replace(
        model,
        tensor_degree=tensor_degree,
        vocabulary=-(-model.vocabulary // padding) * padding,
        sequence_parallel=tensor_degree > 1 and model.sequence % tensor_degree == 0,
        **changes,
    )


def read_config(path: Path) -> Transformer:
    """Read the dimensions of a model from its `config.json`, with sequences of at most 8,192
    tokens.

    Raises:
        UsageError: If the file cannot be read, is not valid, or is of another kind of model.
    """
    try:
        return Transformer(**read_dimensions(path))
    except UsageError as error:
        text = str(error)
        raise UsageError(text if text.startswith(str(path)) else f"{path}, {text}") from None
