"""Programs that run as agents, or in environments of their own, are no modules to be imported."""

collect_ignore = ["programs", "responses_clients"]
