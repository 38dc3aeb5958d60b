"""YAML files of one named format and version, read strictly: every value with the line that it stands on."""

from __future__ import annotations

import difflib
import reprlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from perseus_planner.errors import PlannerError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

_MAX_BYTES = 64 * 2**20
# The C parser is ten times faster, but PyYAML can be built without it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# What PyYAML raises itself, and what int() and datetime raise through it (for `2001-99-99`, say).
_YAML_ERRORS = (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError)
# The C parser overruns its stack on deep nesting, so that is refused before it builds anything.
_MAX_DEPTH = 20


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


@dataclass(frozen=True)
class Document:
    """A mapping in a YAML file: the top-level one, or one inside it.

    Attributes:
        path: the file.
        values: key -> value.
        lines: key -> line number, from 1.
        error: what the refusals of this file are.
        within: the key under which it stands; empty for the top-level one.
        line: where it begins, from 1.
    """

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    error: type[PlannerError]
    within: str = ""
    line: int = 1
    _nodes: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def where(self, key: str) -> str:
        """The place of `key`, for an error message: "profile.yaml, line 4, key 'gpu'"."""
        return f"{self.path}, line {self.lines[key]}, key {key!r}{self._of}"

    def refusal(self, key: str, problem: str) -> PlannerError:
        """The error to raise for what is wrong with the value of `key`, which is there."""
        return self.error(f"{self.where(key)}: {problem}")

    def section(self, key: str, required: Collection[str], optional: Collection[str]) -> Document:
        """The mapping that stands under `key`, checked as the document is: its keys are `required` and `optional`.

        Raises:
            PlannerError: of the type `error`; it is no such mapping.
        """
        return self._section(key, self._nodes[key], required, optional)

    def table(self, key: str, entry: str) -> Document:
        """The mapping that stands under `key`, whose keys may be any; `entry` says what one looks like.

        Raises:
            PlannerError: of the type `error`; it is no mapping, or has a key twice.
        """
        if not isinstance(self._nodes[key], yaml.MappingNode):
            raise self.refusal(key, f"{shown(self.values[key])} is not a mapping; write entries such as {entry}")
        return _mapping(self.path, self._nodes[key], self.error, key)

    def sections(self, key: str, required: Collection[str], optional: Collection[str]) -> tuple[Document, ...]:
        """The mappings in the list that stands under `key`, likewise.

        Raises:
            PlannerError: of the type `error`; it is no list of such mappings.
        """
        if not isinstance(self._nodes[key], yaml.SequenceNode):
            raise self.refusal(key, f"{shown(self.values[key])} is not a list; begin each of its entries with a hyphen")
        return tuple(self._section(key, node, required, optional) for node in self._nodes[key].value)

    @property
    def _of(self) -> str:
        return f" of {self.within}" if self.within else ""

    def _section(self, key: str, node: Any, required: Collection[str], optional: Collection[str]) -> Document:
        known = ", ".join([*required, *optional])
        if not isinstance(node, yaml.MappingNode):
            place = f"{self.path}, line {node.start_mark.line + 1}, key {key!r}{self._of}"
            raise self.error(f"{place}: is not a mapping; write it with the keys {known}")
        inner = _mapping(self.path, node, self.error, key)
        _check_keys(inner, set(required), set(optional))
        return inner


def read_document(
    path: Path,
    name: str,
    version: int,
    required: Collection[str],
    optional: Collection[str],
    error: type[PlannerError],
) -> Document:
    """Read the YAML file at `path`, whose keys `format` and `version` must be `name` and `version`.

    `required` and `optional` are its other keys. Objects are never constructed.

    Raises:
        PlannerError: of the type `error`; the file cannot be read, is not YAML, or is not such a document.
    """
    document = _parse(path, text_of(path, error), error)
    _check_format(document, name, version, error)
    _check_keys(document, {"format", "version", *required}, set(optional))
    return document


def format_of(path: Path) -> str | None:
    """What the file at `path` says that its format is; None where it says nothing, or cannot be read."""
    try:
        name = _parse(path, text_of(path, PlannerError), PlannerError).values.get("format")
    except PlannerError:
        return None
    return name if isinstance(name, str) else None


def with_number(document: Document, key: str, number: float) -> str:
    """The text of `document`'s file with `number` as the value of the top-level `key`, all else as it is.

    Raises:
        PlannerError: of the type of the document's errors; the file is written in a way that this cannot change.
    """
    text, written = text_of(document.path, document.error), yaml.safe_dump(number).split("\n")[0]
    lines = text.splitlines(keepends=True)
    if key in document.values:
        start, end = document._nodes[key].start_mark, document._nodes[key].end_mark
        line = lines[start.line]
        lines[start.line] = f"{line[: start.column]}{written}{line[end.column :]}"
    else:
        last = lines[-1] if lines else ""
        lines += [*(["\n"] if not last.endswith("\n") else []), f"{key}: {written}\n"]
    changed = "".join(lines)
    try:
        values = _parse(document.path, changed, document.error).values
    except PlannerError:
        values = {}
    if values != {**document.values, key: number}:
        raise document.error(f"{document.path}: {key} cannot be written into it; write `{key}: {written}` yourself")
    return changed


