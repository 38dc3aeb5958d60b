"""Draw mutants of the product, each wrong in one token, and count how many the tests kill.

    python tests/support/mutants.py [--count 20] [--seed 1] [--limit 200] [FOLDER ...]

A mutant has another comparison, arithmetic operator or constant, or a call is dropped that stands
alone. Files are drawn as often as they have such tokens; FOLDER ones alone, if given. For each
mutant the test files that can reach it run one after the other, the nearest first: those of its
room and those over fewest imports. It is killed by the first test that fails with it and passes
without it; it survives if none does before files have taken the limit, processor seconds, and the
line of a survivor says how many files ran. A test that hangs is one that fails after the time of
pyproject.toml. The mutants stand in a copy of the checkout, which is removed at the end.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from house import FOLDERS, ROOT, Graph, Source, import_graph, room_of
from house import _read as read_source
from house import sources_of_product as product

COPIED = (*FOLDERS, "tests", "benchmarks", "docs", "examples", "deploy")
"""The folders that tests read."""
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml")
"""The files that tests read."""

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"}
PARTNERS = {ast.And: "or", ast.Or: "and"}
SPELLED = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: r"is\s+not",
    ast.In: "in",
    ast.NotIn: r"not\s+in",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.And: "and",
    ast.Or: "or",
}
_WORDS = re.compile(r"[\w\\+]+")


class Mutant(NamedTuple):
    """One replacement in a file."""

    file: Path  #: below the root
    begin: int  #: first byte that is replaced
    end: int  #: the byte after the last
    text: str  #: what stands there instead

    def of(self, content: bytes) -> bytes:
        """Return the content of the file with the replacement."""
        return content[: self.begin] + self.text.encode() + content[self.end :]

    def shown(self, content: bytes) -> str:
        """Return the line of the replacement, before and after."""
        line = content.count(b"\n", 0, self.begin)
        before, after = (each.splitlines()[line].strip() for each in (content, self.of(content)))
        return f"{self.file}:{line + 1}: {before.decode()}  ->  {after.decode()}"


def mutants_of(file: Path, content: bytes) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    tree = ast.parse(content)
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        return begin, starts[node.end_lineno - 1] + node.end_col_offset

    def between(left: ast.expr, right: ast.expr, operator: ast.AST, text: str) -> Iterator[Mutant]:
        """Replace an operator, which stands alone between its operands but for brackets."""
        begin, end = span(left)[1], span(right)[0]
        spelled = SPELLED[type(operator)]
        pattern = spelled if _WORDS.fullmatch(spelled) and spelled != "+" else re.escape(spelled)
        found = re.search(pattern.encode(), content[begin:end])
        # A comment may hold the token too; then the mutant would be none.
        if found is not None and b"#" not in content[begin:end]:
            yield Mutant(file, begin + found.start(), begin + found.end(), text)

    hidden = _of_no_effect(tree)
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, right, operator in zip(operands, operands[1:], node.ops, strict=False):
                yield from between(left, right, operator, COMPARISONS[type(operator)])
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            is_text = any(isinstance(each, ast.JoinedStr) for each in (node.left, node.right))
            if not is_text:
                yield from between(node.left, node.right, node.op, ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            text = PARTNERS[type(node.op)]
            yield from between(node.values[0], node.values[1], node.op, text)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
            other = not node.value if isinstance(node.value, bool) else node.value + 1
            yield Mutant(file, *span(node), repr(other))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield Mutant(file, *span(node), "pass")


def _of_no_effect(tree: ast.AST) -> set[ast.AST]:
    """Return the nodes in annotations, decorators of kernels and what only type checkers read."""
    roots: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.AnnAssign, ast.arg)):
            roots += filter(None, [node.annotation])
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            roots += [*node.decorator_list, *filter(None, [node.returns])]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            roots.append(node)
        elif isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            roots.append(node.format_spec)
    return {inner for root in roots for inner in ast.walk(root)}


def sources(root: Path) -> list[Source]:
    """Return product, tests and their helpers; a test file is named by its path."""
    files = [*sorted((root / "tests").rglob("*.py")), *sorted((root / "benchmarks").glob("*.py"))]
    names = [
        str(file.relative_to(root)) if file.name.startswith("test_") else file.stem
        for file in files
    ]
    read = (read_source(name, file) for name, file in zip(names, files, strict=True))
    return [*product(root), *read]


def distances(graph: Graph, module: str) -> dict[str, int]:
    """Return over how many imports each file reaches a module."""
    importers: dict[str, list[str]] = {}
    for of, others in graph.items():
        for other in others:
            importers.setdefault(other, []).append(of)
    found, pending = {module: 0}, [module]
    for each in pending:  # grows
        for importer in importers.get(each, ()):
            if importer not in found:
                found[importer] = found[each] + 1
                pending.append(importer)
    return found


def tests_of(graph: Graph, module: str) -> list[str]:
    """Return the test files that can reach a module, the nearest first."""
    room = f"tests/{room_of(module).replace('.', '/')}/"
    far = distances(graph, module)
    found = [each for each in graph if each.startswith("tests/") and each.endswith(".py")]
    reaching = [each for each in found if each in far or each.startswith(room)]
    # A file of the room is as near as one that imports the module itself.
    near = {each: min(far.get(each, 9), 1 if each.startswith(room) else 9) for each in reaching}
    stem = module.rpartition(".")[2]
    return sorted(reaching, key=lambda each: (stem not in each, near[each], far.get(each, 9), each))


class Checkout:
    """A copy of the checkout, in which one file at a time is another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, symlinks=True)
        for name in FILES:
            shutil.copy2(ROOT / name, folder / name)
        self.failing: set[str] = set()  #: tests that fail without any mutant

    @contextmanager
    def with_mutant(self, mutant: Mutant) -> Iterator[None]:
        """Have a mutant inside the block."""
        path = self.folder / mutant.file
        content, times = path.read_bytes(), path.stat()
        path.write_bytes(mutant.of(content))
        try:
            yield
        finally:
            # with its time, by which Python knows what it has compiled
            path.write_bytes(content)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def killer(
        self, mutant: Mutant, tests: Sequence[str], limit_s: float
    ) -> tuple[str | None, int]:
        """Return the first test that fails with a mutant and passes without it, None if none does
        until files have taken the limit, processor seconds; and how many files ran.
        """
        begun_s = _children_s()
        for number, file in enumerate(tests):
            if _children_s() - begun_s > limit_s:
                return None, number
            failed = self._killer_of(mutant, file)
            if failed is not None:
                return failed, number + 1
        return None, len(tests)

    def _killer_of(self, mutant: Mutant, file: str) -> str | None:
        while True:
            with self.with_mutant(mutant):
                failed = self._failed(file)
            if failed is None:
                return None
            without = self._failed(file)
            if without is None:
                return failed
            if without in self.failing:
                return None  # it cannot be left out, so the file tells nothing
            self.failing.add(without)

    def _failed(self, test: str) -> str | None:
        deselected = [f"--deselect={each}" for each in self.failing]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        environment |= {"CI": "1"}  # equal examples in every run
        # as for the checkout that this is a copy of
        environment.setdefault("PLANNER_DATA", str(ROOT.parent / "shared" / "data"))
        ran = subprocess.run(
            [*command, "--tb=no", *deselected, test],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ran.stdout, re.MULTILINE)
        if found is not None:
            return found[1]
        # 5: all tests of a file are soaks, or are not for this machine
        return None if ran.returncode in (0, 5) else f"{test} ended with {ran.returncode}"


