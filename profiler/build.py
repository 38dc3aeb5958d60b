"""`planner profile job.yaml`: stages that a function of the user's builds, `package.module:build_stage`."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError
from perseus_planner.profiler.modules.torch_stage import torch_stage
from perseus_planner.profiler.profiling import SweepSettings
from perseus_planner.profiler.ranks.meeting import TIMEOUT_S, Meeting, Place, local_rank, place_of, process_group
from perseus_planner.profiler.ranks.together import Block, LocalStage, Request, profiled_alone, profiled_together
from perseus_planner.training.microbatch import described
from perseus_planner.training.values import mapped

if TYPE_CHECKING:
    import torch

    from perseus_planner.gpu import Gpu
    from perseus_planner.profiler.stage import Progress, Stage
    from perseus_planner.profiles.profiles import Profile

Loss = Callable[[Any], Any]
_WANTED = "a torch module, a sample input of one microbatch, and the loss of the last stage or None"


@dataclass(frozen=True)
class Builder:
    """A user's function that builds stages.

    Attributes:
        text: how it was named, "package.module:function".
        function: the function.
    """

    text: str
    function: Callable[..., Any]

    @classmethod
    def named(cls, text: str, folder: Path | None = None) -> Builder:
        """Import the function that `text` names.

        Its module is looked up in `folder`, then in the current folder, then wherever Python finds modules.

        Raises:
            UsageError: If the module or the function does not exist, or the module cannot be imported.
        """
        name, colon, attribute = text.partition(":")
        if not (name and colon and attribute):
            raise UsageError(f"stage {text!r} names no function: write package.module:build_stage")
        folders = [str(each) for each in dict.fromkeys([(folder or Path()).resolve(), Path.cwd()])]
        sys.path[:0] = [each for each in folders if each not in sys.path]
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                raise UsageError(
                    f"stage {text!r}: there is no module {error.name!r} in {', in '.join(folders)} or on sys.path"
                ) from None
            raise UsageError(f"stage {text!r}: importing {name} failed: {_told(error)}") from error
        except Exception as error:  # whatever their code raises
            raise UsageError(f"stage {text!r}: importing {name} failed: {_told(error)}") from error
        function = getattr(module, attribute, None)
        if not callable(function):
            raise UsageError(f"stage {text!r}: {name} has no function {attribute!r}; define it, or name another")
        return cls(text, function)

    def built(self, place: Place) -> tuple[torch.nn.Module, object, Loss | None]:
        """The module, sample input and loss at `place`; the function is given those arguments of it that it takes.

        Raises:
            UsageError: the function raises, or returns something else.
        """
        arguments = {name: getattr(place, name) for name in ("stage", "stages", "tensor_rank", "tensor_parallel")}
        parameters = inspect.signature(self.function).parameters
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            arguments = {name: value for name, value in arguments.items() if name in parameters}
        try:
            built = self.function(**arguments)
        except Exception as error:  # whatever their code raises
            raise UsageError(f"{self._called(place)} failed: {_told(error)}") from error
        return self._checked(built, place)

    def _checked(self, built: object, place: Place) -> tuple[torch.nn.Module, object, Loss | None]:
        import torch

        match built:
            case (torch.nn.Module() as module, inputs, loss) if loss is None or callable(loss):
                return module, inputs, loss
        kinds = ", ".join(type(each).__name__ for each in built) if isinstance(built, tuple) else type(built).__name__
        raise UsageError(f"{self._called(place)} returned {kinds}; return {_WANTED}")

    def _called(self, place: Place) -> str:
        return f"{self.text} for stage {place.stage} of {place.stages}"


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
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
) -> Profile | None:
    """Measure all stages of a pipeline: one after the other in one process; as a rank of a job, this rank's stage.

    Under torchrun or the deepspeed launcher there is one rank for each GPU of the pipeline, stage by stage, and only
    rank 0 gets the profile; the others get None.

    Args:
        build: "package.module:function". The function is called with those of the named arguments stage, stages,
            tensor_rank and tensor_parallel that it takes, and returns a torch module, a sample input as in
            `torch_stage`, and the loss of the last stage or None.
        gpu: as in `torch_device.gpu_text`, for each rank.
        stages: how many, at least 1.
        folder: where the module of `build` is looked up first: the folder of the job file that names it. The current
            folder, and wherever Python finds modules, come after it.
        tensor_parallel: GPUs of each stage; more than one need a rank each.
        split_backward: as in `torch_stage`.
        settings: of the sweep; the defaults where None.
        output: the profile to write, .yaml; None: it is not written, and no finished rows are kept.
        resume: go on from finished rows beside `output`.
        blocking_power_w: of one GPU, watts, instead of what is measured. In one process nothing can be measured on a
            real GPU, for there is no neighbour to wait for.
        timeout_s: after how long without a sign of life a rank is taken for dead, seconds.
        progress: told of this rank's rows.

    Raises:
        UsageError: `build` is no such function, or the ranks do not fit the pipeline.
        RankError: another rank has ended.
        GpuError, ProfileError: as `measure_stage`.
    """
    _refuse_without_torch()
    request = Request(gpu, settings or SweepSettings(), output, resume, blocking_power_w, timeout_s, progress)
    with process_group() as rank:
        device = _device(gpu)
        if rank is None:
            if tensor_parallel != 1:
                raise UsageError(
                    f"tensor_parallel is {tensor_parallel}: the GPUs of a stage are measured together, one rank each; "
                    f"start with torchrun, {stages * tensor_parallel} ranks in all"
                )
            places = [Place(stage, stages) for stage in range(stages)]
            builder = Builder.named(build, folder)
            local = [_local(builder, place, device, split_backward) for place in places]
            return profiled_alone(local, request, device)
        with Meeting(timeout_s) as meeting:
            place = place_of(*rank, stages, tensor_parallel)
            stage = _local(Builder.named(build, folder), place, device, split_backward)
            return profiled_together(meeting, [stage], place.tensor_rank, request, device)


def _refuse_without_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError("stages are torch modules: pip install 'perseus-planner[torch]'") from error


def _device(gpu: str) -> torch.device:
    import torch

    if torch.cuda.is_available() and "simulated:" not in gpu:
        torch.cuda.set_device(local_rank())
        return torch.device("cuda", local_rank())
    return torch.device("cpu")


def _local(builder: Builder, place: Place, device: torch.device, split_backward: bool) -> LocalStage:
    @contextmanager
    def opened(gpu: Gpu, block: Block | None) -> Iterator[Stage]:
        module, inputs, loss = builder.built(place)
        module, inputs = module.to(device), mapped(lambda each: each.to(device), inputs)
        first = place.stage == 0
        with torch_stage(gpu, module, inputs, loss, first=first, split_backward=split_backward, block=block) as stage:
            yield stage

    return LocalStage(place.stage, opened)


def _told(error: Exception) -> str:
    """What an exception of their code says, and the line of it that raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {described(error)}"
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not _is_foreign(each.filename)]
    place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{place}{described(error)}"


def _is_foreign(file: str) -> bool:
    """Whether it is of Python, of an installed package, or of the planner, which is none of theirs."""
    return file.startswith("<") or "site-packages" in file or file in (__file__, importlib.__file__) or _standard(file)


def _standard(file: str) -> bool:
    return Path(file).is_relative_to(Path(inspect.__file__).parent)
