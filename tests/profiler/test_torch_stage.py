"""A stage from a torch module: what each kind runs, and a module that is restored afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from perseus_planner.base.errors import UsageError
from perseus_planner.engines.microbatch import count_op_cost
from perseus_planner.engines.torch_state import preserve_state
from perseus_planner.gpu import Gpu, open_gpu
from perseus_planner.gpu.simulated.gpu import SimulatedGpu
from perseus_planner.gpu.simulated.model import CATALOG, OpCost
from perseus_planner.gpu.simulated.options import SimulationOptions
from perseus_planner.profiler.stage import Stage
from perseus_planner.profiler.torch_stage import torch_stage

torch = pytest.importorskip("torch")
nn = torch.nn

WIDTH, ROWS = 16, 4
# Matrix products of two layers, two operations each.
FORWARD = 2 * 2 * ROWS * WIDTH * WIDTH


class Busy:
    """A GPU that is not simulated: computations really run."""

    origin, name, text = "measured", "busy", "busy:0"


class Recorder(SimulatedGpu):
    """A simulated GPU that records the costs of what it runs."""

    def __init__(self) -> None:
        super().__init__(CATALOG["a100-sxm"], options=SimulationOptions(noise=0.0))
        self.works: list[Any] = []

    def run(self, work: Any, repetitions: int = 1) -> None:
        self.works.append(work)
        super().run(work, repetitions)

    def work_of(self, stage: Stage, kind: str) -> OpCost:
        stage.runs[kind].run(1)
        return self.works[-1]


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())


def sample() -> Any:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


class Recomputed(nn.Module):
    def __init__(self, part: Any, *, reentrant: bool) -> None:
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=self.reentrant)


class Counted(nn.Module):
    """Counts its forwards, and the backwards through its output."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part, self.forwards, self.backwards = part, 0, 0

    def forward(self, x: Any) -> Any:
        self.forwards += 1
        output = self.part(x)
        output.register_hook(self._note)
        return output

    def _note(self, _: Any) -> None:
        self.backwards += 1


