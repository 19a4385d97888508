"""An agent's script as `__main__`: FILE, `-m` and `-c` as Python's own command line runs them."""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import runpy
import sys
import types
from collections.abc import Callable


def run(argv: list[str], at_end: Callable[[BaseException | None], None] = lambda _: None) -> None:
    """Runs it; whatever leaves it is told as Python tells it, and leaves here as SystemExit or KeyboardInterrupt.

    `at_end` is called with that once it was told, with None where the script came to its last line.
    """
    try:
        _run(argv)
    except SystemExit as error:
        at_end(error)
        raise
    except BaseException as error:
        error.__traceback__ = _without_ours(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        at_end(error)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *_: None  # told already; Python ends by the signal, as it should
            raise
        sys.exit(1)
    else:
        at_end(None)


def _without_ours(traceback: types.TracebackType | None) -> types.TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


def _run(argv: list[str]) -> None:
    form = argv[0]
    if form == "-m":
        _set_up(["-m", *argv[2:]], os.getcwd())
        _module(argv[1])
    elif form == "-c":
        _set_up(["-c", *argv[2:]], "")
        exec(compile(argv[1], "<string>", "exec", dont_inherit=True), sys.modules["__main__"].__dict__)
    else:
        _file(argv)


def _set_up(argv: list[str], first: str) -> None:
    """`first`: of sys.path; with PYTHONSAFEPATH there is none."""
    sys.argv = argv
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, first)


def _module(name: str) -> None:
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what Python's own main calls


def _file(argv: list[str]) -> None:
    path = argv[0] if os.path.isabs(argv[0]) else os.path.join(os.getcwd(), argv[0].removeprefix("./"))
    if os.path.isdir(path):
        _set_up(argv, path)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: {why}\n")
        sys.exit(2)
    _set_up(argv, os.path.dirname(os.path.realpath(path)))
    main = sys.modules["__main__"]
    main.__file__ = path
    main.__cached__ = None  # type: ignore[attr-defined]
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def make_main() -> types.ModuleType:
    """A new, empty `__main__` in the place of the fork server's; that one, which must live on."""
    before = sys.modules["__main__"]
    main = types.ModuleType("__main__")
    main.__loader__ = importlib.machinery.BuiltinImporter
    vars(main).update(__annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = main
    return before
