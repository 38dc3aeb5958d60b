"""Kernels are measured on CPU ranks, and estimates then take the measured times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from commands import done, refusal
from launching import ranks

from perseus_planner.extensions.explore.operations import layer_times, load_system
from perseus_planner.extensions.explore.transformer import read_transformer

pytest.importorskip("torch")
MODEL = """format: perseus-planner/transformer
version: 1
layers: 4
hidden: 64
heads: 4
kv_heads: 2
gated: true
vocabulary: 128
sequence: 32
"""
MEASURE = "calibrate --kernels small.yaml --gpu a100-sxm -o system.yaml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(MODEL)
    return tmp_path


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_process_measures_layers_head_and_memory(folder: Path, recompute: str):
    code, text, _ = refusal(
        f"{MEASURE} --microbatch 1,2 --recompute {recompute} --node-bandwidth 50"
    )
    assert code == 0
    assert "tensor  microbatch  recomputation  " in text
    system = load_system(Path("system.yaml"))
    assert [(key.tensor_degree, key.microbatch) for key in system.kernels] == [(1, 1), (1, 2)]
    assert system.node_bytes_per_s == 50e9
    shape = replace(read_transformer(Path("small.yaml")), microbatch=2, recomputation=recompute)
    times = next(found for key, found in system.kernels.items() if key.microbatch == 2)
    assert layer_times(shape, system).layer["B"].load(system).time_s(1410) == pytest.approx(
        times.layer_backward_s
    )
    assert times.layer_forward_s > 0
    found = done("explore small.yaml --gpus 2 --system system.yaml --batch 4")
    assert "ESTIMATED FROM MEASURED KERNELS" in found


def test_a_layer_of_ones_own_is_measured_also_where_the_planner_has_none(folder: Path):
    Path("small.yaml").write_text(
        MODEL + "experts: 4\nexperts_used: 2\nexpert_ffn: 64\nprecision: fp8\n"
    )
    Path("mine.py").write_text(
        "import time\nimport torch\n\n\nclass Slow(torch.nn.Linear):\n"
        "    def forward(self, hidden):\n        time.sleep(0.02)\n"
        "        return super().forward(hidden)\n\n\n"
        "def layer(shape, group):\n    assert (shape.experts, group) == (4, None)\n"
        "    return Slow(shape.hidden, shape.hidden)\n"
    )
    measure = MEASURE.replace("a100-sxm", "h100-sxm") + " --microbatch 1"
    _, _, error = refusal(measure)
    assert "precision of fp8 is not measured" in error
    assert "your own layer with --layer" in error
    assert refusal(f"{measure} --layer mine:missing")[0] == 2
    assert refusal(f"{measure} --layer mine:layer")[0] == 0
    (times,) = load_system(Path("system.yaml")).kernels.values()
    assert times.layer_forward_s >= 0.02


def test_the_ranks_of_a_node_measure_tensor_groups_and_their_links(folder: Path):
    command = [*MEASURE.split(), "--microbatch", "1"]
    everyone = ranks("command", 2, folder, str(folder), *command)
    assert [rank.code for rank in everyone] == [0, 0], [rank.stderr for rank in everyone]
    system = load_system(folder / "system.yaml")
    assert [key.tensor_degree for key in system.kernels] == [1, 2]
    assert system.link_bytes_per_s > 0
    assert "".join(rank.stdout for rank in everyone).count("Wrote") == 1
    said = "torch finds no GPU, so processors are measured, which may take hours"
    assert "".join(rank.stderr for rank in everyone).count(said) == 1


REFUSED = {
    MEASURE.replace("--gpu a100-sxm", ""): (
        "--kernels: needs --gpu, the kind of GPU, and --output, the system file to write"
    ),
    f"{MEASURE} --microbatch 1,x": "--microbatch: 'x' is not a whole number of at least 1",
    f"{MEASURE} --tensor-parallel 2": (
        "--tensor-parallel: 2 GPUs do not divide the 1 ranks; start 2 with torchrun "
        "--nproc-per-node 2"
    ),
    f"{MEASURE} --recompute selective": "--recompute: 'selective' is not measured; give none or "
    "full",
    f"{MEASURE} --node-bandwidth 0": (
        "--node-bandwidth: 0.0 is not a bandwidth: give GB/s above 0, such as 50"
    ),
    "calibrate": "give a profile or job and a plan or run, or --kernels and a model",
    "calibrate small.yaml": "small.yaml: is a model; name a profile or a job file",
    f"{MEASURE} --measured 1s": "--kernels: measures on its own; leave out profile, plan "
    "and --measured",
}


@pytest.mark.parametrize(("options", "message"), REFUSED.items(), ids=range(len(REFUSED)))
def test_bad_input_is_refused_in_one_line(folder: Path, options: str, message: str):
    assert refusal(options) == (2, "", f"Error: {message}\n")
