"""Python loads this when it starts under `planner run`, in place of another `sitecustomize`, which
this loads in turn.

It runs in every Python process of a job, so it imports nothing and raises nothing of its own.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing it from `typing` takes longer than all that is done here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.abspath(
    os.path.join(_FOLDER, *[os.pardir] * 4)
)  #: of the package that this file belongs to
_ENGINES = (
    "deepspeed.runtime.pipe.engine",
    "megatron.core.pipeline_parallel.schedules",
    "torch.distributed.pipelining.schedules",
    "torch.optim.optimizer",
)


class _EngineFinder:
    """Finds the modules of training engines as other finders do, and has them wrapped when they
    have been loaded.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _ENGINES:
            return None
        others = [
            finder.find_spec
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        ]
        spec = next(
            (other_spec for find in others if (other_spec := find(name, path, target)) is not None),
            None,
        )
        if spec is not None:
            _wrap_when_loaded(spec.loader)
        return spec


def _wrap_when_loaded(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # of the instance
        execute(module)
        _wrap(module)

    loader.exec_module = exec_module


def _wrap(module: ModuleType) -> None:
    try:
        try:
            import perseus_planner.base  # noqa: F401
        except ModuleNotFoundError:  # this is not the environment of `planner run`
            sys.path.append(_ROOT)
        from perseus_planner.runtime.unmodified.training import wrap

        wrap(module)
    except Exception as error:
        if os.environ.get("RANK", "0") == "0":
            text = f"{module.__name__} cannot be followed: {type(error).__name__}: {error}"
            print(f"planner: {text}; training goes on without the planner", file=sys.stderr)


def _load_next() -> None:
    """Load the `sitecustomize` that this file hides, if there is one."""
    this = sys.modules.pop(__name__)
    try:
        import sitecustomize  # type: ignore[import-not-found, unused-ignore] # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules[__name__] = this


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _EngineFinder())
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _FOLDER]
    _load_next()
