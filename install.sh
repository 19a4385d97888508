#!/usr/bin/env bash
# From a fresh machine to a running Hive. See `usage`. Exit 5: something is missing that only an administrator can add.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
venv=$root/.venv
prefix=""
compile=""
[ "${HIVE_COMPILE:-}" != 1 ] || compile=1

usage() {
    cat >&2 <<'TEXT'
usage: ./install.sh up [ARGS]     install beside this script if needed, then run: hive up --demo ARGS
       ./install.sh test [ARGS]   the same with the test extras, then run: pytest ARGS (--quick: two minutes of them;
                                  --engines: those with real inference engines and containers)
       ./install.sh [--dry-run] [--prefix DIR]
                                  make this box a Hive, or bring the one that is on it up to date (as root; systemd 252);
                                  with HIVE_COMPILE=1 before it what each request passes is compiled (gcc, python3-dev)
       ./install.sh --uninstall [--purge] [--yes] [--dry-run] [--prefix DIR]
                                  take it away again; --purge: configuration, secrets and state, too
       HIVE_PYTHON=PATH           the Python of a new environment; else the first on PATH that was built with a profile
                                  (PGO), else the first
TEXT
    exit 2
}

say() { printf 'install.sh: %s\n' "$*" >&2; }

# As Hive says its errors: behind the first line the code that `hive explain` takes, here that of the exit code.
codes=([1]=internal [2]=usage [3]=not_found [4]=not_permitted [5]=dependency_down [6]=rolled_back [7]=timeout)
die() {
    local first=${1%%$'\n'*}
    say "$first  [${codes[${2:-1}]:-internal}]${1#"$first"}"
    exit "${2:-1}"
}

# Its own words are printed before.
die_of_pip() {
    die "pip could not reach a package index, or failed; its words are above
    check the network, the proxy (HTTPS_PROXY), certificates and 'pip config list', then type the same command again" 5
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

# How well a Python suits, "" where it is too old or none: see hive/host/python_build.py.
fitness() { "$1" -I "$root/hive/host/python_build.py" 2>/dev/null || true; }

# The Python of a new environment: HIVE_PYTHON, else of those on PATH the first that suits best, "" where there is none.
find_python() {
    local candidate found="" best=0 fit candidates
    if [ -n "${HIVE_PYTHON:-}" ]; then
        printf '%s\n' "$HIVE_PYTHON"
        return
    fi
    # Each of a name: a version manager's shim stands before the system's, and is rarely built with a profile.
    mapfile -t candidates < <(type -aP python3 python3.11 python3.12 python3.13 python3.14)
    for candidate in "${candidates[@]}"; do
        fit=$(fitness "$candidate")
        if [ "${fit:-0}" -gt "$best" ]; then
            best=$fit
            found=$candidate
        fi
        [ "$best" -lt 3 ] || break
    done
    printf '%s\n' "$found"
}

# A choice that cannot be is refused before anything else is done.
check_choice() {
    [ -z "${HIVE_PYTHON:-}" ] || [ -n "$(fitness "$HIVE_PYTHON")" ] ||
        die "HIVE_PYTHON=$HIVE_PYTHON is no Python 3.11 or newer" 2
}

# Debian ships ensurepip, without which no environment can be made, apart from python3.
venv_works() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

missing_packages() {
    local python
    python=$(find_python)
    if [ -z "$python" ] || ! venv_works "$python"; then echo python3-venv; fi
    # An image brings its own.
    if [ -z "$prefix" ] && ! command -v redis-server >/dev/null; then echo redis-server; fi
    if [ -n "$compile" ] && ! command -v gcc >/dev/null; then echo gcc; fi
    if [ -n "$compile" ] && [ -n "$python" ] && ! has_headers "$python"; then echo python3-dev; fi
}

has_headers() { "$1" -c 'import pathlib, sysconfig as s, sys; sys.exit(not pathlib.Path(s.get_path("include"), "Python.h").exists())'; }

apt_lists_are_empty() { ! compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null; }

# $@: what is missing. Ends where it cannot be installed from here.
may_add_packages() {
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        die "python3-venv (Python 3.11 or newer) and redis-server are needed; missing here: $*. Type:
    sudo apt-get update && sudo apt-get install -y python3-venv redis-server" 5
    fi
}

apt_get() { DEBIAN_FRONTEND=noninteractive quietly apt-get -q "$@"; }

add() { apt_get install -y --no-install-recommends -o APT::Keep-Downloaded-Packages=false "$@"; }

read_lists() { apt_get update || die "apt-get update failed" 5; }

add_packages() {
    local missing
    add "$@" || die "apt-get install failed" 5
    mapfile -t missing < <(missing_packages)
    [ "${#missing[@]}" -eq 0 ] || die "still missing after apt-get install: ${missing[*]} (Python 3.11 or newer?)" 5
}

ensure_packages() {
    local missing
    mapfile -t missing < <(missing_packages)
    [ "${#missing[@]}" -gt 0 ] || return 0
    may_add_packages "${missing[@]}"
    if apt_lists_are_empty; then
        say "reading the package lists"
        read_lists
    fi
    say "installing ${missing[*]} with apt"
    add_packages "${missing[@]}"
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
    local python
    if [ -e "$venv/unfinished" ] || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
        if [ -e "$venv" ]; then
            say "repairing $venv"
            rm -rf -- "$venv"
        else
            say "making $venv"
        fi
        mkdir -- "$venv"
        : >"$venv/unfinished"
        python=$(find_python)
        quietly "$python" -m venv "$venv" || die "$python -m venv failed"
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
    ) || die_of_pip
    printf '%s\n' "$stamp" >"$venv/installed-run"
    [ "$1" = run ] || printf '%s\n' "$stamp" >"$venv/installed-test"
    rm -f -- "$venv/unfinished"
}

