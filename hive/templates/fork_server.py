"""The fork server of a template: it imports, warms, and makes children that become agents.

It is run as handed_over.py makes it, `python /proc/self/fd/N [FD]`: it reads no file of Hive's.

In the ready state it then runs a script, as that of an agent, which calls `hive.ready()`: children are made inside of
that call, and it returns in them.

It speaks with the helper over one SEQPACKET socket (descriptor 3), a JSON object in each packet; when that closes it
ends, and its children go on. A child waits until the process between has ended, sets itself up, hands its pidfd over on
a socket of its own, and waits again: for `go` it goes on as the script, for anything else it ends with 125.
"""

from __future__ import annotations

import array
import base64
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import platform
import re
import resource
import signal
import site
import socket
import sys
import threading
import time
import types
from typing import Any, NoReturn

PACKET_BYTES = 64 * 1024
DESCRIPTORS_MAX = 8
NOT_RELEASED = 125
PARENT_S = 5.0
"""For the process between template and child to end."""
READY = "_hive_template_ready"
"""The name in sys.modules under which `hive.ready()` finds the template."""
SOURCES: dict[str, tuple[str, str]] = globals().get("SOURCES", {})
"""Name → path and text of each module of Hive's that is needed here; the path is for tracebacks only."""
IMPORTS, SCRIPT = "its imports", "its script"
"""Names of those who may have done what a template cannot have."""
SOURCES_BYTES = 16 * 1024
"""Of the names of files that a script has imported."""


class HandedOver:
    """Loads a module of `SOURCES`."""

    def __init__(self, name: str) -> None:
        self._path, self._text = SOURCES[name]

    def create_module(self, _: object) -> None:
        """None: an ordinary module."""

    def exec_module(self, module: types.ModuleType) -> None:
        exec(compile(self._text, self._path, "exec", dont_inherit=True), vars(module))


def _spec_of(module: str, name: str) -> Any:
    """No package: the file alone."""
    loader: Any = HandedOver(name)
    path = SOURCES[name][0]
    return importlib.util.spec_from_file_location(module, path, loader=loader, submodule_search_locations=None)


