"""Options of commands, each declared once: in the type of a parameter of the command, or of a field
of a dataclass that the command takes.

    @dataclass(frozen=True)
    class PlanLimits:
        on_time: Annotated[Certainty | None, "The probability of being on time, e.g. 95%."] = None

    @command("planner plan frontier.npz --on-time 95% -o plan.yaml")
    def plan(
        frontier: Path,  # FRONTIER, an argument; parameters after the * are options
        *,
        limits: PlanLimits,
        replicas: Annotated[Counts, "The number of pipelines of each FRONTIER."] = (),
        output: Annotated[Path, output_file("the plan", ".yaml", ".yml")],
    ) -> None:

The type says how the text is read: `Time` and the others below obey a rule of `base.units`, a bool
is a flag, a `Literal` is a choice, and a tuple an option that can be repeated. A text beside it is
its help, and `Option` says what else click is told. The name of the option is that of the
parameter without its unit, `--in` for `in_s`. A command has the option --json too.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from perseus_planner.base import extensions, units
from perseus_planner.base.errors import UsageError

PATH = click.Path(path_type=Path)
PATH.name = "file"  # as the help calls it


class Option:
    """What click is told of an option or argument beside its type, help and default.

    Args:
        names: its names, if they do not follow from that of the parameter.
        settings: arguments of `click.Option`.
    """

    def __init__(self, *names: str, **settings: Any) -> None:
        self.settings = {**settings, "names": names} if names else settings


_CALLED = MappingProxyType({"--time": "--deadline"})
"""What people type for an option -> its name, where no spelling leads from one to the other."""


class _Command(click.Command):
    """A command, some of whose parameters are made when they are first asked for."""

    def __init__(
        self, others: Callable[[], list[click.Parameter]], *args: Any, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self._others = others

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return all parameters."""
        # Only once: click asks for the parameters each time that it shows or reads them.
        self.params += self._others()
        self._others = list
        return super().get_params(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; say what an option is called that goes by another name."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            meant = _CALLED.get(error.option_name)
            if meant is None or all(meant not in each.opts for each in self.get_params(ctx)):
                raise
            # An error of our own, as click names nothing that is not spelt alike.
            raise click.UsageError(f"{error.message} Did you mean '{meant}'?", ctx) from None


def command(
    *lines: str,
    name: str | None = None,
    has_json: bool = True,
    others: Callable[[], list[click.Parameter]] = list,
    **settings: Any,
) -> Callable[[Callable[..., None]], click.Command]:
    """Return the decorator that makes a command of a function, by the types of its parameters.

    Args:
        lines: examples of it, for its help.
        name: its name; by default that of the function.
        has_json: whether it has the option --json, which `console.report` obeys.
        others: returns parameters that are declared elsewhere, which is loaded when the command
            is used; the function takes them as keywords.
        settings: arguments of `click.Command`.
    """
    if lines:
        settings["epilog"] = examples(*lines)

    def decorate(function: Callable[..., None]) -> click.Command:
        # The first paragraph is the summary, whole, as lists cut what is longer.
        summary = str(inspect.getdoc(function)).partition("\n\n")[0].replace("\n", " ")
        hints = get_type_hints(function, include_extras=True)
        groups: dict[str, Any] = {key: hint for key, hint in hints.items() if is_dataclass(hint)}
        params = [*_parameters(function, hints)]
        if has_json:
            params.append(click.Option(["--json", "as_json"], is_flag=True, help=_JSON))

        # Fields of a group are options of their own, and become one value again here.
        def call(**values: Any) -> None:
            values.pop("as_json", None)
            for key, group in groups.items():
                values[key] = group(
                    **{field.name: values.pop(field.name) for field in fields(group)}
                )
            function(**values)

        return _Command(
            others,
            name or function.__name__.replace("_", "-"),
            params=params,
            callback=call,
            help=function.__doc__,
            short_help=summary,  # whole, also in lists of commands
            **settings,
        )

    return decorate


def _parameters(function: Callable[..., None], hints: dict[str, Any]) -> Iterator[click.Parameter]:
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            continue  # `others` of the command
        if is_dataclass(hint):
            # With the signature of its `__init__`.
            yield from _parameters(hint, get_type_hints(hint, include_extras=True))  # type: ignore[arg-type]
            continue
        settings = _settings(hint)
        # Without a default the parameter must be given; click would take None.
        if parameter.default is not parameter.empty:
            settings["default"] = parameter.default
        settings.setdefault("required", "default" not in settings)
        # Positional parameters are arguments; those of dataclasses are options all the same.
        if parameter.kind is not parameter.KEYWORD_ONLY and not is_dataclass(function):
            if settings.pop("multiple", False):
                settings["nargs"] = -1
            yield click.Argument([name], **settings)
            continue
        # A default of nothing is said in words by the help itself.
        has_value = settings.get("default") not in (None, ())
        settings.setdefault("show_default", has_value and not settings.get("is_flag"))
        yield click.Option([*settings.pop("names", (option_name(name),)), name], **settings)


def _settings(hint: Any) -> dict[str, Any]:
    """Return what the type of a parameter says of it, as arguments of `click.Option`."""
    origin = get_origin(hint)
    first, *others = get_args(hint) or (hint,)
    if origin is Annotated:
        settings = _settings(first)
        # In the order of the type: an `Option` says what differs from what the type implies, a text
        # is the help.
        for said in others:
            if isinstance(said, Option):
                settings |= said.settings
            elif isinstance(said, click.ParamType):
                settings = {"type": said}
            else:
                settings["help"] = said
        return settings
    # `None` as a default means that the option was not given.
    if origin in (Union, UnionType):  # it or None
        return {**_settings(first), "required": False}
    if origin is tuple:
        return {**_settings(first), "multiple": True, "required": False}
    if origin is Literal:
        return {"type": click.Choice([first, *others])}
    if hint is bool:
        return {"is_flag": True, "default": False, "required": False}
    return {"type": PATH if hint is Path else hint}


def option_name(name: str) -> str:
    """Return the name of the option for a parameter: `--ttl` for `ttl_s`."""
    return "--" + re.sub("_[sw]$", "", name).replace("_", "-")


def examples(*lines: str) -> str:
    """Return the examples at the end of a command's help."""
    return f"\b\nExample{'s' * (len(lines) > 1)}:\n" + "\n".join(f"  {line}" for line in lines)


class Text(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """The type of an option that a function reads.

    Args:
        name: what it is called in the help.
        read: a function of the text and of the name of the option, for error texts.
    """

    def __init__(self, name: str, read: Callable[[str, str], Any]) -> None:
        self.name = name
        self.read = read

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        """Return what a text says; a value that is none stands as it is."""
        option = "" if parameter is None else parameter.opts[0]
        return self.read(value, option) if isinstance(value, str) else value


class WholeNumber(click.IntRange):
    """The type of an option: a whole number of at least `least`."""

    name = "whole number"

    def __init__(self, least: int) -> None:
        super().__init__(min=least)


class Quantity(Text):
    """The type of an option: a number by a rule of `base.units`, in SI units."""

    def __init__(self, rule: units.Quantity | units.Rule, name: str) -> None:
        super().__init__(name, rule.read)


class Listed(Text):
    """The type of an option: several numbers between commas, each by a rule of `base.units`."""

    def __init__(self, rule: units.Quantity | units.Rule, name: str) -> None:
        super().__init__(
            f"{name},{name},…",
            lambda text, option: tuple(rule.read(part, option) for part in text.split(",")),
        )


#: kind of file, as `base.file_kinds.kind_of` tells it -> what it is called
_KINDS = {
    "run": "the folder of a run",
    "frontier": "a frontier",
    "profile": "a profile",
    "plan": "a plan",
    "job": "a job file",
    "inference": "a plan of inference pools",
    "lengths": "a table of microbatches",
    "stragglers": "a table of straggler events",
    "budget": "a schedule of power budgets",
    "serving": "an inference profile",
    "rates": "a table of request rates",
    "trace": "a trace of requests",
    "transformer": "a model",
    "system": "a system file",
    "page": "a page for a browser",
}


class SourceFile(Text):
    """The type of an argument: a file to read, which is refused if it is one of another kind.

    Args:
        kinds: the kinds that are read; none for all that `planner show` knows.
    """

    def __init__(self, *kinds: str) -> None:
        wanted = kinds or ("profile", "frontier", "plan", "job", "run")

        def read(text: str, _: str) -> Path:
            from perseus_planner.base.file_kinds import kind_of

            path = Path(text)
            # A path that does not exist is refused by whoever reads it, with the reason.
            kind = kind_of(path) if path.exists() else None
            # Extensions may bring kinds of files, which only a command for all kinds shows.
            taken = kinds or {*extensions.places("shown"), *wanted}
            if kind in _KINDS and kind not in taken:
                # The error names what is wanted, in the words of the help.
                names = ", ".join(_KINDS[kind_name] for kind_name in wanted[:-1])
                names = " or ".join(filter(None, (names, _KINDS[wanted[-1]])))
                # Any folder may be a run's.
                what = "a folder" if kind == "run" else _KINDS[kind]
                raise UsageError(f"{path}: is {what}; name {names}")
            return path

        super().__init__("file", read)


class OutputFile(Text):
    """The type of an option: a file to write, which is refused before any work is done if it cannot
    be written.

    Args:
        endings: what its name must end in; none for anything.
    """

    def __init__(self, *endings: str) -> None:
        def read(text: str, option: str) -> Path:
            path = Path(text)
            check_writable(path, option)
            if endings and path.suffix.lower() not in endings:
                raise UsageError(f"{option} {path}: must end in {' or '.join(endings)}; rename it")
            return path

        super().__init__("file", read)


def check_writable(path: Path, place: str) -> None:
    """Check that a file can be written; `place` names the option or key that it comes from.

    Raises:
        UsageError: If it is a folder, or its folder does not exist or cannot be written to.
    """
    if path.is_dir():
        raise UsageError(f"{place} {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UsageError(
            f"{place} {path}: there is no folder {path.parent}; make it, or name another"
        )
    # A new file needs a folder that can be written to, an old one itself.
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        what = "this file" if path.exists() else f"the folder {path.parent}"
        raise UsageError(
            f"{place} {path}: {what} cannot be written to; change its permissions, or name another"
        )


def check_folder(path: Path, place: str, *, may_be_file: bool = False) -> None:
    """Check that `path` can be made, or written to if it is there; `place` names its option.

    Raises:
        UsageError: If it is a file, unless it may be, or in one, or the folder that it would be in
            cannot be written to.
    """
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    if not nearest.is_dir() and not (may_be_file and nearest == path):
        raise UsageError(f"{place} {path}: {nearest} is a file; name a folder")
    if not os.access(nearest, os.W_OK):
        raise UsageError(
            f"{place} {path}: {nearest} cannot be written to; change its permissions, or name "
            "another"
        )


def refuse_same(
    sources: Iterable[Path | None], target: Path | None, option: str = "--output"
) -> None:
    """Check that `target`, which `option` names, is not one of the files that are read.

    Raises:
        UsageError: If it is one of them.
    """
    for source in filter(None, sources):
        if target and target.exists() and source.exists() and target.samefile(source):
            raise UsageError(f"{option} {target}: is the file that is read; name another")


def complete(names: Callable[[], Iterable[str]]) -> Option:
    """Return what completes the value of an option in the shell: those of `names`, which is
    called only then.
    """
    return Option(
        shell_complete=lambda _context, _parameter, begun: [
            name for name in names() if name.startswith(begun)
        ]
    )


def gpu_names() -> list[str]:
    """Return the texts of GPUs that can be named on any node."""
    from perseus_planner.gpu import back_ends

    return [*(f"{name}:" for name in back_ends()), *(f"simulated:{name}" for name in chip_names())]


def chip_names() -> list[str]:
    """Return the names of kinds of GPUs."""
    from perseus_planner.gpu.simulated.model import CATALOG

    return list(CATALOG)


def output_file(what: str, *endings: str) -> Option:
    """Return the option that names the file to write, whose name must have one of the endings."""
    text = f"File to write: {what}, {endings[0]}."
    return Option("--output", "-o", type=OutputFile(*endings), help=text)


Time = Annotated[float, Quantity(units.DURATION, "time")]  #: seconds above 0
Lag = Annotated[float, Quantity(units.LAG, "time")]  #: seconds of 0 or more
TransferTime = Annotated[float, Quantity(units.TRANSFER, "time")]  #: seconds of 0 or more
Carbon = Annotated[float, Quantity(units.CARBON, "mass")]  #: grams of 0 or more
Overhead = Annotated[float, Quantity(units.OVERHEAD, "time")]  #: seconds, also below 0
Power = Annotated[float, Quantity(units.POWER_BUDGET, "power")]  #: watts above 0
BlockingPower = Annotated[float, Quantity(units.BLOCKING_POWER, "power")]  #: watts of 0 or more
Slowdown = Annotated[float, Quantity(units.SLOWDOWN, "ratio")]
Certainty = Annotated[float, Quantity(units.CERTAINTY, "percent")]
Tolerance = Annotated[float, Quantity(units.TOLERANCE, "percent")]
Spread = Annotated[float, Quantity(units.SPREAD, "percent")]
Share = Annotated[float, Quantity(units.SHARE, "share")]
Number = Annotated[int, Option(metavar="N")]
Natural = Annotated[int, Option(type=WholeNumber(0), metavar="N")]
Positive = Annotated[int, Option(type=WholeNumber(1), metavar="N")]
Stages = Annotated[int, Option(metavar="S")]
GpuCount = Annotated[int, Option(metavar="GPUS")]
Counts = Annotated[tuple[int, ...], Listed(units.COUNT, "n")]
GpuName = Annotated[str, Option(metavar="GPU")]
_JSON = "Print one JSON object, in SI units, instead of text."
