"""Profile stages that a function of the user's builds, named "package.module:build_stage"."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError, how_to_install
from perseus_planner.engines.microbatch import describe_error
from perseus_planner.engines.torch_state import map_tensors
from perseus_planner.profiler.ranks.group import (
    RankGroup,
    RankPosition,
    local_rank,
    position_of,
    process_group,
)
from perseus_planner.profiler.ranks.measure import (
    LocalStage,
    ProfileRequest,
    measure_alone,
    measure_with_ranks,
)
from perseus_planner.profiler.sweep import SweepSettings
from perseus_planner.profiler.torch_stage import torch_stage

if TYPE_CHECKING:
    import torch

    from perseus_planner.gpu import Gpu
    from perseus_planner.profiler.again import Again
    from perseus_planner.profiler.stage import Block, Progress, Repeating, Stage
    from perseus_planner.profiles.profiles import Profile

Loss = Callable[[Any], Any]
_WANTED = "a torch module, a sample input of one microbatch, and the loss of the last stage or None"


@dataclass(frozen=True)
class StageBuilder:
    """A user's function that builds stages."""

    text: str  #: Its name, "package.module:function"
    function: Callable[..., Any]  #: The function
    #: Returns the modes of a module; None for one way of running.
    modes: Callable[[Any], Mapping[str, Callable[[], None]]] | None = None

    @classmethod
    def load(cls, text: str, folder: Path | None = None, modes: str | None = None) -> StageBuilder:
        """Import the function that `text` names, and the one that `modes` names.

        Its module is looked up in `folder`, then in the current folder, then wherever Python finds
        modules.

        Raises:
            UsageError: If the module or the function does not exist, or the module cannot be
                imported.
        """
        name, colon, attribute = text.partition(":")
        if not (name and colon and attribute):
            raise UsageError(f"{text!r} does not name a function; write package.module:function")
        # Looked up here first, as a script run from its folder would.
        folders = [str(path) for path in dict.fromkeys([(folder or Path()).resolve(), Path.cwd()])]
        sys.path[:0] = [path for path in folders if path not in sys.path]
        try:
            module = importlib.import_module(name)
        # The module itself is missing, or one that it imports.
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                raise UsageError(
                    f"function {text!r}: there is no module {error.name!r} in "
                    f"{', in '.join(folders)} or on sys.path"
                ) from None
            raise UsageError(
                f"function {text!r}: importing {name} failed: {_reason(error)}"
            ) from error
        except Exception as error:  # the user's code may raise anything
            raise UsageError(
                f"function {text!r}: importing {name} failed: {_reason(error)}"
            ) from error
        function = getattr(module, attribute, None)
        if not callable(function):
            raise UsageError(
                f"function {text!r}: {name} has no function {attribute!r}; define it, or name "
                "another"
            )
        of_modes = None if modes is None else cls.load(modes, folder).function
        return cls(text, function, of_modes)

    def build(self, position: RankPosition) -> tuple[torch.nn.Module, object, Loss | None]:
        """Return the module, sample input and loss at `position`.

        The function is called with those of the named arguments stage, stages, tensor_rank and
        tensor_parallel that it takes.

        Raises:
            UsageError: If the function raises, or returns something else.
        """
        arguments = {
            name: getattr(position, name)
            for name in ("stage", "stages", "tensor_rank", "tensor_parallel")
        }
        # A function need not take all of these; one with `**kwargs` gets all.
        parameters = inspect.signature(self.function).parameters
        if not any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
        ):
            arguments = {name: value for name, value in arguments.items() if name in parameters}
        try:
            built = self.function(**arguments)
        except Exception as error:  # the user's code may raise anything
            raise UsageError(f"{self._call_text(position)} failed: {_reason(error)}") from error
        return self._checked(built, position)

    def _checked(
        self, built: object, position: RankPosition
    ) -> tuple[torch.nn.Module, object, Loss | None]:
        import torch

        match built:
            case (torch.nn.Module() as module, inputs, loss) if loss is None or callable(loss):
                return module, inputs, loss
        # The error names what was returned, part by part.
        kinds = (
            ", ".join(type(part).__name__ for part in built)
            if isinstance(built, tuple)
            else type(built).__name__
        )
        raise UsageError(f"{self._call_text(position)} returned {kinds}; return {_WANTED}")

    def _call_text(self, position: RankPosition) -> str:
        return f"{self.text} for stage {position.stage} of {position.stages}"