class Once(torch.autograd.Function):
    """Frees what it has saved in its first backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.own = x
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gradient = 2 * ctx.own * gradient
        ctx.own = None
        return gradient


class Freeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = network()

    def forward(self, x: Any) -> Any:
        return Once.apply(self.part(x))


def work_of(module: Any, *kinds: str, **options: Any) -> list[OpCost]:
    gpu = Recorder()
    with torch_stage(gpu, module, sample(), **options) as stage:
        return [gpu.work_of(stage, kind) for kind in kinds]


def test_backward_has_twice_the_flops_of_forward() -> None:
    forward, backward = work_of(network(), "F", "B")
    assert (forward.flops, backward.flops) == (FORWARD, 2 * FORWARD)


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_with_recomputation_has_three_times_the_flops_of_forward(reentrant: bool) -> None:
    forward, backward = work_of(Recomputed(network(), reentrant=reentrant), "F", "B")
    assert (forward.flops, backward.flops) == (FORWARD, 3 * FORWARD)


def test_the_first_stage_computes_no_gradient_of_its_input() -> None:
    (backward,) = work_of(network(), "B", first=True)
    assert backward.flops == 2 * FORWARD - FORWARD / 2


def test_gradients_of_inputs_and_weights_are_the_backward_in_two_parts() -> None:
    whole, inputs, weights = work_of(network(), "B", "I", "W", split_backward=True)
    assert (inputs.flops, weights.flops) == (FORWARD, FORWARD)
    assert whole.flops == inputs.flops + weights.flops


def test_in_the_first_stage_the_gradient_of_weights_is_the_whole_backward() -> None:
    gpu = Recorder()
    with torch_stage(gpu, network(), sample(), first=True, split_backward=True) as stage:
        whole, weights = (gpu.work_of(stage, kind) for kind in "BW")
        assert weights == whole
        assert stage.without_work == ("I",)


def test_bytes_are_those_that_operators_read_and_write() -> None:
    a, b = torch.zeros(10), torch.zeros(10)
    assert count_op_cost(lambda: a + b).bytes == 3 * 40
    assert count_op_cost(lambda: a.view(2, 5).t()).bytes == 0


def test_attention_on_the_cpu_counts() -> None:
    q = torch.randn(2, 4, 16, 8)
    attention = nn.functional.scaled_dot_product_attention
    assert count_op_cost(lambda: attention(q, q, q)).flops == 2 * 2 * (2 * 4) * 16 * 16 * 8


@pytest.mark.skipif(
    not hasattr(nn.functional, "grouped_mm"), reason="this torch has no products in groups"
)
def test_experts_in_groups_count_as_in_a_loop() -> None:
    experts, each, width, hidden = 4, 16, 32, 48
    ends = torch.arange(each, experts * each + 1, each, dtype=torch.int32)

    def in_groups(tokens: Any, up: Any, down: Any) -> Any:
        inner = nn.functional.grouped_mm(tokens, up, offs=ends).relu()
        return nn.functional.grouped_mm(inner, down, offs=ends)

    def in_a_loop(tokens: Any, up: Any, down: Any) -> Any:
        parts = zip(tokens.chunk(experts), up, down, strict=True)
        return torch.cat([(part @ first).relu() @ second for part, first, second in parts])

    shapes = ((experts * each, width), (experts, width, hidden), (experts, hidden, width))
    tensors = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    once = 2 * 2 * experts * each * width * hidden
    flops = []
    for run in (in_groups, in_a_loop):
        outputs = []
        forward = count_op_cost(partial(lambda run, kept: kept.append(run(*tensors)), run, outputs))
        backward = count_op_cost(outputs[0].square().sum().backward)
        flops.append((forward.flops, backward.flops))
    assert flops[0] == flops[1] == (once, 2 * once)
    three = torch.randn(experts, each, width).bfloat16()
    wide = torch.randn(width, experts * 8).bfloat16()
    columns = torch.arange(8, experts * 8 + 1, 8, dtype=torch.int32)
    product = partial(nn.functional.grouped_mm, three, wide, offs=columns)
    assert count_op_cost(product).flops == 2 * experts * each * width * 8


def test_a_product_whose_flops_are_not_known_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    with torch.no_grad(), pytest.raises(UsageError) as refused:
        count_op_cost(lambda: layer(torch.randn(2, 6, 32)))
    assert str(refused.value) == (
        "the FLOPs of the operator aten::_transformer_encoder_layer_fwd are not known, so this "
        "stage cannot run on a simulated GPU; measure it on a GPU, or use another operator"
    )


def test_time_on_a_simulated_gpu_is_the_models() -> None:
    gpu = Recorder()
    with torch_stage(gpu, network(), sample()) as stage:
        start_s = gpu.now_s()
        stage.runs["B"].run(7)
        assert gpu.now_s() - start_s == pytest.approx(
            7 * gpu.model.load(gpu.works[-1]).time_s(1410)
        )


def test_forward_and_backward_really_run_apart_from_each_other() -> None:
    module = Counted(network())
    with torch_stage(Busy(), module, sample()) as stage:
        module.forwards = module.backwards = 0
        stage.runs["F"].run(5)
        assert (module.forwards, module.backwards) == (5, 0)
        stage.runs["B"].run(5)
        assert (module.forwards, module.backwards) == (6, 5)  # one forward left the graph
        stage.runs["B"].run(3)
        assert (module.forwards, module.backwards) == (6, 8)


def test_gradients_accumulate_from_backward_to_backward() -> None:
    module = network()
    with torch_stage(Busy(), module, sample(), lambda output: output.square().mean()) as stage:
        for parameter in module.parameters():
            parameter.grad = None
        stage.runs["B"].run(1)
        once = [parameter.grad.clone() for parameter in module.parameters()]
        stage.runs["B"].run(2)
        for parameter, gradient in zip(module.parameters(), once, strict=True):
            torch.testing.assert_close(parameter.grad, 3 * gradient)


def test_a_split_backward_gives_the_gradients_of_the_whole_one() -> None:
    module = network()

    def gradients(stage: Stage, kinds: str) -> list[Any]:
        for parameter in module.parameters():
            parameter.grad = None
        for kind in kinds:
            stage.runs[kind].run(2)
        return [parameter.grad.clone() for parameter in module.parameters()]

    loss: Callable[[Any], Any]
    for loss in (None, lambda output: output.square().mean()):
        with torch_stage(Busy(), module, sample(), loss, split_backward=True) as stage:
            torch.testing.assert_close(gradients(stage, "FIW"), gradients(stage, "B"))


def test_a_backward_whose_graph_cannot_be_kept_is_measured_with_its_forward() -> None:
    with torch_stage(Busy(), Freeing(), sample()) as stage:
        assert stage.runs["B"].includes == "F"
        stage.runs["B"].run(3)
        stage.runs["F"].run(2)
    gpu = Recorder()
    with torch_stage(gpu, Freeing(), sample()) as stage:
        forward, both = (gpu.work_of(stage, kind) for kind in "FB")
        assert both.flops == 3 * forward.flops


def test_a_backward_that_frees_cannot_be_split() -> None:
    with pytest.raises(UsageError, match="cannot be split: an autograd function in it frees"):
        ExitStack().enter_context(torch_stage(Busy(), Freeing(), sample(), split_backward=True))


def test_inputs_are_a_tensor_a_tuple_or_named() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, a: Any, b: Any) -> Any:
            return {"sum": (a + b) * self.weight, "count": torch.tensor(3)}

    for inputs in ((sample(), sample()), {"a": sample(), "b": sample()}):
        with torch_stage(Busy(), Sum(), inputs) as stage:
            stage.runs["B"].run(1)


class Everything(nn.Module):
    """A module with everything that a forward and a backward change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = (
            nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.5),
        )
        self.drop.eval()

    def forward(self, x: Any) -> Any:
        return torch.dropout(self.drop(self.linear(self.norm(x))), 0.5, self.training)


