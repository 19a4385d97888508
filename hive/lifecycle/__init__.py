"""The life of models at every kind of server, by order: the runner API's tasks, flushes of prompt caches, the registry.

May import: control, and what that may. Begin with runner.py; hive/daemon.py makes its services.
"""
