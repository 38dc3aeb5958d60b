"""Keeps what every command of the README and of docs/ prints, to compare two states of the code:

    python tests/support/keep_outputs.py before.json
    python tests/support/keep_outputs.py after.json
    python tests/support/keep_outputs.py --compare before.json after.json

Commands run in order, in one folder, as `documents.py` runs them. Times of this machine, ports,
temporary folders and digests of learnt files differ from run to run, so each command is run by two
runs of one state first: a line that differs there is not compared.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from command_options import ROOT
from documents import PAGES, Reader, free_port, starts_service
from made_runs import write_run

import perseus_planner.cli
from perseus_planner import Plan

_NO_OUTPUT = "(not compared: it differs from run to run)"


def _before(command: str) -> None:
    if command.startswith("planner show run"):
        write_run(Path("run"), Plan.load("plan.yaml"), 3)


def kept_outputs() -> dict[str, str]:
    """Return what each command prints, by page and command."""
    kept: dict[str, str] = {}
    page_name = ""
    invoke = CliRunner.invoke

    def keep(self: CliRunner, command: Any, words: Any, *args: Any, **kwargs: Any) -> Any:
        result = invoke(self, command, words, *args, **kwargs)
        kept[f"{page_name}: {' '.join(words)}"] = f"{result.exit_code}\n{result.output}"
        return result

    folder = Path(tempfile.mkdtemp())
    CliRunner.invoke = keep  # type: ignore[method-assign]
    home = Path.cwd()
    try:
        for name in ("examples", "benchmarks"):
            (folder / name).symlink_to(ROOT / name)
        os.chdir(folder)
        port = free_port()
        readme = Reader(port, os.environ.__setitem__, _before)
        page_name = PAGES[0].name
        readme.read(PAGES[0])
        for page in PAGES[1:]:
            page_name = page.name
            copy = Path(tempfile.mkdtemp())
            shutil.copytree(folder, copy, symlinks=True, dirs_exist_ok=True)
            os.chdir(copy)
            own_port = free_port() if starts_service(page) else port
            reader = Reader(own_port, os.environ.__setitem__, _before)
            try:
                reader.read(page)
            except AssertionError as error:
                kept[f"{page_name}: stopped"] = str(error)
            finally:
                reader.close()
                os.chdir(folder)
                shutil.rmtree(copy)
            for key, text in kept.items():
                kept[key] = text.replace(str(own_port), "PORT").replace(str(copy), "FOLDER")
        readme.close()
    finally:
        CliRunner.invoke = invoke  # type: ignore[method-assign]
        os.chdir(home)
        shutil.rmtree(folder)
    for key, text in kept.items():
        kept[key] = text.replace(str(port), "PORT").replace(str(folder), "FOLDER")
    for name, command in sorted(perseus_planner.cli.main.commands.items()):
        kept[f"help: {name}"] = CliRunner().invoke(command, ["--help"], prog_name=name).output
    return kept


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the differences of two files, one text for each command."""
    differences = []
    for key in sorted(before.keys() | after.keys()):
        old = before.get(key, {"text": "", "varies": []})
        new = after.get(key, {"text": "", "varies": []})
        varies = {*old["varies"], *new["varies"]}
        texts = [
            [
                _NO_OUTPUT if number in varies else line
                for number, line in enumerate(kept["text"].splitlines())
            ]
            for kept in (old, new)
        ]
        if texts[0] != texts[1]:
            differences.append("\n".join([key, *difflib.unified_diff(*texts, lineterm="", n=0)]))
    return differences


def main() -> None:
    """Keep or compare."""
    if sys.argv[1] == "--compare":
        before, after = (json.loads(Path(name).read_text()) for name in sys.argv[2:4])
        differences = compare(before, after)
        print("\n\n".join(differences))
        print(f"{len(before)} and {len(after)} commands; {len(differences)} differ")
        sys.exit(bool(differences))
    first, second = kept_outputs(), kept_outputs()
    kept = {}
    for key, text in first.items():
        other = second.get(key, "").splitlines()
        lines = text.splitlines()
        varies = [
            number
            for number, line in enumerate(lines)
            if number >= len(other) or other[number] != line
        ]
        kept[key] = {"text": text, "varies": varies}
    Path(sys.argv[1]).write_text(json.dumps(kept, indent=1))
    print(f"{len(kept)} commands, {sum(bool(each['varies']) for each in kept.values())} vary")


if __name__ == "__main__":
    main()
