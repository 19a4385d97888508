"""The servers of models as the helper starts them: those of the pool's slots, and the four fixed inference units.

May import: leaves, host, link, and of the backends the entries and the models' directory.
Begin with model_slots.py.
"""
