"""The releases of engines that tests have trained with."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

_LOG = logging.getLogger("perseus_planner.runtime")

TESTED = {
    "torch": ((2, 6), (2, 15)),
    "deepspeed": ((0, 14), (0, 19)),
    "megatron-core": ((0, 9), (0, 19)),
}
"""Package -> its first and its last minor release that was trained with. `make test` and
`make test-newest` train with the last ones."""

_said: set[str] = set()  #: packages of which a release was named


def tested_releases() -> str:
    """Return the tested releases as one text."""
    return ", ".join(
        f"{package} {_text(first)} to {_text(last)}" for package, (first, last) in TESTED.items()
    )


def untested(package: str, release: str) -> bool:
    """Return whether no test has trained with a release, such as "2.16.0a0+git"."""
    first, last = TESTED[package]
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return numbers is None or not first <= (int(numbers[1]), int(numbers[2])) <= last


def name_untested(packages: Iterable[str]) -> None:
    """Name releases that no test has trained with, each once in this process, at INFO."""
    for package in packages:
        try:
            release = version(package)
        except PackageNotFoundError:
            continue
        if package not in _said and untested(package, release):
            _said.add(package)
            _LOG.info(
                "planner: no test has trained with %s %s yet (tested: %s to %s); if something is "
                "not as it should be, say so with your report",
                package,
                release,
                *map(_text, TESTED[package]),
            )


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