def test_everything_is_restored_afterwards() -> None:
    module, stepped = Everything(), []
    module(sample()).sum().backward()
    for parameter in module.parameters():
        parameter.main_grad = torch.ones_like(parameter)
        parameter.register_post_accumulate_grad_hook(stepped.append)
    module.zero_grad()
    module(sample()).sum().backward()
    stepped.clear()
    gradients = [
        (each, each.grad, each.grad.clone(), each.main_grad) for each in module.parameters()
    ]
    state = {name: value.clone() for name, value in module.state_dict().items()}
    modes, random = [part.training for part in module.modules()], torch.get_rng_state()
    with torch_stage(Busy(), module, sample(), split_backward=True) as stage:
        for timed in stage.runs.values():
            timed.run(2)
    assert not stepped
    for parameter, gradient, content, main in gradients:
        assert parameter.grad is gradient
        assert torch.equal(gradient, content)
        assert parameter.main_grad is main
        assert bool((main == 1).all())
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert [part.training for part in module.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    module(sample()).sum().backward()
    assert len(stepped) == len(gradients)


def test_gradients_in_place_of_those_of_the_next_stage_have_unit_variance() -> None:
    """Those that are too small for float16 would be zeros, which take less power."""
    module, seen = nn.Linear(512, 512).half(), []

    def watched(x: Any) -> Any:
        output = module(x)
        output.register_hook(seen.append)
        return output

    with torch_stage(Busy(), module, torch.ones(128, 512).half(), forward=watched) as stage:
        stage.runs["B"].run(1)
    assert seen[-1].float().std().item() == pytest.approx(1.0, abs=0.05)


def test_the_main_gradient_that_is_there_is_used() -> None:
    """A second one in float32 would take twice the memory of the weights."""
    module = nn.Linear(WIDTH, WIDTH)
    mains = [torch.full_like(parameter, 3.0) for parameter in module.parameters()]
    for parameter, main in zip(module.parameters(), mains, strict=True):
        parameter.main_grad = main
    with preserve_state(module):
        for parameter, main in zip(module.parameters(), mains, strict=True):
            assert parameter.main_grad is main
            assert bool((main == 0).all())
            main.fill_(5.0)
    assert all(bool((main == 3.0).all()) for main in mains)


def test_a_module_that_evaluates_trains_while_it_is_measured() -> None:
    module = network().eval()
    with preserve_state(module):
        assert all(part.training for part in module.modules())
    assert not any(part.training for part in module.modules())


def test_blocking_on_a_simulated_gpu_takes_virtual_time_and_a_real_message() -> None:
    gpu, waited = Recorder(), []
    with torch_stage(gpu, network(), sample(), block=waited.append) as stage:
        start_s = gpu.now_s()
        assert stage.block is not None
        stage.block(50.0)
    assert waited == [0.0]
    assert gpu.now_s() - start_s == pytest.approx(50.0)


def refused(module: Any, inputs: Any, loss: Any = None) -> str:
    with pytest.raises(UsageError) as error, torch_stage(Busy(), module, inputs, loss):
        pass
    return str(error.value)


def test_a_stage_that_cannot_run_is_refused() -> None:
    wrong = refused(network(), torch.zeros(ROWS, 3))
    assert re.match(
        "the stage cannot be run on its sample input: RuntimeError: (addmm: )?mat1 and mat2 shapes",
        wrong,
    )
    assert refused(network(), sample(), lambda output: output) == (
        f"the loss consists of 1 tensors of shapes ({ROWS}, {WIDTH}); return one scalar"
    )


@pytest.mark.parametrize("gpu", [Busy(), open_gpu("simulated:a100-sxm")])
def test_what_runs_nothing_has_no_work(gpu: Gpu) -> None:
    frozen = network().requires_grad_(requires_grad=False)
    found = {}
    for name, first, split in (
        ("first", True, False),
        ("first, split", True, True),
        ("later", False, False),
        ("later, split", False, True),
    ):
        with torch_stage(gpu, frozen, sample(), first=first, split_backward=split) as stage:
            found[name] = "".join(stage.runs), "".join(stage.without_work)
    assert found == {
        "first": ("F", "B"),
        "first, split": ("F", "BIW"),
        "later": ("FB", ""),  # it sends gradients on
        "later, split": ("FBI", "W"),
    }


def test_a_dry_run_of_a_simulated_gpu_is_refused() -> None:
    class DryRun(Busy):
        origin, text = "simulated", "dry-run:simulated:a100-sxm"

    with (
        pytest.raises(UsageError, match="open 'simulated:a100-sxm' itself"),
        torch_stage(DryRun(), network(), sample()),
    ):
        pass