ensure_installed() {
    check_choice
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
sources=(hive systemd conf man pyproject.toml setup.py constraints.txt README.md)
code_stamp() {
    {
        "$(find_python)" --version
        [ -z "$compile" ] || echo compiled
        cd -- "$root"
        find "${sources[@]}" -type f ! -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum
    } | sha256sum | cut -d' ' -f1
}

# The complete environment of the code that $1 stamps, "" where there is none.
find_version() {
    local found
    [ -n "$1" ] || return 0
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

# $1: where. It is complete once it is filled.
begin_version() {
    mkdir -p -- "$1"
    : >"$1/unfinished"
    quietly "$(find_python)" -m venv "$1" || die "python3 -m venv failed"
}

# $1: where, $2: its stamp.
fill_version() {
    local copy code=0 commit changed git extras=""
    # From a copy: a build leaves things beside what it builds, and takes what an earlier one left.
    copy=$(mktemp -d)
    (cd -- "$root" && tar -c --exclude=__pycache__ -- "${sources[@]}") | tar -x -C "$copy"
    # What was added to the version before: jobs with MCP servers go on working.
    if compgen -G "$prefix/opt/hive/current/lib/python3*/site-packages/mcp" >/dev/null; then extras="[mcp]"; fi
    # By the environment, too: from there pip takes it for what it builds with.
    quietly env PIP_CONSTRAINT="$copy/constraints.txt" PIP_BUILD_CONSTRAINT="$copy/constraints.txt" HIVE_COMPILE="$compile" \
        "$1/bin/python" -m pip install --disable-pip-version-check --no-input --no-warn-script-location \
        -c "$copy/constraints.txt" "$copy$extras" || code=$?
    rm -rf -- "$copy"
    [ "$code" -eq 0 ] || die_of_pip
    # In an image the scripts name the place they will have there.
    if [ -n "$prefix" ]; then
        grep -lIrZ -F "$prefix/opt/" "$1/bin" "$1/pyvenv.cfg" | xargs -0r sed -i "s|$prefix/opt/|/opt/|g"
    fi
    # For `hive version`, which names the commit where this is no release (hive/build.py).
    git=(git -c "safe.directory=$root" -C "$root")
    commit=$("${git[@]}" describe --tags '--match=v[0-9]*' --always --long --abbrev=7 2>/dev/null) || commit=""
    changed=$("${git[@]}" --no-optional-locks status --porcelain --untracked-files=no 2>/dev/null) || commit=""
    rm -f -- "$1/share/hive/commit"
    [ -z "$commit" ] || printf '%s%s\n' "$commit" "${changed:+-dirty}" >"$1/share/hive/commit"
    sync -f -- "$1"
    printf '%s\n' "$2" >"$1/stamp"
    rm -f -- "$1/unfinished"
}

installed_packages() { dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' | sed -n 's/^ii *//p' | sort; }

# --- steps: what is done, and what a dry run says of it, in one place

# A line of a table of steps: $1 the step, $2 what it does, the rest the command that does it.
step() {
    printf '%s\t%s\t' "$1" "$2"
    shift 2
    printf '%q ' "$@"
    printf '\n'
}

# $1: a table of steps. Each is said and done.
take() {
    local lines line name words act
    mapfile -t lines < <("$1")
    for line in "${lines[@]}"; do
        IFS=$'\t' read -r name words act <<<"$line"
        say "$name: $words"
        eval "$act"
    done
}

# The same of a dry run: each is said, nothing is done. What takes --json reads only what Hive itself says.
tell() {
    local lines line name words act said=""
    mapfile -t lines < <("$1")
    for line in "${lines[@]}"; do
        IFS=$'\t' read -r name words act <<<"$line"
        if [ -n "$json" ]; then
            say "$name: $words"
            continue
        fi
        [ "$name" = "$said" ] || printf '%s\n' "$name"
        printf '    %s\n' "$words"
        said=$name
    done
}

# Which packages came with Hive is noted, so that --purge can take them away again.
packages=/var/lib/hive/packages

remember_packages() {
    mkdir -p -- "${packages%/*}"
    installed_packages >"$packages.part"
    mv -- "$packages.part" "$packages.before"
}

note_packages() {
    { cat -- "$packages" 2>/dev/null || true; installed_packages | comm -13 "$packages.before" -; } |
        sort -u >"$packages.new"
    mv -- "$packages.new" "$packages"
    rm -f -- "$packages.before"
}

# Not worth failing for: it makes the man pages.
add_scdoc() { add scdoc || say "scdoc cannot be installed"; }

end_debians_redis() { quietly systemctl disable --now redis-server.service || say "redis-server.service cannot be disabled"; }

# Whether Redis comes, or came before this was cut off, with Hive.
redis_comes() { [[ " $* " == *" redis-server "* ]] || { [ -e "$packages.before" ] && ! grep -qx redis-server "$packages.before"; }; }

package_steps() {
    local missing=() wanted=() is_noted=""
    mapfile -t missing < <(missing_packages)
    wanted=("${missing[@]}")
    command -v scdoc >/dev/null || ! command -v apt-get >/dev/null || wanted+=(scdoc)
    [ ! -e "$packages.before" ] || is_noted=yes
    if [ "${#wanted[@]}" -gt 0 ]; then
        if [ -z "$prefix" ] && [ -z "$is_noted" ]; then
            is_noted=yes
            step packages "note in $packages.before which packages are there" remember_packages
        fi
        ! apt_lists_are_empty || step packages "apt-get update" read_lists
        [ "${#missing[@]}" -eq 0 ] || step packages "apt-get install ${missing[*]}" add_packages "${missing[@]}"
        [ "${wanted[*]}" = "${missing[*]}" ] || step packages "apt-get install scdoc, which makes the man pages" add_scdoc
    fi
    [ -z "$prefix" ] || return 0
    # The package starts a Redis of its own on a TCP port; Hive's is another.
    ! redis_comes "${missing[@]}" || step packages "systemctl disable --now redis-server.service" end_debians_redis
    [ -z "$is_noted" ] || step packages "note in $packages which of them came with Hive" note_packages
}

# Half-made environments are taken away, one of this code is made where there is none.
environment_steps() {
    local found stamp=""
    for found in "$versions"/*; do
        [ ! -e "$found/unfinished" ] || step environment "remove $found, which never was complete" rm -rf -- "$found"
    done
    [ -z "$(find_python)" ] || stamp=$(code_stamp)
    [ -z "$(find_version "$stamp")" ] || return 0
    found=$(next_version)
    step environment "make $found" begin_version "$found"
    step environment "pip install $root into it" fill_version "$found" "$stamp"
}

# What Hive itself does then, where nothing is there yet that could say it in full: each step and what it does at most.
hive_steps() {
    local name words
    while IFS=$'\t' read -r name words; do
        step "$name" "$words" hive
    done < <(sed -n 's/^    "\([^"]*\)": "\([^"]\{1,\}\)",$/\1\t\2/p' "$root/hive/install/step_list.py")
}

# Why this box cannot become a Hive, and the exit code before it; nothing where it can.
why_not_box() {
    local version
    if [ "$(id -u)" -ne 0 ]; then
        echo "4 this takes root: sudo ./install.sh"
    elif [ -n "$prefix" ]; then
        return 0
    elif [ ! -d /run/systemd/system ]; then
        echo "5 systemd is not PID 1 here; ./install.sh up needs none, an image takes --prefix"
    else
        version=$(systemctl --version | sed -n '1s/^systemd \([0-9]*\).*/\1/p')
        [ "${version:-0}" -ge 252 ] || echo "5 systemd 252 or newer is needed, as in Debian 12; here is ${version:-none}"
    fi
}

require_box() {
    local code why
    read -r code why < <(why_not_box) || return 0
    die "$why" "$code"
}

install_box() {
    local missing=()
    require_box
    mapfile -t missing < <(missing_packages)
    [ "${#missing[@]}" -eq 0 ] || may_add_packages "${missing[@]}"
    take package_steps
    mkdir -p -- "$versions"
    exec 9<"$versions"
    flock -n 9 || die "another install.sh is at work in $versions"
    take environment_steps
    target=$(find_version "$(code_stamp)")
    exec 9<&-
    cd /
    exec "$target/bin/python" -P -m hive install --yes "$@"
}

# What Hive itself would do, told by an environment of this code that passes. Fails where none can be made.
tell_passing() {
    local passing code=0
    say "making an environment that passes, to tell the rest"
    passing=$(mktemp -d)
    # Its scripts are not used, so they need not name another place.
    (prefix="" begin_version "$passing/venv" && prefix="" fill_version "$passing/venv" passing) || code=1
    if [ "$code" -eq 0 ]; then
        (cd / && "$passing/venv/bin/python" -P -m hive install --dry-run "$@") || code=$(($? + 100))
    fi
    rm -rf -- "$passing"
    return "$code"
}

# Tells everything and changes nothing.
plan_box() {
    local code why
    if read -r code why < <(why_not_box); then say "as it is now, the run would end here: $why"; fi
    if [ -n "$(missing_packages)" ] && ! command -v apt-get >/dev/null; then
        say "as it is now, the run would end here: there is no apt-get to install $(missing_packages | xargs)"
    fi
    tell package_steps
    tell environment_steps
    if [ -n "$(find_python)" ] && venv_works "$(find_python)"; then
        target=$(find_version "$(code_stamp)")
        if [ -n "$target" ]; then
            cd / && exec "$target/bin/python" -P -m hive install --dry-run "$@"
        fi
        code=0
        tell_passing "$@" || code=$?
        [ "$code" -lt 100 ] || exit $((code - 100))
        [ "$code" -ne 0 ] || return 0
    fi
    [ -z "$json" ] || die "--json: the rest can be told once python3-venv is installed and pip finds what Hive needs" 5
    tell hive_steps
    say "these are all steps, and what each does at most; file by file they are told where python3-venv is installed"
}

# --- taking it away

stop_services() {
    systemctl stop hive.target 'hive-model@*' 'hive-agent@*' 'hive-*' 2>/dev/null || true
    systemctl stop hive-agents.slice hive-model.slice hive.slice 2>/dev/null || true
}

# What the installer noted of one kind in $1: files, users, groups.
noted() {
    local manifest=$prefix/var/lib/hive/install.json
    [ -e "$manifest" ] || return 0
    case $1 in
        files) sed -n 's/^  "\(\/[^"]*\)": \[.*/\1/p' "$manifest" ;;
        *) sed -n "/^ \"$1\": \[\$/,/^ \]/s/^  \"\([^\"]*\)\",\{0,1\}\$/\1/p" "$manifest" ;;
    esac
}

# What is taken away where no environment is there any more that could do it.
rest_steps() {
    local path name directories=(/opt/hive)
    if [ -z "$prefix" ]; then
        step services "systemctl stop hive.target and every unit of Hive" stop_services
        directories+=(/run/hive /run/hive-inference /run/hive-model)
    fi
    [ -z "$purge" ] || directories+=(/etc/hive /var/lib/hive)
    while read -r path; do
        [[ $path != /etc/hive/*.conf && $path != /etc/hive/*.toml ]] || [ -n "$purge" ] || continue
        if [ -e "$prefix$path" ] || [ -L "$prefix$path" ]; then
            step files "remove $prefix$path" rm -f -- "$prefix$path"
        fi
    done < <(noted files)
    path=$prefix/usr/local/bin/hive
    [ "$(readlink -- "$path")" != /opt/hive/current/bin/hive ] || step files "remove $path" rm -f -- "$path"
    if [ -z "$prefix" ]; then
        step services "systemctl daemon-reload" systemctl daemon-reload
        [ -n "$purge" ] || [ ! -d /var/lib/hive ] || step state "give /var/lib/hive to root" chown -hR 0:0 /var/lib/hive
        while read -r name; do
            ! getent passwd "$name" >/dev/null || step users "remove user $name" userdel "$name"
        done < <(noted users)
        while read -r name; do
            # That of a user's name goes with the user.
            ! getent group "$name" >/dev/null || getent passwd "$name" >/dev/null ||
                step users "remove group $name" groupdel "$name"
        done < <(noted groups)
    fi
    for path in "${directories[@]}"; do
        [ ! -e "$prefix$path" ] || step directories "remove $prefix$path" rm -rf -- "$prefix$path"
    done
}

is_anything_left() {
    local path
    for path in /opt/hive ${purge:+/etc/hive /var/lib/hive}; do [ ! -e "$prefix$path" ] || return 0; done
    [ -n "$(noted users)" ] || noted files | grep -qvE '^/etc/hive/[a-z]*\.(conf|toml)$'
}

# Those of `came`, which came with Hive, unless something else needs one of them by now.
removal_steps() {
    local others
    [ "${#came[@]}" -gt 0 ] || return 0
    others=$(apt-get -s purge "${came[@]}" | sed -n 's/^\(Purg\|Remv\) \([^ ]*\).*/\2/p' |
        grep -vxF -f <(printf '%s\n' "${came[@]}") || true)
    if [ -n "$others" ]; then
        step packages "keep ${came[*]}: they came with Hive, and others need them now" true
    else
        step packages "apt-get purge ${came[*]}" purge_packages "${came[@]}"
    fi
}

purge_packages() { apt_get purge -y "$@" || die "apt-get purge failed" 5; }

uninstall_box() {
    local found do=take came=()
    require_box
    [ -z "$dry" ] || do=tell
    is_anything_left || die "Hive is not installed in ${prefix:-/}: there is nothing to remove" 3
    if [ -n "$purge" ] && [ -z "$prefix" ] && [ -e "$packages" ]; then mapfile -t came <"$packages"; fi
    found=$(readlink -f -- "$prefix/opt/hive/current" || true)/bin/python
    [ -x "$found" ] || found=$(compgen -G "$versions/*/bin/python" | head -n 1 || true)
    if [ -n "$found" ] && (cd / && "$found" -P -m hive version >/dev/null 2>&1); then
        (cd / && "$found" -P -m hive uninstall "$@")
    elif [ -z "$dry" ] && [ -z "$yes" ]; then
        die "this Hive cannot remove itself any more; with --uninstall --yes install.sh does" 3
    else
        "$do" rest_steps
    fi
    "$do" removal_steps
}

box() {
    local word uninstall="" dry="" purge="" yes="" json="" passed=()
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
            --json) json=yes ;;
            *) usage ;;
        esac
        [ "$word" = --yes ] || [ "$word" = -y ] || passed+=("$word")
    done
    [ -z "$purge" ] || [ -n "$uninstall" ] || usage
    [ -n "$uninstall" ] || check_choice
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
    up | test) [ -z "$compile" ] || die "HIVE_COMPILE=1 is for a box, ./install.sh alone: a checkout has no compiled files" 2 ;;
esac
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
        # The tests start some hundred times Python; without bytecode each compiles all of Hive.
        unset PYTHONDONTWRITEBYTECODE
        exec "$venv/bin/python" -m pytest -n auto "$@"
        ;;
    "" | -*) box "$@" ;;
    *) usage ;;
esac
