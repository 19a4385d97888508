"""Programs of the templates that agents are forked from: they run in the agents' own Python."""
