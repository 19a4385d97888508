#!/bin/bash
# Installs Claude Code and Codex for tests/journeys/test_coding_agents.py; .ci/run does not, as they take 660 MB.
#
#   setup_coding_agents.sh
#
# Leaves ${HIVE_CI_CACHE:-/var/cache/hive-ci}/coding/node_modules with both programs, and prints that directory. Does
# nothing where these versions are there. Needs npm.
set -euo pipefail
WANTED=("@anthropic-ai/claude-code@2.1.197" "@openai/codex@0.171.0")
DIR=${HIVE_CI_CACHE:-/var/cache/hive-ci}/coding

mkdir -p "$DIR"
exec 9>"$DIR/.lock"
flock 9 # two runs at once: the second finds what the first has made
if [ "$(cat "$DIR/installed" 2>/dev/null)" != "${WANTED[*]}" ]; then
    echo "installing ${WANTED[*]} in $DIR" >&2
    rm -rf -- "$DIR/node_modules"
    echo '{"private":true}' >"$DIR/package.json"
    npm install --prefix "$DIR" --no-save --no-audit --no-fund --ignore-scripts "${WANTED[@]}" >&2
    # Its one script: it puts the program for this machine, from a package of its own, in the place of a stub.
    (cd -- "$DIR/node_modules/@anthropic-ai/claude-code" && node install.cjs >&2)
    echo "${WANTED[*]}" >"$DIR/installed"
fi
echo "$DIR/node_modules"
