"""Read YAML files of one named format and version strictly; every value knows the line that it
stands on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from perseus_planner.base.errors import PlannerError, did_you_mean, printable, shown
from perseus_planner.base.fields import Check, FieldType, keys, types
from perseus_planner.base.files import read_text

T = TypeVar("T")

# The C parser is ten times faster, but PyYAML can be built without it.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The fastest safe loader that PyYAML has."""
# PyYAML raises the first one itself; int() and datetime raise the others through it, for
# `2001-99-99`, say.
_YAML_ERRORS = (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError)
# The C parser overruns its stack on deep nesting, so deep nesting is refused before anything is
# built.
_MAX_DEPTH = 20
_TOO_DEEP = f"is nested more than {_MAX_DEPTH} levels deep; write one `key: value` a line"


@dataclass(frozen=True)
class Document:
    """A mapping in a YAML file: the top-level one, or one inside it."""

    path: Path  #: the file
    values: Mapping[str, Any]  #: key -> value
    lines: Mapping[str, int]  #: key -> line number, from 1
    error: type[PlannerError]  #: the type of error that the methods raise
    within: str = ""  #: the key under which the mapping stands; empty for the top-level one
    line: int = 1  #: the line on which the mapping begins, from 1
    _nodes: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def where(self, key: str) -> str:
        """Return the place of `key` for an error text: "profile.yaml, line 4, key 'gpu'"."""
        return f"{self.path}, line {self.lines[key]}, key {shown(key)}{self._of}"

    def span(self, key: str) -> tuple[Any, Any]:
        """Return the YAML marks of where the value of `key` begins and ends in the text."""
        node = self._nodes[key]
        return node.start_mark, node.end_mark

    def refusal(self, key: str, problem: str) -> PlannerError:
        """Return the error to raise for a problem with the value of `key`, which must be
        present.
        """
        return self.error(f"{self.where(key)}: {problem}")

    def number(self, key: str, rule: Check) -> Any:
        """Return the number under `key`.

        Raises:
            PlannerError: If it breaks `rule`; of the type `error`.
        """
        return rule.check(self.values[key], self.where(key), self.error)

    def numbers(self, key: str, rule: Check) -> tuple[Any, ...]:
        """Return the numbers in the list under `key`.

        Raises:
            PlannerError: If there is no list, it is empty, or a number breaks `rule`; of the type
                `error`.
        """
        values = self.values[key]
        if not isinstance(values, list) or not values:
            raise self.refusal(
                key, f"{shown(values)} is not a list of numbers; write one such as [0, 2]"
            )
        return tuple(rule.check(value, self.where(key), self.error) for value in values)

    def text(self, key: str) -> str:
        """Return the text under `key`.

        Raises:
            PlannerError: If it is not one line of printable text; of the type `error`.
        """
        value = self.values[key]
        if not isinstance(value, str) or not value or not value.isprintable():
            raise self.refusal(key, f"{shown(value)} is not one line of text; write one")
        return value

    def section(self, key: str, required: Collection[str], optional: Collection[str]) -> Document:
        """Return the mapping under `key`, which must have the `required` keys and may have the
        `optional` ones.

        Raises:
            PlannerError: If there is no such mapping; of the type `error`.
        """
        return self._section(key, self._nodes[key], self.values[key], required, optional)

    def table(self, key: str, entry: str) -> Document:
        """Return the mapping under `key`, which may have any keys.

        Args:
            key: the key.
            entry: an example of an entry, for the error text.

        Raises:
            PlannerError: If there is no mapping, or it has a key twice; of the type `error`.
        """
        if not isinstance(self._nodes[key], yaml.MappingNode):
            raise self.refusal(
                key, f"{shown(self.values[key])} is not a mapping; write entries such as {entry}"
            )
        return _mapping(self.path, self._nodes[key], self.error, key)

    def sections(
        self, key: str, required: Collection[str], optional: Collection[str]
    ) -> tuple[Document, ...]:
        """Return the mappings in the list under `key`, each checked as by `section`.

        Raises:
            PlannerError: If there is no list of such mappings; of the type `error`.
        """
        if not isinstance(self._nodes[key], yaml.SequenceNode):
            raise self.refusal(
                key,
                f"{shown(self.values[key])} is not a list; begin each of its entries with a hyphen",
            )
        entries = zip(self._nodes[key].value, self.values[key], strict=True)
        return tuple(self._section(key, node, value, required, optional) for node, value in entries)

    def part(self, key: str, kind: type[T]) -> T:
        """Return the dataclass of which the mapping under `key` holds the fields; see
        `load`.
        """
        return load(kind, self.section(key, *keys(kind)))

    def parts(self, key: str, kind: type[T]) -> tuple[T, ...]:
        """Return such dataclasses of the mappings in the list under `key`."""
        return tuple(load(kind, entry) for entry in self.sections(key, *keys(kind)))

    @property
    def _of(self) -> str:
        return f" of {self.within}" if self.within else ""

    def _section(
        self,
        key: str,
        node: Any,
        value: object,
        required: Collection[str],
        optional: Collection[str],
    ) -> Document:
        # The error for a text in place of a mapping has to say what to write.
        known_keys = ", ".join([*required, *optional])
        if not isinstance(node, yaml.MappingNode):
            where = f"{self.path}, line {node.start_mark.line + 1}, key {shown(key)}{self._of}"
            raise self.error(
                f"{where}: {shown(value)} is not a mapping; write it with the keys {known_keys}"
            )
        # Read from the nodes again, so that each key knows its line.
        inner = _mapping(self.path, node, self.error, key)
        _check_keys(inner, set(required), set(optional))
        return inner


