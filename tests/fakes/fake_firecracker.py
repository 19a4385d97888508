"""A fake Firecracker: a real process with the real program's API, event loop and vsock sockets, and no machine.

Tests start it through `firecracker_programs.py`, which writes a `firecracker` and a `jailer` that run it. What a test
changes while it runs are files in a directory of faults (`FAULTS`). Each behaviour with where it is written (FC:
firecracker 1.17.0-dev, 81b38b9; muhttp: micro-http 7975fe0):

API
- HTTP/1.1 over a unix socket, keep-alive, on a thread of its own that works at one request at a time; that one goes to
  the VMM's thread and is waited for (FC src/firecracker/src/api_server/mod.rs `serve_vmm_action_request`)
- the socket must not exist yet; it stays when the process ends (FC api_server_adapter.rs `FailedToBindSocket`)
- ten connections; the eleventh gets `HTTP/1.1 503` and `{ "error": "Too many open connections" }`, and is closed
  (muhttp src/server.rs `MAX_CONNECTIONS`)
- a request whose sender hung up before it was read is not done (muhttp src/server.rs `requests`)
- 51,200 bytes of body (muhttp `MAX_PAYLOAD_SIZE`); PUT and PATCH have one, GET has none (FC parsed_request.rs)
- success is 204 without a body, a question 200; everything else 400 with `fault_message` (FC parsed_request.rs)
- unknown fields, missing fields, other types are 400 (`deny_unknown_fields`); fields of later versions are unknown to
  earlier ones (CHANGELOG.md: free_page_reporting 1.14, vsock_override 1.16)
- what is only for before or after the start is 400 at the other time (FC rpc_interface.rs)
- files are opened when they are named: a kernel that is not there is refused at once (FC vmm_config/boot_source.rs)

Pausing
- Paused of a paused machine and Resumed of a running one are 204 (FC tests/…/test_pause_resume.py)
- after a Pause *whatever came of it* the VMM's thread does nothing but answer the API until a Resume: no vsock, no
  timers (FC api_server_adapter.rs `handle_request`); `GET /` says Running then if the Pause failed (lib.rs `pause_vm`)
- a vCPU that does not answer fails a Pause or Resume with `Failed to message the vCPUs.`, after up to 30 s, in which
  the API answers nobody (FC lib.rs `RECV_TIMEOUT_SEC`); here after as long as the fault says
- the guest is stopped; the clocks go on (FC never touches KVM_SET_CLOCK at a bare pause)
- SendCtrlAltDel while paused is 204, and the guest has the keys when it runs again (FC devices/legacy/i8042.rs)
- a balloon's new target while paused is 204 and does nothing before the resume

Three keys
- are lost on a guest whose keyboard driver is not up: the VMM says 204 (seen, 1.15.1); the driver empties the
  controller when it comes up (Linux drivers/input/serio/i8042.c `i8042_flush`)
- the controller holds four presses nobody read; a fifth is refused (FC devices/legacy/i8042.rs `BUF_SIZE`)

What it says of itself, on its standard output, beside the guest's console
- the time, its id and the thread before each line; every request to the API, unless `--level` is `Warn` or quieter
  (FC logger/logging.rs, parsed_request.rs `log_received_api_request`)
- at an error its cause as `Error: …` on the standard error, and after it a line with the exit code (FC main.rs `main`)
- the vsock device: see fake_vsock.py

Snapshots, as protocol only: create needs Paused and resets vsock at the resume; load needs a VMM nothing was told yet,
and ends the process where it fails (FC rpc_interface.rs `load_snapshot`). The guest that was loaded begins anew.

The end: the guest's shutdown or reboot ends the VMM with exit code 0, whatever ran in it (FC lib.rs `FcExitCode`).

Other than in the real one: the guest is a child of the VMM, stopped by SIGSTOP, so its CPU time and memory are not the
VMM's own, and it is up within 30 ms; no KVM, no disk, no network, no seccomp; the network's tap device is looked for,
not opened.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import selectors
import signal
import socket
import threading
import time
from typing import Any, NoReturn

import fake_guest
from fake_vmm_api import Answer, Api, Fault, Request
from fake_vsock import Muxer, bind_error

NOT_STARTED, RUNNING, PAUSED = "Not started", "Running", "Paused"
PRE_BOOT = "The requested operation is not supported before starting the microVM."
POST_BOOT = "The requested operation is not supported after starting the microVM."
VCPUS_SILENT = "Internal VMM error: Failed to message the vCPUs."
KEYS_FULL = "Internal VMM error: I8042 error: i8042 internal buffer full."
UNREAD_PRESSES = 4
QUIET_LEVELS = ("off", "error", "warn", "warning")

FAULTS = {
    "dies-at-start": "ends with exit code 1 before it listens",
    "api-late": "listens only after so many seconds",
    "pause-fails": "a Pause stops the event loop and fails",
    "pause-hangs": "a Pause takes so many seconds",
    "resume-fails": "a Resume fails",
    "resume-hangs": "a Resume takes so many seconds",
    "boot-fails": "InstanceStart is refused",
    "freezes-at-boot": "InstanceStart is never answered",
    "boots-slowly": "the guest's keyboard driver is up after so many seconds",
}
"""Names of files in the directory of faults, for all machines or as `<id>.<name>` for one; numbers are in the file."""


class Vmm:
    """The machine and its devices. `faults`: descriptor of the directory of faults, kept from outside the jail."""

    def __init__(self, id_: str, version: str, faults: int) -> None:
        self.id = id_
        self.said_version = version
        self.version: tuple[int, int, int] = tuple(int(part) for part in version.split("-")[0].split("."))  # type: ignore[assignment]
        self.faults = faults
        self.state = NOT_STARTED
        self.config: dict[str, Any] = {"machine-config": {"vcpu_count": 1, "mem_size_mib": 128}}
        self.muxer: Muxer | None = None
        self.guest = 0
        self.presses = 0
        """Presses of the three keys that the guest has not read."""
        self.up_at = 0.0
        self.is_up = False
        """The guest's driver has emptied the keyboard's controller."""
        self.was_told = False
        self.snapshot_was_taken = False
        self.requests: queue.Queue[Request] = queue.Queue()
        self.answers: queue.Queue[Answer | Fault] = queue.Queue()
        self.is_answered = threading.Lock()
        self.asked = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self.selector = selectors.DefaultSelector()

    def ask(self, request: Request) -> Answer:
        """From the API's thread. Raises Fault."""
        self.requests.put(request)
        os.eventfd_write(self.asked, 1)
        answer = self.answers.get()
        if isinstance(answer, Fault):
            raise answer
        return answer

    def fault(self, name: str) -> str | None:
        """The content of this fault's file; None where there is none."""
        for file in (f"{self.id}.{name}", name):
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(file, os.O_RDONLY, dir_fd=self.faults)
                with os.fdopen(descriptor) as opened:
                    return opened.read()
        return None

    def sleep_as(self, name: str) -> None:
        if (seconds := self.fault(name)) is not None:
            time.sleep(float(seconds))

    # --- its two loops ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        while self.state == NOT_STARTED:
            request = self.requests.get()
            os.eventfd_read(self.asked)
            self.handle(request)
        self.selector.register(self.asked, selectors.EVENT_READ, self.on_api)
        ended = os.pidfd_open(self.guest)
        self.selector.register(ended, selectors.EVENT_READ, lambda mask: self.end())
        while True:
            for key, mask in self.selector.select(self.muxer.next_s() if self.muxer else None):
                if key.fileobj in self.selector.get_map():
                    key.data(mask)
            if self.muxer is not None:
                self.muxer.expire()

    def end(self) -> NoReturn:
        """Lets go out first what was answered; a caller without an answer by now never gets one."""
        self.is_answered.acquire(timeout=0.05)
        os._exit(0)

    def on_api(self, mask: int) -> None:
        """Stays in here from a Pause to the next Resume: that is what stops all devices."""
        os.eventfd_read(self.asked)
        try:
            request = self.requests.get_nowait()
        except queue.Empty:
            return
        self.handle(request)
        if request == Request("PATCH vm", {"state": "Paused"}):
            while request != Request("PATCH vm", {"state": "Resumed"}):
                request = self.requests.get()
                self.handle(request)

    def handle(self, request: Request) -> None:
        answer: Answer | Fault
        try:
            answer = self.do(request)
        except Fault as fault:
            answer = fault
        self.answers.put(answer)
        if request.what == "PUT snapshot/load" and isinstance(answer, Fault) and not self.was_told:
            time.sleep(0.05)  # its answer goes out
            os._exit(1)

    def do(self, request: Request) -> Answer:
        """(status, what is said). Raises Fault."""
        what, fields = request
        match what:
            case "GET ":
                return 200, {
                    "id": self.id,
                    "state": self.state,
                    "vmm_version": self.said_version,
                    "app_name": "Firecracker",
                }
            case "GET version":
                return 200, {"firecracker_version": self.said_version}
            case "GET machine-config":
                defaults = {"smt": False, "track_dirty_pages": False, "huge_pages": "None"}
                return 200, {**defaults, **self.config["machine-config"]}
            case "GET vm/config":
                return 200, self.config
            case "GET balloon":
                if "balloon" not in self.config:
                    raise Fault("Balloon config error: No balloon device found.")
                return 200, self.config["balloon"]
            case "PUT actions":
                self.act(fields["action_type"])
            case "PATCH vm" | "PATCH balloon" | "PUT snapshot/create":
                if self.state == NOT_STARTED:
                    raise Fault(PRE_BOOT)
                self.change(what, fields)
            case _:
                if self.state != NOT_STARTED:
                    raise Fault(POST_BOOT)
                self.configure(what, fields)
        return 204, None

    # --- before the start ------------------------------------------------------------------------------------------

    def configure(self, what: str, fields: dict[str, Any]) -> None:
        if what == "PUT snapshot/load":
            self.load(fields)
            return
        self.was_told = True
        key = what.removeprefix("PUT ")
        match key:
            case "machine-config" if not 1 <= fields["vcpu_count"] <= 32:
                raise Fault(
                    "Machine config error: The number of vCPUs must be greater than 0, less than 32 and must be 1 or"
                    " an even number if SMT is enabled."
                )
            case "machine-config" if fields["mem_size_mib"] <= 0:
                raise Fault(
                    "Machine config error: The memory size (MiB) is either 0, or not a multiple of the configured"
                    " page size."
                )
            case "boot-source":
                self.open(fields["kernel_image_path"], "Boot source error: The kernel file cannot be opened: {}")
            case "drives":
                path = fields["path_on_host"]
                self.open(path, f"{DRIVE_ERROR} {{}} {path}", writable=not fields.get("is_read_only"))
            case "network-interfaces":
                try:
                    socket.if_nametoindex(fields["host_dev_name"])
                except OSError:
                    raise Fault(NETWORK_ERROR.format(fields["host_dev_name"])) from None
            case "vsock":
                self.bind_vsock(fields["uds_path"])
        self.config[key] = fields

    @staticmethod
    def open(path: str, sentence: str, *, writable: bool = False) -> None:
        try:
            os.close(os.open(path, os.O_RDWR if writable else os.O_RDONLY))
        except OSError as error:
            raise Fault(sentence.format(bind_error(error))) from None

    def bind_vsock(self, uds_path: str) -> None:
        if self.muxer is not None:
            os.unlink(self.muxer.uds_path)
            self.muxer.listener.close()
        try:
            self.muxer = Muxer(uds_path)
        except OSError as error:
            raise Fault(f"{VSOCK_ERROR}: {bind_error(error)}") from None

    def act(self, action: str) -> None:
        if action not in ("InstanceStart", "SendCtrlAltDel", "FlushMetrics"):
            raise Fault(
                "An error occurred when deserializing the json body of a request: unknown variant `"
                f"{action}`, expected one of `FlushMetrics`, `InstanceStart`, `SendCtrlAltDel` at line 1 column 1."
            )
        if (action == "InstanceStart") != (self.state == NOT_STARTED):
            raise Fault(PRE_BOOT if self.state == NOT_STARTED else POST_BOOT)
        if action == "InstanceStart":
            if self.fault("freezes-at-boot") is not None:
                time.sleep(3600)
            if "boot-source" not in self.config:
                raise Fault("Start microvm error: Cannot start microvm without kernel configuration.")
            if self.fault("boot-fails") is not None:
                raise Fault(
                    "Start microvm error: Kvm error: Error creating KVM object: Permission denied (os error 13)"
                )
            self.boot()
        elif action == "SendCtrlAltDel":
            if time.monotonic() >= self.up_at and not self.is_up:
                self.is_up, self.presses = True, 0
            if self.presses == UNREAD_PRESSES:
                raise Fault(KEYS_FULL)
            self.presses += 1
            self.pass_keys_on()

    def boot(self) -> None:
        with open(self.config["drives"]["path_on_host"], encoding="utf-8") as image:
            text = image.read()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = ours
        boot_s = float(self.fault("boots-slowly") or fake_guest.BOOT_S)
        self.up_at = time.monotonic() + boot_s
        self.guest = fake_guest.boot(text, theirs, up_at=self.up_at)
        theirs.close()
        if self.muxer is not None:
            self.muxer.activate(self.selector, ours)
        self.state = RUNNING

    # --- after the start -------------------------------------------------------------------------------------------

    def change(self, what: str, fields: dict[str, Any]) -> None:
        if what == "PATCH balloon":
            self.config.setdefault("balloon", {})["amount_mib"] = fields["amount_mib"]
        elif what == "PUT snapshot/create":
            self.create_snapshot(fields)
        elif fields["state"] == "Paused":
            self.pause()
        elif fields["state"] == "Resumed":
            self.resume()
        else:
            raise Fault("An error occurred when deserializing the json body of a request: unknown variant.")

    def pause(self) -> None:
        self.sleep_as("pause-hangs")
        if self.fault("pause-fails") is not None:
            raise Fault(VCPUS_SILENT)
        if self.state == RUNNING:
            os.kill(self.guest, signal.SIGSTOP)
            os.waitpid(self.guest, os.WUNTRACED)
        self.state = PAUSED

    def resume(self) -> None:
        self.sleep_as("resume-hangs")
        if self.fault("resume-fails") is not None:
            raise Fault(VCPUS_SILENT)
        if self.muxer is not None and self.version in ((1, 16, 0), (1, 16, 1)):
            self.muxer.become_deaf()
        if self.muxer is not None and self.snapshot_was_taken:
            self.muxer.reset()
            self.snapshot_was_taken = False
        os.kill(self.guest, signal.SIGCONT)
        self.state = RUNNING
        self.pass_keys_on()

    def pass_keys_on(self) -> None:
        if self.presses and self.state == RUNNING and self.is_up:
            self.presses = 0
            with contextlib.suppress(OSError):
                self.channel.send(json.dumps({"op": "ctrl-alt-del"}).encode())

    # --- snapshots -------------------------------------------------------------------------------------------------

    def create_snapshot(self, fields: dict[str, Any]) -> None:
        if self.state != PAUSED:
            raise Fault(
                "Create snapshot error: Cannot save the microVM state: Operation not allowed:"
                " save/restore unavailable while running"
            )
        with open(fields["snapshot_path"], "w", encoding="utf-8") as file:
            json.dump(self.config, file)
        with open(fields["mem_file_path"], "wb") as memory:
            memory.truncate(self.config["machine-config"]["mem_size_mib"] << 20)
        self.snapshot_was_taken = True

    def load(self, fields: dict[str, Any]) -> None:
        if self.was_told:
            raise Fault(
                "Load snapshot error: Loading a microVM snapshot not allowed after configuring boot-specific resources."
            )
        try:
            with open(fields["snapshot_path"], encoding="utf-8") as file:
                self.config = json.load(file)
            os.stat(fields["mem_backend"]["backend_path"])
        except (OSError, ValueError) as error:
            raise Fault(f"Load snapshot error: Failed to restore from snapshot: {error}") from None
        uds_path = (fields.get("vsock_override") or self.config.get("vsock") or {}).get("uds_path")
        if uds_path:
            self.bind_vsock(uds_path)
        self.boot()
        if not fields.get("resume_vm"):
            self.pause()