def unreadable(path: Path, error: OSError) -> str:
    """What to tell the user who named `path`, which could not be read because of `error`."""
    if isinstance(error, FileNotFoundError):
        return f"{path}: no such file; check the path"
    if isinstance(error, IsADirectoryError):
        return f"{path}: is a folder; name the file in it"
    return f"{path}: cannot be read: {error.strerror}; check the path and its permissions"


def shown(value: object) -> str:
    """`repr(value)` as an error message quotes it: cut when it is long."""
    return _SHORT.repr(value)


def text_of(path: Path, error: type[PlannerError], suspicion: str = "so not what the planner wrote") -> str:
    """The text of the file at `path`.

    Args:
        path: the file.
        error: what is raised.
        suspicion: what is to be thought of a file that is too large.

    Raises:
        PlannerError: of the type `error`; the file cannot be read, is too large or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as reason:
        raise error(unreadable(path, reason)) from reason
    if len(data) > _MAX_BYTES:
        raise error(f"{path}: is larger than {_MAX_BYTES} bytes, {suspicion}; name another file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        line = data.count(b"\n", 0, reason.start) + 1
        raise error(f"{path}, line {line}: is not UTF-8 text; save the file as UTF-8") from reason


def _parse(path: Path, text: str, error: type[PlannerError]) -> Document:
    try:
        _check_events(path, text, error)
        loader = _LOADER(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
        if not isinstance(root, yaml.MappingNode):
            raise error(f"{path}: is not a mapping; write one `key: value` a line")
        return _mapping(path, root, error)
    except _YAML_ERRORS as reason:
        raise error(_yaml_complaint(path, reason)) from reason


def _mapping(path: Path, root: Any, error: type[PlannerError], within: str = "") -> Document:
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    nodes: dict[str, Any] = {}
    loader = _LOADER("")  # what it constructs comes from the nodes alone
    try:
        for key_node, value_node in root.value:
            key, line = str(loader.construct_object(key_node, deep=True)), key_node.start_mark.line + 1
            if key in values:
                raise error(f"{path}, line {line}: key {key!r} stands on line {lines[key]} too; keep one")
            values[key] = loader.construct_object(value_node, deep=True)
            lines[key], nodes[key] = line, value_node
    finally:
        loader.dispose()
    return Document(path, values, lines, error, within, root.start_mark.line + 1, nodes)


def _check_events(path: Path, text: str, error: type[PlannerError]) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):  # ten lines of them can stand for a billion values
            place = f"{path}, line {event.start_mark.line + 1}" if event.start_mark else f"{path}"
            raise error(f"{place}: uses the alias *{event.anchor}; write the value itself")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise error(f"{path}: is nested more than {_MAX_DEPTH} levels deep; write one `key: value` a line")


def _yaml_complaint(path: Path, reason: Exception) -> str:
    mark = getattr(reason, "problem_mark", None)
    place = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else f"{path}"
    problem = " ".join(str(getattr(reason, "problem", None) or reason).split())
    if isinstance(reason, yaml.constructor.ConstructorError):
        return f"{place}: {problem}; write plain values, without tags such as !!python/object"
    return f"{place}: is not valid YAML: {problem}; correct that line"


def _check_format(document: Document, name: str, version: int, error: type[PlannerError]) -> None:
    values = document.values
    if "format" not in values:
        raise error(f"{document.path}: has no key 'format'; a file of this kind says `format: {name}`")
    if values["format"] != name:
        raise error(
            f"{document.where('format')}: {shown(values['format'])} is not {name!r}; name a file of that format"
        )
    if "version" not in values:
        raise error(f"{document.path}: has no key 'version'; write `version: {version}`")
    # `True == 1`, so the type is compared too.
    if type(values["version"]) is not int or values["version"] != version:
        raise error(
            f"{document.where('version')}: {shown(values['version'])} cannot be read: this planner reads version "
            f"{version}; use the planner that wrote the file, or write it again with this one"
        )


def _check_keys(document: Document, required: set[str], optional: set[str]) -> None:
    known = required | optional
    for key in document.values:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"remove it; known keys are {', '.join(sorted(known))}"
            place = f"{document.path}, line {document.lines[key]}"
            raise document.error(f"{place}: unknown key {shown(key)}{document._of}; {remedy}")
    missing = sorted(required - set(document.values))
    if missing:
        place = f"{document.path}, line {document.line}, {document.within}" if document.within else f"{document.path}"
        raise document.error(f"{place}: has no key {', '.join(map(repr, missing))}; add it")
