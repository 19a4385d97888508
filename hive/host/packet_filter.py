"""The networks open to an agent in the host's network, as a program for the kernel.

Pure, but for `put_on` and `why_not`.

Like systemd's IPAddressDeny=any with IPAddressAllow=, but it knows ports, and tells this host from others. A network
means other hosts, whatever addresses this host has in it. Of this host an agent has the proxy's port and its own, to be
called at, and not the backend's, the API's or a neighbour's, unless the list names networks of the loopback. So
`0.0.0.0/0` is the internet without a way around Hive. All that a socket of the group sends or gets is looked at; what
is not allowed is dropped, so a connect to it times out or is refused (EPERM).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from pathlib import Path

import msgspec

from hive.errors import BadRequest, HiveError
from hive.host import bpf
from hive.host.bpf import EGRESS

NETWORKS_MAX = 256
"""Each is up to 14 instructions, of which the kernel takes a million, and is looked at for every packet."""
LOOPBACK = "127.0.0.1"

# The instructions used (Documentation/bpf/standardization/instruction-set.rst).
_LOAD_W, _LOAD_H, _LOAD_B = 0x61, 0x69, 0x71
_MOV, _MOV_REGISTER, _MOV_REGISTER_32 = 0xB7, 0xBF, 0xBC
_ADD, _AND_32 = 0x07, 0x54
_JUMP_IF_NOT_32, _JUMP_IF_32 = 0x56, 0x16
_CALL, _EXIT = 0x85, 0x95
_SKB_LOAD_BYTES = 26
_PROTOCOL, _INTERFACE = 16, 40
"""Offsets in `struct __sk_buff`."""
_LO = 1
"""Index of the loopback interface, by which a host speaks with all its addresses (LOOPBACK_IFINDEX)."""
_IP_AT, _TCP_AT = -40, -56
"""Offsets of the heads on the program's stack."""
_ACK = 0x10


class FilterRules(msgspec.Struct, frozen=True):
    """`networks`: as in an agent's `egress`. `hive_port`: of the loopback, where it finds Hive; `own_port`: where it
    is called from the loopback. None: no such."""

    networks: tuple[str, ...]
    hive_port: int | None = None
    own_port: int | None = None


def put_on(group: Path, rules: FilterRules) -> None:
    """Holds the sockets made from now on in this control group (v2) to the rules, past the end of this process.

    Raises BadRequest, NotPermitted, NotSupported, HiveError.
    """
    for direction in (bpf.INGRESS, bpf.EGRESS):
        program = bpf.load(program_for(rules, direction), direction)
        try:
            bpf.attach(group, program, direction)
        finally:
            os.close(program)


def why_not() -> str:
    """The reason that no filter can be put on any group here, empty where one can. Takes 0.1 ms."""
    try:
        os.close(bpf.load(program_for(FilterRules(()), EGRESS), EGRESS))
    except HiveError as error:
        return error.message
    return ""


def check(rules: FilterRules) -> None:
    """Raises BadRequest for what is no network, and for too many."""
    program_for(rules, EGRESS)


def program_for(rules: FilterRules, direction: int) -> bytes:
    """The program's instructions. Raises BadRequest for what is no network, and for too many."""
    if len(rules.networks) > NETWORKS_MAX:
        raise BadRequest(f"egress: {len(rules.networks)} networks; at most {NETWORKS_MAX}")
    try:
        networks = [ipaddress.ip_network(network) for network in rules.networks]
    except ValueError as error:
        raise BadRequest(f"egress: {error}") from None
    code = _Code()
    code.add(_MOV_REGISTER, 6, 1)
    code.add(_LOAD_W, 7, 6, offset=_PROTOCOL)
    code.jump(_JUMP_IF_NOT_32, 7, socket.htons(0x0800), "not 4")
    code.load_bytes(0, 20, _IP_AT)
    code.add(_LOAD_W, 8, 10, offset=_IP_AT + (16 if direction == EGRESS else 12))
    _allow(code, [8], [network for network in networks if network.version == 4])
    _allow_ports(code, rules, direction)
    code.here("not 4")
    code.jump(_JUMP_IF_NOT_32, 7, socket.htons(0x86DD), "deny")
    code.load_bytes(0, 40, _IP_AT)
    address = [7, 8, 9, 5]
    for index, register in enumerate(address):
        code.add(_LOAD_W, register, 10, offset=_IP_AT + (24 if direction == EGRESS else 8) + 4 * index)
    _allow(code, address, [network for network in networks if network.version == 6])
    code.here("deny")
    code.answer(0)
    return code.assembled()


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def names_this_host(network: Network) -> bool:
    """Whether a network of a list counts for this host too: one that is of the loopback, and of nothing else.

    >>> [names_this_host(ipaddress.ip_network(n)) for n in ("127.0.0.0/8", "127.0.0.53/32", "::1/128")]
    [True, True, True]
    >>> [names_this_host(ipaddress.ip_network(n)) for n in ("0.0.0.0/0", "192.0.2.7/32", "::/0")]
    [False, False, False]
    """
    return network.is_loopback


