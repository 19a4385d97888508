"""`hive doctor`: one check per subject. Also the status of a Hive whose daemon does not answer.

May import: leaves, files, host, store, backends, client, the helper's client.
Begin with doctor.py.
"""
