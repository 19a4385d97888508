"""The first program of a template that is a unit: `python connect.py SOCKET` becomes the fork server.

systemd hands no descriptor to a unit that is made at run time. So it connects, and the helper sends what it has to
become and with which environment, and the end of the socket that is the fork server's descriptor 3.
"""

from __future__ import annotations

import json
import os
import socket
import sys

CONTROL_FD = 3
PACKET_BYTES = 256 * 1024


def main() -> None:
    helper = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    helper.connect(sys.argv[1])
    packet, descriptors, _, _ = socket.recv_fds(helper, PACKET_BYTES, 1)
    if not packet or not descriptors:
        sys.exit("the helper has ended")
    order = json.loads(packet)
    kept = os.dup(descriptors[0]) if descriptors[0] == CONTROL_FD else descriptors[0]
    os.dup2(kept, CONTROL_FD)
    os.closerange(CONTROL_FD + 1, os.sysconf("SC_OPEN_MAX"))
    os.execve(order["command"][0], order["command"], order["env"])


if __name__ == "__main__":
    main()
