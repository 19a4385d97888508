"""Supervision of one inference server: its process, its judge, and requests to it that always come to an end."""
