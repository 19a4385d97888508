"""Ways an agent runs: a process, a unit of systemd, a container, a virtual machine; its home, its jail, its output.

May import: leaves, host, and of the link what is said to the helper.
Begin with runtime.py.
"""
