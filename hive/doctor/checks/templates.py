"""Templates: may they have what bounds them here, and does each start, with the packages of now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, wrong
from hive.doctor.checks.target import Subject
from hive.terminal_text import counted

NONE = "no template is described"
FORBIDDEN = {
    "user.max_user_namespaces": "0",
    "kernel.unprivileged_userns_clone": "0",
    "kernel.apparmor_restrict_unprivileged_userns": "1",
}
"""Settings of the kernel, with the value by which no process without rights gets a user namespace: the first of every
kernel, the second of Debian's, the third of Ubuntu's. Where it is not there it forbids nothing."""


def look_at_namespaces(subject: Subject) -> CheckVerdict:
    is_apart = subject.is_appliance or subject.is_root
    found = {name: Path("/proc/sys", *name.split(".")) for name in FORBIDDEN}
    values = {name: path.read_text().strip() for name, path in found.items() if path.exists()}
    return judge_namespaces(list(subject.settings.templates), values, is_apart=is_apart)


def judge_namespaces(templates: Sequence[str], values: Mapping[str, str], *, is_apart: bool) -> CheckVerdict:
    """`values`: of the settings that are there. `is_apart`: agents have users of their own.

    >>> judge_namespaces(["lg"], {"user.max_user_namespaces": "0"}, is_apart=False).reason
    'agents run as this user: a template needs no user namespace'
    """
    if not templates:
        return skipped(NONE)
    if not is_apart:
        return skipped("agents run as this user: a template needs no user namespace")
    for name, forbids in FORBIDDEN.items():
        if values.get(name) == forbids:
            return wrong("userns_forbidden", name=name, value=forbids, to="15000" if forbids == "0" else "0")
    return passed("the kernel permits user namespaces")


def look_at_ready(subject: Subject) -> CheckVerdict:
    if not subject.settings.templates and not subject.config_error:
        return skipped(NONE)
    client = subject.client
    if client is None:
        return skipped("no daemon answers that would know how they are")
    return judge_ready(client.get("/api/templates", timeout_s=subject.limit_s)["templates"])


def judge_ready(templates: Sequence[Mapping[str, Any]]) -> CheckVerdict:
    """`templates`: as the API shows them.

    >>> judge_ready([]).reason, judge_ready([{"name": "lg", "state": "none", "is_stale": False}]).reason
    ('no template is described', '1 template, 0 of them started')
    """
    if not templates:
        return skipped(NONE)
    failed = [one for one in templates if one["state"] == "failed"]
    if failed:
        name, why = failed[0]["name"], failed[0]["why"]
        return wrong("template_failed", template=name, why=why, more=len(failed) - 1)
    stale = [one["name"] for one in templates if one["is_stale"]]
    if stale:
        return wrong("template_stale", template=stale[0], more=len(stale) - 1)
    started = sum(one["state"] == "ready" for one in templates)
    return passed(f"{counted(len(templates), 'template')}, {started} of them started")


CHECKS = (
    Check("templates.namespaces", "Templates may have user namespaces here.", look_at_namespaces),
    Check("templates.ready", "Templates start, and none is stale.", look_at_ready),
)
