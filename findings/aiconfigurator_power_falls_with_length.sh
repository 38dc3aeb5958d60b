#!/usr/bin/env bash
# aiconfigurator-core 0.12.0: the measured power of attention on a B200 falls by 19 % from 10,240 to
# 12,288 tokens, at no lower speed.
#
# Behaviour: of the 736 tables of kernels three have a column `power`, all of the B200 under vLLM
# 0.22.0. In that of attention (forward, causal, bf16, 128 channels, no window, 16 heads and more,
# 1 ms and more) the median is 954 to 972 W at every length from 1,024 to 10,240 tokens, and 790 and
# 774 W at 12,288 and 16,384, with every batch size and number of heads. Speed keeps rising, so no
# power limit or lower clock explains it. Whoever takes joules of attention from this table gets a
# step between these lengths, which may be of the measuring and not of the GPU.
#
# Seen: "3 tables with power; 10240: 972 W at 1134 TFLOPS; 12288: 790 W at 1156 TFLOPS".
#
# Usage: findings/aiconfigurator_power_falls_with_length.sh
#        PYTHON=venv/bin/python findings/aiconfigurator_power_falls_with_length.sh   # has both already
set -eu

python="${PYTHON:-}"
if [ -z "$python" ]; then
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
    python3 -m venv "$folder/venv"
    python="$folder/venv/bin/python"
    "$python" -m pip install --quiet --no-deps "aiconfigurator-core==0.12.0" "pyarrow==26.0.1"
fi

"$python" - <<'PYTHON'
import sys
from importlib.metadata import distribution
from statistics import median

from pyarrow import parquet

package = distribution("aiconfigurator-core")
assert package.version == "0.12.0", package.version
files = [package.locate_file(each) for each in package.files if each.suffix == ".parquet"]
with_power = [each for each in files if "power" in parquet.read_schema(each).names]
(table,) = [each for each in with_power if "/context_attention_perf" in str(each)]
seen = {10240: [], 12288: []}
for row in parquet.read_table(table).to_pylist():
    if (
        row["isl"] in seen
        and row["head_dim"] == 128
        and row["num_heads"] >= 16
        and row["window_size"] == 0
        and row["kv_cache_dtype"] == row["attn_dtype"] == "bfloat16"
        and row["latency"] >= 1.0
    ):
        # Two products of which a causal mask leaves half.
        flops = 2 * row["batch_size"] * row["num_heads"] * row["isl"] ** 2 * 128
        seen[row["isl"]].append((row["power"], flops / row["latency"] / 1e9))
found = {
    tokens: [median(each[place] for each in rows) for place in (0, 1)]
    for tokens, rows in seen.items()
}
text = "; ".join(f"{tokens}: {w:.0f} W at {tf:.0f} TFLOPS" for tokens, (w, tf) in found.items())
print(f"{len(with_power)} tables with power; {text}")
is_so = found[12288][0] < 0.85 * found[10240][0] and found[12288][1] > found[10240][1]
sys.exit(0 if is_so and len(with_power) == 3 else "the table is another one now")
PYTHON
