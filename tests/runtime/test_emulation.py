"""Training on emulated GPUs gives the same results as without, and takes as long as the profile
predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from virtual_time import VirtualTime
from virtual_time import virtual_time as virtual_time

from perseus_planner import Profile
from perseus_planner.base.errors import UsageError
from perseus_planner.engines.microbatch import stage_op_cost
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.emulated import EmulatedGpu, open_emulated
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.profiler.torch_stage import torch_stage
from perseus_planner.runtime.emulation import emulate, emulate_stage

torch = pytest.importorskip("torch")
nn = torch.nn

from launching import ranks  # noqa: E402

WIDTH = 64


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would wait for each other where other tests use the processors
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    with closing(open_emulated("a100-sxm/0?slower=200000")) as found:
        yield found


class Recomputed(nn.Module):
    """A module that recomputes its forward in the backward, with random numbers."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.GELU())
        self.reentrant = reentrant

    def forward(self, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=self.reentrant)


class Two(nn.Module):
    """A module that also takes a mask, and returns two tensors with gradients, and the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, mask: Any) -> Any:
        return self.one(x * mask), {"other": self.other(x)}, mask


def plain() -> Any:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)
    )


def mean_square(output: Any) -> Any:
    return output.square().mean()


MODULES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None, bool]] = {
    "in the middle": (plain, None, False),
    "first": (plain, None, True),
    "last": (plain, mean_square, False),
    "recomputed": (partial(Recomputed, reentrant=False), None, False),
    "recomputed, reentrant": (partial(Recomputed, reentrant=True), None, False),
}


def sample(*, first: bool) -> Any:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_(
        not first
    )


def backward(output: Any, loss: Callable[[Any], Any] | None) -> None:
    (output.square().sum() if loss is None else loss(output)).backward()


def trained(module: Any, loss: Callable[[Any], Any] | None, *, first: bool) -> list[Any]:
    """Return outputs, gradients and buffers of three microbatches, and a random number after
    them.
    """
    results: list[Any] = []
    for _ in range(3):
        x = sample(first=first)
        output = module(x)
        results.append(output.detach().clone())
        backward(output, loss)
        results += [x.grad] if x.grad is not None else []
    return [
        *results,
        *(each.grad for each in module.parameters()),
        *module.state_dict().values(),
        torch.rand(1),
    ]


@pytest.mark.parametrize("name", MODULES)
def test_outputs_gradients_and_random_state_are_the_same_to_the_last_bit(
    gpu: EmulatedGpu, name: str
):
    build, loss, first = MODULES[name]
    results = []
    for context in (nullcontext, partial(emulate_stage, gpu=gpu, loss=loss, first=first)):
        torch.manual_seed(0)
        module = build()
        before = dict(vars(module))
        with context(module) if context is not nullcontext else nullcontext():
            results.append(trained(module, loss, first=first))
        hooks = [
            vars(module)[each]
            for each in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        ]
        assert not any(hooks)
        assert vars(module).keys() == before.keys()
    assert len(results[0]) == len(results[1])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", MODULES)
def test_the_work_is_what_a_profile_measures(gpu: EmulatedGpu, name: str):
    build, loss, first = MODULES[name]
    module = build()
    work = stage_op_cost(module, sample(first=first), loss, first=first)
    with (
        open_gpu(gpu.simulated_text) as simulated,
        torch_stage(simulated, module, sample(first=first), loss, first=first) as stage,
    ):
        for kind, counted in (("F", work.forward), ("B", work.backward)):
            seconds = []
            for each in (
                (stage.runs[kind], stage.runs["F"])
                if stage.runs[kind].includes
                else (stage.runs[kind],)
            ):
                start_s = simulated.now_s()
                each.run(1)
                seconds.append(simulated.now_s() - start_s)
            profiled_s = seconds[0] - sum(seconds[1:])
            assert gpu.model.load(counted).time_s(1410) == pytest.approx(profiled_s, rel=0.01)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("clock_mhz", [1410, 420])
def test_forward_and_backward_take_as_long_as_the_gpu_says_at_its_clock(
    virtual_time: VirtualTime, gpu: EmulatedGpu, name: str, clock_mhz: int
):
    build, loss, first = MODULES[name]
    module = build()
    expected_s = [
        gpu.model.load(work).time_s(clock_mhz)
        for work in stage_op_cost(module, sample(first=first), loss, first=first)
    ]
    gpu.set_clock_mhz(clock_mhz)
    gpu.wait(2e-3)
    assert min(expected_s) > 0.01
    assert max(expected_s) < 0.2
    with emulate_stage(module, gpu, loss=loss, first=first):
        backward(module(sample(first=first)), loss)  # counts the work
        x, moments_s = sample(first=first), [gpu.now_s()]
        output = module(x)
        moments_s.append(gpu.now_s())
        backward(output, loss)
        moments_s.append(gpu.now_s())
    assert [*np.diff(moments_s)] == pytest.approx(expected_s, rel=1e-3)


def test_several_outputs_are_one_backward(virtual_time: VirtualTime, gpu: EmulatedGpu):
    module, mask = Two(), torch.ones(WIDTH, WIDTH)
    expected_s = gpu.model.load(stage_op_cost(module, (sample(first=False), mask)).backward).time_s(
        1410
    )
    with emulate_stage(module, gpu):
        one, two, _ = module(sample(first=False), mask)
        for retain in (True, False):  # a graph that is kept takes its time again
            start_s = gpu.now_s()
            torch.autograd.backward([one.sum(), two["other"].sum()], retain_graph=retain)
            assert gpu.now_s() - start_s == pytest.approx(expected_s, rel=1e-3)


def test_other_shapes_are_other_work(virtual_time: VirtualTime, gpu: EmulatedGpu):
    module = plain()
    with emulate_stage(module, gpu):
        module(torch.randn(8, WIDTH))
        small = stage_op_cost(module, torch.randn(8, WIDTH)).forward
        large = stage_op_cost(module, torch.randn(64, WIDTH)).forward
        module(torch.randn(64, WIDTH))
        for rows, work in ((8, small), (64, large), (8, small)):
            start_s = gpu.now_s()
            module(torch.randn(rows, WIDTH))
            assert gpu.now_s() - start_s == pytest.approx(
                gpu.model.load(work).time_s(1410), rel=1e-3
            )


def test_evaluation_is_left_alone(gpu: EmulatedGpu):
    module = plain().eval()
    with emulate_stage(module, gpu), torch.no_grad():
        state = gpu._shared.read()
        module(sample(first=True))
        assert gpu._shared.read() == state


def test_a_stage_that_fails_leaves_the_next_microbatch_as_it_was(gpu: EmulatedGpu):
    module = plain()
    with emulate_stage(module, gpu):
        module(sample(first=False))
        with pytest.raises(
            UsageError, match=r"cannot be run on its sample input: RuntimeError: (addmm: )?mat1"
        ):
            module(torch.randn(WIDTH, WIDTH + 1))
        backward(module(sample(first=False)), None)
    assert not module._forward_hooks


# Which GPU, which engine


def test_without_a_number_it_is_the_gpu_of_the_local_rank(monkeypatch: pytest.MonkeyPatch):
    cpu, text = torch.device("cpu"), "emulated:a100-sxm?slower=2000"
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(
        UsageError, match="LOCAL_RANK is not set; start this with torchrun, or write a number"
    ):
        gpu_text(text, cpu)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert gpu_text(text, cpu) == "emulated:a100-sxm/3?slower=2000"
    assert gpu_text(f"dry-run:{text}", cpu) == "dry-run:emulated:a100-sxm/3?slower=2000"
    assert gpu_text("emulated:a100-sxm/1", cpu) == "emulated:a100-sxm/1"


def test_what_is_no_engine_is_refused():
    refused = pytest.raises(
        UsageError, match="emulate was given a Linear; give it a DeepSpeed PipelineEngine,"
    )
    with refused, emulate(nn.Linear(1, 1), "emulated:a100-sxm/0"):
        pass


def test_an_emulated_gpu_is_not_profiled_in_real_time(gpu: EmulatedGpu):
    with (
        pytest.raises(
            UsageError,
            match=r"runs in real time; profile 'simulated:a100-sxm\?slower=200000&noise=0",
        ),
        torch_stage(gpu, plain(), sample(first=False)),
    ):
        pass


@pytest.mark.parametrize(
    "engine", ["torch", "interleaved", pytest.param("deepspeed", marks=pytest.mark.soak)]
)
def test_an_engine_trains_as_without_and_draws_what_the_profile_says(engine: str, tmp_path: Path):
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    imports = ["deepspeed.pipe"] if engine == "deepspeed" else []
    ended = ranks("emulation_programs:train", 2, tmp_path, engine, imports=imports)
    assert [(each.code, each.stderr) for each in ended] == [(0, "")] * 2
    assert Profile.load(tmp_path / "profile.yaml").gpu == "simulated a100-sxm slower=20000"


@pytest.mark.soak
def test_each_mode_draws_what_the_profile_says_of_it(tmp_path: Path):
    ended = ranks("emulation_programs:modes", 2, tmp_path)
    assert [(each.code, each.stderr) for each in ended] == [(0, "")] * 2


def test_a_schedule_that_splits_its_backwards_is_refused(tmp_path: Path):
    ended = ranks("emulation_programs:split", 2, tmp_path)
    assert [each.code for each in ended] == [0, 0], ended
