"""Puts the performance recipes of a wheel of Megatron-Bridge through the adapter's own check: how a
plan of each can be followed.

    pip download --no-deps --python-version 3.12 --only-binary=:all: megatron-bridge
    python benchmarks/bridge_recipes.py megatron_bridge-0.6.2-py3-none-any.whl [FILE.json]

Nothing of the wheel is imported or run: its recipes are read as syntax trees, and the assignments
to their configs are followed through the functions of the wheel that they call. What depends on a
value that is not in the wheel stays unknown; a recipe whose pipeline or graphs depend on one counts
as unread.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from perseus_planner.base.errors import UsageError
from perseus_planner.engines.megatron import _check_visible, _is_one_graph

_RECIPES = "megatron.bridge.perf_recipes"
_READ = ("pipeline_model_parallel_size", "cuda_graph_impl", "cuda_graph_scope", "overlap_moe")
"""What an unknown branch must not set for a recipe to count as read."""
_MOST_CALLS = 12  #: deep
HOOKS, TIME, REFUSED, UNREAD = "hooks", "by time", "refused", "unread"


class Unknown:
    """A value that is not in the wheel."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()


@dataclass
class Config:
    """A config, by what was assigned to it."""

    values: dict[str, Any] = field(default_factory=dict)
    is_doubtful: bool = False  #: whether an unknown branch sets something that matters

    def get(self, name: str) -> Any:
        """Return an attribute; a config of its own if nothing was assigned to it."""
        return self.values.setdefault(name, Config())


class Wheel:
    """The modules of a wheel, as syntax trees."""

    def __init__(self, path: Path) -> None:
        self.modules: dict[str, ast.Module] = {}
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.startswith("megatron/bridge/") and name.endswith(".py"):
                    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                    self.modules[module] = ast.parse(archive.read(name))
        self.names = {module: _names(tree) for module, tree in self.modules.items()}

    def function(self, module: str, name: str) -> tuple[str, ast.FunctionDef] | None:
        """Return a function that a module has or imports, with the module that defines it."""
        for _ in range(_MOST_CALLS):
            found = self.names.get(module, {}).get(name)
            if isinstance(found, ast.FunctionDef):
                return module, found
            if not isinstance(found, tuple):
                return None
            module, name = found
        return None

    def recipes(self) -> list[tuple[str, str]]:
        """Return module and name of each performance recipe, each once."""
        return sorted(
            (module, name)
            for module, names in self.names.items()
            if module.startswith(_RECIPES)
            for name, found in names.items()
            if isinstance(found, ast.FunctionDef)
            and name.endswith("_config")
            and not name.startswith("_")
            and not found.args.args
        )


def _names(tree: ast.Module) -> dict[str, Any]:
    """Return what a module defines or imports, by name."""
    names: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = node.module, alias.name
    return names


