"""The daemon of the tests of its services, for those of the life of models."""

from __future__ import annotations

from tests.control.conftest import box, live

__all__ = ["box", "live"]
