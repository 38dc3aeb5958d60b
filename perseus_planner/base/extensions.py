"""What is added to the core: folders of `perseus_planner/extensions`, and packages of others.

The core imports no extension. Each says in one value, its `EXTENSION`, what it adds and where that
stands; a module is imported when what stands in it is first asked for. Those of this distribution
are found by listing the folder, so that a clone works without metadata, and one whose folder is
deleted is not there. A package of somebody else names its value under the entry point group
`perseus_planner.extensions`:

    [project.entry-points."perseus_planner.extensions"]
    site = "site_planner:EXTENSION"
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from perseus_planner.base.errors import UsageError

GROUP = "perseus_planner.extensions"
"""The group of entry points, and the package whose folders are extensions."""

_FOLDER = Path(__file__).resolve().parents[1] / "extensions"


@dataclass(frozen=True)
class Extension:
    """What an extension adds. A place is "module:name", and its module must be cheap to name only:
    it is imported when it is first needed.

    Attributes:
        commands: Heading of the help -> name of a command of `planner` -> its place, a
            `click.Command`.
        shown: Kind of file -> a function of its path that returns its summary and its text, for
            `planner show`.
        reported: Kind of file -> a function of paths and energy rates that returns its report, the
            text and the page, for `planner report`.
        gpus: Name of a back-end -> a function that opens the GPU which the text after the colon
            names, and returns a `gpu.Gpu`.
        schedules: Name of a schedule -> a `schedules.generators.Generator`.
        deciders: Name -> a function that makes a `runtime.decider.Decider`.
        offers: What the core asks for by name -> its place; `OFFERS` lists the names.
    """

    commands: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    reported: Mapping[str, str] = field(default_factory=dict)
    gpus: Mapping[str, str] = field(default_factory=dict)
    schedules: Mapping[str, str] = field(default_factory=dict)
    deciders: Mapping[str, str] = field(default_factory=dict)
    offers: Mapping[str, str] = field(default_factory=dict)


OFFERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "acceptance": ("lab", "runs `planner doctor --acceptance`"),
        "kernels": ("explore", "measures kernels for `planner calibrate --kernels`"),
        "kareus": ("lab", "reads a folder of plans of Kareus"),
        "other planners": ("lab", "chooses clocks as other planners do, for `planner report`"),
        "client": ("service", "has `perseus_planner.Client`"),
        "service link": ("service", "follows a service while training"),
        "sequence work": ("autopilot", "has `perseus_planner.runtime.sequence_work`"),
    }
)
"""Name of an offer -> the extension of this distribution that makes it, and what it does."""

DECIDERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "autopilot": ("autopilot", "learns clocks while training runs without a plan"),
        "batches": ("autopilot", "has clocks follow each batch, for the option work"),
    }
)
"""Likewise, of the deciders that the options of a training ask for."""


class _Found(NamedTuple):
    extensions: Mapping[str, Extension]
    problems: tuple[str, ...]


@cache
def _found() -> _Found:
    # Its own ones first, and unguarded: a fault there is one of this distribution.
    usable = {name: _own(name) for name in _own_names()}
    problems = list[str]()
    # One of another package must not stop the planner, whatever is wrong with it.
    for name, loaded in _foreign().items():
        if isinstance(loaded, str):
            problems.append(loaded)
            continue
        clash = _twice(name, loaded, usable)
        if clash is not None:
            problems.append(clash)
            continue
        usable[name] = loaded
    return _Found(MappingProxyType(usable), tuple(problems))


def extensions() -> Mapping[str, Extension]:
    """Return all extensions by name: those of this distribution, then those of others. One of
    another package that cannot be used is left out, and `problems` says why: nothing else is to
    stop for it.
    """
    return _found().extensions


def problems() -> tuple[str, ...]:
    """Return why extensions of other packages are left out, and what to do."""
    return _found().problems


def remedy(advice: str) -> str:
    """Return the advice for a name that nothing has, with the problems of extensions which may have
    it.
    """
    return "; ".join([advice, *problems()])


def places(kind: str) -> Mapping[str, str]:
    """Return what all extensions add of one kind, a field of `Extension` without headings, by
    name.
    """
    return MappingProxyType(
        {
            name: place
            for extension in extensions().values()
            for name, place in getattr(extension, kind).items()
        }
    )


def commands(
    taken: Collection[str] = (),
) -> tuple[Mapping[str, Mapping[str, Any]], tuple[str, ...]]:
    """Return the commands of all extensions, by heading and name, and why some are left out: what
    another package calls by a name that is `taken` must not stand in its place.
    """
    loaded: dict[str, dict[str, Any]] = {}
    unusable = [*problems()]
    # The same rule as above: own commands must load, others are left out.
    own_names = {*_own_names()}
    for name, extension in extensions().items():
        for heading, named in extension.commands.items():
            for command, place in named.items():
                if command in taken:
                    unusable.append(
                        f"the extension {name!r} has a command {command!r}, which the planner has "
                        "already, so that command is left out; have its package call it otherwise"
                    )
                    continue
                try:
                    loaded.setdefault(heading, {})[command] = load(place)
                except Exception as error:
                    if name in own_names:
                        raise
                    unusable.append(_unusable(f"the command {command!r} of {name!r}", error))
    return loaded, tuple(unusable)


def offer(name: str) -> Any:
    """Return what an extension offers under a name of `OFFERS`.

    Raises:
        UsageError: If no extension offers it; names the one of this distribution that does.
    """
    place = places("offers").get(name)
    if place is None:
        # Which one would have it is known without it, for the error.
        extension, does = OFFERS[name]
        raise UsageError(missing_text(extension, does))
    return load(place)


def missing_text(extension: str, what: str) -> str:
    """Return the text of an error: what an extension does that is not installed."""
    return (
        f"the extension {extension!r} {what}, and it is not installed here; install the whole of "
        "perseus-planner"
    )


def load(place: str) -> Any:
    """Return what stands at a place, "module:name"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _own_names() -> list[str]:
    if not _FOLDER.is_dir():  # the core alone
        # A distribution of the core alone has no folder.
        return []
    return sorted(folder.parent.name for folder in _FOLDER.glob("*/__init__.py"))


