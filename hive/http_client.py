"""httpx as a library alone.

Where rich and click are installed it imports them, and pygments, for a command line of its own: 70 ms of each start.
It knows how to be without: `None` below makes that import an ImportError.
"""

import sys

sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]

import httpx  # noqa: E402

__all__ = ["httpx"]
