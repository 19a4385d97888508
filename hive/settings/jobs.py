"""The settings of model jobs: `[jobs]`, prompts that Hive carries through their turns with tools by itself."""

from __future__ import annotations

from typing import Annotated

import msgspec

from hive.settings.meta import setting_meta as _s


class JobsSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[jobs]`: model jobs, which operators begin, and agents by `background` (docs/jobs.md)."""

    enabled: Annotated[bool, _s("Model jobs may be begun.")] = True
    at_once: Annotated[int, _s("Model jobs that run at a time; others wait.", ge=1, le=1000)] = 16
    kept_mb: Annotated[
        int, _s("Of the output of jobs that have ended; beyond it that of the oldest goes.", unit="MiB", ge=1)
    ] = 256
    output_max_mb: Annotated[int, _s("Output of one job, at which it fails.", unit="MiB", ge=1, le=1024)] = 16
    idle_exit_s: Annotated[
        float, _s("The process of jobs ends when it has had none for so long.", unit="s", ge=0, le=86400)
    ] = 60
    max_tool_iterations: Annotated[
        int, _s("Turns with calls of tools in one job, and in the jobs that these begin.", ge=1, le=1000)
    ] = 8
    tool_timeout_s: Annotated[float, _s("One call of a tool, from its start.", unit="s", gt=0, le=3600)] = 30
    tool_result_max_kb: Annotated[
        int, _s("Text of one tool's result; the rest is cut off.", unit="KiB", ge=1, le=16384)
    ] = 64
