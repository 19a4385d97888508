"""Makes in a child what it must not have of its template, as it is in a Python that was just started.

This cannot be made so: the secret of `hash()`, addresses, and what packages have read of the environment already.
"""

from __future__ import annotations

import codecs
import faulthandler
import gc
import io
import logging
import os
import random
import signal
import site
import sys
import threading
import time
from typing import Any
from weakref import WeakSet

IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""By Python itself, as soon as it starts."""


class UnseededRandoms:
    """The generators of `random.Random` that took their seed from the system while a template imported.

    All children would draw the same numbers of them; those with a seed of their own are to draw the same.
    """

    def __init__(self) -> None:
        self._found: WeakSet[random.Random] = WeakSet()
        self._seed = random.Random.seed

    def watch(self) -> None:
        """From now on; no thread is there yet."""
        found, seed = self._found, self._seed

        def seed_noted(this: random.Random, a: Any = None, version: int = 2) -> None:
            (found.add if a is None else found.discard)(this)
            seed(this, a, version)

        random.Random.seed = seed_noted  # type: ignore[method-assign,assignment]

    def watch_no_more(self) -> None:
        random.Random.seed = self._seed  # type: ignore[method-assign]

    def seed_anew(self) -> None:
        for each in self._found:
            each.seed()


def reset(
    env: dict[str, str],
    randoms: UnseededRandoms,
    template_env: dict[str, str],
    *,
    first: str = "",
    collects: bool = True,
) -> None:
    """All of it, in the child, which has its working directory, user and descriptors already.

    In the ready state `first` is the entry of sys.path that is the script's, and `collects` as the script had it.
    """
    signals()
    streams(env)
    environment(env)
    paths(env, template_env, first)
    switches(env)
    numbers(randoms)
    modules()
    if collects:
        gc.enable()


def signals() -> None:
    """Dispositions and mask of a new program, and Python's own on top of them."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        wanted: Any = signal.SIG_IGN if number in IGNORED else signal.SIG_DFL
        if number == signal.SIGINT:
            wanted = signal.default_int_handler
        if signal.getsignal(number) != wanted:
            signal.signal(number, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def timers() -> None:
    """None of them goes off any more: a fork does not copy them, and in a template none may ring."""
    for kind in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(kind, 0)


def streams(env: dict[str, str]) -> None:
    """stdin, stdout and stderr anew over descriptors 0 to 2; log handlers that had the old ones get these."""
    before = sys.stdin, sys.stdout, sys.stderr
    encoding, _, errors = env.get("PYTHONIOENCODING", "").partition(":")
    encoding = encoding and codecs.lookup(encoding).name
    unbuffered = bool(env.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = before[number]
        mode = "r" if number == 0 else "w"
        chosen = errors or str(getattr(old, "errors", "strict"))
        made = _stream(
            number,
            mode,
            encoding=encoding or str(getattr(old, "encoding", "utf-8")),
            errors="backslashreplace" if number == 2 else chosen,
            unbuffered=unbuffered,
        )
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
    _hand_to_logging(before)


_old_streams: list[object] = []


def _stream(number: int, mode: str, *, encoding: str, errors: str, unbuffered: bool) -> io.TextIOWrapper:
    """As `create_stdio` in CPython's pylifecycle.c makes it."""
    is_raw = unbuffered and mode == "w"
    binary: Any = open(number, f"{mode}b", 0 if is_raw else -1, closefd=False)  # noqa: SIM115 - for good
    raw = binary if is_raw else binary.raw
    raw.name = ("<stdin>", "<stdout>", "<stderr>")[number]
    made = io.TextIOWrapper(
        binary,
        encoding,
        errors,
        "\n",
        line_buffering=not unbuffered and (number == 2 or raw.isatty()),
        write_through=unbuffered,
    )
    made.mode = mode  # type: ignore[misc]
    return made


def _hand_to_logging(before: tuple[Any, Any, Any]) -> None:
    """A handler that a package made while importing writes where the agent prints."""
    _old_streams.extend(before)  # never closed: packages may hold them too
    new = sys.stdin, sys.stdout, sys.stderr
    for reference in list(getattr(logging, "_handlerList", ())):
        handler = reference()
        if isinstance(handler, logging.StreamHandler) and "stream" in vars(
            handler
        ):  # logging's last resort looks itself
            handler.stream = next((new[at] for at, old in enumerate(before) if old is handler.stream), handler.stream)


def environment(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    time.tzset()


def paths(env: dict[str, str], template_env: dict[str, str], first: str = "") -> None:
    """sys.path as it would be but for its first entry, which is the script's: PYTHONPATH, user site-packages.

    `first`: that entry where it is there already; what the script put before it stays there.
    """
    before, wanted = _python_path(template_env), _python_path(env)
    if before != wanted:
        at = sys.path.index(first) + 1 if first in sys.path else 0
        added = [entry for entry in wanted if entry not in sys.path[:at]]
        sys.path[at:] = added + [entry for entry in sys.path[at:] if entry not in before and entry not in wanted]
    if site.ENABLE_USER_SITE:
        site.USER_BASE = site.USER_SITE = None
        own = site.getusersitepackages()
        if os.path.isdir(own) and own not in sys.path:
            packages = site.getsitepackages()
            at = min((sys.path.index(each) for each in packages if each in sys.path), default=len(sys.path))
            known = set(sys.path)
            site.addsitedir(own, known)
            new = [entry for entry in sys.path if entry not in known or entry == own]
            sys.path[:] = [entry for entry in sys.path if entry not in new]
            sys.path[at:at] = new


def _python_path(env: dict[str, str]) -> list[str]:
    value = env.get("PYTHONPATH", "")
    return list(dict.fromkeys(os.path.abspath(entry) for entry in value.split(os.pathsep))) if value else []


def switches(env: dict[str, str]) -> None:
    """Heeds the variables that Python reads when it starts, as far as that can be done later."""
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = env.get("PYTHONPYCACHEPREFIX") or None
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    elif faulthandler.is_enabled():
        faulthandler.disable()


def numbers(randoms: UnseededRandoms) -> None:
    """Generators of random numbers. (`random`'s own, OpenSSL's and uuid's are seeded anew by a fork.)"""
    randoms.seed_anew()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def modules() -> None:
    """Undoes what modules of the standard library keep of the process that imported them."""
    threading.current_thread().name = "MainThread"
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile.tempdir = None
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
        process.ORIGINAL_DIR = _directory()


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None
