#!/usr/bin/env bash
# megatron-core 0.19.2: `megatron.core.__version__` depends on where the environment lies.
#
# package_info.py runs `git rev-parse --short HEAD` in its own folder and appends the result. In a
# virtual environment inside a git repository of any project, git answers with that project's
# commit: the version reads 0.19.2+<your commit>, and changes with each commit of yours. Outside of a
# repository it reads 0.19.2. `importlib.metadata.version("megatron-core")` is 0.19.2 in both.
# The variable NO_VCS_VERSION=1 turns it off. Needs python3.12 and git; downloads one wheel.
set -eu
PYTHON=${PYTHON:-python3.12}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$PYTHON" -m venv "$work/project/.venv"
pip="$work/project/.venv/bin/pip"
"$pip" install --quiet --no-deps --only-binary=:all: megatron-core==0.19.2

# The package itself needs torch; its version does not.
read_version='
import runpy, sysconfig
path = sysconfig.get_path("purelib") + "/megatron/core/package_info.py"
print(runpy.run_path(path)["__version__"])'
version() { "$work/project/.venv/bin/python" -c "$read_version"; }

outside=$(version)
git -C "$work/project" init --quiet
git -C "$work/project" -c user.name=a -c user.email=a@example.com \
    commit --quiet --allow-empty --message "A commit of your own"
commit=$(git -C "$work/project" rev-parse --short HEAD)
inside=$(version)
off=$(NO_VCS_VERSION=1 version)

echo "outside of a repository: $outside"
echo "in yours, at commit $commit: $inside"
echo "with NO_VCS_VERSION=1: $off"
[ "$outside" = 0.19.2 ]
[ "$inside" = "0.19.2+$commit" ]
[ "$off" = 0.19.2 ]
