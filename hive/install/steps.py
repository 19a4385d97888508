"""The steps of an installation that put files: units, configuration, manual, links. Each can be asked what it would do.

A step is done when its plan is empty. What a step does it can do again, wherever it was cut off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from hive.errors import WrongState
from hive.files import layout, share
from hive.files.layout import Layout
from hive.files.share import Managed
from hive.host.files import link_whole, remove, remove_tree, translated, write_whole
from hive.install import conf_file
from hive.install.manifest import InstallManifest, mark_at, mark_of, missing_directories

SAVED = ".hive-saved"
"""Ends the name of a file that was changed by hand and had to make place for that of a new version."""


class Box:
    """One root and the version that goes there: what every step needs.

    `share`: where the version's files are. `say` takes sentences for a person.
    """

    def __init__(self, place: Layout, *, version: str, share: Path, say: Callable[[str], None]) -> None:
        self.layout = place
        self.version = version
        self.share = share
        self.say = say
        self.manifest = InstallManifest.load(place)

    def __repr__(self) -> str:
        return f"<Box {self.layout.root} {self.version}>"

    def at(self, path: str) -> Path:
        return self.layout.at(path)

    @property
    def venv(self) -> Path:
        return self.at(self.layout.version(self.version))

    def intend(self, marks: dict[str, str], *, directories: Sequence[str] = ()) -> None:
        """Writes down what is about to be put where, and makes the directories that are missing for it."""
        for path, mark in marks.items():
            self.manifest.expect(path, mark)
        wanted = [*directories, *(os.path.dirname(path) for path in marks)]
        fresh = [found for one in dict.fromkeys(wanted) for found in missing_directories(self.layout, one)]
        # The one the manifest itself is in goes last of all, whatever that says.
        self.manifest.add_directories(path for path in fresh if path != layout.STATE)
        self.manifest.settled = False
        self.manifest.save(self.layout)
        for directory in dict.fromkeys(fresh):
            with translated(self.at(directory)):
                self.at(directory).mkdir(mode=0o755, exist_ok=True)

    def settle(self) -> None:
        """Writes down that nothing is being replaced any more."""
        for path, marks in self.manifest.files.items():
            if len(marks) > 1 and (found := mark_at(self.at(path))) in marks:
                self.manifest.files[path] = [found]
        self.manifest.save(self.layout)

    def forget(self, paths: Sequence[str]) -> None:
        """Writes down that these are gone."""
        for path in paths:
            self.manifest.files.pop(path, None)
        self.manifest.save(self.layout)

    def take_away(self, paths: Sequence[str]) -> None:
        """Removes those of `paths` that Hive put there."""
        known = [path for path in paths if self.manifest.knows(path)]
        for path in known:
            remove(self.at(path))
        if known:
            self.forget(known)

    def take_directories_away(self) -> None:
        """Removes the directories that were made and are empty by now. The manifest is not written."""
        for path in reversed(list(self.manifest.directories)):
            try:
                self.at(path).rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                continue  # somebody else uses it by now, or what stays is in it
            self.manifest.directories.remove(path)


class InstallStep(Protocol):
    """`plan`: what `do` would change now, a line each; empty where it is done. `plan_undo` and `undo` alike.

    All raise HiveError's kinds. `notices`: what a person should know beside that.
    """

    name: str

    def plan(self) -> list[str]: ...
    def do(self) -> None: ...
    def notices(self) -> list[str]: ...
    def plan_undo(self, *, purge: bool) -> list[str]: ...
    def undo(self, *, purge: bool) -> None: ...


class QuietStep:
    """A step that has nothing to do, nothing to say, and leaves nothing to be undone, but for what it says itself."""

    def plan(self) -> list[str]:
        return []

    def do(self) -> None:
        return

    def notices(self) -> list[str]:
        return []

    def plan_undo(self, *, purge: bool) -> list[str]:  # noqa: ARG002
        return []

    def undo(self, *, purge: bool) -> None:  # noqa: ARG002
        return


class FilesStep(QuietStep):
    """Files that are the version's: replaced with it, also where somebody changed them (that copy is kept)."""

    def __init__(self, box: Box, name: str, wanted: Callable[[], list[Managed]], *, notice: str = "") -> None:
        self.name = name
        self._box = box
        self._make = wanted
        self._made: list[Managed] | None = None
        self._notice = notice

    @property
    def wanted(self) -> list[Managed]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def strangers(self) -> list[str]:
        """Places where something is that Hive did not put there."""
        found = ((file, mark_at(self._box.at(file.path))) for file in self.wanted)
        return [
            file.path
            for file, mark in found
            if mark and mark != mark_of(file.content) and not self._box.manifest.knows(file.path)
        ]

    def plan(self) -> list[str]:
        lines = []
        for file in self._outstanding():
            if self._changed_by_hand(file):
                lines.append(f"keep {file.path}, which was changed by hand, as {file.path}{SAVED}")
            lines.append(f"{'replace' if mark_at(self._box.at(file.path)) else 'write'} {file.path}")
        return lines

    def do(self) -> None:
        todo = self._outstanding()
        saved = {f"{file.path}{SAVED}": found for file in todo if (found := self._changed_by_hand(file))}
        self._box.intend({**{file.path: mark_of(file.content) for file in todo}, **saved})
        for file in todo:
            path = self._box.at(file.path)
            if f"{file.path}{SAVED}" in saved:
                write_whole(self._box.at(f"{file.path}{SAVED}"), path.read_bytes(), mode=file.mode)
            write_whole(path, file.content, mode=file.mode)

    def notices(self) -> list[str]:
        return [self._notice] if self._notice and not self.wanted else []

    def plan_undo(self, *, purge: bool) -> list[str]:  # noqa: ARG002
        return [f"remove {file.path}" for file in self.wanted if self._box.manifest.knows(file.path)]

    def undo(self, *, purge: bool) -> None:  # noqa: ARG002
        self._box.take_away([file.path for file in self.wanted])

    def _outstanding(self) -> list[Managed]:
        return [file for file in self.wanted if not self._is_there(file)]

    def _is_there(self, file: Managed) -> bool:
        path = self._box.at(file.path)
        if mark_at(path) != mark_of(file.content) or path.stat().st_mode & 0o777 != file.mode:
            return False
        return self._box.manifest.knows(file.path)

    def _changed_by_hand(self, file: Managed) -> str:
        """The mark of a copy that was changed by hand; empty where none was."""
        found = mark_at(self._box.at(file.path))
        known = self._box.manifest.files.get(file.path)
        return found if found and known is not None and found not in (*known, mark_of(file.content)) else ""


