#!/bin/bash
# Installs diffusers beside the environment of vLLM for the CPU, whose torch and transformers it uses, once per machine.
#
#   setup_diffusers.sh
#
# Leaves ${HIVE_CI_CACHE:-/var/cache/hive-ci}/diffusers/venv (60 MB) and tiny pipelines in .../diffusers/pipelines (one
# of each class), and prints its folder. Does nothing where they are there. Takes half a minute, and 1 to 5 minutes more
# where vLLM is not there yet.
set -euo pipefail
TOOLS=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
CACHE=${HIVE_CI_CACHE:-/var/cache/hive-ci}
DIR=$CACHE/diffusers

bash "$TOOLS/setup_vllm_cpu.sh" >/dev/null
mkdir -p "$DIR"
exec 9>"$DIR/.lock"
flock 9 # two runs at once: the second finds what the first has made
if ! cmp -s "$TOOLS/requirements-diffusers.txt" "$DIR/installed" ||
    ! [ -e "$DIR/venv/lib/python3.11/site-packages/torch-of-vllm.pth" ]; then
    echo "installing diffusers in $DIR" >&2
    rm -rf -- "$DIR/venv" "$DIR/installed"
    python3 -m venv "$DIR/venv"
    "$DIR/venv/bin/pip" install -q --disable-pip-version-check --no-deps -r "$TOOLS/requirements-diffusers.txt" >&2
    # One torch (1.2 GB) serves both: what is not here is looked for there.
    theirs=$(cd -- "$CACHE/vllm/venv/lib/python3.11/site-packages" && pwd)
    echo "$theirs" >"$DIR/venv/lib/python3.11/site-packages/torch-of-vllm.pth"
    "$DIR/venv/bin/python" -c 'import diffusers, torch, transformers' >&2
    cp "$TOOLS/requirements-diffusers.txt" "$DIR/installed"
fi
if ! cmp -s "$TOOLS/make_tiny_pipeline.py" "$DIR/pipelines-made-by.py"; then
    rm -rf -- "$DIR/pipelines" "$DIR/pipelines.new"
    for class in sd sdxl sd3 flux; do
        "$DIR/venv/bin/python" "$TOOLS/make_tiny_pipeline.py" "$DIR/pipelines.new/$class" --class "$class" >&2
    done
    mv "$DIR/pipelines.new" "$DIR/pipelines"
    cp "$TOOLS/make_tiny_pipeline.py" "$DIR/pipelines-made-by.py"
fi
echo "$DIR"
