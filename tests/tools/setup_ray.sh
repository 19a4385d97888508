#!/bin/bash
# Installs Ray with Ray Serve, without an engine, in an environment of its own, once per machine.
#
#   setup_ray.sh
#
# Leaves ${HIVE_CI_CACHE:-/var/cache/hive-ci}/ray/venv (0.5 GB) and prints it. Does nothing where those versions are
# there. Takes 1 to 3 minutes. Needs Python 3.11; where the registry does not have one, exit 1 and pip's own words.
set -euo pipefail
TOOLS=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
DIR=${HIVE_CI_CACHE:-/var/cache/hive-ci}/ray

mkdir -p "$DIR"
exec 9>"$DIR/.lock"
flock 9 # two runs at once: the second finds what the first has made
if ! cmp -s "$TOOLS/requirements-ray.txt" "$DIR/installed"; then
    echo "installing Ray in $DIR, 1 to 3 minutes" >&2
    rm -rf -- "$DIR/venv" "$DIR/installed"
    python3 -m venv "$DIR/venv"
    "$DIR/venv/bin/pip" install -q --disable-pip-version-check --no-deps -r "$TOOLS/requirements-ray.txt" >&2
    "$DIR/venv/bin/python" -c 'from ray import serve' >&2
    cp "$TOOLS/requirements-ray.txt" "$DIR/installed"
fi
echo "$DIR/venv"
