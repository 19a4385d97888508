#!/usr/bin/env bash
# From a fresh machine to a running Hive. See `usage`. Exit 5: something is missing that only an administrator can add.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
venv=$root/.venv

usage() {
    cat >&2 <<'TEXT'
usage: ./install.sh up [ARGS]     install beside this script if needed, then run: hive up --demo ARGS
       ./install.sh test [ARGS]   the same with the test extras, then run: pytest ARGS
TEXT
    exit 2
}

say() { printf 'install.sh: %s\n' "$*" >&2; }

die() {
    say "$1"
    exit "${2:-1}"
}

# Runs a command, showing what it printed only where it failed.
quietly() {
    local noise
    noise=$("$@" 2>&1) || {
        local code=$?
        printf '%s\n' "$noise" >&2
        return "$code"
    }
}

# The first Python that is new enough, "" where there is none.
find_python() {
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13 python3.14; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            command -v "$candidate"
            return
        fi
    done
}

# Debian ships ensurepip, without which no environment can be made, apart from python3.
venv_works() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

missing_packages() {
    local python
    python=$(find_python)
    if [ -z "$python" ] || ! venv_works "$python"; then echo python3-venv; fi
    if ! command -v redis-server >/dev/null; then echo redis-server; fi
}

apt_lists_are_empty() { ! compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null; }

ensure_packages() {
    local missing
    mapfile -t missing < <(missing_packages)
    [ "${#missing[@]}" -gt 0 ] || return 0
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        die "python3-venv (Python 3.11 or newer) and redis-server are needed; missing here: ${missing[*]}. Type:
    sudo apt-get update && sudo apt-get install -y python3-venv redis-server" 5
    fi
    export DEBIAN_FRONTEND=noninteractive
    if apt_lists_are_empty; then
        say "reading the package lists"
        quietly apt-get update -q || die "apt-get update failed" 5
    fi
    say "installing ${missing[*]} with apt"
    quietly apt-get install -q -y --no-install-recommends "${missing[@]}" || die "apt-get install failed" 5
    mapfile -t missing < <(missing_packages)
    [ "${#missing[@]}" -eq 0 ] || die "still missing after apt-get install: ${missing[*]} (Python 3.11 or newer?)" 5
}

# What an installation depends on. The path is in it because the scripts of an environment hold it.
wanted_stamp() {
    { printf '%s\n' "$venv" && cat -- "$root/pyproject.toml" "$root/constraints.txt"; } | sha256sum | cut -d' ' -f1
}

is_installed() {
    [ "$(cat -- "$venv/installed-$1" 2>/dev/null)" = "$stamp" ] && [ -x "$venv/bin/python" ] &&
        [ ! -e "$venv/unfinished" ]
}

make_venv() {
    if [ -e "$venv/unfinished" ] || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
        if [ -e "$venv" ]; then
            say "repairing $venv"
            rm -rf -- "$venv"
        else
            say "making $venv"
        fi
        mkdir -- "$venv"
        : >"$venv/unfinished"
        quietly "$(find_python)" -m venv "$venv" || die "python3 -m venv failed"
    fi
    : >"$venv/unfinished"
}

# $1: run, or test, which includes run.
install_hive() {
    [ -w "$root" ] || die "$root is not writable by $(id -un): nothing can be installed there" 4
    make_venv
    local extras=""
    [ "$1" = run ] || extras="[test]"
    say "installing Hive and what it needs into $venv"
    (
        cd -- "$root"
        quietly "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-warn-script-location \
            -c constraints.txt -e ".$extras"
    ) || die "pip install failed" 5
    printf '%s\n' "$stamp" >"$venv/installed-run"
    [ "$1" = run ] || printf '%s\n' "$stamp" >"$venv/installed-test"
    rm -f -- "$venv/unfinished"
}

ensure_installed() {
    ensure_packages
    stamp=$(wanted_stamp)
    is_installed "$1" && return
    # One at a time; the lock is on this script itself, so that nothing is left behind.
    exec 9<"${BASH_SOURCE[0]}"
    flock 9
    is_installed "$1" || install_hive "$1"
    exec 9<&-
}

[ $# -gt 0 ] || usage
word=$1
shift
case $word in
    up)
        ensure_installed run
        exec "$venv/bin/python" -P -m hive up --demo "$@"
        ;;
    test)
        ensure_installed test
        cd -- "$root"
        # A tree that belongs to someone else is left as it is.
        if [ ! -w "$root" ]; then
            HYPOTHESIS_STORAGE_DIRECTORY=${TMPDIR:-/tmp}/hypothesis-$(id -u)
            export HYPOTHESIS_STORAGE_DIRECTORY
            set -- -p no:cacheprovider "$@"
        fi
        exec "$venv/bin/python" -m pytest "$@"
        ;;
    *) usage ;;
esac