DRIVE_ERROR = (
    "Drive config error: Unable to create the virtio block device: Virtio backend error: Error manipulating the backing"
    " file:"
)
NETWORK_ERROR = (
    "Network config error: Could not create the network device: Open tap device failed: Error while creating ifreq"
    " structure: Operation not permitted (os error 1). Invalid TUN/TAP Backend provided by {}. Check our documentation"
    " on setting up the network devices."
)
VSOCK_ERROR = "Vsock config error: Cannot create backend for vsock device: Error binding to the host-side Unix socket"


# --- the program -----------------------------------------------------------------------------------------------------


def run(arguments: list[str], *, version: str, faults: int) -> int:
    """`firecracker` with these arguments; its exit code."""
    if "--version" in arguments:
        print(f"Firecracker v{version}\n")
        return 0
    given = dict(zip(arguments[::2], arguments[1::2], strict=False))
    id_, path = given.get("--id", "anonymous-instance"), given.get("--api-sock", "/run/firecracker.socket")
    vmm = Vmm(id_, version, faults)
    is_quiet = given.get("--level", "Info").lower() in QUIET_LEVELS

    def log(line: str, thread: str = "main") -> None:
        now = time.time()
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now))
        fake_guest.say(f"{second}.{int(now % 1 * 1e9):09d} [{id_}:{thread}] {line}")

    def ends_with(error: str) -> int:
        log(f"RunWithApiError error: {error}")
        fake_guest.say(f"Error: RunWithApi({error})")
        log("Firecracker exiting with error. exit_code=1")
        return 1

    if not is_quiet:
        log(f"Running Firecracker v{version}")
    if vmm.fault("dies-at-start") is not None:
        return ends_with("SeccompFilter(Install(Prctl(1)))")
    vmm.sleep_as("api-late")
    try:
        on_request = None if is_quiet else functools.partial(log, thread="fc_api")
        api = Api(path, vmm.version, vmm.ask, vmm.is_answered, on_request)
    except OSError:
        return ends_with(f'FailedToBindSocket("{path}")')
    threading.Thread(target=api.run, daemon=True, name="fc_api").start()
    vmm.run()
    return 0
