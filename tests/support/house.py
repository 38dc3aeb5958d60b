"""Measure the source: `make size` prints how large product and tests are, and which imports run in
circles or up.

Code tokens are what a reader reads, whatever the width of lines: those of `tokenize` without
comments, line ends, indents and docstrings. An f-string is one token, as before Python 3.12. Code
lines are the lines on which such a token stands.

Imports in functions and for type checkers count as well; a name that is put together at run time
does not. Only for type checkers, a public door (`DOORS`) may name what an extension brings.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("perseus_planner", "profiler", "runtime")
"""The folders of the product; the first holds links to the others."""
ROOMS = (
    "base",
    "profiles",
    "schedules",
    "plans",
    "solver",
    "gpu",
    "engines",
    "runs",
    "views",
)
"""The folders of the package, in the order of the data."""
LEAVES = ("profiler", "runtime", "cli")
"""Folders that no other folder imports, but that the last may import the others."""
FACE = "face"
"""The package itself, of public names."""
DOORS = ("perseus_planner", "perseus_planner.runtime")
"""Modules under whose names users import what extensions bring."""
CORE = (*ROOMS, FACE, *LEAVES)
"""What works without any extension."""
EXTENSIONS = "extensions"
"""The folder of extensions, which the core does not import; `base.extensions` finds them."""
EDGE = tuple(
    f"{EXTENSIONS}.{folder.parent.name}"
    for folder in sorted((ROOT / FOLDERS[0] / EXTENSIONS).glob("*/__init__.py"))
)
"""The extensions; each is a room."""
ORDER = (*CORE, EXTENSIONS, *EDGE)
"""All rooms: each imports only rooms before it, and extensions import each other."""
PAGES = (".css", ".html", ".j2", ".js")
"""The endings of what browsers read, and of the templates that it is made of."""

Graph = Mapping[str, Collection[str]]
"""Module -> the modules that it imports."""

_LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
_FSTRING_STEPS = {"FSTRING_START": 1, "FSTRING_END": -1}  # from Python 3.12


class Source(NamedTuple):
    """A file of Python, under the name by which others import it."""

    module: str
    text: str
    nodes: list[ast.AST]


class Size(NamedTuple):
    """How much code there is, in one file or more."""

    files: int
    tokens: int
    lines: int


def size_of(source: Source) -> Size:
    """Return the code tokens and the code lines of a file."""
    docstrings = set(docstring_places(source.nodes))
    tokens, depth, lines = 0, 0, set[int]()  # of f-strings
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type in _LAYOUT or (token.type == tokenize.STRING and token.start in docstrings):
            continue
        lines.update(range(token.start[0], token.end[0] + 1))
        tokens += depth == 0
        depth += _FSTRING_STEPS.get(tokenize.tok_name[token.type], 0)
    return Size(1, tokens, len(lines))


def total(sizes: Iterable[Size]) -> Size:
    """Return the size of all files together."""
    return Size(*map(sum, zip(Size(0, 0, 0), *sizes, strict=True)))


def docstring_places(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, int]]:
    """Yield the line and column at which each docstring begins."""
    for node in nodes:
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            yield node.body[0].lineno, node.body[0].col_offset


def sources_of_product(root: Path = ROOT) -> list[Source]:
    """Return the files of the product by their names in the installed package."""
    files = (file for folder in FOLDERS for file in sorted((root / folder).rglob("*.py")))
    return [_read(_module(file.relative_to(root)), file) for file in files]


def sources_of_tests(root: Path = ROOT) -> list[Source]:
    """Return the files of the tests, which import each other without a folder."""
    return [_read(file.stem, file) for file in sorted((root / "tests").rglob("*.py"))]


def _read(module: str, file: Path) -> Source:
    text = file.read_text(encoding="utf-8")
    return Source(module, text, list(ast.walk(ast.parse(text, str(file)))))


def _module(file: Path) -> str:
    parts = file.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == FOLDERS[0] else (FOLDERS[0], *parts))


def room_of(module: str) -> str:
    """Return the room of `ORDER` that a module of the product stands in."""
    folders = module.split(".")[1:]
    if not folders:
        return FACE
    if folders[0] == EXTENSIONS:
        return ".".join(folders[:2])
    return "cli" if folders[0] == "__main__" else folders[0]


def imported(node: ast.AST) -> Iterator[str]:
    """Yield every module that an import in `node` may load: `from a import b` may load a and
    a.b.
    """
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (name.name for name in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}", *(f"{child.module}.{name.name}" for name in child.names))


def import_graph(sources: Collection[Source]) -> Graph:
    """Return which of these files import which others; of a and a.b, `from a import b` is a.b."""
    modules = {source.module for source in sources}
    graph = {module: set[str]() for module in modules}
    for module, _, nodes in sources:
        shown = _for_type_checkers(nodes) if module in DOORS else set()
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = list(imported(node))
                if node in shown and f".{EXTENSIONS}." in names[0]:
                    continue
                if isinstance(node, ast.ImportFrom) and modules.issuperset(names[1:]):
                    del names[0]
                graph[module] |= modules.intersection(names) - {module}
    return graph


def _for_type_checkers(nodes: Iterable[ast.AST]) -> set[ast.AST]:
    """Return the nodes below `if TYPE_CHECKING:`."""
    found = set[ast.AST]()
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found.update(ast.walk(node))
    return found


def circles(graph: Graph) -> list[list[str]]:
    """Return the sets of modules of which each imports all others, over some or none between."""
    reached = {module: _reached(graph, module) for module in graph}
    found = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in graph
    }
    return [list(circle) for circle in sorted(found) if circle]


def _reached(graph: Graph, module: str) -> set[str]:
    reached, pending = set[str](), [*graph[module]]
    while pending:
        each = pending.pop()
        if each not in reached:
            reached.add(each)
            pending += graph[each]
    return reached


def arrows_up(graph: Graph) -> list[tuple[str, str]]:
    """Return the pairs of rooms of which the first imports the second, though it comes later."""
    pairs = {(room_of(of), room_of(to)) for of, others in graph.items() for to in others}
    return sorted(
        (of, to)
        for of, to in pairs
        if ORDER.index(of) < ORDER.index(to) and not (of in EDGE and to in EDGE)
    )


def print_sizes(root: Path) -> None:
    """Print the sizes of the checkout at `root`."""
    product, tests = sources_of_product(root), sources_of_tests(root)
    sizes = [(room_of(source.module), size_of(source)) for source in product]
    _print_row("", "files", "code tokens", "code lines")
    _print_row("product", *total(size for _, size in sizes))
    _print_row(" core", *total(size for place, size in sizes if place in CORE))
    for room in CORE:
        _print_row(f"  {room}", *total(size for place, size in sizes if place == room))
    _print_row(" extensions", *total(size for place, size in sizes if place not in CORE))
    for room in EDGE:
        name = room.partition(".")[2]
        _print_row(f"  {name}", *total(size for place, size in sizes if place == room))
    _print_row("tests", *total(map(size_of, tests)))

    _print_row("\n(without blanks)", "files", "characters", "lines")
    for title, folders in (("pages", FOLDERS), ("pages of tests", ("tests",))):
        files = [file for folder in folders for file in (root / folder).rglob("*")]
        texts = [file.read_text(encoding="utf-8") for file in files if file.suffix in PAGES]
        lines = [line for text in texts for line in text.splitlines() if line.strip()]
        _print_row(title, len(texts), sum(len("".join(line.split())) for line in lines), len(lines))

    graph = import_graph(product)
    rings = [" ".join(ring) for ring in (*circles(graph), *circles(import_graph(tests)))]
    ups = [" -> ".join(pair) for pair in arrows_up(graph)]
    print(f"\ncircles of files: {len(rings)}", *rings, sep="\n  ")
    print(f"arrows up between rooms: {len(ups)}", *ups, sep="\n  ")


def _print_row(title: str, *cells: int | str) -> None:
    texts = (cell if isinstance(cell, str) else f"{cell:,}" for cell in cells)
    print(f"{title:<18}" + "".join(f"{text:>13}" for text in texts))


if __name__ == "__main__":
    print_sizes(Path(sys.argv[1]) if sys.argv[1:] else ROOT)
