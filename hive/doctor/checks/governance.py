"""The rules of governance: are there any, do they hold, and what do they leave open?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, unseen, wrong
from hive.doctor.checks.target import Subject
from hive.errors import ConfigError
from hive.governance.rules import parse
from hive.host.trusted_file import read_trusted
from hive.settings.file import rules_file


def look_at_rules(subject: Subject) -> CheckVerdict:
    path = rules_file(subject.config_file) if subject.config_file else subject.layout.at(str(rules_file(None)))
    owners = {0} if subject.is_appliance else {0, os.geteuid()}
    try:
        rules = parse(read_trusted(path, "the rules", owners).decode(), path=str(path))
        if subject.is_appliance and not path.stat().st_mode & 0o004:
            return wrong("rules_wrong", why=f"{path}: the daemon cannot read it", hint=f"chmod o+r {path}")
    except FileNotFoundError:
        return skipped(f"there is no {path}: roles alone decide")
    except UnicodeDecodeError as error:
        return wrong("rules_wrong", why=f"{path}: not UTF-8: {error}", hint="")
    except ConfigError as error:
        if isinstance(error.__cause__, PermissionError) and not subject.is_root:
            return unseen(f"this user may not read {path}", "governance.rules")
        return wrong("rules_wrong", why=error.message, hint=error.hint)
    return judge_open(path, rules.open)


def judge_open(path: Path, left_open: Sequence[str]) -> CheckVerdict:
    """
    >>> judge_open(Path("/etc/hive/governance.toml"), []).reason
    '/etc/hive/governance.toml has a rule for every operation'
    """
    if left_open:
        return wrong("rules_open", path=path, operations=list(left_open))
    return passed(f"{path} has a rule for every operation")


CHECKS = (Check("governance.rules", "governance.toml is valid, root's, and leaves nothing open.", look_at_rules),)
