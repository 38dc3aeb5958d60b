"""A transformer's shape by the name of a preset, or from a YAML file.

    format: perseus-planner/transformer
    version: 1
    layers: 24
    hidden: 2048
    heads: 16
    vocabulary: 50304
    sequence: 2048

The other keys are the other attributes of `Transformer`. Without them there are as many key and value heads as heads,
heads divide the hidden width, and the feed-forward block is four times as wide.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from perseus_planner.documents import read_document
from perseus_planner.errors import UsageError
from perseus_planner.estimate.presets import PRESETS
from perseus_planner.estimate.transformer import Transformer
from perseus_planner.quantities import COUNT

_FORMAT = "perseus-planner/transformer"
_VERSION = 1
_REQUIRED = ("layers", "hidden", "heads", "vocabulary", "sequence")
_YAML_SUFFIXES = (".yaml", ".yml")


def named_transformer(text: str) -> Transformer:
    """The preset of that name, or what the YAML file of that name says.

    Raises:
        UsageError: there is neither, or the file says no transformer.
    """
    if text in PRESETS:
        return PRESETS[text]
    if Path(text).suffix.lower() in _YAML_SUFFIXES:
        return read_transformer(Path(text))
    raise UsageError(
        f"model {text!r}: there is no such model; name a .yaml file of its dimensions, or one of {', '.join(PRESETS)}"
    )


def read_transformer(path: Path) -> Transformer:
    """What the file at `path` says.

    Raises:
        UsageError: it cannot be read, or says no transformer; the text names file, line and remedy.
    """
    optional = [field.name for field in fields(Transformer) if field.name not in _REQUIRED]
    document = read_document(path, _FORMAT, _VERSION, _REQUIRED, optional, UsageError)
    values = {key: value for key, value in document.values.items() if key not in ("format", "version")}
    hidden, heads = values["hidden"], values["heads"]
    if COUNT.accept(hidden) is not None and COUNT.accept(heads) is not None:
        if "head_size" not in values and hidden % heads:
            raise document.refusal("heads", f"{heads} does not divide hidden of {hidden}; give head_size too")
        values = {"kv_heads": heads, "head_size": hidden // heads, "ffn": 4 * hidden, **values}
    else:
        values = {"kv_heads": 1, "head_size": 1, "ffn": 1, **values}  # which of the two is wrong is said below
    try:
        return Transformer(**values)
    except UsageError as error:
        key = str(error).partition(":")[0]
        place = f"{path}, line {document.lines[key]}" if key in document.lines else f"{path}"
        raise UsageError(f"{place}, {error}") from None