def profile_stages(
    build: str,
    gpu: str,
    stages: int,
    *,
    folder: Path | None = None,
    tensor_parallel: int = 1,
    split_backward: bool = False,
    settings: SweepSettings | None = None,
    output: Path | None = None,
    resume: bool = False,
    blocking_power_w: float | None = None,
    progress: Progress | None = None,
    modes: str | None = None,
    again: Again | None = None,
) -> Profile | None:
    """Measure all stages of a pipeline: one after the other in one process, or this rank's stage as
    a rank of a job.

    Under torchrun or the deepspeed launcher there is one rank for each GPU of the pipeline, stage
    by stage. Only rank 0 gets the profile; the others get None.

    Args:
        build: The function that builds a stage, "package.module:function". It is called with those
            of the named arguments stage, stages, tensor_rank and tensor_parallel that it takes, and
            returns a torch module, a sample input as in `torch_stage`, and the loss of the last
            stage or None.
        gpu: Each rank's GPU, as in `torch_device.gpu_text`.
        stages: The number of stages, at least 1.
        folder: The folder to look for the module of `build` in, before the current folder.
        tensor_parallel: The number of GPUs that share a stage; more than one need a rank each.
        split_backward: As in `torch_stage`.
        settings: How to measure; the defaults if None.
        output: The profile to write, .yaml; None to write neither it nor finished rows.
        resume: Whether to go on from the finished rows beside `output`.
        blocking_power_w: Power of one waiting GPU, watts, instead of what is measured. Needed in
            one process on a real GPU, which has no neighbour to wait for.
        progress: Called with this rank's rows.
        modes: The function, "package.module:function", that returns the modes of a stage, given its
            module, as `planner_runtime` takes them; None for one way of running.
        again: The plan whose rows alone are measured, and the profile that they are joined to.

    Raises:
        UsageError: If `build` or `modes` cannot be used, or the ranks do not fit the pipeline.
        RankError: If another rank has ended.
        GpuError, ProfileError: As in `measure_stage`.
    """
    require_torch()
    request = ProfileRequest(
        gpu, settings or SweepSettings(), output, resume, blocking_power_w, progress, again=again
    )
    with process_group() as rank:
        device = torch_device(gpu)
        # No rank of a job: all stages in this process, one after the other.
        if rank is None:
            if tensor_parallel != 1:
                raise UsageError(
                    f"tensor_parallel is {tensor_parallel}: the GPUs of a stage are measured "
                    f"together, one rank each; start with torchrun, {stages * tensor_parallel} "
                    "ranks in all"
                )
            builder = StageBuilder.load(build, folder, modes)
            positions = [RankPosition(stage, stages) for stage in range(stages)]
            local = [
                _local_stage(builder, position, device, split_backward) for position in positions
            ]
            return measure_alone(local, request, device)
        with RankGroup(request.settings.repetition_s) as group:
            position = position_of(*rank, stages, tensor_parallel)
            stage = _local_stage(
                StageBuilder.load(build, folder, modes), position, device, split_backward
            )
            return measure_with_ranks(group, [stage], position.tensor_rank, request, device)


def require_torch() -> None:
    """Check that torch is installed.

    Raises:
        UsageError: If it is not.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError(f"stages are torch modules: {how_to_install('torch')}") from error


def torch_device(gpu: str) -> torch.device:
    """Return the device that this process computes on, and make it torch's current one; the CPU
    for a simulated GPU.
    """
    import torch

    if torch.cuda.is_available() and "simulated:" not in gpu:
        torch.cuda.set_device(local_rank())
        return torch.device("cuda", local_rank())
    return torch.device("cpu")


def _local_stage(
    builder: StageBuilder, position: RankPosition, device: torch.device, split_backward: bool
) -> LocalStage:
    @contextmanager
    def opened(gpu: Gpu, block: Block | None, repeating: Repeating) -> Iterator[Stage]:
        module, inputs, loss = builder.build(position)
        module = module.to(device)
        inputs = map_tensors(lambda tensor: tensor.to(device), inputs)
        first = position.stage == 0
        with torch_stage(
            gpu,
            module,
            inputs,
            loss,
            first=first,
            split_backward=split_backward,
            block=block,
            repeating=repeating,
            modes=None if builder.modes is None else builder.modes(module),
        ) as stage:
            yield stage

    return LocalStage(position.stage, opened)


def _reason(error: Exception) -> str:
    """Return the text of an exception of the user's code, after the line of that code that
    raised it.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {describe_error(error)}"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)
    ]
    line = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{line}{describe_error(error)}"


def _is_users(file: str) -> bool:
    """Return whether a file belongs to the user: not to Python, an installed package or the
    planner.
    """
    if file.startswith("<") or "site-packages" in file or file in (__file__, importlib.__file__):
        return False
    return not Path(file).is_relative_to(Path(inspect.__file__).parent)