def _allow(code: _Code, address: list[int], networks: list[Network]) -> None:
    """Lets pass by address, in these registers. Goes on behind it for what is left of this host."""
    for network in filter(names_this_host, networks):
        code.allow_within(address, network.network_address.packed, network.netmask.packed)
    this_host = f"this host by {len(address)}"
    code.add(_LOAD_W, 1, 6, offset=_INTERFACE)
    code.jump(_JUMP_IF_32, 1, _LO, this_host)
    others = [network for network in networks if not names_this_host(network)]
    if any(network.prefixlen == 0 for network in others):
        code.answer(1)  # and nothing behind it: the kernel refuses what cannot be reached
    else:
        for network in others:
            code.allow_within(address, network.network_address.packed, network.netmask.packed)
        code.answer(0)
    code.here(this_host)


def _allow_ports(code: _Code, rules: FilterRules, direction: int) -> None:
    """Allows the agent's part of the loopback, by TCP over IPv4; everything else is denied here."""
    code.jump(_JUMP_IF_NOT_32, 8, _word(socket.inet_aton(LOOPBACK)), "deny")
    code.add(_LOAD_B, 1, 10, offset=_IP_AT + 9)
    code.jump(_JUMP_IF_NOT_32, 1, socket.IPPROTO_TCP, "deny")
    code.add(_LOAD_B, 1, 10, offset=_IP_AT)
    code.jump(_JUMP_IF_NOT_32, 1, 0x45, "deny")  # with options the ports would be elsewhere
    code.add(_LOAD_H, 1, 10, offset=_IP_AT + 6)
    code.add(_AND_32, 1, value=socket.htons(0x3FFF))
    code.jump(_JUMP_IF_NOT_32, 1, 0, "deny")  # in a fragment there may be none
    code.load_bytes(20, 14, _TCP_AT)
    source, destination = _TCP_AT, _TCP_AT + 2
    theirs, ours = (destination, source) if direction == EGRESS else (source, destination)
    if rules.hive_port is not None:
        code.add(_LOAD_H, 1, 10, offset=theirs)
        code.jump(_JUMP_IF_NOT_32, 1, socket.htons(rules.hive_port), "not Hive")
        code.answer(1)
        code.here("not Hive")
    if rules.own_port is not None:
        code.add(_LOAD_H, 1, 10, offset=ours)
        code.jump(_JUMP_IF_NOT_32, 1, socket.htons(rules.own_port), "deny")
        if direction == EGRESS:  # to answer from it, not to call: the first segment of a call acknowledges nothing
            code.add(_LOAD_B, 1, 10, offset=_TCP_AT + 13)
            code.add(_AND_32, 1, value=_ACK)
            code.jump(_JUMP_IF_32, 1, 0, "deny")
        code.answer(1)
    else:
        code.answer(0)


def _word(packed: bytes) -> int:
    """Four bytes of a packet as the program sees them: it loads them as this machine's own."""
    return int(struct.unpack("=i", packed)[0])


class _Code:
    """Instructions, with names for where jumps lead."""

    def __init__(self) -> None:
        self._instructions: list[tuple[int, int, int, int | str, int]] = []
        self._labels: dict[str, int] = {}

    def add(self, operation: int, to: int = 0, source: int = 0, *, offset: int | str = 0, value: int = 0) -> None:
        self._instructions.append((operation, to, source, offset, value))

    def jump(self, operation: int, register: int, value: int, label: str) -> None:
        self.add(operation, register, offset=label, value=value)

    def here(self, label: str) -> None:
        self._labels[label] = len(self._instructions)

    def answer(self, verdict: int) -> None:
        self.add(_MOV, 0, value=verdict)
        self.add(_EXIT)

    def load_bytes(self, start: int, count: int, stack_at: int) -> None:
        """`count` bytes of the packet from `start` on to the stack; a packet that is shorter is denied."""
        self.add(_MOV_REGISTER, 1, 6)
        self.add(_MOV, 2, value=start)
        self.add(_MOV_REGISTER, 3, 10)
        self.add(_ADD, 3, value=stack_at)
        self.add(_MOV, 4, value=count)
        self.add(_CALL, value=_SKB_LOAD_BYTES)
        self.jump(_JUMP_IF_NOT_32, 0, 0, "deny")

    def allow_within(self, registers: list[int], address: bytes, mask: bytes) -> None:
        """Allows where the address in the registers is within this network."""
        beyond = f"beyond {len(self._instructions)}"
        for index, register in enumerate(registers):
            part = slice(4 * index, 4 * index + 4)
            if mask[part] != bytes(4):
                self.add(_MOV_REGISTER_32, 1, register)
                self.add(_AND_32, 1, value=_word(mask[part]))
                self.jump(_JUMP_IF_NOT_32, 1, _word(address[part]), beyond)
        self.answer(1)
        self.here(beyond)

    def assembled(self) -> bytes:
        code = bytearray()
        for index, (operation, to, source, offset, value) in enumerate(self._instructions):
            distance = self._labels[offset] - index - 1 if isinstance(offset, str) else offset
            code += struct.pack("=BBhi", operation, to | source << 4, distance, value)
        return bytes(code)
