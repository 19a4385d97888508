"""Packets that an agent's filter lets through: the real kernel runs it over packets, and over real connections."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.errors import BadRequest, HiveError, NotSupported
from hive.host import bpf, packet_filter
from hive.host.bpf import EGRESS, INGRESS
from hive.host.cgroup import Subtree
from hive.host.packet_filter import NETWORKS_MAX, FilterRules, names_this_host, program_for, put_on
from tests.examples import examples

HIVE, OWN = 11435, 8080
ACK, SYN = 0x10, 0x02
LO = 1
ELSEWHERE = next((index for index, _ in socket.if_nameindex() if index != LO), 0)
"""An interface by which other hosts would be reached."""
TCP, UDP = socket.IPPROTO_TCP, socket.IPPROTO_UDP
kernel = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0 or bool(bpf.why_not()), reason="loading a packet filter takes root"),
]


def packet(
    source: str,
    destination: str,
    *,
    protocol: int = TCP,
    ports: tuple[int, int] = (0, 0),
    flags: int = ACK,
    first_byte: int = 0x45,
    fragment: int = 0,
    cut: int | None = None,
) -> bytes:
    """An Ethernet frame with one IP packet of either version, up to `cut` bytes of it."""
    tcp = struct.pack("!HHIIBBHHH", *ports, 0, 0, 0x50, flags, 0, 0, 0)
    ours, theirs = ipaddress.ip_address(source), ipaddress.ip_address(destination)
    if ours.version == 4:
        head = struct.pack("!BBHHHBBH", first_byte, 0, 40, 0, fragment, 64, protocol, 0)
    else:
        head = struct.pack("!IHBB", 6 << 28, 20, protocol, 64)
    whole = head + ours.packed + theirs.packed + tcp
    return bytes(12) + (b"\x08\x00" if ours.version == 4 else b"\x86\xdd") + whole[:cut]


def passes(rules: FilterRules, direction: int, frame: bytes, *, by: int = LO) -> bool:
    """`by`: index of the network interface."""
    program = bpf.load(program_for(rules, direction), direction)
    try:
        verdict = bpf.try_on(program, frame, by)
    finally:
        os.close(program)
    assert verdict in (0, 1)
    return verdict == 1


def elsewhere() -> int:
    if not ELSEWHERE:
        pytest.skip("this host has no network but its own")
    return ELSEWHERE


class Same:
    """`pytest.mark` for a whole class of tests that need the kernel."""

    pytestmark = kernel


class TestByPacket(Same):
    @pytest.mark.parametrize(
        ("networks", "address", "expected"),
        [
            (["192.0.2.0/24"], "192.0.2.255", True),
            (["192.0.2.0/24"], "192.0.3.0", False),
            (["192.0.2.7/32"], "192.0.2.7", True),
            (["192.0.2.7/32"], "192.0.2.6", False),
            (["128.0.0.0/1"], "255.255.255.255", True),
            (["128.0.0.0/1"], "127.255.255.255", False),
            (["0.0.0.0/0"], "192.0.2.1", True),
            (["0.0.0.0/0"], "2001:db8::1", False),
            (["::/0"], "192.0.2.1", False),
            (["::/0"], "2001:db8::1", True),
            (["2001:db8::/33"], "2001:db8:7fff::1", True),
            (["2001:db8::/33"], "2001:db8:8000::1", False),
            (["2001:db8::1/128"], "2001:db8::1", True),
            (["2001:db8::1/128"], "2001:db8::2", False),
            ([], "192.0.2.1", False),
            (["198.51.100.0/24", "192.0.2.0/24", "::/1"], "192.0.2.1", True),
        ],
    )
    @pytest.mark.parametrize("direction", [INGRESS, EGRESS])
    def test_an_address_passes_where_a_network_of_the_list_has_it(
        self, networks: list[str], address: str, expected: bool, direction: int
    ) -> None:
        own = "10.1.2.3" if ":" not in address else "fd00::1"
        ends = (own, address) if direction == EGRESS else (address, own)
        assert passes(FilterRules(tuple(networks)), direction, packet(*ends), by=elsewhere()) is expected

    @pytest.mark.parametrize(
        ("networks", "address", "expected"),
        [
            (["0.0.0.0/0", "::/0"], "127.0.0.1", False),
            (["0.0.0.0/0", "::/0"], "192.0.2.7", False),
            (["0.0.0.0/0", "::/0"], "::1", False),
            (["192.0.2.0/24"], "192.0.2.7", False),
            (["192.0.2.7/32"], "192.0.2.7", False),
            (["127.0.0.0/8"], "127.0.0.1", True),
            (["127.0.0.2/32"], "127.0.0.1", False),
            (["::1/128"], "::1", True),
            (["fd00::7/128"], "fd00::7", False),
            (["fd00::/64"], "fd00::7", False),
            ([], "127.0.0.1", False),
            ([], "::1", False),
        ],
    )
    @pytest.mark.parametrize("direction", [INGRESS, EGRESS])
    def test_of_this_host_a_list_has_what_it_names_of_the_loopback_and_no_other_address(
        self, networks: list[str], address: str, expected: bool, direction: int
    ) -> None:
        """A host speaks with each of its addresses by `lo`; the internet is not its own database."""
        assert passes(FilterRules(tuple(networks)), direction, packet(address, address)) is expected

    @pytest.mark.parametrize(
        ("direction", "how", "expected"),
        [
            (EGRESS, {"ports": (40000, HIVE), "flags": SYN}, True),
            (EGRESS, {"ports": (40000, HIVE)}, True),
            (INGRESS, {"ports": (HIVE, 40000)}, True),
            (EGRESS, {"ports": (40000, 11434), "flags": SYN}, False),
            (EGRESS, {"ports": (40000, 3000), "flags": SYN}, False),
            (EGRESS, {"ports": (HIVE, 3000)}, False),
            (INGRESS, {"ports": (3000, 40000)}, False),
            (INGRESS, {"ports": (40000, OWN), "flags": SYN}, True),
            (EGRESS, {"ports": (OWN, 40000), "flags": SYN | ACK}, True),
            (EGRESS, {"ports": (OWN, 3000), "flags": SYN}, False),
            (EGRESS, {"ports": (OWN, HIVE), "flags": SYN}, True),
            (EGRESS, {"ports": (40000, HIVE), "protocol": UDP}, False),
            (EGRESS, {"ports": (40000, HIVE), "first_byte": 0x46}, False),
            (EGRESS, {"ports": (40000, HIVE), "fragment": 0x2000}, False),
            (EGRESS, {"ports": (40000, HIVE), "fragment": 1}, False),
            (EGRESS, {"ports": (40000, HIVE), "fragment": 0x4000}, True),
            (EGRESS, {"ports": (40000, HIVE), "cut": 33}, False),
        ],
    )
    def test_of_the_loopback_it_has_hives_port_and_its_own_to_be_called_at(
        self, direction: int, how: dict[str, int], expected: bool
    ) -> None:
        rules = FilterRules(("192.0.2.0/24",), hive_port=HIVE, own_port=OWN)
        assert passes(rules, direction, packet("127.0.0.1", "127.0.0.1", **how)) is expected  # type: ignore[arg-type]

    def test_without_ports_nothing_of_the_loopback_passes(self) -> None:
        for direction in (INGRESS, EGRESS):
            for ports in ((HIVE, HIVE), (OWN, OWN), (0, 0)):
                assert not passes(
                    FilterRules(("192.0.2.0/24",)), direction, packet("127.0.0.1", "127.0.0.1", ports=ports)
                )

    def test_another_address_of_the_loopback_is_not_hives(self) -> None:
        assert not passes(FilterRules((), HIVE), EGRESS, packet("127.0.0.1", "127.0.0.2", ports=(40000, HIVE)))

    def test_what_is_no_ip_is_dropped(self) -> None:
        frame = bytes(12) + b"\x08\x06" + bytes(40)
        assert not passes(FilterRules(("0.0.0.0/0", "::/0")), EGRESS, frame, by=elsewhere())

    def test_as_many_networks_as_may_be_are_one_program(self) -> None:
        networks = [f"10.{i}.0.0/17" for i in range(NETWORKS_MAX // 2)]
        networks += [f"2001:db8:{i:x}::/49" for i in range(NETWORKS_MAX // 2)]
        rules = FilterRules(tuple(networks), HIVE, OWN)
        assert passes(rules, EGRESS, packet("10.1.2.3", "10.127.0.1"), by=elsewhere())
        assert not passes(rules, EGRESS, packet("10.1.2.3", "10.127.128.1"), by=elsewhere())
        assert passes(rules, EGRESS, packet("::1", "2001:db8:7f::1"), by=elsewhere())

    @settings(max_examples=examples(200), deadline=None)
    @given(data=st.data())
    def test_it_says_what_the_list_says_of_every_packet(self, data: st.DataObject) -> None:
        networks = data.draw(st.lists(st.one_of(networks_of(4, 32), networks_of(6, 128)), max_size=4), label="networks")
        rules = FilterRules(
            tuple(map(str, networks)), data.draw(st.none() | st.just(HIVE)), data.draw(st.none() | st.just(OWN))
        )
        near = [str(network.network_address) for network in networks] + ["127.0.0.1", "::1"]
        theirs = data.draw(st.sampled_from(near) | st.ip_addresses().map(str), label="theirs")
        is_4 = ipaddress.ip_address(theirs).version == 4
        port, peer = data.draw(st.sampled_from([HIVE, OWN, 1])), data.draw(st.sampled_from([HIVE, OWN, 1]))
        direction, flags = data.draw(st.sampled_from([INGRESS, EGRESS])), data.draw(st.sampled_from([SYN, ACK]))
        protocol = data.draw(st.sampled_from([TCP, UDP]))
        own = "127.0.0.1" if is_4 else "::1"
        ends, ports = ((own, theirs), (port, peer)) if direction == EGRESS else ((theirs, own), (peer, port))
        by = data.draw(st.sampled_from([LO, elsewhere()]), label="by")
        found = passes(rules, direction, packet(*ends, ports=ports, flags=flags, protocol=protocol), by=by)
        counted = [network for network in networks if by != LO or names_this_host(network)]
        listed = any(ipaddress.ip_address(theirs) in network for network in counted)
        by_port = (
            (theirs, by) == ("127.0.0.1", LO)
            and protocol == TCP
            and (peer == rules.hive_port or (port == rules.own_port and (direction == INGRESS or flags == ACK)))
        )
        assert found is (listed or by_port)


def networks_of(version: int, bits: int) -> st.SearchStrategy[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    return st.builds(
        lambda address, prefix: ipaddress.ip_network(f"{address}/{prefix}", strict=False),
        st.ip_addresses(v=version),  # type: ignore[arg-type]
        st.integers(0, bits),
    )


def test_what_is_no_network_is_said() -> None:
    with pytest.raises(BadRequest, match="egress: 'example"):
        program_for(FilterRules(("example.org",)), EGRESS)


def test_too_many_networks_are_too_many() -> None:
    with pytest.raises(BadRequest, match="257 networks; at most 256"):
        program_for(FilterRules(("192.0.2.0/24",) * 257), EGRESS)


def test_a_machine_it_is_not_written_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hive.host.bpf.platform.machine", lambda: "s390x")
    assert bpf.why_not() == "packet filters: not for s390x yet"
    with pytest.raises(NotSupported):
        bpf.load(program_for(FilterRules(()), EGRESS), EGRESS)


# --- on a group ----------------------------------------------------------------------------------------------------

CALL = """
import os, socket, sys
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
for where in sys.argv[2:]:
    host, _, port = where.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 0.3) as sock: print(sock.recv(10).decode())
    except OSError as error: print(type(error).__name__)
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Path]:
    subtree = Subtree.find(tmp_path)
    if subtree is None:
        pytest.skip("no control group to make one in")
    leaf = subtree.leaf("filtered")
    leaf.make()
    yield leaf.path
    leaf.remove()
    subtree.remove()


