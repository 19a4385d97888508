#!/bin/bash
# Installs client packages that Hive's own tests cannot be installed with, for
# tests/journeys/test_responses.py and test_tasks.py.
#
#   setup_clients.sh
#
# Leaves ${HIVE_CI_CACHE:-/var/cache/hive-ci}/clients with venv/ (openai-agents, pydantic-ai, langgraph; 200 MB) and,
# where npm is there, node_modules/ (openai, @ai-sdk/openai; 40 MB), and prints it. Does nothing where these versions are
# there. Takes half a minute. Needs Python 3.11; where a registry does not have one, exit 1 and the installer's own words.
set -euo pipefail
PYTHON=("openai-agents==0.24.0" "pydantic-ai-slim[openai]==2.68.0" "langgraph==1.2.24" "langchain-openai==1.7.4")
NODE=("openai@6.49.0" "ai@6.0.326" "@ai-sdk/openai@3.0.141" "zod@4.6.7")
DIR=${HIVE_CI_CACHE:-/var/cache/hive-ci}/clients

mkdir -p "$DIR"
exec 9>"$DIR/.lock"
flock 9 # two runs at once: the second finds what the first has made
VERSION="${PYTHON[*]} ${NODE[*]}"
if [ "$(cat "$DIR/installed" 2>/dev/null)" != "$VERSION" ]; then
    echo "installing client packages in $DIR" >&2
    rm -rf -- "$DIR/venv" "$DIR/node_modules"
    python3 -m venv "$DIR/venv"
    "$DIR/venv/bin/pip" install -q --disable-pip-version-check "${PYTHON[@]}" >&2
    if command -v npm >/dev/null; then
        echo '{"private":true}' >"$DIR/package.json"
        npm install --prefix "$DIR" --no-save --no-audit --no-fund --ignore-scripts "${NODE[@]}" >&2
    fi
    echo "$VERSION" >"$DIR/installed"
fi
echo "$DIR"
