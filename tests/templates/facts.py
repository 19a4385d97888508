"""An agent's script that prints what it finds itself to be, a fact a line: as a program the same as from a template."""

# ruff: noqa: SIM115 - nothing else is done with its files

from __future__ import annotations

import gc
import json
import locale
import logging
import os
import resource
import signal
import stat
import sys
import tempfile
import threading
import time

HANDLED = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]


def tell(name: str, *values: object) -> None:
    sys.stdout.write(f"{name}: {json.dumps([str(value) for value in values])}\n")


def descriptors() -> list[str]:
    found = []
    for fd in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            kind = stat.S_IFMT(os.stat(int(fd)).st_mode)
            flags = open(f"/proc/self/fdinfo/{fd}").read().split("flags:")[1].split()[0]
        except OSError:
            continue  # of the listing
        found.append(f"{fd} {kind:o} {flags}")
    return found


def status(*names: str) -> list[str]:
    lines = open("/proc/self/status").read().splitlines()
    return [" ".join(line.split()) for line in lines if line.split(":")[0] in names]


tell("argv", *sys.argv)
tell("orig_argv", *sys.orig_argv)
tell("executable", sys.executable, sys.prefix)
tell("path", *sys.path)
# `sys.flags` cannot be changed; that one has a switch beside it, which can.
tell("flags", *(repr(sys.flags)[10:-1].replace("dont_write_bytecode=1", "dont_write_bytecode=0").split(", ")))
tell("switches", sys.dont_write_bytecode, sys.pycache_prefix, sys.warnoptions, sys._xoptions)
tell(
    "main",
    *sorted(
        f"{name} {type(value).__name__}"
        for name, value in vars(sys.modules["__main__"]).items()
        if name.startswith("__")
    ),
)
main = sys.modules["__main__"]
tell(
    "main values",
    main.__name__,
    getattr(main, "__file__", ""),
    main.__package__,
    main.__spec__ and main.__spec__.name,
    main.__doc__,
)
tell("loader", type(main.__loader__), getattr(main.__loader__, "path", ""))
tell("frames", sys._getframe().f_code.co_filename, sys._getframe().f_globals is vars(main))
tell("cwd", os.getcwd())
tell("umask", os.umask(0o77))
tell("env", *sorted(f"{name}={value}" for name, value in os.environ.items()))
tell("proc env", *sorted(open("/proc/self/environ").read().split("\0")))
tell("cmdline", *open("/proc/self/cmdline").read().split("\0"))
tell("comm", open("/proc/self/comm").read())
tell("descriptors", *descriptors())
tell("signals", *(f"{number} {signal.getsignal(number)!r}".split(" at 0x")[0] for number in HANDLED))
tell("mask", signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.sigpending())
tell(
    "kernel",
    *status("SigIgn", "SigCgt", "SigBlk", "SigPnd", "ShdPnd", "NoNewPrivs", "Seccomp", "Threads", "Umask", "Groups"),
)
tell("kernel rights", *status("Uid", "Gid", "CapEff", "CapPrm", "CapInh", "CapAmb"))
tell("wakeup", signal.set_wakeup_fd(-1))
for name, stream in (("stdin", sys.stdin), ("stdout", sys.stdout), ("stderr", sys.stderr)):
    buffered = type(getattr(stream, "buffer", None)).__name__
    tell(name, stream.name, stream.mode, stream.encoding, stream.errors, stream.newlines, buffered)
    tell(
        f"{name} writes",
        stream.line_buffering,
        stream.write_through,  # type: ignore[union-attr]
        stream.fileno(),
        stream is getattr(sys, f"__{name}__"),
    )
    tell(f"{name} raw", stream.buffer.name, stream.buffer.mode)
tell("timers", *(signal.getitimer(kind) for kind in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)))
tell("session", os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid())
kinds = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
tell("limits", *(f"{name} {resource.getrlimit(getattr(resource, name))}" for name in kinds))
tell("dumpable", os.stat("/proc/self/status").st_uid == os.getuid())
tell("oom", open("/proc/self/oom_score_adj").read(), os.nice(0))
tell("locale", *(locale.setlocale(kind) for kind in (locale.LC_CTYPE, locale.LC_TIME)), locale.getpreferredencoding())
tell("encodings", sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), sys.getdefaultencoding())
tell("zone", time.tzname, time.timezone, time.strftime("%H", time.localtime(0)))
tell("logging", logging.getLogger().handlers, logging.getLogger().level, logging.lastResort)
tell("collector", gc.isenabled(), gc.get_threshold(), gc.get_debug())
tell(
    "threads",
    threading.current_thread().name,
    threading.active_count(),
    threading.main_thread() is threading.current_thread(),
)
tell("temporary", tempfile.tempdir, tempfile.gettempdir())
tell(
    "ours",
    *sorted(
        name
        for name in sys.modules
        if "hive" in name or name in ("reset", "script", "warm", "kernel", "unit_setup", "fork_server")
    ),
)
sys.stdout.flush()
