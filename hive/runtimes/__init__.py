"""Ways an agent runs: a process, a unit of systemd, a container, a virtual machine; its home, its jail, its output.

May import: leaves, host; of the link what is said to the helper, the form of a script and who is at a socket; of
`templates` the two files that are handed over.
Begin with runtime.py.
"""
