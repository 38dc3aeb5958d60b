"""Measure the source: `make size` prints how large product and tests are, how the product reads,
and which imports run in circles or up.

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
"""The package itself, of public names; the command line uses them."""
DOORS = ("perseus_planner", "perseus_planner.runtime")
"""Modules under whose names users import what extensions bring."""
CORE = (*ROOMS, *LEAVES[:-1], FACE, LEAVES[-1])
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


class Legibility(NamedTuple):
    """What makes code slow to read, counted in one file or more."""

    tokens: int = 0  #: code tokens
    pairs: int = 0  #: assignments of a tuple to a tuple, several in one line
    comments: int = 0  #: comments in bodies of functions
    long_functions: int = 0  #: functions over `LONG_FUNCTION` lines
    long_files: int = 0  #: files over `LONG_FILE` lines
    many_parameters: int = 0  #: functions of more than `MANY_PARAMETERS` parameters

    def per_thousand(self, count: int) -> str:
        """Return a count for 1,000 code tokens, as text."""
        return f"{1000 * count / self.tokens:.2f}" if self.tokens else "-"


LONG_FUNCTION = 50
"""Lines of signature and body, without the docstring."""
LONG_FILE = 500
"""Lines of a file."""
MANY_PARAMETERS = 6
"""Parameters of a function, without `self` and `cls`."""


def legibility_of(source: Source) -> Legibility:
    """Return the counts of a file."""
    functions = [
        node for node in source.nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    inside = set[int]()  # lines of bodies
    for function in functions:
        inside.update(range(function.lineno, (function.end_lineno or 0) + 1))
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        is_note = token.type == tokenize.COMMENT and not _is_directive(token.string)
        comments += is_note and token.start[0] in inside
    return Legibility(
        tokens=size_of(source).tokens,
        pairs=sum(map(_is_pair, source.nodes)),
        comments=comments,
        long_functions=sum(lines_of(function) > LONG_FUNCTION for function in functions),
        long_files=int(len(source.text.splitlines()) > LONG_FILE),
        many_parameters=sum(parameters_of(each) > MANY_PARAMETERS for each in functions),
    )


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's signature and body, without its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of parameters of a function, without `self` and `cls`."""
    taken = function.args
    named = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs]
    return sum(each.arg not in ("self", "cls") for each in named)


def _is_pair(node: ast.AST) -> bool:
    """Return whether a statement assigns a tuple to a tuple."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    )


def _is_directive(comment: str) -> bool:
    """Return whether a comment speaks to a tool."""
    return comment.lstrip("# ").startswith(("type:", "noqa", "fmt:", "pragma:"))


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

    print_legibility(product)
    _print_row("\n(without blanks)", "files", "characters", "lines")
    for title, folders in (("pages", FOLDERS), ("pages of tests", ("tests",))):
        files = [file for folder in folders for file in (root / folder).rglob("*")]
        _print_texts(title, [file for file in files if file.suffix in PAGES])
    # Kernels are C, of which the rows above know nothing.
    _print_texts("C of kernels", [*(root / "perseus_planner").rglob("c/*.[ch]")])

    graph = import_graph(product)
    rings = [" ".join(ring) for ring in (*circles(graph), *circles(import_graph(tests)))]
    ups = [" -> ".join(pair) for pair in arrows_up(graph)]
    print(f"\ncircles of files: {len(rings)}", *rings, sep="\n  ")
    print(f"arrows up between rooms: {len(ups)}", *ups, sep="\n  ")


def _print_texts(title: str, files: Collection[Path]) -> None:
    texts = [file.read_text(encoding="utf-8") for file in files]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    characters = sum(len("".join(line.split())) for line in lines)
    _print_row(title, len(texts), characters, len(lines))


def print_legibility(product: Collection[Source]) -> None:
    """Print how the product reads, room by room."""
    counts = [(room_of(source.module), legibility_of(source)) for source in product]
    heads = ("pairs /1,000", "notes /1,000", f"> {LONG_FUNCTION} lines", f"> {LONG_FILE} lines")
    print()
    _print_row("how it reads", *heads, f"> {MANY_PARAMETERS} given")
    _print_reading("product", (each for _, each in counts))
    for room in (*CORE, *EDGE):
        title = f"  {room.removeprefix(f'{EXTENSIONS}.')}"
        _print_reading(title, (each for place, each in counts if place == room))


def _print_reading(title: str, counts: Iterable[Legibility]) -> None:
    # Of all files together, a count is the sum of theirs.
    read = Legibility(*map(sum, zip(Legibility(), *counts, strict=True)))
    _print_row(
        title,
        read.per_thousand(read.pairs),
        read.per_thousand(read.comments),
        read.long_functions,
        read.long_files,
        read.many_parameters,
    )


def _print_row(title: str, *cells: int | str) -> None:
    texts = (cell if isinstance(cell, str) else f"{cell:,}" for cell in cells)
    print(f"{title:<18}" + "".join(f"{text:>13}" for text in texts))


if __name__ == "__main__":
    print_sizes(Path(sys.argv[1]) if sys.argv[1:] else ROOT)
