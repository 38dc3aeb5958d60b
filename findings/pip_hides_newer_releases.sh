#!/usr/bin/env bash
# pip on Python 3.11 shows Megatron-core 0.16.1 as the newest release, without a word of 0.17 to 0.19.
#
# Seen with pip 26.3 on 2026-11-28: megatron-core 0.17.0 and later declare Requires-Python >= 3.12, and pip leaves out what
# its Python is too old for. `pip index versions megatron-core` says 0.16.1 for Python 3.11 and 0.19.2 for 3.12, and prints
# nothing beside it. So a project that tests with 3.11 does not learn of three minor releases.
#
# Fails if the newest release for 3.11 is no longer older than the one for 3.12.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check pip==26.3

newest() { # the newest release that pip shows for a version of Python
    "$folder/venv/bin/pip" index versions megatron-core --python-version "$1" --only-binary=:all: 2> "$folder/log" |
        sed -n '1s/.*(\(.*\))/\1/p'
}

for_312=$(newest 3.12)
for_311=$(newest 3.11)
echo "megatron-core for Python 3.11: $for_311; for Python 3.12: $for_312"
echo "What pip says beside it for 3.11: $(wc -c < "$folder/log") bytes"
[ -n "$for_311" ] && [ -n "$for_312" ] && [ "$for_311" != "$for_312" ]
[ "$(printf '%s\n' "$for_311" "$for_312" | sort -V | tail -n 1)" = "$for_312" ]
