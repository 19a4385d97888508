"""`hive jobs`: what the daemon starts, or systemd, for model jobs."""

from __future__ import annotations

from typing import Annotated

import typer

from hive.cli import service_starts


def run_jobs(
    link_fd: Annotated[int | None, typer.Option(metavar="FD", help="Its link to the daemon.")] = None,
) -> int:
    """Runs the loops of model jobs, a service.

    It takes its link to the daemon from the socket that systemd hands over, and ends with it.

    Examples:
      hive jobs --link-fd 5
    """
    return service_starts.jobs(link_fd=link_fd)
