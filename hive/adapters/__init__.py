"""LoRA adapters as files: what may come in, whose signature it has, and the directory in which it is kept.

May import: leaves and host. Begin with install.py.
"""
