"""The first program of a template that is a unit: `python connect.py SOCKET` becomes the fork server.

It is a copy beside the socket: Hive's own may be where the template may not read.

systemd hands no descriptor to a unit that is made at run time. So it connects, and the helper sends what it has to
become and with which environment, the end of the socket that is the fork server's descriptor 3, and its program as 4.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys

CONTROL_FD, PROGRAM_FD = 3, 4
PACKET_BYTES = 256 * 1024


def main() -> None:
    helper = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    helper.connect(sys.argv[1])
    packet, descriptors, _, _ = socket.recv_fds(helper, PACKET_BYTES, 2)
    if not packet or len(descriptors) != 2:
        sys.exit("the helper has ended")
    order = json.loads(packet)
    control, program = (fcntl.fcntl(each, fcntl.F_DUPFD, PROGRAM_FD + 1) for each in descriptors)
    os.dup2(control, CONTROL_FD)
    os.dup2(program, PROGRAM_FD)
    os.closerange(PROGRAM_FD + 1, os.sysconf("SC_OPEN_MAX"))
    os.execve(order["command"][0], order["command"], order["env"])


if __name__ == "__main__":
    main()
