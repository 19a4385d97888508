"""`hive pool import`: reads the seed's files, and puts what they describe into models.d, checked as a whole before."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from hive.errors import AS_ROOT, ConfigError, NotFound, NotPermitted, UsageError, WrongState
from hive.files.offline_audit import database_of, noted
from hive.host.files import create_whole, translated
from hive.settings.file import FILE_MAX_BYTES, MODELS_D, load_text, model_files
from hive.settings.pool_import import ImportedModels, imported

MODE, DIRECTORY_MODE = 0o644, 0o755
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class PoolImport(msgspec.Struct, frozen=True):
    """Descriptions made of the seed's files. `text`: as a file of models.d; `file`: where it is, None: nowhere."""

    found: ImportedModels
    text: str
    file: Path | None = None


def import_files(sources: Sequence[Path], base: Path | None = None) -> PoolImport:
    """Reads `sources`; paths in them that are not absolute are those of `base`, else of the first source's directory.

    Raises ConfigError (no such models, or not as models.d takes them), NotFound, NotPermitted.
    """
    found = imported({str(path): _document(path) for path in sources}, (base or sources[0].parent).absolute())
    kinds = {"model": found.models, "task": found.tasks}
    text = tomli_w.dumps({kind: named for kind, named in kinds.items() if named})
    _check("", None, text, sources[0].name, f"what {sources[0]} describes", [])
    return PoolImport(found, text)


def write(made: PoolImport, conf: Path, name: str) -> PoolImport:
    """Puts it at `models.d/NAME.toml` beside `conf`, where nothing is, if the whole configuration is right with it.

    Raises UsageError (the name), ConfigError, WrongState (something is there), NotFound, NotPermitted, StoreFull.
    """
    if not _FILE_NAME.fullmatch(name):
        raise UsageError(f"{name[:80]!r} is no name of a file", hint="letters, digits and . _ - (at most 64)")
    real = Path(os.path.realpath(conf))
    target = conf.parent / MODELS_D / f"{name.removesuffix('.toml')}.toml"
    if not conf.parent.is_dir():
        raise NotFound(f"there is no directory {conf.parent}", hint="name another file with --config")
    database = database_of(conf, uid=os.geteuid(), env=os.environ)
    with noted(database, "import_models", target=target.stem, file=str(target)) as about:
        about["models"], about["tasks"] = len(made.found.models), len(made.found.tasks)
        if os.path.lexists(target):
            raise WrongState(f"{target} is there already", hint="--write another name, or move that file away")
        text = _text(real) if real.exists() else ""
        _check(text, conf, made.text, target.name, str(target), model_files(target.parent))
        with translated(target.parent):
            if not target.parent.is_dir():
                target.parent.mkdir(mode=DIRECTORY_MODE)
                target.parent.chmod(DIRECTORY_MODE)  # whatever the umask: the services read it as other users
        if not create_whole(target, made.text.encode(), mode=MODE):
            raise WrongState(f"{target} is there already", hint="--write another name, or move that file away")
    return msgspec.structs.replace(made, file=target)


def _check(conf: str, path: Path | None, text: str, name: str, said: str, others: list[Path]) -> None:
    """Raises ConfigError where the settings are wrong with `text` as one more file, called `said` in what it says."""
    with tempfile.TemporaryDirectory(prefix="hive-import-") as folder:
        draft = Path(folder, name)
        draft.write_text(text)
        try:
            load_text(conf, path=path, env={}, model_files=[*others, draft])
        except ConfigError as error:
            raise ConfigError(error.message.replace(str(draft), said), hint=error.hint) from None


def _document(path: Path) -> Any:
    """The document of a YAML file, which JSON is too. Raises ConfigError with the line."""
    import yaml  # only this command pays for it

    class UniqueLoader(yaml.SafeLoader):  # type: ignore[misc] # PyYAML has no types
        """PyYAML takes the last of two equal keys, and says nothing."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if isinstance(key.value, str) and key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value[:80]!a} twice", key.start_mark)
                seen.add(key.value if isinstance(key.value, str) else id(key))
            return super().construct_mapping(node, deep=deep)

    data = _read(path)
    try:
        return yaml.load(data, Loader=UniqueLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ConfigError(f"{where}: {error.problem}", hint="it has to be YAML or JSON") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {str(error)[:200]}", hint="it has to be YAML or JSON") from None


def _text(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8") from None


def _read(path: Path) -> bytes:
    try:
        if not path.is_file() and path.exists():
            raise ConfigError(f"{path} is no file")
        with path.open("rb") as file:
            data = file.read(FILE_MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(f"there is no {path}") from None
    except PermissionError as error:
        raise NotPermitted(f"{path} cannot be read: {error.strerror}", hint=AS_ROOT) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if len(data) > FILE_MAX_BYTES:
        raise ConfigError(f"{path}: larger than {FILE_MAX_BYTES} bytes")
    return data