def _own(name: str) -> Extension:
    extension = load(f"{GROUP}.{name}:EXTENSION")
    assert isinstance(extension, Extension)
    return extension


def _foreign() -> dict[str, Extension | str]:
    """Return the extensions that the entry points of other packages name, or why one cannot be
    used.
    """
    # Reading metadata takes milliseconds, which most commands do without.
    from importlib.metadata import entry_points

    extensions_by_name: dict[str, Extension | str] = {}
    for point in entry_points(group=GROUP):
        package = "a package" if point.dist is None else point.dist.name
        what = f"the extension {point.name!r} of {package}"
        try:
            extension = point.load()
        except Exception as error:  # it is code of others
            extensions_by_name[point.name] = _unusable(what, error)
            continue
        if not isinstance(extension, Extension):
            # Whatever else an entry point names is told like one that fails to load.
            extension = _unusable(what, TypeError(f"{point.value} is not an Extension"))
        extensions_by_name[point.name] = extension
    return extensions_by_name


def _unusable(what: str, error: Exception) -> str:
    return (
        f"{what} cannot be loaded: {type(error).__name__}: {error}; mend it, or uninstall its "
        "package"
    )


def _twice(name: str, extension: Extension, found: Mapping[str, Extension]) -> str | None:
    """Return what an extension adds that another adds already; None if nothing."""
    if name in found:
        return f"there are two extensions {name!r}; uninstall one"
    # A name that two add would mean either, by the order of loading.
    for other_name, other in found.items():
        for kind in (attribute.name for attribute in fields(Extension)):
            names = _names(extension, kind) & _names(other, kind)
            if names:
                return (
                    f"the extensions {name!r} and {other_name!r} both have {kind} "
                    f"{min(names)!r}, so {name!r} is left out; uninstall one"
                )
    return None


def _names(extension: Extension, kind: str) -> set[str]:
    added = getattr(extension, kind)
    if kind == "commands":
        return {name for named in added.values() for name in named}
    return set(added)
