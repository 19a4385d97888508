"""Programs of a fake machine: small ones, and the kernel's side of their vsock.

The root file system's image is a text: one program and its arguments a line. All of them run, as threads of one child
of the VMM; the machine shuts down when one of them returns `OFF`. Programs: `idle`, `burn`, `exit7` (ends), `stubborn`
(does not end on Ctrl-Alt-Del), `ballast MIB` (memory that is written to), `ticks` (a line every 10 ms on the console),
`http PORT` (answers every request with the count of them), `echo PORT`, `client` (asks Hive at CID 2, port 11434),
`flood N` (calls Hive N times and keeps all of them).

With its VMM it speaks over one SOCK_SEQPACKET socket, which stands for the vsock device's queues: JSON, and one end of
a socket pair per connection. A first byte `1` on that says that the other side took it (VIRTIO_VSOCK_OP_RESPONSE).
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable

TAKEN = b"1"
PR_SET_PDEATHSIG = 1
HOST_CID = 2
BOOT_S = 0.03
"""Until its programs run and its keyboard driver is up; a real kernel takes 100 ms and more."""
UP = "Run /sbin/init as init process"
"""A kernel's last line before its first program, on the console."""
_libc = ctypes.CDLL(None)


class Guest:
    """The guest's kernel and programs. `channel`: its end of the socket to the VMM."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.listening: dict[int, queue.Queue[socket.socket]] = {}
        self.heeds_ctrl_alt_del = True

    def connect(self, port: int) -> socket.socket:
        """To the host. Raises ConnectionResetError where nobody listens there."""
        ours, theirs = socket.socketpair()
        message = json.dumps({"op": "request", "cid": HOST_CID, "port": port}).encode()
        socket.send_fds(self.channel, [message], [theirs.fileno()])
        theirs.close()
        if ours.recv(1) != TAKEN:
            ours.close()
            raise ConnectionResetError
        return ours

    def listen(self, port: int) -> queue.Queue[socket.socket]:
        """Connections to `port`, as they come."""
        self.listening[port] = queue.Queue()
        return self.listening[port]

    def serve(self) -> None:
        """Serves what the VMM has for the guest: a connection, three keys."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self.channel, 4096, 1)
            if not message:
                os._exit(1)
            said = json.loads(message)
            if said["op"] == "ctrl-alt-del" and self.heeds_ctrl_alt_del:
                say("reboot: Restarting system")
                os._exit(0)
            elif said["op"] == "request":
                sock = socket.socket(fileno=descriptors[0])
                waiting = self.listening.get(said["port"])
                if waiting is None:
                    sock.close()
                else:
                    sock.sendall(TAKEN)
                    waiting.put(sock)


def say(line: str) -> None:
    """On the serial console, which is the VMM's standard output."""
    os.write(1, f"{line}\n".encode())


# --- programs ----------------------------------------------------------------------------------------------------


def idle(guest: Guest) -> None:
    threading.Event().wait()


def burn(guest: Guest) -> None:
    while True:
        pass


def exit7(guest: Guest) -> None:
    """Ends as a guest whose exit code nobody outside learns: a kernel without init panics, and reboots."""
    say("Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000700")


def stubborn(guest: Guest) -> None:
    guest.heeds_ctrl_alt_del = False
    say("stubborn")
    threading.Event().wait()


def ballast(guest: Guest, mib: str) -> None:
    memory = bytearray(os.urandom(4096) * (int(mib) * 256))
    say(f"ballast {len(memory)}")
    threading.Event().wait()


def ticks(guest: Guest) -> None:
    for number in range(1_000_000):
        say(f"tick {number}")
        time.sleep(0.01)


def http(guest: Guest, port: str) -> None:
    count = 0
    incoming = guest.listen(int(port))
    say(f"http {port}")

    def talk(sock: socket.socket) -> None:
        nonlocal count
        while (head := sock.recv(65536)) and b"\r\n\r\n" in head:
            count += 1
            body = f"answer {count}\n".encode()
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        sock.close()

    while True:
        threading.Thread(target=talk, args=(incoming.get(),), daemon=True).start()


def echo(guest: Guest, port: str) -> None:
    """One connection at a time."""
    incoming = guest.listen(int(port))
    say(f"echo {port}")
    while True:
        with incoming.get() as sock:
            while data := sock.recv(65536):
                sock.sendall(data)


def client(guest: Guest) -> None:
    """Asks until it has one answer, and says what that was, and who it was that answered."""
    while True:
        try:
            with guest.connect(11434) as sock:
                sock.sendall(b"GET /api/version HTTP/1.1\r\nHost: 127.0.0.1:11434\r\nConnection: close\r\n\r\n")
                answer = b"".join(iter(lambda: sock.recv(65536), b""))
        except ConnectionResetError:
            time.sleep(0.02)
            continue
        if answer:
            say(f"hive said {answer.splitlines()[0].decode()} {answer.splitlines()[-1].decode()}")
            threading.Event().wait()


def flood(guest: Guest, count: str) -> None:
    held = [guest.connect(11434) for _ in range(int(count))]
    say(f"flood {len(held)}")
    threading.Event().wait()


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program for program in (idle, burn, exit7, stubborn, ballast, ticks, http, echo, client, flood)
}


def boot(image: str, channel: socket.socket, *, up_at: float) -> int:
    """Forks the guest; its pid. It dies with its VMM's main thread. `up_at`: when its programs begin (monotonic).

    Raises KeyError for an unknown program.
    """
    lines = [line.split() for line in image.splitlines() if line.strip() and not line.startswith("#")]
    programs = [(PROGRAMS[name], arguments) for name, *arguments in lines]
    is_bound, bind = os.pipe()
    pid = os.fork()
    if pid == 0:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.write(bind, b".")  # no sooner may it be stopped
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        keep = os.dup(channel.fileno())
        os.dup2(keep, 3)
        os.closerange(4, 4096)
        time.sleep(max(up_at - time.monotonic(), 0))
        say(UP)
        _run(Guest(socket.socket(fileno=3)), programs)
        os._exit(0)
    os.close(bind)
    os.read(is_bound, 1)
    os.close(is_bound)
    return pid


def _run(guest: Guest, programs: list[tuple[Callable[..., None], list[str]]]) -> None:
    """Until the first of them returns."""
    ended = threading.Event()

    def run(program: Callable[..., None], arguments: list[str]) -> None:
        program(guest, *arguments)
        ended.set()

    threading.Thread(target=guest.serve, daemon=True).start()
    for program, arguments in programs:
        threading.Thread(target=run, args=(program, arguments), daemon=True).start()
    ended.wait()
