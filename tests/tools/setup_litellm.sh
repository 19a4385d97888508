#!/bin/bash
# Installs LiteLLM's proxy, a peer of benchmarks/translation.py and benchmarks/proxy.py, once per machine.
#
#   setup_litellm.sh
#
# Leaves ${HIVE_CI_CACHE:-/var/cache/hive-ci}/litellm/venv (about 1 GB) and prints it. Does nothing where that version
# is there. Takes 1 to 5 minutes. Needs Python 3.11; where the registry does not have it, exit 1 and pip's own words.
set -euo pipefail
VERSION=1.99.4
DIR=${HIVE_CI_CACHE:-/var/cache/hive-ci}/litellm

mkdir -p "$DIR"
exec 9>"$DIR/.lock"
flock 9 # two runs at once: the second finds what the first has made
if [ "$(cat "$DIR/installed" 2>/dev/null)" != "$VERSION" ]; then
    echo "installing LiteLLM $VERSION in $DIR, 1 to 5 minutes" >&2
    rm -rf -- "$DIR/venv"
    python3 -m venv "$DIR/venv"
    "$DIR/venv/bin/pip" install -q --disable-pip-version-check "litellm[proxy]==$VERSION" >&2
    echo "$VERSION" >"$DIR/installed"
fi
echo "$DIR/venv"
