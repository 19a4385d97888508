"""The services of the daemon: agents, models, messages, usage. They know no HTTP.

May import: leaves, audit, pooling, pool, agents, backends, models, link, store, host, the helper's client.
Begin with registration.py; hive/daemon.py makes them, and hive/api/services.py lists them.
"""
