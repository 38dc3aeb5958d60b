"""Check commands and code that documents show but tests do not run, by option parsers and
signatures.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import shlex
from pathlib import Path

import click

from perseus_planner.cli import main

ROOT = Path(__file__).parents[2]


def check_inline(command: str) -> None:
    """Check that the subcommand and options, the file or the target of a command in the text
    exist.
    """
    program, *words = shlex.split(command.replace("…", ""))
    if program == "make":
        assert _goals(words) <= _targets(), command
    elif program == "python":
        assert (ROOT / words[0]).is_file(), command
    elif words:
        name = words[0]
        if name.startswith("-") or name.isupper() or name.endswith(".yaml"):  # a job file
            return
        shown = main.commands[name]
        if isinstance(shown, click.Group) and len(words) > 1:
            shown = shown.commands[words[1]]
        parameters = shown.get_params(click.Context(shown))
        options = {option for each in parameters for option in [*each.opts, *each.secondary_opts]}
        assert {word for word in words if word.startswith("-")} <= options | {"--help", "--json"}, (
            command
        )


def check_shell(line: str) -> None:
    """Parse the options of each command of a line with its program's parser."""
    for part in re.split(r" \| | && ", line.partition(" #")[0].replace("2>&1", "")):
        words = shlex.split(part)
        while words[0] == "sudo" or re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        program, *arguments = words
        assert program in _PARSERS, (
            f"{line}: no parser for the options of {program}; leave the title of the block out"
        )
        _PARSERS[program](arguments)


def check_python(text: str) -> None:
    """Run the imports of the planner, and bind each call of an imported name to its signature."""
    tree, names = ast.parse(text), {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("perseus_planner")
        ):
            module = importlib.import_module(node.module)
            names |= {each.asname or each.name: getattr(module, each.name) for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            keywords = {each.arg: None for each in node.keywords if each.arg}
            inspect.signature(names[node.func.id]).bind(*[None] * len(node.args), **keywords)


def _planner(words: list[str]) -> None:
    name, *arguments = words
    main.commands[name].make_context(name, arguments)


def _pip(words: list[str]) -> None:
    assert words[0] == "install"
    project = (ROOT / "pyproject.toml").read_text()
    extras = project.partition("[project.optional-dependencies]\n")[2].partition("\n\n")[0]
    known = set(re.findall(r"^(\w+) =", extras, re.MULTILINE))
    for word in filter(lambda word: word != "-e", words[1:]):
        named = re.fullmatch(r"(?:\.|perseus-planner)(?:\[([\w,]+)\])?", word)
        assert named, f"pip install {word}: not this package"
        assert set((named[1] or "plot").split(",")) <= known, word


def _make(words: list[str]) -> None:
    assert _goals(words) <= _targets(), words


def _goals(words: list[str]) -> set[str]:
    """Return the targets among the arguments of make; the others set its variables."""
    return {word for word in words if "=" not in word}


def _slurm(words: list[str]) -> None:
    """Parse the options of srun or salloc that the pages use, and check the command that
    follows.
    """
    parser = argparse.ArgumentParser(exit_on_error=False)
    for name in ("--nodes", "--ntasks-per-node", "--gpus-per-node"):
        parser.add_argument(name, type=int)
    parser.add_argument("--exclusive", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    if command := parser.parse_args(words).command:
        _PARSERS[command[0]](command[1:])


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    read = get_args_parser().parse_args(words)
    _training(read.training_script, read.training_script_args, is_module=read.module)


def _deepspeed(words: list[str]) -> None:
    from deepspeed.launcher.runner import parse_args

    read = parse_args(words)
    _training(read.user_script, read.user_args, is_module=read.module)


def _training(script: str, arguments: list[str], *, is_module: bool) -> None:
    if is_module:
        assert script == "perseus_planner"
        _planner(arguments)
    else:
        text = (ROOT / script).read_text() + (ROOT / script).with_name("shared.py").read_text()
        assert all(f'"{word}"' in text for word in arguments if word.startswith("-")), arguments


def _sbatch(arguments: list[str]) -> None:
    assert arguments == ["train.sbatch"]  # the file of the tutorial


def _source(arguments: list[str]) -> None:
    assert arguments == [".venv/bin/activate"], f"source {arguments}: is not what `make` makes"


_PARSERS = {
    "planner": _planner,
    "pip": _pip,
    "make": _make,
    "torchrun": _torchrun,
    "deepspeed": _deepspeed,
    "source": _source,
    "srun": _slurm,
    "sbatch": _sbatch,
    "salloc": _slurm,
}
