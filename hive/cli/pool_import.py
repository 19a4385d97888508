"""`hive pool import`: models and tasks that another program's files describe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hive.cli.call import Answer, CommandCall, err
from hive.cli.config import File
from hive.terminal_text import counted


def import_models(
    call: CommandCall,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Manifest and tasks.yaml, YAML or JSON.", show_default=False)
    ],
    models_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of paths that are not absolute; else that of the first FILE.")
    ] = None,
    write: Annotated[
        str | None, typer.Option(metavar="NAME", help="Put it into models.d, as NAME.toml, instead of printing it.")
    ] = None,
    config: File = None,
) -> None:
    """Makes descriptions for models.d of the models of a manifest, and of the tasks of tasks.yaml.

    Each thing that was left out is told on standard error. Nothing is written unless the whole configuration is right
    with it, and nothing that is there is replaced. The daemon reads models.d at its start.

    Examples:
      hive pool import manifest.yaml tasks.yaml
      sudo hive pool import manifest.yaml --models-dir /srv/models --write seed
      hive pool import manifest.yaml --json | jq '.models | keys'
    """
    from hive.files.pool_import import import_files
    from hive.files.pool_import import write as put
    from hive.settings.file import DEFAULT_FILE

    made = import_files(files, models_dir)
    if write is not None:
        made = put(made, config or DEFAULT_FILE, write)
    answer: Answer = {
        "models": made.found.models,
        "tasks": made.found.tasks,
        "notes": made.found.notes,
        "text": made.text,
        "file": None if made.file is None else str(made.file),
    }
    if not call.as_json:
        for note in made.found.notes:
            err(f"note: {note}")
    call.show("pool.import", answer, lambda: _shown(answer))


def _shown(answer: Answer) -> str:
    if answer["file"] is None:
        return str(answer["text"]).rstrip("\n")
    tasks = f" and {counted(len(answer['tasks']), 'task')}" if answer["tasks"] else ""
    models = counted(len(answer["models"]), "model")
    return f"{models}{tasks} in {answer['file']}\nin effect after: systemctl restart hive-daemon"
