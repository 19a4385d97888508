"""The version of this Hive, and the commit it was made from."""

from __future__ import annotations

import platform

from hive import build
from hive.cli.call import CommandCall
from hive.errors import HiveError

GIT_S = 2.0


def version(call: CommandCall) -> None:
    """Prints the version of this command, its build, and the commit it was made from where it is no release.

    What follows the + is another one for any other code, and the same in a clone, a wheel and an installed Hive.
    compiled=yes: what each request passes was compiled (HIVE_COMPILE=1 ./install.sh).

    Examples:
      hive version
      hive version --json
    """
    said = {
        "hive": build.version(),
        "commit": commit() or None,
        "python": platform.python_version(),
        "compiled": build.COMPILED.exists(),
    }
    call.show("version", said, line)


def line() -> str:
    """The answer of `hive --version`, too."""
    found = commit()
    named = f"hive {build.version()} ({found})" if found else f"hive {build.version()}"
    return f"{named} compiled={build.compiled()}"


def commit() -> str:
    """The commit as `1a2b3c4` or `1a2b3c4, modified`; empty for a release, and where it is not known."""
    checkout = build.CODE.parent
    if not (checkout / ".git").exists():
        try:
            return build.commit_of((build.home() / build.COMMIT).read_text(encoding="ascii"))
        except (OSError, UnicodeDecodeError):
            return ""
    from hive.host import program  # no other start needs it

    git = ["git", "-C", str(checkout)]
    try:
        described = program.run([*git, *build.DESCRIBE], env=program.PLAIN, limit_s=GIT_S)
        changed = program.run([*git, *build.CHANGED], env=program.PLAIN, limit_s=GIT_S)
    except HiveError:
        return ""
    dirty = "-dirty" if changed.text.strip() else ""
    return build.commit_of(described.text.strip() + dirty) if described.code == changed.code == 0 else ""
