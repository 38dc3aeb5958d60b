"""Number 49: speed and power of attention and of long products, estimated, beside measured kernels.

The tables are those of aiconfigurator-core 0.12 on PyPI, which is not installed with the planner:

    python -m venv tables && tables/bin/pip install --no-deps aiconfigurator-core==0.12.0
    PLANNER_KERNELS=tables python benchmarks/run.py --only 49    # pyarrow: the extra `traces`
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from data import MissingError, Size
from results import Check, Section, Table

from perseus_planner.extensions.explore.operations import (
    SYSTEMS,
    Operation,
    Product,
    System,
    layer_operations,
    phases_of,
)
from perseus_planner.extensions.explore.transformer import PRESETS

NUMBER = 49
_FOLDERS = {
    "h100-sxm": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "b300": "b300_sxm",
    "gb300": "gb300",
    "a100-sxm": "a100_sxm",
    "l40s": "l40s",
}
_TESTED = ("h100-sxm", "h200", "b200")  #: whose speeds the checks are of
# FlashAttention and its like, as trainings run it. TensorRT-LLM's operation also fills a cache.
_ENGINES = ("sglang", "vllm")
_LEAST_MS = 1.0  #: shorter kernels do not fill a GPU
_LEAST_HEADS = 16
_HEAD_SIZE = 128
_LENGTHS = (1024, 16384)
_LEAST_SIZE = 2048  #: of products, in each of the three dimensions
_SPEEDS = {
    "gpu": ("GPU", ""),
    "tokens": ("tokens", "d"),
    "count": ("kernels", "d"),
    "measured": ("measured, TFLOPS", ".0f"),
    "model": ("model, TFLOPS", ".0f"),
    "error": ("error of the speed, %", "+.1f"),
    "before": ("with one speed, %", "+.1f"),
}
_WINDOWS = {
    "gpu": ("GPU", ""),
    "window": ("window", "d"),
    "tokens": ("tokens", "d"),
    "count": ("kernels", "d"),
    "error": ("error of the speed, %", "+.1f"),
}
_POWERS = {
    "gpu": ("GPU", ""),
    "tokens": ("tokens", "d"),
    "count": ("kernels", "d"),
    "measured": ("measured, W", ".0f"),
    "model": ("model, W", ".0f"),
    "error": ("error, %", "+.1f"),
}
_PRODUCTS = {
    "gpu": ("GPU", ""),
    "count": ("products", "d"),
    "measured": ("measured, TFLOPS", ".0f"),
    "model": ("model, TFLOPS", ".0f"),
    "error": ("error of the speed, %", "+.1f"),
}
_FITS = {
    "gpu": ("GPU", ""),
    "share": ("fused_share that fits", ".3f"),
    "share_now": ("in gpus.yaml", ".3f"),
    "half": ("fused_half_keys that fits", ".0f"),
    "half_now": ("in gpus.yaml", ".0f"),
}
# What gpus.yaml had for every length.
_ONE_SHARE = 0.7


def measure(size: Size) -> Section:
    """Compare all GPUs; raise MissingError if the tables are not installed."""
    tables = _tables()
    speeds = [row for gpu in _FOLDERS for row in _speed_rows(gpu, tables)]
    powers = list(_power_rows("b200", tables))
    products = [_product_row(gpu, tables) for gpu in _FOLDERS]
    windows = [row for gpu in _TESTED for row in _window_rows(gpu, tables)]
    return Section(
        NUMBER,
        "Attention by its length, and long products",
        "*Measured* forwards of attention (causal, bf16, 128 channels, 16 heads and more, 1 ms and "
        "more) and products of 1 ms and more, each dimension at least 2,048 (NVIDIA "
        "aiconfigurator-core 0.12), beside the model of the GPU at its top clock.",
        [
            Table(_SPEEDS, speeds),
            Table(_FITS, [_fit_row(gpu, speeds) for gpu in _FOLDERS]),
            Table(_WINDOWS, windows),
            Table(_POWERS, powers),
            Table(_PRODUCTS, products),
        ],
        [
            *(_speed_check(gpu, speeds) for gpu in _TESTED),
            _power_check(powers),
            *(_product_check(row) for row in products if row["gpu"] == "l40s"),
        ],
        [
            "Medians of SGLang's and vLLM's newest tables together. The two numbers of a "
            "generation are fitted to these lengths; the windows were not fitted.",
            "Errors are those of the speed: -30 % is a kernel that is said to take 1.4 times as "
            "long.",
            "Speeds of products are of kernels alone; those of H100, H200 and B200 in gpus.yaml "
            "are fitted to whole trainings (number 24), and lower.",
            "Power of attention is known of the B200 alone (vLLM 0.22's table). Its fall above "
            "10,240 tokens at no lower speed has no known cause.",
            "Backwards of attention are in no table; their speed is assumed to be the forward's.",
        ],
    )


def _tables() -> Path:
    root = os.environ.get("PLANNER_KERNELS")
    found = sorted(Path(root).glob("**/aiconfigurator_core/systems/data")) if root else []
    if not found:
        raise MissingError(
            "no tables of kernels: install aiconfigurator-core 0.12.0 (pip install --no-deps) into "
            "an environment of its own, and name it in PLANNER_KERNELS"
        )
    return found[0]


def _rows(path: Path, columns: Sequence[str]) -> Mapping[str, Any]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise MissingError("no reader of parquet: install pyarrow") from None
    present = set(parquet.read_schema(path).names)
    table = parquet.read_table(path, columns=[name for name in columns if name in present])
    return {
        name: table[name].to_numpy(zero_copy_only=False) if name in present else None
        for name in columns
    }


_ATTENTION = (
    "batch_size",
    "isl",
    "num_heads",
    "num_key_value_heads",
    "head_dim",
    "attn_dtype",
    "kv_cache_dtype",
    "window_size",
    "latency",
    "power",
)


def _newest(folder: Path, engine: str) -> Path:
    files = (folder / "attention" / engine).glob("*/context_attention_perf.parquet")
    return max(files, key=lambda path: [int(n) for n in path.parent.name.split(".")])


def _attention(path: Path, window: int) -> Mapping[int, list[tuple[float, ...]]]:
    """Return TFLOPS and watts of the kernels by length; watts are nan where there are none."""
    rows = _rows(path, _ATTENTION)
    chosen = (
        (rows["attn_dtype"] == "bfloat16")
        & (rows["kv_cache_dtype"] == "bfloat16")
        & (rows["head_dim"] == _HEAD_SIZE)
        & (rows["num_heads"] >= _LEAST_HEADS)
        & (rows["latency"] >= _LEAST_MS)
        & (rows["isl"] >= _LENGTHS[0])
        & (rows["isl"] <= _LENGTHS[1])
    )
    if rows["window_size"] is not None:
        chosen &= rows["window_size"] == window
    elif window:
        chosen &= False
    found = defaultdict(list)
    for index in np.flatnonzero(chosen):
        length = int(rows["isl"][index])
        pairs = _keys(length, window) * length
        width = int(rows["batch_size"][index]) * int(rows["num_heads"][index]) * _HEAD_SIZE
        tflops = 4 * width * pairs / float(rows["latency"][index]) / 1e9
        watts = float("nan") if rows["power"] is None else float(rows["power"][index])
        found[length].append((tflops, watts))
    return dict(sorted(found.items()))


def _keys(length: int, window: int) -> float:
    inside = min(window or length, length)
    return inside * (1 - (inside - 1) / (2 * length))


def _core(length: int, window: int) -> tuple[Operation, ...]:
    """Return the operations of attention in a layer of 16 heads, as the planner has them."""
    shape = replace(
        PRESETS["gpt3-1.3b"],
        hidden=_HEAD_SIZE * _LEAST_HEADS,
        heads=_LEAST_HEADS,
        head_size=_HEAD_SIZE,
        sequence=length,
        window=window,
        microbatch=16,
        attention="flash-causal",
    )
    return tuple(
        each for each in layer_operations(shape)["F"] if isinstance(each, Product) and each.fused
    )


def _estimate(length: int, system: System, window: int = 0) -> tuple[float, float]:
    """Return TFLOPS and watts of attention at the top clock."""
    operations = _core(length, window)
    load = phases_of(operations, PRESETS["gpt3-1.3b"], system).load(system)
    time_s = load.time_s(system.top_mhz)
    flops = sum(each.flops for each in operations if isinstance(each, Product))
    return flops / time_s / 1e12, load.energy_j(system.top_mhz) / time_s


def _both(gpu: str, tables: Path, window: int = 0) -> Mapping[int, list[float]]:
    found = defaultdict(list)
    for engine in _ENGINES:
        path = _newest(tables / _FOLDERS[gpu], engine)
        for length, kernels in _attention(path, window).items():
            found[length] += [tflops for tflops, _ in kernels]
    return found


def _speed_rows(gpu: str, tables: Path) -> Iterator[dict[str, Any]]:
    system = SYSTEMS[gpu]
    one_speed = replace(system, fused_share=_ONE_SHARE, fused_half_keys=0.0)
    for length, kernels in sorted(_both(gpu, tables).items()):
        measured = median(kernels)
        model, _ = _estimate(length, system)
        yield {
            "gpu": gpu,
            "tokens": length,
            "count": len(kernels),
            "measured": measured,
            "model": model,
            "error": 100 * (model / measured - 1),
            "before": 100 * (_estimate(length, one_speed)[0] / measured - 1),
        }


def _window_rows(gpu: str, tables: Path) -> Iterator[dict[str, Any]]:
    for window in (1024, 8192):
        for length, kernels in sorted(_both(gpu, tables, window).items()):
            if length > window:
                model, _ = _estimate(length, SYSTEMS[gpu], window)
                yield {
                    "gpu": gpu,
                    "window": window,
                    "tokens": length,
                    "count": len(kernels),
                    "error": 100 * (model / median(kernels) - 1),
                }


def _power_rows(gpu: str, tables: Path) -> Iterator[dict[str, Any]]:
    path = tables / _FOLDERS[gpu] / "attention/vllm/0.22.0/context_attention_perf.parquet"
    for length, kernels in _attention(path, 0).items():
        measured = median(watts for _, watts in kernels)
        _, model = _estimate(length, SYSTEMS[gpu])
        yield {
            "gpu": gpu,
            "tokens": length,
            "count": len(kernels),
            "measured": measured,
            "model": model,
            "error": 100 * (model / measured - 1),
        }


def _product_row(gpu: str, tables: Path) -> dict[str, Any]:
    measured, errors, models = [], [], []
    system = SYSTEMS[gpu]
    for path in (tables / _FOLDERS[gpu] / "gemm").glob("*/*/gemm_perf.parquet"):
        rows = _rows(path, ("m", "n", "k", "gemm_dtype", "latency"))
        chosen = (rows["gemm_dtype"] == "bfloat16") & (rows["latency"] >= _LEAST_MS)
        for size in "mnk":
            chosen &= rows[size] >= _LEAST_SIZE
        for index in np.flatnonzero(chosen):
            product = Product(*(int(rows[size][index]) for size in "mnk"))
            load = phases_of((product,), PRESETS["gpt3-1.3b"], system).load(system)
            model = product.flops / load.time_s(system.top_mhz) / 1e12
            found = product.flops / float(rows["latency"][index]) / 1e9
            measured.append(found)
            models.append(model)
            errors.append(100 * (model / found - 1))
    return {
        "gpu": gpu,
        "count": len(measured),
        "measured": median(measured),
        "model": median(models),
        "error": median(errors),
    }


def _fit_row(gpu: str, speeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the two numbers that fit the medians best, each with the same relative weight."""
    rows = [row for row in speeds if row["gpu"] == gpu]
    keys = np.array([_keys(row["tokens"], 0) for row in rows])
    tflops = np.array([row["measured"] for row in rows])
    # 1 / speed = 1 / most + half / most / keys, a line; its errors count relatively.
    line = np.stack([tflops, tflops / keys], axis=1)
    (slowness, per_key), *_ = np.linalg.lstsq(line, np.ones(len(rows)), rcond=None)
    system = SYSTEMS[gpu]
    full = system.product_flops_per_cycle * system.top_mhz * 1e6 / 1e12
    return {
        "gpu": gpu,
        "share": 1 / slowness / full,
        "share_now": system.fused_share,
        "half": per_key / slowness,
        "half_now": system.fused_half_keys,
    }


def _speed_check(gpu: str, speeds: Sequence[Mapping[str, Any]]) -> Check:
    errors = [abs(row["error"]) for row in speeds if row["gpu"] == gpu]
    middle, worst = median(errors), max(errors)
    return Check(
        f"{gpu}: speed of attention {middle:.1f} % off in the median of lengths, limit 10 %; "
        f"worst length {worst:.1f} %, limit 15 %",
        middle <= 10 and worst <= 15,
    )


def _power_check(powers: Sequence[Mapping[str, Any]]) -> Check:
    worst = max(abs(row["error"]) for row in powers)
    return Check(f"b200: power of attention {worst:.1f} % off at most, limit 10 %", worst <= 10)


def _product_check(row: Mapping[str, Any]) -> Check:
    return Check(
        f"{row['gpu']}: speed of long products {row['error']:+.1f} % off in the median, limit 10 %",
        abs(row["error"]) <= 10,
    )
