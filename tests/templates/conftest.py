from __future__ import annotations

collect_ignore = ["facts.py"]  # a program: it prints what it finds