@pytest.fixture
def served() -> Iterator[Callable[[str], str]]:
    """Something that says hello to one caller there; where it is."""
    with contextlib.ExitStack() as made:

        def serve(host: str) -> str:
            sock = made.enter_context(socket.create_server((host, 0)))
            where = f"{host}:{sock.getsockname()[1]}"
            child = subprocess.Popen(
                [
                    "/usr/bin/python3",
                    "-Sc",
                    "import socket; c, _ = socket.socket(fileno=0).accept(); c.sendall(b'hello')",
                ],
                stdin=sock.fileno(),
            )
            made.callback(child.wait)
            made.callback(child.kill)
            return where

        yield serve


def called(group: Path, *where: str) -> list[str]:
    command = ["/usr/bin/python3", "-Sc", CALL, str(group), *where]
    return subprocess.check_output(command, text=True).split()


@pytest.mark.cgroup
class TestOnAGroup(Same):
    def test_its_processes_reach_what_is_listed_and_hive_and_nothing_else(
        self, group: Path, served: Callable[[str], str]
    ) -> None:
        listed, hive, neighbour = served("127.0.0.2"), served("127.0.0.1"), served("127.0.0.1")
        put_on(group, FilterRules(("127.0.0.2/32",), hive_port=int(hive.rpartition(":")[2])))
        found = called(group, listed, hive, neighbour)
        assert found[:2] == ["hello", "hello"]
        assert found[2] in ("TimeoutError", "PermissionError")

    def test_another_filter_takes_the_place_of_the_one_before(self, group: Path, served: Callable[[str], str]) -> None:
        where = served("127.0.0.1")
        put_on(group, FilterRules(("192.0.2.0/24",)))
        assert called(group, where) != ["hello"]
        put_on(group, FilterRules(("127.0.0.0/8",)))
        assert called(group, where) == ["hello"]

    def test_a_group_that_is_not_there_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(HiveError, match="no control group"):
            put_on(tmp_path / "none", FilterRules(()))
        with pytest.raises(HiveError, match="cannot be put on"):
            put_on(tmp_path, FilterRules(()))


def test_what_the_kernel_has_against_a_program_is_told() -> None:
    if os.geteuid() != 0:
        pytest.skip("loading a packet filter takes root")
    with pytest.raises(HiveError, match=r"the kernel refuses a packet filter: .*R0 !read_ok"):
        bpf.load(struct.pack("=BBhi", packet_filter._EXIT, 0, 0, 0), EGRESS)