class Configuration(QuietStep):
    """hive.conf and the helper's policy: written once, the operator's from then on."""

    name = "configuration"

    def __init__(self, box: Box) -> None:
        self._box = box

    def plan(self) -> list[str]:
        return [f"write {path}" for path in self._contents() if not self._box.at(path).exists()]

    def do(self) -> None:
        contents = {path: text for path, text in self._contents().items() if not self._box.at(path).exists()}
        self._box.intend({path: mark_of(content) for path, content in contents.items()})
        for path, content in contents.items():
            write_whole(self._box.at(path), content, mode=0o644)

    def notices(self) -> list[str]:
        """Settings the file does not know yet; of a file that Hive did not write, only what an appliance needs."""
        path = self._box.at(layout.CONF_FILE)
        if not path.exists():
            return []
        new = conf_file.new_settings(path.read_text(errors="replace"))
        if self._box.manifest.knows(layout.CONF_FILE):
            return [
                f"new in hive.conf(5): {one.name} (default {one.default or 'empty'}): {one.sentence}" for one in new
            ]
        unset = [one.name for one in new if one.name in conf_file.SET]
        return [
            f"{layout.CONF_FILE} was there and stays; an installed Hive has {conf_file.said(name)}" for name in unset
        ]

    def plan_undo(self, *, purge: bool) -> list[str]:
        known = [path for path in self._contents() if self._box.manifest.knows(path)]
        return [f"{'remove' if purge else 'keep'} {path}" for path in (*known, *self._beside)]

    def undo(self, *, purge: bool) -> None:
        if not purge:
            return
        for path in self._beside:  # before hive.conf, by which it is known whose they are
            remove_tree(self._box.at(path))
        self._box.take_away(self.paths)

    @property
    def _beside(self) -> list[str]:
        """Paths of what operators have put beside a hive.conf of Hive's: descriptions of models and templates, and
        keys of adapters."""
        if not self._box.manifest.knows(layout.CONF_FILE):
            return []
        beside = (layout.MODELS_D, layout.TEMPLATES_D, layout.ADAPTER_KEYS)
        return [path for path in beside if os.path.lexists(self._box.at(path))]

    @property
    def paths(self) -> list[str]:
        return list(self._contents())

    def _contents(self) -> dict[str, bytes]:
        return {layout.CONF_FILE: conf_file.text().encode(), layout.POLICY_FILE: share.policy(self._box.share)}


