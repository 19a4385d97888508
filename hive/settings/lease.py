"""The settings of leases: `[lease]`, memory of the pool for programs that are no model."""

from __future__ import annotations

from typing import Annotated

import msgspec

from hive.settings.meta import setting_meta as _s


class LeaseSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[lease]`: memory of the pool for programs that are no model. The limits are those of a user who is no admin."""

    max_mb: Annotated[
        int, _s("Memory of all leases of one user together, waiting ones too; 0: no limit.", unit="MiB", ge=0)
    ] = 0
    max_s: Annotated[float, _s("Longest time of one lease; 0: no limit.", unit="s", ge=0)] = 0
    grace_s: Annotated[
        float, _s("A program has so long between SIGTERM and SIGKILL, where it did not say.", unit="s", ge=0, le=3600)
    ] = 60
    share: Annotated[
        float, _s("Of a GPU that leases may hold together which are not preemptible, without --all.", gt=0, le=1)
    ] = 0.5
    overrun: Annotated[
        str, _s("One that takes more memory than it asked for is told of, or ended.", pattern="^(tell|end)$")
    ] = "tell"
