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

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
        "warm up": ("autopilot", "compiles what training without a plan needs"),
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


@cache
def extensions() -> Mapping[str, Extension]:
    """Return all extensions by name: those of this distribution, then those of others.

    Raises:
        UsageError: If the extension of another package cannot be loaded, or adds what is there.
    """
    found = {name: _own(name) for name in _own_names()}
    for name, extension in _foreign().items():
        _check_new(name, extension, found)
        found[name] = extension
    return MappingProxyType(found)


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


def commands() -> Mapping[str, Mapping[str, Any]]:
    """Return the commands of all extensions, by heading and name."""
    loaded: dict[str, dict[str, Any]] = {}
    for extension in extensions().values():
        for heading, named in extension.commands.items():
            loaded.setdefault(heading, {}).update(
                {name: load(place) for name, place in named.items()}
            )
    return loaded


def offer(name: str) -> Any:
    """Return what an extension offers under a name of `OFFERS`.

    Raises:
        UsageError: If no extension offers it; names the one of this distribution that does.
    """
    place = places("offers").get(name)
    if place is None:
        extension, what = OFFERS[name]
        raise UsageError(missing_text(extension, what))
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
        return []
    return sorted(folder.parent.name for folder in _FOLDER.glob("*/__init__.py"))


def _own(name: str) -> Extension:
    extension = load(f"{GROUP}.{name}:EXTENSION")
    assert isinstance(extension, Extension)
    return extension


def _foreign() -> dict[str, Extension]:
    """Return the extensions that the entry points of other packages name."""
    from importlib.metadata import entry_points

    found = {}
    for point in entry_points(group=GROUP):
        try:
            extension = point.load()
        except Exception as error:  # it is code of others
            problem = f"{type(error).__name__}: {error}"
        else:
            if isinstance(extension, Extension):
                found[point.name] = extension
                continue
            problem = f"{point.value} is not an Extension"
        package = "a package" if point.dist is None else point.dist.name
        raise UsageError(
            f"the extension {point.name!r} of {package} cannot be loaded: {problem}; mend it, or "
            "uninstall it"
        )
    return found


def _check_new(name: str, extension: Extension, found: Mapping[str, Extension]) -> None:
    """Refuse an extension that adds what another adds already."""
    if name in found:
        raise UsageError(f"there are two extensions {name!r}; uninstall one")
    for other_name, other in found.items():
        for kind in (each.name for each in fields(Extension)):
            names = _names(extension, kind) & _names(other, kind)
            if names:
                raise UsageError(
                    f"the extensions {name!r} and {other_name!r} both have {kind} "
                    f"{min(names)!r}; uninstall one"
                )


def _names(extension: Extension, kind: str) -> set[str]:
    added = getattr(extension, kind)
    if kind == "commands":
        return {name for named in added.values() for name in named}
    return set(added)
