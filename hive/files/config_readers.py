"""Files of the configuration that a service cannot read. Root reads all of them, so a check by root looks at modes.

The services read hive.conf, models.d and templates.d as users of their own, which are in no group of these files.
"""

from __future__ import annotations

import stat
from pathlib import Path

from hive.settings.file import MODELS_D, TEMPLATES_D, model_files


def unreadable(conf: Path) -> list[str]:
    """One sentence for each file or directory that others may not read; none for what is not there.

    Raises ConfigError where one of the directories cannot be read at all.
    """
    places = [(conf, stat.S_IROTH)]
    for directory in (conf.parent / MODELS_D, conf.parent / TEMPLATES_D):
        if files := model_files(directory):
            places += [(directory, stat.S_IROTH | stat.S_IXOTH), *((file, stat.S_IROTH) for file in files)]
    return [
        f"{place}: the services of Hive cannot read it; chmod o+{'r' if bits == stat.S_IROTH else 'rx'} {place}"
        for place, bits in places
        if place.stat().st_mode & bits != bits
    ]
