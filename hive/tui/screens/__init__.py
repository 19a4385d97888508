"""Screens that cover the table for a moment: one agent's page, questions, the list of keys."""
