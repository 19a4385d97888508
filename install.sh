#!/usr/bin/env bash
# From a fresh machine to a running Hive. See `usage`. Exit 5: something is missing that only an administrator can add.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
venv=$root/.venv
prefix=""

usage() {
    cat >&2 <<'TEXT'
usage: ./install.sh up [ARGS]     install beside this script if needed, then run: hive up --demo ARGS
       ./install.sh test [ARGS]   the same with the test extras, then run: pytest ARGS
       ./install.sh [--dry-run] [--prefix DIR]
                                  make this box a Hive, or bring the one that is on it up to date (as root; systemd 252)
       ./install.sh --uninstall [--purge] [--yes] [--dry-run] [--prefix DIR]
                                  take it away again; --purge: configuration, secrets and state, too
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
    # An image brings its own.
    if [ -z "$prefix" ] && ! command -v redis-server >/dev/null; then echo redis-server; fi
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
    quietly apt-get install -q -y --no-install-recommends -o APT::Keep-Downloaded-Packages=false "${missing[@]}" || die "apt-get install failed" 5
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

# --- a whole box -----------------------------------------------------------------------------------------------------

# What a version is made of. Where the same is there already, no new environment is made.
sources=(hive systemd conf man pyproject.toml constraints.txt README.md)
code_stamp() {
    {
        "$(find_python)" --version
        cd -- "$root"
        find "${sources[@]}" -type f ! -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum
    } | sha256sum | cut -d' ' -f1
}

# The complete environment of the code that $1 stamps, "" where there is none.
find_version() {
    local found
    for found in "$versions"/*; do
        if [ ! -e "$found/unfinished" ] && [ "$(cat -- "$found/stamp" 2>/dev/null)" = "$1" ]; then
            printf '%s\n' "$found"
            return
        fi
    done
}

# Where the next environment goes: VERSION-N.
next_version() {
    local version number=1
    version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$root/hive/__init__.py")
    while [ -e "$versions/$version-$number" ]; do number=$((number + 1)); done
    printf '%s\n' "$versions/$version-$number"
}

# $1: where, $2: its stamp.
make_version() {
    local copy code=0
    mkdir -p -- "$1"
    : >"$1/unfinished"
    quietly "$(find_python)" -m venv "$1" || die "python3 -m venv failed"
    # From a copy: a build leaves things beside what it builds, and takes what an earlier one left.
    copy=$(mktemp -d)
    (cd -- "$root" && tar -c --exclude=__pycache__ -- "${sources[@]}") | tar -x -C "$copy"
    quietly "$1/bin/python" -m pip install --disable-pip-version-check --no-input --no-warn-script-location \
        -c "$copy/constraints.txt" "$copy" || code=$?
    rm -rf -- "$copy"
    [ "$code" -eq 0 ] || die "pip install failed" 5
    # In an image the scripts name the place they will have there.
    if [ -n "$prefix" ]; then
        grep -lIrZ -F "$prefix/opt/" "$1/bin" "$1/pyvenv.cfg" | xargs -0r sed -i "s|$prefix/opt/|/opt/|g"
    fi
    sync -f -- "$1"
    printf '%s\n' "$2" >"$1/stamp"
    rm -f -- "$1/unfinished"
}

installed_packages() { dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' | sed -n 's/^ii *//p' | sort; }

# Which packages came with Hive is noted, so that --purge can take them away again.
packages=/var/lib/hive/packages
note_packages() {
    [ -e "$packages.before" ] || return 0
    { cat -- "$packages" 2>/dev/null || true; installed_packages | comm -13 "$packages.before" -; } |
        sort -u >"$packages.new"
    mv -- "$packages.new" "$packages"
    rm -f -- "$packages.before"
}

box_packages() {
    local had_redis=yes
    command -v redis-server >/dev/null || had_redis=no
    if [ -n "$(missing_packages)" ] || ! command -v scdoc >/dev/null; then
        if [ -z "$prefix" ] && command -v apt-get >/dev/null && [ ! -e "$packages.before" ]; then
            mkdir -p -- "${packages%/*}"
            installed_packages >"$packages.part"
            mv -- "$packages.part" "$packages.before"
        fi
        ensure_packages
        # Not worth failing for: it makes the man pages.
        if ! command -v scdoc >/dev/null && command -v apt-get >/dev/null; then
            say "installing scdoc with apt"
            if apt_lists_are_empty; then quietly apt-get update -q || true; fi
            quietly apt-get install -q -y --no-install-recommends -o APT::Keep-Downloaded-Packages=false scdoc || say "scdoc cannot be installed"
        fi
    fi
    [ -n "$prefix" ] || note_packages
    # The package starts a Redis of its own on a TCP port; Hive's is another.
    if [ "$had_redis" = no ] && [ -z "$prefix" ]; then
        quietly systemctl disable --now redis-server.service || say "redis-server.service cannot be disabled"
    fi
}

require_box() {
    local version
    [ "$(id -u)" -eq 0 ] || die "this takes root: sudo ./install.sh" 4
    [ -z "$prefix" ] || return 0
    [ -d /run/systemd/system ] || die "systemd is not PID 1 here; ./install.sh up needs none, an image takes --prefix" 5
    version=$(systemctl --version | sed -n '1s/^systemd \([0-9]*\).*/\1/p')
    [ "${version:-0}" -ge 252 ] || die "systemd 252 or newer is needed, as in Debian 12; here is ${version:-none}" 5
}

# Half-made environments are taken away, one of this code is made where there is none. Sets `target`.
make_target() {
    local stamp found
    mkdir -p -- "$versions"
    exec 9<"$versions"
    flock -n 9 || die "another install.sh is at work in $versions"
    for found in "$versions"/*; do
        if [ -e "$found/unfinished" ]; then
            say "removing $found, which never was complete"
            rm -rf -- "$found"
        fi
    done
    stamp=$(code_stamp)
    target=$(find_version "$stamp")
    if [ -z "$target" ]; then
        target=$(next_version)
        say "making $target"
        make_version "$target" "$stamp"
    fi
    exec 9<&-
}

install_box() {
    require_box
    box_packages
    make_target
    cd /
    exec "$target/bin/python" -P -m hive install --yes "$@"
}

# Tells everything and changes nothing; what Hive itself would do it says from an environment that passes.
plan_box() {
    local missing passing code=0
    mapfile -t missing < <(missing_packages)
    [ "${#missing[@]}" -eq 0 ] || printf 'packages\n    apt-get install %s\n' "${missing[*]}"
    if [ -z "$(find_python)" ] || ! venv_works "$(find_python)"; then
        die "the rest can be told once python3-venv is installed" 5
    fi
    target=$(find_version "$(code_stamp)")
    if [ -n "$target" ]; then
        cd / && exec "$target/bin/python" -P -m hive install --dry-run "$@"
    fi
    printf 'environment\n    make %s\n    pip install %s\n' "$(next_version)" "$root"
    say "making an environment that passes, to tell the rest"
    passing=$(mktemp -d)
    # Its scripts are not used, so they need not name another place.
    (prefix="" make_version "$passing/venv" passing && cd / && "$passing/venv/bin/python" -P -m hive install --dry-run "$@") ||
        code=$?
    rm -rf -- "$passing"
    return "$code"
}

# What is left where no environment is there any more that could do it.
remove_rest() {
    local path kept=(/opt/hive)
    [ -z "$purge" ] || kept+=(/etc/hive /var/lib/hive)
    for path in "${kept[@]}"; do
        if [ -e "$prefix$path" ]; then
            say "removing $prefix$path"
            rm -rf -- "$prefix$path"
        fi
    done
    if [ "$(readlink -- "$prefix/usr/local/bin/hive")" = /opt/hive/current/bin/hive ]; then
        rm -f -- "$prefix/usr/local/bin/hive"
    fi
}

# Those that came with Hive, unless something else needs one of them by now.
remove_packages() {
    local others
    [ "$#" -gt 0 ] || return 0
    others=$(apt-get -s purge "$@" | sed -n 's/^\(Purg\|Remv\) \([^ ]*\).*/\2/p' | grep -vxF -f <(printf '%s\n' "$@") || true)
    if [ -n "$others" ]; then
        say "these packages came with Hive, and others need them now: $*"
        return 0
    fi
    say "removing $* with apt"
    DEBIAN_FRONTEND=noninteractive quietly apt-get purge -q -y "$@" || die "apt-get purge failed" 5
}

uninstall_box() {
    local found came=()
    require_box
    if [ -n "$purge" ] && [ -z "$prefix" ] && [ -e "$packages" ]; then mapfile -t came <"$packages"; fi
    found=$(readlink -f -- "$prefix/opt/hive/current" || true)/bin/python
    [ -x "$found" ] || found=$(compgen -G "$versions/*/bin/python" | head -n 1 || true)
    if [ -n "$found" ] && (cd / && "$found" -P -m hive version >/dev/null 2>&1); then
        (cd / && "$found" -P -m hive uninstall "$@")
    elif [ -n "$dry" ] || [ -z "$yes" ]; then
        die "Hive is not installed, or cannot remove itself any more; with --uninstall --yes what is left of it is removed" 3
    else
        remove_rest
    fi
    [ -n "$dry" ] || remove_packages "${came[@]}"
}

box() {
    local word uninstall="" dry="" purge="" yes="" passed=()
    # Of the system, not of whoever is root just now: services run with it.
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    umask 022
    while [ $# -gt 0 ]; do
        word=$1
        shift
        case $word in
            --uninstall) uninstall=yes && continue ;;
            --dry-run | -n) dry=yes && continue ;;
            --prefix)
                [ -d "${1:-}" ] || die "--prefix takes the root directory of an image" 2
                prefix=$(cd -- "$1" && pwd -P)
                prefix=${prefix%/}
                shift
                continue
                ;;
            --purge) purge=yes ;;
            --yes | -y) yes=yes ;;
            --json) ;;
            *) usage ;;
        esac
        [ "$word" = --yes ] || [ "$word" = -y ] || passed+=("$word")
    done
    [ -z "$purge" ] || [ -n "$uninstall" ] || usage
    [ -z "$prefix" ] || passed+=(--prefix "$prefix")
    versions=$prefix/opt/hive/versions
    case $uninstall-$dry in
        yes-) uninstall_box "${passed[@]}" ${yes:+--yes} ;;
        yes-yes) uninstall_box "${passed[@]}" --dry-run ;;
        -) install_box "${passed[@]}" ;;
        -yes) plan_box "${passed[@]}" ;;
    esac
}

case ${1:-} in
    up)
        shift
        ensure_installed run
        exec "$venv/bin/python" -P -m hive up --demo "$@"
        ;;
    test)
        shift
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
    "" | -*) box "$@" ;;
    *) usage ;;
esac
