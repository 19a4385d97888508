"""The services of the daemon: agents, models, jobs, messages, usage, audit. They know no HTTP.

May import: leaves, agents, backends, models, link, store, host, the helper's client.
Begin with services.py; hive/daemon.py makes them.
"""