def _children_s() -> float:
    """Return the processor time of the processes that have ended, seconds."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> None:
    """Draw mutants, run tests, print what became of each and how many were killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument(
        "--limit", type=float, default=200, help="processor seconds of tests for each"
    )
    parser.add_argument("folders", nargs="*", default=FOLDERS, metavar="FOLDER")
    options = parser.parse_args()

    named = {source.module: source for source in product(ROOT)}
    files = {
        file.relative_to(ROOT): file.read_bytes()
        for folder in options.folders
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not file.is_relative_to(ROOT / FOLDERS[0] / "runtime")  # links to rooms that
        and not file.is_relative_to(ROOT / FOLDERS[0] / "profiler")  # stand beside
    }
    mutants = [each for file, content in files.items() for each in mutants_of(file, content)]
    drawn = random.Random(options.seed).sample(mutants, options.count)
    print(f"{len(drawn)} of {len(mutants)} mutants, seed {options.seed}", flush=True)

    graph = import_graph(sources(ROOT))
    killed = 0
    with tempfile.TemporaryDirectory() as place:
        checkout = Checkout(Path(place))
        for number, mutant in enumerate(drawn, 1):
            content = files[mutant.file]
            module = _module_of(mutant.file)
            assert module in named, module
            tests = tests_of(graph, module)
            killer, count = checkout.killer(mutant, tests, options.limit)
            killed += killer is not None
            print(f"{number}. {mutant.shown(content)}", flush=True)
            survives = f"SURVIVES {count} of {len(tests)} files that can reach it"
            print(f"   {survives if killer is None else f'killed by {killer}'}", flush=True)
    print(f"{killed} of {len(drawn)} mutants are killed")


def _module_of(file: Path) -> str:
    parts = file.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == FOLDERS[0] else (FOLDERS[0], *parts))


if __name__ == "__main__":
    main()
