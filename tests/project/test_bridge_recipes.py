"""Recipes are read from a wheel of Megatron-Bridge, and their layouts compared with proposals: on a
small wheel that is written as its recipes are.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

COMMON = """
END = ["decoder"] * 13 + ["loss"]

def base(mtp):
    cfg = common()
    cfg.model = AutoBridge.from_hf_pretrained("model").to_megatron_provider()
    cfg.model.mtp_num_layers = mtp
    return cfg

def of_map(ranks, virtual):
    known = {
        (1, 1): None,
        (4, 1): [["embedding"] + ["decoder"] * 16] + [["decoder"] * 16] * 2 + [END],
    }
    if (ranks, virtual) not in known:
        raise ValueError("unknown")
    layout = known[(ranks, virtual)]
    if layout is not None:
        layout = list([list(stage) for stage in layout])
    return layout

def set_layout(model, layout=None):
    if layout is not None:
        model.pipeline_model_parallel_layout = layout
        return
    last = ["mtp"] * (getattr(model, "mtp_num_layers", 1) or 0) + ["loss"]
    ranks = model.pipeline_model_parallel_size or 1
    known = {2: [["embedding"] + ["decoder"] * 31, ["decoder"] * 30 + last]}
    if ranks in known:
        model.pipeline_model_parallel_layout = known[ranks]
"""
RECIPES = """
from megatron.bridge.perf_recipes.shared import base, of_map, set_layout

def degrees(cfg, ranks, virtual):
    cfg.model.pipeline_model_parallel_size = ranks
    cfg.model.virtual_pipeline_model_parallel_size = virtual
    cfg.model.expert_model_parallel_size = 8
    cfg.model.seq_length = 4096
    cfg.train.micro_batch_size = 1
    cfg.train.global_batch_size = 256
    return cfg

def kimi_k2_pretrain_256gpu_b200_bf16_config():
    cfg = degrees(base(0), 4, None)
    cfg.model.pipeline_model_parallel_layout = of_map(4, 1)
    return cfg

def kimi_k2_pretrain_256gpu_b200_fp8mx_config():
    cfg = degrees(base(0), 4, 2)
    set_layout(cfg.model, "Et|t*12|(t*8|)*4t*8|t*8L")
    return cfg

def deepseek_v3_pretrain_256gpu_gb200_nvfp4_config():
    cfg = degrees(base(1), 2, None)
    set_layout(cfg.model)
    return cfg

def other_pretrain_64gpu_h100_bf16_config():
    cfg = degrees(base(1), 2, None)
    set_layout(cfg.model, environment())
    return cfg

def without_pretrain_64gpu_h100_bf16_config():
    return degrees(base(1), 2, None)
"""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    path = tmp_path / "small.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("megatron/bridge/perf_recipes/shared.py", COMMON)
        archive.writestr("megatron/bridge/perf_recipes/all/recipes.py", RECIPES)
    return path


def test_layouts_are_read_as_strings_lists_and_from_tables(wheel: Path):
    from bridge_recipes import Wheel, read

    opened = Wheel(wheel)
    recipes = [read(opened, *recipe) for recipe in opened.recipes()]
    assert {recipe.name: (recipe.layout, recipe.has_layout) for recipe in recipes if recipe} == {
        "deepseek_v3_pretrain_256gpu_gb200_nvfp4_config": ("Et*31|t*30mL", True),
        "kimi_k2_pretrain_256gpu_b200_bf16_config": ("Et*16|(t*16|)*2t*13L", True),
        "kimi_k2_pretrain_256gpu_b200_fp8mx_config": ("Et|t*12|(t*8|)*5t*8L", True),
        "other_pretrain_64gpu_h100_bf16_config": (None, True),
        "without_pretrain_64gpu_h100_bf16_config": (None, False),
    }


def test_no_proposal_is_slower_and_an_unbalanced_layout_is_mended(
    wheel: Path, capsys: pytest.CaptureFixture[str]
):
    import bridge_layouts
    from bridge_recipes import Wheel, configured

    opened = Wheel(wheel)
    compared = {}
    for module, name in opened.recipes():
        try:
            compared[name] = bridge_layouts.compare(name, configured(opened, module, name))
        except bridge_layouts.NotEstimatedError as problem:
            compared[name] = str(problem)
    found = {name: each for name, each in compared.items() if not isinstance(each, str)}
    assert len(found) == 3
    assert all(each.gain >= 0.0 for each in found.values())
    mended = found["kimi_k2_pretrain_256gpu_b200_fp8mx_config"]
    assert mended.gain > 0.02
    assert sum(mended.proposed.layers) == sum(mended.own.layers) == 61
    kept = found["deepseek_v3_pretrain_256gpu_gb200_nvfp4_config"]
    assert kept.proposed.predictions == kept.own.predictions == (0, 1)
    assert compared["other_pretrain_64gpu_h100_bf16_config"] == (
        "a model with layers that are not estimated"
    )
    assert bridge_layouts.main([str(wheel)]) == 0
    assert "4 recipes of pipelines with a layout, 3 estimated. The proposal is slower in 0" in (
        capsys.readouterr().out
    )