class LinksStep(QuietStep):
    """Symbolic links: path → what it says."""

    def __init__(self, box: Box, name: str, wanted: Callable[[], dict[str, str]]) -> None:
        self.name = name
        self._box = box
        self._make = wanted

    @property
    def wanted(self) -> dict[str, str]:
        return self._make()

    def strangers(self) -> list[str]:
        return [
            path
            for path, target in self.wanted.items()
            if mark_at(self._box.at(path)) not in ("", target) and not self._box.manifest.knows(path)
        ]

    def plan(self) -> list[str]:
        return [f"link {path} -> {target}" for path, target in self._outstanding().items()]

    def do(self) -> None:
        todo = self._outstanding()
        self._box.intend(todo)
        for path, target in todo.items():
            link_whole(self._box.at(path), target)

    def plan_undo(self, *, purge: bool) -> list[str]:  # noqa: ARG002
        return [f"remove {path}" for path in self.wanted if self._box.manifest.knows(path)]

    def undo(self, *, purge: bool) -> None:  # noqa: ARG002
        self._box.take_away(list(self.wanted))

    def _outstanding(self) -> dict[str, str]:
        known = self._box.manifest.knows
        return {
            path: target
            for path, target in self.wanted.items()
            if mark_at(self._box.at(path)) != target or not known(path)
        }


def enabled(units: Sequence[Managed], unit: str) -> dict[str, str]:
    """The links that `systemctl enable unit` would make: of its [Install] section, and those of `Also=`.

    >>> target = Managed("/etc/systemd/system/a.target", b"[Install]\\nWantedBy=multi-user.target\\n")
    >>> enabled([target], "a.target")
    {'/etc/systemd/system/multi-user.target.wants/a.target': '../a.target'}
    """
    by_name = {os.path.basename(file.path): file for file in units}
    links: dict[str, str] = {}
    todo, seen = [unit], set[str]()
    while todo:
        name = todo.pop()
        if name in seen or name not in by_name:
            continue
        seen.add(name)
        section = _install_section(by_name[name])
        for key, suffix in (("wantedby", "wants"), ("requiredby", "requires")):
            for above in section.get(key, "").split():
                links[f"{layout.UNITS}/{above}.{suffix}/{name}"] = f"../{name}"
        todo.extend(section.get("also", "").split())
    return links


def _install_section(unit: Managed) -> dict[str, str]:
    """Later lines of one key go on the earlier ones."""
    found: dict[str, str] = {}
    section = ""
    for line in unit.content.decode().splitlines():
        if line.startswith("["):
            section = line.strip()
        elif section == "[Install]" and "=" in line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            found[key.strip().lower()] = f"{found.get(key.strip().lower(), '')} {value.strip()}".strip()
    return found


def refuse_strangers(steps: Sequence[InstallStep]) -> None:
    """Raises WrongState where something of somebody else's is in the way; before anything is changed."""
    found = [path for step in steps if isinstance(step, FilesStep | LinksStep) for path in step.strangers()]
    if found:
        raise WrongState(f"in the way, and not Hive's: {', '.join(found)}", hint="move it away, then try again")
