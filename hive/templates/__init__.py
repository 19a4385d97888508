"""Programs of a template's own Python: the fork server, and what its children do before they are an agent's script.

The standard library only, Python 3.9 and later, nothing of Hive: they run among the packages of somebody else.
"""
