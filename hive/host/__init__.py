"""The machine: processes, control groups, systemd, GPU, sockets. The only room that starts programs.

May import: leaves.
Begin with process.py.
"""
