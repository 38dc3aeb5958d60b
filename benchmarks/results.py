"""The results of benchmarks: tables, checked answers and notes, and the files that hold them."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import perseus_planner
from perseus_planner.base.files import replacing

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("numpy", "networkx", "scipy", "lowtime")


@dataclass(frozen=True)
class Table:
    """Rows of values, and how to print them.

    Attributes:
        columns: key of a row's value -> (heading, format specification of the value).
        rows: key -> value; None prints as a dash.
    """

    columns: Mapping[str, tuple[str, str]]
    rows: Sequence[Mapping[str, Any]]

    def markdown(self) -> str:
        """Return the table as Markdown, with numbers on the right."""
        lines = [
            [heading for heading, _ in self.columns.values()],
            ["---" if spec == "" else "---:" for _, spec in self.columns.values()],
            *(
                [_text(row.get(key), spec) for key, (_, spec) in self.columns.items()]
                for row in self.rows
            ),
        ]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: object, spec: str) -> str:
    return "-" if value is None else format(value, spec)


@dataclass(frozen=True)
class Check:
    """An answer that must be right on every machine.

    Attributes:
        text: what was checked, with the worst value found.
        passed: whether it holds.
    """

    text: str
    passed: bool

    def __str__(self) -> str:
        return f"{'checked' if self.passed else 'FAILED'}: {self.text}"


@dataclass(frozen=True)
class Section:
    """One number of the benchmark.

    Attributes:
        number: its number for `--only`.
        title: its heading.
        how: how its values came to be: measured, replayed or simulated.
        tables: its values.
        checks: its answers.
        notes: what a reader must know to read it right.
    """

    number: int
    title: str
    how: str
    tables: Sequence[Table] = ()
    checks: Sequence[Check] = ()
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Return the section as Markdown."""
        listed = [
            "\n".join(f"- {entry}" for entry in entries)
            for entries in (self.checks, self.notes)
            if entries
        ]
        tables = [table.markdown() for table in self.tables]
        return "\n\n".join([f"## {self.number}. {self.title}", self.how, *tables, *listed])


def failed(sections: Sequence[Section]) -> list[Check]:
    """Return the answers that are wrong."""
    return [check for section in sections for check in section.checks if not check.passed]


def environment() -> dict[str, Any]:
    """The machine and the versions of a run."""
    versions = {"python": platform.python_version(), "perseus-planner": perseus_planner.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def _commit() -> str:
    """Return the commit that was run, and whether its code was changed since."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git(
            "status",
            "--porcelain",
            "--",
            "perseus_planner",
            "profiler",
            "runtime",
            "benchmarks/*.py",
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with uncommitted changes" if changed else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def cpu_model() -> str:
    """Return the processor as Linux names it, else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _short(machine: str) -> str:
    """Return the name of a processor or GPU as a part of a file name, such as
    `intel-xeon-platinum-8481c`.
    """
    plain = re.sub(r"\(.*?\)|@.*|\b(CPU|Processor|\d+-Core)\b", " ", machine)
    return "-".join(re.findall(r"[a-z0-9]+", plain.lower()))


def write(
    name: str,
    sections: Sequence[Section],
    config: object,
    about: Mapping[str, Any],
    target: Path,
    machine: str | None = None,
) -> list[Path]:
    """Write `<name>_<machine>_<date>.md` and `.json` into the folder `target`; replaces files of
    that name.

    Args:
        name: which benchmarks.
        sections: their results.
        config: their settings, a dataclass.
        about: `environment()`.
        target: the folder.
        machine: the machine that they are about; None for this processor.
    """
    target.mkdir(parents=True, exist_ok=True)
    stem = f"{name}_{_short(machine or cpu_model())}_{about['date']}"
    document = {
        **about,
        "config": asdict(config),
        "sections": [asdict(section) for section in sections],
    }  # type: ignore[call-overload]
    texts = {
        ".md": _markdown(name, sections, about),
        ".json": json.dumps(document, indent=1) + "\n",
    }
    paths = []
    for suffix, text in texts.items():
        paths.append(target / f"{stem}{suffix}")
        with replacing(paths[-1]) as file:
            file.write(text.encode())
    return paths


def _markdown(name: str, sections: Sequence[Section], about: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    head = [
        f"# Benchmark results: {name}",
        f"Made by `{about['command']}` on {about['date']} at commit {about['commit']}.",
        f"{about['cpu']}, {about['cpus']} CPUs (load {about['load_at_start']} at the start), "
        f"{about['system']}. {versions}.",
        "*Measured* is what this machine took or what was measured on GPUs; *replayed* is an "
        "iteration added up from the measured seconds and joules of its computations; *simulated* "
        "is neither. Savings and deadlines are relative to all computations at the maximum clock.",
    ]
    wrong = failed(sections)
    if wrong:
        head.append(
            "\n".join(
                ["**Answers that are not right:**", "", *(f"- {check.text}" for check in wrong)]
            )
        )
    return "\n\n".join([*head, *(section.markdown() for section in sections)]) + "\n"
