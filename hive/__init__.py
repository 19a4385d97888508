"""Hive: many sandboxed agents on one GPU box, asleep while they have nothing to do."""

import sys

__version__ = "0.2.0"


def ready() -> None:
    """Marks in an agent's script where its template stops; each agent of that template goes on from here by itself.

    Outside of a template, and the second time, it returns at once (docs/templates.md). Python 3.9 and later, alone:
    a template whose packages have no Hive loads this file.
    """
    template = sys.modules.get("_hive_template_ready")
    if template is not None:
        template.ready()
