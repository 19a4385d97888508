"""Programs that serve one model of sound or pictures each, as servers of the pool: `hive-runner KIND`.

A runner has a virtual environment of its own, with its engine. It imports the standard library, its engine and this
room alone (decision 056).
"""
