"""Programs that run as agents are no modules to be imported."""

collect_ignore = ["programs"]