def load(kind: type[T], document: Document, **given: Any) -> T:
    """Make a dataclass of the values that a document has under the names of its fields.

    Args:
        kind: a dataclass. What its fields may be: numbers with a rule, texts, dataclasses, tuples
            of those; or anything that has a `Reader`.
        document: a mapping in a YAML file. Its keys have been checked, by `keys(kind)` say.
        given: fields that the document does not hold.

    Raises:
        PlannerError: If a value is not that of its field; of the document's type of error.
    """
    # What is absent gets the default of its field, so it is not named at all.
    read = {
        name: _read(document, name, field)
        for name, field in types(kind).items()
        if name in document.values and name not in given
    }
    return kind(**read, **given)


def _read(document: Document, key: str, field: FieldType) -> Any:
    if field.reader is not None:
        return field.reader.read(document, key)
    if field.rule is not None:
        # A field that may be one value or several is decided by what was written.
        if field.is_tuple and (not field.is_one or isinstance(document.values[key], list)):
            return document.numbers(key, field.rule)
        return document.number(key, field.rule)
    if not is_dataclass(field.inner):
        return document.text(key)
    kind = cast("type[Any]", field.inner)
    return document.part(key, kind) if field.is_one else document.parts(key, kind)


def read_document(
    path: Path,
    name: str,
    version: int,
    required: Collection[str],
    optional: Collection[str],
    error: type[PlannerError],
    also: int | None = None,
    written_by: str | None = None,
) -> Document:
    """Read the YAML file at `path` without constructing any objects from it.

    Args:
        path: the file.
        name: the value of its key `format`.
        version: the value of its key `version`.
        required: the other keys that it must have.
        optional: the keys that it may have.
        error: the type of error to raise.
        also: another version that is read.
        written_by: the command that writes such files, if nobody writes them by hand.

    Raises:
        PlannerError: If the file cannot be read, is not YAML, or is not such a document; of the
            type `error`.
    """
    document = parse(path, read_text(path, error), error)
    _check_format(document, name, version, error, also)
    _check_keys(document, {"format", "version", *required}, set(optional), written_by)
    return document


def check_digest(
    document: Document, digest_of: Callable[[Mapping[str, Any]], str], command: str
) -> Mapping[str, Any]:
    """Return the content of a document, of which its key `digest` must be the digest.

    Raises:
        PlannerError: If it is another; says that `command` makes the document.
    """
    # The digest is of what is planned, not of the marks of the file itself.
    content = {
        key: value
        for key, value in document.values.items()
        if key not in ("format", "version", "digest")
    }
    with suppress(TypeError):  # of a key that JSON cannot have, so it was never written
        if document.values["digest"] == digest_of(content):
            return content
    raise document.refusal(
        "digest",
        "does not match the content, so the file was changed after it was written; make the plan "
        f"again with `{command}`",
    )