class Reader:
    """Follows a function of the wheel."""

    def __init__(self, wheel: Wheel, module: str, depth: int = 0) -> None:
        self._wheel = wheel
        self._module = module
        self._depth = depth
        self._locals: dict[str, Any] = {}
        self._returned: Any = None
        self._has_returned = False

    def call(
        self, function: ast.FunctionDef, given: Sequence[Any], named: Mapping[str, Any]
    ) -> Any:
        """Return what a function returns."""
        arguments = function.args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        defaults = dict(
            zip(names[len(names) - len(arguments.defaults) :], arguments.defaults, strict=True)
        )
        pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        defaults |= {each.arg: value for each, value in pairs if value is not None}
        self._locals = {name: self._value(value) for name, value in defaults.items()}
        self._locals |= dict(zip(names, given, strict=False)) | dict(named)
        self._run(function.body)
        return self._returned

    def _run(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            if self._has_returned:
                return
            self._step(statement)

    def _step(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign):
            value = self._value(statement.value)
            for target in statement.targets:
                self._assign(target, value)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._assign(statement.target, self._value(statement.value))
        elif isinstance(statement, ast.Expr):
            self._value(statement.value)
        elif isinstance(statement, ast.Return):
            self._returned = None if statement.value is None else self._value(statement.value)
            self._has_returned = True
        elif isinstance(statement, ast.If):
            test = self._value(statement.test)
            if isinstance(test, (Unknown, Config)):
                self._doubt(statement)
            else:
                self._run(statement.body if test else statement.orelse)

    def _doubt(self, statement: ast.If) -> None:
        """Note that a branch that is not taken may set something that matters."""
        text = "".join(ast.dump(each) for each in (*statement.body, *statement.orelse))
        if any(name in text for name in _READ):
            for value in self._locals.values():
                if isinstance(value, Config):
                    value.is_doubtful = True

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._locals[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self._value(target.value)
            if isinstance(owner, Config):
                owner.values[target.attr] = value
        elif isinstance(target, ast.Tuple) and isinstance(value, (list, tuple)):
            for each, own in zip(target.elts, value, strict=False):
                self._assign(each, own)

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [self._value(each) for each in node.elts]
        if isinstance(node, ast.Name):
            return self._locals.get(node.id, UNKNOWN)
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            return owner.get(node.attr) if isinstance(owner, Config) else _member(node)
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.IfExp):
            test = self._value(node.test)
            if isinstance(test, (Unknown, Config)):
                return UNKNOWN
            return self._value(node.body if test else node.orelse)
        return self._operation(node)

    def _operation(self, node: ast.expr) -> Any:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self._value(node.operand)
            return UNKNOWN if isinstance(value, (Unknown, Config)) else not value
        if isinstance(node, ast.BoolOp):
            values = [self._value(each) for each in node.values]
            known = [each for each in values if not isinstance(each, (Unknown, Config))]
            is_and = isinstance(node.op, ast.And)
            if is_and and not all(known):
                return False
            if not is_and and any(known):
                return True
            return is_and if len(known) == len(values) else UNKNOWN
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left = self._value(node.left)
            right = self._value(node.comparators[0])
            if isinstance(left, (Unknown, Config)) or isinstance(right, (Unknown, Config)):
                return UNKNOWN
            if isinstance(node.ops[0], (ast.Is, ast.Eq)):
                return left == right
            if isinstance(node.ops[0], (ast.IsNot, ast.NotEq)):
                return left != right
            if isinstance(node.ops[0], ast.In) and isinstance(right, (list, str)):
                return left in right
        return UNKNOWN

    def _called(self, node: ast.Call) -> Any:
        given = [self._value(each) for each in node.args]
        named = {each.arg: self._value(each.value) for each in node.keywords if each.arg}
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name in ("getattr", "hasattr") and given and isinstance(given[0], Config):
            if name == "hasattr":
                return given[1] in given[0].values
            return given[0].values.get(given[1], given[2] if len(given) > 2 else UNKNOWN)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("deepcopy", "copy"):
            return given[0] if given else UNKNOWN
        found = None if name is None else self._wheel.function(self._module, name)
        if found is not None and self._depth < _MOST_CALLS:
            module, function = found
            return Reader(self._wheel, module, self._depth + 1).call(function, given, named)
        return Config(dict(named))  # of a class, for all that is known


def _member(node: ast.Attribute) -> Any:
    """Return the name of a member of an enumeration, such as `CudaGraphScope.attn`."""
    return node.attr if isinstance(node.value, ast.Name) else UNKNOWN


@dataclass(frozen=True)
class Recipe:
    """How a plan of a recipe can be followed."""

    family: str
    name: str
    ranks: int  #: of a pipeline
    way: str
    is_overlapped: bool
    is_graph: bool
    has_layout: bool


def read(wheel: Wheel, module: str, name: str) -> Recipe | None:
    """Return a recipe that has a pipeline; None if it has none."""
    found = wheel.function(module, name)
    assert found is not None
    config = Reader(wheel, module).call(found[1], (), {})
    family = module.removeprefix(f"{_RECIPES}.").split(".")[0]
    if not isinstance(config, Config):
        return Recipe(family, name, 0, UNREAD, False, False, False)
    model = config.get("model")
    overlap = config.get("comm_overlap")
    if not isinstance(model, Config):
        return Recipe(family, name, 0, UNREAD, False, False, False)
    ranks = model.values.get("pipeline_model_parallel_size", 1)
    if not isinstance(ranks, int):
        return Recipe(family, name, 0, UNREAD, False, False, False)
    if ranks < 2:
        return None
    # Bridge copies the overlaps of its own config into the model's.
    overlaps = overlap.values if isinstance(overlap, Config) else {}
    name_of_overlap = "overlap_moe_expert_parallel_comm"
    overlapped = overlaps.get(name_of_overlap, model.values.get(name_of_overlap, False))
    megatron = SimpleNamespace(
        cuda_graph_impl=_plain(model.values.get("cuda_graph_impl")),
        cuda_graph_scope=_plain(model.values.get("cuda_graph_scope")),
        overlap_moe_expert_parallel_comm=overlapped is True,
        hybrid_context_parallel=model.values.get("hybrid_context_parallel") is True,
    )
    is_graph = _is_one_graph(megatron)
    way = HOOKS
    if is_graph:
        way = TIME
    else:
        try:
            _check_visible(megatron, ranks)
        except UsageError:
            way = REFUSED
    if config.is_doubtful or model.is_doubtful or isinstance(overlapped, Unknown):
        way = UNREAD
    layout = model.values.get("pipeline_model_parallel_layout")
    has_layout = layout is not None and not isinstance(layout, Config)
    return Recipe(family, name, ranks, way, overlapped is True, is_graph, has_layout)


def _plain(value: Any) -> Any:
    """Return a value that Megatron's config may have; None for what is not known."""
    return None if isinstance(value, (Unknown, Config)) else value


def table(recipes: Sequence[Recipe]) -> str:
    """Return the table of families."""
    ways = (HOOKS, TIME, REFUSED, UNREAD)
    families = sorted({recipe.family for recipe in recipes})
    lines = [
        f"| family | pipeline recipes | {' | '.join(ways)} | overlapped | graph |",
        f"|---|{'---:|' * (len(ways) + 3)}",
    ]
    for family in (*families, None):
        own = [recipe for recipe in recipes if family in (None, recipe.family)]
        counts = Counter(recipe.way for recipe in own)
        cells = [
            f"`{family}`" if family else "all",
            str(len(own)),
            *(str(counts[way]) for way in ways),
            str(sum(recipe.is_overlapped for recipe in own)),
            str(sum(recipe.is_graph for recipe in own)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print the table; write each recipe's row to a file if one is named."""
    wheel = Wheel(Path(arguments[0]))
    found = [read(wheel, *recipe) for recipe in wheel.recipes()]
    recipes = [recipe for recipe in found if recipe is not None]
    print(table(recipes))
    print(f"\n{len(found)} recipes, {len(recipes)} with a pipeline")
    if len(arguments) > 1:
        rows = [vars(recipe) for recipe in recipes]
        Path(arguments[1]).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
