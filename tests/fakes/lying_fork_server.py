#!/usr/bin/python3
"""A template that lies: run in the place of a Python, as `lying_fork_server.py PROGRAM FD`, with its LIE in the
environment. All else is what the real fork server does."""

# mypy: ignore-errors

import importlib
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time

LIE = os.environ["LIE"]
PROGRAM = sys.argv.pop(0) and sys.argv[0]
loader = importlib.machinery.SourceFileLoader("fork_server", PROGRAM)
spec = importlib.util.spec_from_file_location("fork_server", PROGRAM, loader=loader)
assert spec is not None
assert spec.loader is not None
fork_server = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fork_server)
Server, Packets, setup = fork_server.ForkServer, fork_server.Packets, fork_server.unit_setup
say, set_up = Packets.say, Server._set_up


def said(self, content, fds=()):
    """Says what is to be told to the helper, or something else."""
    if "ready" in content and LIE == "no word":
        signal.pause()
    if "ready" in content and LIE == "nonsense":
        self._sock.send(b"\xff")
    if "ready" in content and LIE == "flood":
        while True:
            os.write(1, b"x" * 100_000)
    if "pid" not in content:
        say(self, content, fds)
        return
    if LIE == "another process":
        fds = (os.pidfd_open(server_pid),)
    if LIE == "a file":
        fds = (os.open("/etc/passwd", os.O_RDONLY),)
    if LIE == "a number":
        fds = ()
    if LIE == "two":
        fds = (*fds, os.dup(fds[0]))
    if LIE == "second child" and os.fork() == 0:
        time.sleep(600)
    say(self, content, fds)
    if LIE == "more words":
        say(self, {"go": {}})
    if LIE == "ended":
        os._exit(0)
    if LIE == "descriptor":
        os.open("/etc/passwd", os.O_RDONLY)


def no_rights_dropped():
    """Keeps its rights in the template's namespace."""


def other_user(uid, gid):
    become(uid + 1, gid + 1)


become = setup.become
server_pid = os.getpid()
Packets.say = said
if LIE == "rights":
    setup.drop_rights = no_rights_dropped
if LIE == "other user":
    setup.become = other_user
    os.chdir = lambda _: None  # which that user may not enter
if LIE == "no network":
    fork_server.kernel.unshare = lambda flags: None if flags == 0x40000000 else unshare(flags)
unshare = fork_server.kernel.unshare if LIE != "no network" else importlib.import_module("ctypes").CDLL(None).unshare
if LIE == "silence":
    Server._become = lambda *_: time.sleep(600)
if LIE == "limits":
    fork_server.resource.setrlimit = lambda *_: None
server = fork_server.begin()
server.hold(fork_server.IMPORTS)
order = server.serve()
fork_server.script.make_main()
fork_server.script.run(order["argv"])