def parse(path: Path, text: str, error: type[PlannerError]) -> Document:
    """Return the mapping that a text is, whatever its keys.

    Args:
        path: the file that the text is of, or will be.
        text: the text.
        error: the type of error to raise.

    Raises:
        PlannerError: If it is not YAML, or not a mapping; of the type `error`.
    """
    try:
        # Before nodes are made: deep nesting and aliases could exhaust stack and memory.
        _check_events(path, text, error)
        loader = LOADER(text)
        try:
            # Nodes and not objects: they know their lines, and construct nothing.
            root = loader.get_single_node()
        finally:
            loader.dispose()
        if root is None:
            raise error(f"{path}: is empty; write one `key: value` a line")
        if not isinstance(root, yaml.MappingNode):
            raise error(f"{path}: is not a mapping; write one `key: value` a line")
        return _mapping(path, root, error)
    except _YAML_ERRORS as reason:
        raise error(_yaml_complaint(path, reason)) from reason


def _mapping(path: Path, root: Any, error: type[PlannerError], within: str = "") -> Document:
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    nodes: dict[str, Any] = {}
    loader = LOADER("")  # what it constructs comes from the nodes alone
    try:
        for key_node, value_node in root.value:
            # Keys may be numbers or dates in YAML; here each is its text.
            key = str(loader.construct_object(key_node, deep=True))
            line = key_node.start_mark.line + 1
            # YAML forbids a key that is there twice, and its parsers silently take the last one.
            if key in values:
                raise error(
                    f"{path}, line {line}: key {shown(key)} stands on line {lines[key]} too; keep "
                    "one"
                )
            values[key] = loader.construct_object(value_node, deep=True)
            lines[key] = line
            nodes[key] = value_node
    finally:
        loader.dispose()
    return Document(path, values, lines, error, within, root.start_mark.line + 1, nodes)


def _check_events(path: Path, text: str, error: type[PlannerError]) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.AliasEvent):  # ten lines of them can stand for a billion values
            where = f"{path}, line {event.start_mark.line + 1}" if event.start_mark else f"{path}"
            raise error(f"{where}: uses the alias *{event.anchor}; write the value itself")
        # How many collections are open at this event.
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > _MAX_DEPTH:
            raise error(f"{path}: {_TOO_DEEP}")


def _yaml_complaint(path: Path, reason: Exception) -> str:
    mark = getattr(reason, "problem_mark", None)
    where = (
        f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else f"{path}"
    )
    # ValueError and others, which come through PyYAML, name no problem of their own.
    problem = printable(str(getattr(reason, "problem", None) or reason))
    if "nesting depth" in problem:  # of libyaml, which since PyYAML 6.0.4 ends at 1,000 levels
        return f"{path}: {_TOO_DEEP}"
    # Safe loaders refuse tags, which could make any object.
    if isinstance(reason, yaml.constructor.ConstructorError):
        return f"{where}: {problem}; write plain values, without tags such as !!python/object"
    return f"{where}: is not valid YAML: {problem}; correct that line"


def _check_format(
    document: Document, name: str, version: int, error: type[PlannerError], also: int | None
) -> None:
    values = document.values
    if "format" not in values:
        raise error(f"{document.path}: has no key 'format'; write `format: {name}`")
    if values["format"] != name:
        raise error(
            f"{document.where('format')}: {shown(values['format'])} is not {name!r}; name a file "
            "of that format"
        )
    if "version" not in values:
        raise error(f"{document.path}: has no key 'version'; write `version: {version}`")
    # `True == 1`, so the type is compared too.
    if type(values["version"]) is not int or values["version"] not in (version, also):
        read = f"version {version}" if also is None else f"versions {version} and {also}"
        raise error(
            f"{document.where('version')}: {shown(values['version'])} cannot be read: this "
            f"planner reads {read}; use the planner that wrote the file, or write it "
            "again with this one"
        )


def _check_keys(
    document: Document, required: set[str], optional: set[str], written_by: str | None = None
) -> None:
    known_keys = required | optional
    for key in document.values:
        if key not in known_keys:
            near = did_you_mean(str(key), sorted(known_keys), repr)
            remedy = near or f"remove it; known keys are {', '.join(sorted(known_keys))}"
            where = f"{document.path}, line {document.lines[key]}"
            raise document.error(f"{where}: unknown key {shown(key)}{document._of}; {remedy}")
    # Unknown keys come first: a misspelt one is missing as well.
    missing = sorted(required - set(document.values))
    names = ", ".join(map(repr, missing))
    # Nobody can add by hand what a command wrote: most often a copy was cut off.
    if missing and written_by is not None:
        raise document.error(
            f"{document.path}: has no key {names}, as a file that was cut off; copy it again, or "
            f"make it again with `{written_by}`"
        )
    if missing:
        where = (
            f"{document.path}, line {document.line}, {document.within}"
            if document.within
            else f"{document.path}"
        )
        raise document.error(f"{where}: has no key {names}; add it")