def _load(name: str) -> types.ModuleType:
    """A module of this directory, under no name that an agent's own may have."""
    spec = _spec_of(f"_hive_template_{name}", name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if SOURCES:  # else this is only looked at, as by a version's self-check
    kernel, reset, script, unit_setup, warm = map(_load, ("kernel", "reset", "script", "unit_setup", "warm"))


class UnfitTemplate(Exception):
    """Something keeps this process from being a template; in a sentence."""


class Packets:
    """One end of a SEQPACKET socket."""

    def __init__(self, fd: int) -> None:
        self._sock = socket.socket(fileno=fd)

    def say(self, content: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._sock.sendmsg([json.dumps(content).encode()], ancillary)

    def hear(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next packet; None where the other end is closed."""
        data, fds, _, _ = socket.recv_fds(self._sock, PACKET_BYTES, DESCRIPTORS_MAX)
        return (json.loads(data), list(fds)) if data else None

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


class ForkServer:
    """The template, before and after it is ready.

    `script`: the one that it stops in, empty where it stops after its imports. `pid`: its own; another process that
    has this object is no template.
    """

    def __init__(self, control: Packets) -> None:
        self.control = control
        self.randoms = reset.UnseededRandoms()
        self.env = dict(os.environ)
        self.pid = os.getpid()
        self.script = ""
        self._finder = HiveFinder()
        self._began = 0.0
        self._pin = False
        self._collects = True

    # --- getting ready -----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Does what the first message asks but for its script. Says what failed and ends the process where it fails."""
        try:
            order = self._hear("start")
            if order["user_namespace"]:
                self._enter_user_namespace(order["own_network"])
            if order["filter"] is not None:
                unit_setup.load_filter(base64.b64decode(order["filter"]))
            self.script, self._pin = order.get("script", ""), order["pin"]
            self._began = time.monotonic()
            self.randoms.watch()
            self._import(order["imports"], order["warm"])
            if self.script:
                gc.collect()
                self._check(IMPORTS)
                self._offer_ready()
        except UnfitTemplate as error:
            self._fail(error)

    def hold(self, who: str) -> None:
        """Stops where it is: says that it is ready, or what keeps it from being a template, and ends then."""
        try:
            self.randoms.watch_no_more()
            reset.signals()
            reset.timers()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for Hive, which closes the socket
            sys.stdout.flush()
            sys.stderr.flush()
            self._collects = not self.script or gc.isenabled()
            gc.disable()
            gc.collect()
            gc.collect()
            gc.freeze()
            self._check(who)
            self.control.say({"ready": self._described(self._pinned())})
        except BaseException as error:
            self._fail(error)

    def _pinned(self) -> list[str]:
        """Its notes."""
        try:
            if self._pin:
                kernel.lock_memory()
        except OSError as error:
            return [f"its memory is not pinned: {error.strerror}"]
        return []

    def _described(self, notes: list[str]) -> dict[str, Any]:
        return {
            "threads": len(os.listdir("/proc/self/task")),
            "imports_s": time.monotonic() - self._began,
            "python": platform.python_version(),
            "packages": _package_directories(),
            "sources": _sources_of(self.script) if self.script else [],
            "notes": notes,
        }

    def _fail(self, error: BaseException) -> NoReturn:
        """At once, whatever the script would do at its end."""
        with contextlib.suppress(BaseException):
            self.control.say({"failed": (str(error) if isinstance(error, UnfitTemplate) else _in_words(error))[:2000]})
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)

    def _hear(self, word: str) -> dict[str, Any]:
        heard = self.control.hear()
        if heard is None:
            os._exit(0)
        if word not in heard[0]:
            raise UnfitTemplate(f"{word} was expected")
        return heard[0][word]  # type: ignore[no-any-return]

    def _enter_user_namespace(self, own_network: bool) -> None:
        """Its user is the same number inside as outside, and root is nobody there."""
        try:
            kernel.unshare(kernel.CLONE_NEWUSER | (kernel.CLONE_NEWNET if own_network else 0))
        except OSError as error:
            raise UnfitTemplate(f"it may have no user namespace of its own: {error.strerror}") from error
        self.control.say({"unshared": {}})
        self._hear("mapped")

    def _import(self, imports: list[str], recipes: list[str]) -> None:
        for name in imports:
            try:
                importlib.import_module(name)
            except BaseException as error:
                raise UnfitTemplate(f"import {name} failed: {_in_words(error)}") from error
        for name in recipes:
            try:
                warm.find(name)()
            except BaseException as error:
                raise UnfitTemplate(f"warm {name} failed: {_in_words(error)}") from error

    def _check(self, who: str) -> None:
        """A thread or a process is not copied by a fork, and an open descriptor would be every child's."""
        names = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
        if names:
            raise UnfitTemplate(f"{who} started threads, which a fork does not copy: {', '.join(names)}")
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1 + _threads_of_openblas():
            raise UnfitTemplate(f"{who} started {threads - 1} threads, which a fork does not copy")
        left = [f"{fd} ({name})" for fd, name in _open_descriptors() if fd > 2 and fd != self.control.fileno()]
        if left:
            raise UnfitTemplate(f"{who} left descriptors open, which every child would have: {', '.join(left)}")
        if _has_children():
            raise UnfitTemplate(f"{who} started a process that has not ended, which a fork does not copy")

    # --- in a script -------------------------------------------------------------------------------------------------

    def _offer_ready(self) -> None:
        """Puts there what the script's `hive.ready()` finds, and `hive` itself where the packages have none."""
        try:
            with open(self.script, "rb"):
                pass
        except OSError as error:
            raise UnfitTemplate(f"its script cannot be read: {_in_words(error)}") from error
        offered = types.ModuleType(READY)
        offered.ready = self.ready  # type: ignore[attr-defined]
        sys.modules[READY] = offered
        sys.meta_path.append(self._finder)

    def run_script(self) -> None:
        """The script's whole life: in the template until `hive.ready()`, from there in each child as an agent."""
        script.run([self.script], self._too_early)

    def ready(self) -> None:
        """`hive.ready()` in its script. Returns in a released child, which is an agent then, and ends the process where
        it can be no template."""
        if os.getpid() != self.pid:
            return
        loops = sys.modules.get("asyncio.events")
        if threading.current_thread() is not threading.main_thread():
            self._fail(UnfitTemplate("its script called hive.ready() in a thread: only the main thread may"))
        if loops is not None and loops._get_running_loop() is not None:
            self._fail(UnfitTemplate("its script called hive.ready() in an event loop: call it before asyncio.run()"))
        self.hold(SCRIPT)
        sys.argv[:] = self.serve()["argv"]

    def _too_early(self, error: BaseException | None) -> None:
        """Called at the script's end, which is an agent's own in a child."""
        if os.getpid() != self.pid:
            return
        how = "ended" if error is None or isinstance(error, SystemExit) else "failed"
        self._fail(UnfitTemplate(f"its script {how} before hive.ready()" + (f": {_in_words(error)}" if error else "")))

    def _offer_no_more(self) -> None:
        """In a child, which is no template; nor is a process of its own that gets the number of one that ended."""
        self.pid = -1
        sys.modules.pop(READY, None)
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self._finder)

    # --- children ----------------------------------------------------------------------------------------------------

    def serve(self) -> dict[str, Any]:
        """Makes children until the helper closes the socket. Returns in a child only: its order, once released."""
        while True:
            heard = self.control.hear()
            if heard is None:
                os._exit(0)
            message, fds = heard
            if "fork" in message:
                between = os.fork()
                if between == 0:
                    parent = os.getpid()
                    if os.fork():
                        os._exit(0)
                    return self._become(message["fork"], fds, parent)
                os.waitpid(between, 0)
            for fd in fds:
                os.close(fd)

    def _become(self, order: dict[str, Any], fds: list[int], parent: int) -> dict[str, Any]:
        try:
            self.control.close()
            line = Packets(fds[1])
        except BaseException:
            os._exit(NOT_RELEASED)
        try:
            self._set_up(order, fds, parent, line)
            heard = line.hear()
            if heard is None or "go" not in heard[0]:
                os._exit(NOT_RELEASED)
            line.close()
        except BaseException as error:
            _fail(line, error)
        try:
            if self.script:
                self._offer_no_more()
            first = os.path.dirname(os.path.realpath(self.script)) if self.script else ""
            reset.reset(order["env"], self.randoms, self.env, first=first, collects=self._collects)
        except BaseException as error:
            os.write(2, f"hive: its template cannot make it what it should be: {_in_words(error)}\n".encode())
            os._exit(NOT_RELEASED)
        return order

    def _set_up(self, order: dict[str, Any], fds: list[int], parent: int, line: Packets) -> None:
        until = time.monotonic() + PARENT_S
        while os.getppid() == parent:
            if time.monotonic() > until:
                raise OSError("the process between it and the template does not end")
            time.sleep(0.0005)
        os.setsid()
        os.dup2(fds[0], 1)
        os.dup2(fds[0], 2)
        if order["own_network"]:
            kernel.unshare(kernel.CLONE_NEWNET)
            kernel.bring_up_loopback()
        if order["place"] is not None:
            unit_setup.own_mounts(order["place"], fds[2:])
        for kind, soft, hard in order["limits"]:
            if resource.getrlimit(kind) != (soft, hard):
                resource.setrlimit(kind, (soft, hard))
        if order["uid"] is not None:
            unit_setup.become(order["uid"], order["uid"] if order["gid"] is None else order["gid"])
            unit_setup.drop_rights()
        unit_setup.forbid_new_privileges()
        unit_setup.be_dumpable()
        os.umask(order["umask"])
        os.chdir(order["cwd"])
        words = [sys.executable, *order["argv"]]
        entries = [f"{name}={value}" for name, value in order["env"].items()]
        with contextlib.suppress(OSError):  # then `ps` shows the template's
            kernel.show_as([os.fsencode(word) for word in words], [os.fsencode(entry) for entry in entries])
        sys.orig_argv = words  # type: ignore[misc,attr-defined,unused-ignore]
        os.closerange(3, line.fileno())
        os.closerange(line.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        if order["filter"] is not None:
            unit_setup.load_filter(base64.b64decode(order["filter"]))
        pidfd = os.pidfd_open(os.getpid())
        line.say({"pid": os.getpid()}, (pidfd,))
        os.close(pidfd)


class HiveFinder:
    """Finds `hive` where no other finder does: the one file of it that a script needs, which is no package here."""

    def find_spec(self, name: str, *_: object) -> Any:
        if name != "hive":
            return None
        return _spec_of("hive", "hive")


def _fail(line: Packets, error: BaseException) -> NoReturn:
    with contextlib.suppress(BaseException):
        line.say({"failed": _in_words(error)[:2000]})
    os._exit(NOT_RELEASED)


def _in_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _threads_of_openblas() -> int:
    """Each OpenBLAS of numpy or scipy has one for every core but the first, and ends them itself before a fork."""
    with open("/proc/self/maps") as file:
        found = set(re.findall(r"/\S*openblas\S*\.so\S*", file.read()))
    return len(found) * max(0, (os.cpu_count() or 1) - 1)


def _open_descriptors() -> list[tuple[int, str]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            continue  # of the listing itself
    return found


def _has_children() -> bool:
    """Whether a process that this one started is there; those that ended are reaped."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _sources_of(path: str) -> list[str]:
    """The script, and the modules beside it or below that it has imported, packages apart."""
    place = os.path.dirname(os.path.realpath(path)) + os.sep
    found = [path]
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and file not in found and file.startswith(place) and "-packages" not in file:
            found.append(file)
    while sum(map(len, found)) > SOURCES_BYTES:
        found.pop()
    return found


def _package_directories() -> list[str]:
    known = [*site.getsitepackages(), *(path for path in sys.path if path.endswith(("-packages",)))]
    return [path for path in dict.fromkeys(known) if os.path.isdir(path)][:16]


def begin() -> ForkServer:
    """The template, with its imports done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for Hive, which closes the socket
    fd = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    os.set_inheritable(fd, False)
    server = ForkServer(Packets(fd))
    server.prepare()
    return server


if __name__ == "__main__":
    _server = begin()
    if _server.script:
        _main = script.make_main()
        _server.run_script()
    else:
        _server.hold(IMPORTS)
        _order = _server.serve()
        _main = script.make_main()
        script.run(_order["argv"])
