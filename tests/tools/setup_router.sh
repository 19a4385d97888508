#!/bin/bash
# Installs vLLM's own router in an environment of its own, once per machine.
#
#   setup_router.sh
#
# Leaves ${HIVE_CI_CACHE:-/var/cache/hive-ci}/router/venv (130 MB) and prints it. Does nothing where that version is
# there. Takes half a minute. Needs Python 3.11; where the registry does not have it, exit 1 and pip's own words.
set -euo pipefail
VERSION=0.1.17
DIR=${HIVE_CI_CACHE:-/var/cache/hive-ci}/router

mkdir -p "$DIR"
exec 9>"$DIR/.lock"
flock 9 # two runs at once: the second finds what the first has made
if [ "$(cat "$DIR/installed" 2>/dev/null)" != "$VERSION" ]; then
    echo "installing vllm-router $VERSION in $DIR" >&2
    rm -rf -- "$DIR/venv" "$DIR/installed"
    python3 -m venv "$DIR/venv"
    "$DIR/venv/bin/pip" install -q --disable-pip-version-check "vllm-router==$VERSION" >&2
    echo "$VERSION" >"$DIR/installed"
fi
echo "$DIR/venv"
