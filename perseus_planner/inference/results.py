"""What other load generators measured, as rows of an inference profile: the JSON files of
GenAI-Perf (`profile_export_genai_perf.json`), guidellm (`benchmarks.json`) and
`vllm bench serve --save-result`. They have no energy: a sampler that ran beside them says the
power.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from perseus_planner.base.errors import UsageError
from perseus_planner.inference.serving import ServedRow, Shape


def read_results(
    path: Path,
    setting: int,
    tensor_degree: int,
    power_w: float | None = None,
    shape: Shape | None = None,
) -> list[ServedRow]:
    """Return a row of each load in a file.

    Args:
        path: The file.
        setting: The clock in MHz, or power limit in watts, that was set.
        tensor_degree: Number of GPUs of the server.
        power_w: Their mean power meanwhile, watts, all together; None if it is not known.
        shape: The class of its requests; None for their mean lengths.

    Raises:
        UsageError: If the file cannot be read, or is none of these.
    """
    try:
        content = msgspec.json.decode(path.read_bytes())
        loads = list(_loads(content))
    except (OSError, msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: cannot be read as a result of genai-perf, guidellm or vllm bench serve "
            f"({error!r}); give the JSON file that one of them writes"
        ) from error
    rows = []
    for load in loads:
        lengths = Shape(round(load.pop("inputs")), round(load.pop("outputs")))
        energy_j = power_w / load["requests_per_s"] if power_w is not None else None
        rows.append(
            ServedRow(
                shape or lengths,
                tensor_degree=tensor_degree,
                setting=setting,
                energy_j=energy_j,
                error_j=None,
                idle_w=None,
                **load,
            )
        )
    return rows


def _loads(content: Any) -> Iterator[dict[str, Any]]:
    """Yield the fields of a row for each load."""
    if "benchmarks" in content:
        for benchmark in content["benchmarks"]:
            yield _guidellm(benchmark)
    elif "request_throughput" in content and isinstance(content["request_throughput"], dict):
        yield _genai_perf(content)
    else:
        yield _vllm(content)


def _vllm(content: Mapping[str, Any]) -> dict[str, Any]:
    count, concurrency = content["completed"], content.get("max_concurrency")
    rate = content["request_rate"]
    is_open = concurrency is None and rate != "inf"

    def high_s(name: str) -> float:
        key = f"p95_{name}_ms"
        return float(content[key if key in content else f"p99_{name}_ms"]) / 1e3

    return {
        "concurrency": None if is_open else int(concurrency or count),
        "rate_per_s": float(rate) if is_open else None,
        "requests_per_s": float(content["request_throughput"]),
        "inputs": content["total_input_tokens"] / count,
        "outputs": content["total_output_tokens"] / count,
        "ttft_p50_s": content["median_ttft_ms"] / 1e3,
        "ttft_p95_s": high_s("ttft"),
        "tbt_p50_s": content["median_tpot_ms"] / 1e3,
        "tbt_p95_s": high_s("tpot"),
    }


def _genai_perf(content: Mapping[str, Any]) -> dict[str, Any]:
    asked = content["input_config"]
    loop = (asked.get("perf_analyzer") or {}).get("stimulus") or asked
    concurrency, rate = loop.get("concurrency"), loop.get("request_rate")
    if (concurrency is None) == (rate is None):
        raise ValueError("its input_config has no concurrency or request_rate")

    def of(name: str, what: str) -> float:
        scale = {"ms": 1e3, "us": 1e6, "ns": 1e9}.get(content[name]["unit"], 1.0)
        return float(content[name][what]) / scale

    return {
        "concurrency": concurrency,
        "rate_per_s": rate,
        "requests_per_s": of("request_throughput", "avg"),
        "inputs": of("input_sequence_length", "avg"),
        "outputs": of("output_sequence_length", "avg"),
        "ttft_p50_s": of("time_to_first_token", "p50"),
        "ttft_p95_s": of("time_to_first_token", "p95"),
        "tbt_p50_s": of("inter_token_latency", "p50"),
        "tbt_p95_s": of("inter_token_latency", "p95"),
    }


def _guidellm(benchmark: Mapping[str, Any]) -> dict[str, Any]:
    places = (benchmark.get(name) or {} for name in ("config", "args", "scheduler"))
    strategy = next(place["strategy"] for place in places if place.get("strategy"))
    kind = strategy["type_"]
    concurrency = 1 if kind == "synchronous" else strategy.get("streams")
    if kind == "throughput":
        concurrency = strategy.get("max_concurrency")
    metrics = benchmark["metrics"]

    def of(name: str, percentile: str = "") -> float:
        found = metrics[name]["successful"]
        return float(found["percentiles"][percentile] if percentile else found["mean"])

    return {
        "concurrency": concurrency,
        "rate_per_s": None if concurrency else float(strategy["rate"]),
        "requests_per_s": of("requests_per_second"),
        "inputs": of("prompt_token_count"),
        "outputs": of("output_token_count"),
        "ttft_p50_s": of("time_to_first_token_ms", "p50") / 1e3,
        "ttft_p95_s": of("time_to_first_token_ms", "p95") / 1e3,
        "tbt_p50_s": of("inter_token_latency_ms", "p50") / 1e3,
        "tbt_p95_s": of("inter_token_latency_ms", "p95") / 1e3,
    }
