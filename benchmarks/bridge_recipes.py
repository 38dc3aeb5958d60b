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
from perseus_planner.engines.megatron import _check_visible
from perseus_planner.engines.megatron_graphs import is_one_graph
from perseus_planner.schedules.layouts import Layout, unroll

_RECIPES = "megatron.bridge.perf_recipes"
_READ = ("pipeline_model_parallel_size", "cuda_graph_impl", "cuda_graph_scope", "overlap_moe")
"""What an unknown branch must not set for a recipe to count as read."""
_LAYOUT = "pipeline_model_parallel_layout"
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
    is_layout_doubtful: bool = False  #: or may set its layout

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

    def constant(self, module: str, name: str) -> ast.expr | None:
        """Return what a module assigns to a name."""
        found = self.names.get(module, {}).get(name)
        return found if isinstance(found, ast.expr) else None

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
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = node.value  # a constant, read where it is used
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
        for value in self._locals.values():
            if isinstance(value, Config):
                value.is_doubtful |= any(name in text for name in _READ)
                value.is_layout_doubtful |= _LAYOUT in text

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._locals[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self._value(target.value)
            if isinstance(owner, Config):
                owner.values[target.attr] = value
        elif isinstance(target, ast.Tuple) and isinstance(value, Sequence):
            for each, own in zip(target.elts, value, strict=False):
                self._assign(each, own)

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Set)):
            return [self._value(each) for each in node.elts]
        if isinstance(node, ast.Tuple):
            return tuple(self._value(each) for each in node.elts)
        if isinstance(node, ast.Name):
            return self._named(node.id)
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

    def _named(self, name: str) -> Any:
        if name in self._locals:
            return self._locals[name]
        constant = self._wheel.constant(self._module, name)
        return UNKNOWN if constant is None else self._value(constant)

    def _collected(self, node: ast.expr) -> Any:
        """Return the value of what makes or reads lists and dictionaries, such as layouts by
        numbers of stages.
        """
        if isinstance(node, ast.Dict) and None not in node.keys:
            keys = [self._value(each) for each in node.keys if each is not None]
            if all(isinstance(key, (str, int, tuple)) for key in keys):
                return dict(zip(keys, map(self._value, node.values), strict=True))
        if isinstance(node, ast.Subscript):
            owner = self._value(node.value)
            key = self._value(node.slice)
            if isinstance(owner, dict) and not isinstance(key, (Unknown, Config, list)):
                return owner.get(key, UNKNOWN)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            left = self._value(node.left)
            right = self._value(node.right)
            is_sum = isinstance(node.op, ast.Add)
            if is_sum and isinstance(left, list) and isinstance(right, list):
                return left + right
            if not is_sum and isinstance(left, list) and isinstance(right, int):
                return left * right
        if isinstance(node, ast.ListComp) and len(node.generators) == 1:
            each = node.generators[0]
            values = self._value(each.iter)
            if isinstance(values, list) and not each.ifs:
                return [self._with(each.target, value, node.elt) for value in values]
        return UNKNOWN

    def _with(self, target: ast.expr, value: Any, node: ast.expr) -> Any:
        self._assign(target, value)
        return self._value(node)

    def _operation(self, node: ast.expr) -> Any:
        if isinstance(node, (ast.Dict, ast.Subscript, ast.BinOp, ast.ListComp)):
            return self._collected(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self._value(node.operand)
            return UNKNOWN if isinstance(value, (Unknown, Config)) else not value
        if isinstance(node, ast.BoolOp):
            return self._decided(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left = self._value(node.left)
            right = self._value(node.comparators[0])
            if isinstance(left, (Unknown, Config)) or isinstance(right, (Unknown, Config)):
                return UNKNOWN
            if isinstance(node.ops[0], (ast.Is, ast.Eq)):
                return left == right
            if isinstance(node.ops[0], (ast.IsNot, ast.NotEq)):
                return left != right
            if isinstance(right, (list, str, dict)):
                if isinstance(node.ops[0], ast.In):
                    return left in right
                if isinstance(node.ops[0], ast.NotIn):
                    return left not in right
        return UNKNOWN

    def _decided(self, node: ast.BoolOp) -> Any:
        """Return the value of an `and` or `or`; whether it is true where only that is known."""
        values = [self._value(each) for each in node.values]
        is_and = isinstance(node.op, ast.And)
        is_known = True
        for value in values:
            if isinstance(value, (Unknown, Config)):
                is_known = False
            elif bool(value) != is_and:  # it decides
                return value if is_known else not is_and
        return values[-1] if is_known else UNKNOWN

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
        if name == "list" and len(given) == 1 and isinstance(given[0], (list, tuple)):
            return [*given[0]]
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
    layout: str | None  #: in Megatron's letters; None for none, or one that was not read


_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def layout_of(model: Config) -> str | None:
    """Return the layout of a model, in letters; None for none, or one that was not read."""
    given = model.values.get(_LAYOUT)
    if model.is_layout_doubtful:
        return None
    if isinstance(given, list):
        stages = [each for stage in given for each in [stage if isinstance(stage, list) else None]]
        if None in stages or not all(word in _LETTERS for stage in stages for word in stage):
            return None
        given = "|".join("".join(_LETTERS[word] for word in stage) for stage in stages)
    return str(Layout(unroll(given))) if isinstance(given, str) and given else None


def configured(wheel: Wheel, module: str, name: str) -> Any:
    """Return the config of a recipe."""
    found = wheel.function(module, name)
    assert found is not None
    return Reader(wheel, module).call(found[1], (), {})


def read(wheel: Wheel, module: str, name: str) -> Recipe | None:
    """Return a recipe that has a pipeline; None if it has none."""
    config = configured(wheel, module, name)
    family = module.removeprefix(f"{_RECIPES}.").split(".")[0]
    unread = Recipe(family, name, 0, UNREAD, False, False, False, None)
    if not isinstance(config, Config):
        return unread
    model = config.get("model")
    overlap = config.get("comm_overlap")
    if not isinstance(model, Config):
        return unread
    ranks = model.values.get("pipeline_model_parallel_size", 1)
    if not isinstance(ranks, int):
        return unread
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
    is_graph = is_one_graph(megatron)
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
    layout = model.values.get(_LAYOUT)
    has_layout = layout is not None and not isinstance(layout, Config)
    overlaps_experts = overlapped is True
    layout_text = layout_of(model)
    return Recipe(family, name, ranks, way, overlaps_experts, is_graph, has_layout, layout_text)


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
