"""Fuzzes the parsers from the kept corpus: `python -m tests.fuzz.fuzzing [--seconds 600] [TARGET ...]`.

Hypothesis mutates corpus entries and shrinks what fails; a failing input is written into the corpus, where every
later run (and the test suite) begins with it. Seconds are of CPU time, for each target.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS
from tests.wire.response_vectors import ANSWERS

HERE = Path(__file__).parent

CORPUS = HERE / "corpus"
LONGEST = 12_000
"""Bytes: below every size budget, so that what is refused is refused for what it says."""
ROUND = 300
"""Examples between two looks at the clock."""
WORDS = [
    *(b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b"\t", b":", b";", b",", b"\0", b"\x7f", b"\xff", b"0", b"0\r\n\r\n"),
    *(b"data: ", b"data:", b"[DONE]", b": ping\n", b"{}", b'"', b"\\u212a", b"\xe2\x84\xaa", b"[[", b"1e999", b"NaN"),
    *(b"Content-Length: 2\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: h\r\n", b"HTTP/1.1", b"Upgrade: h2c\r\n"),
    *(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b'"model":"x",', b'"MODEL":1'),
    *(b"--xx-b\r\n", b"\r\n--xx-b--\r\n", b'Content-Disposition: form-data; name="', b'"; filename="a"\r\n\r\n'),
]


def seeds(target: str) -> list[bytes]:
    """Seeds for a target: the files of its corpus, and the vectors of the wire's tests."""
    found = [path.read_bytes() for path in sorted((CORPUS / target).glob("*"))]
    vectors = [json.loads(line) for line in (HERE.parent / "wire" / "vectors.jsonl").read_text().splitlines()]
    raws = [vector["raw"].encode("latin-1") for vector in vectors if "raw" in vector]
    if target == "head":
        found += raws
    elif target == "chunk":
        found += [raw.partition(b"\r\n\r\n")[2] for raw in raws if b"chunked\r\n\r\n" in raw]
    elif target == "answer":
        found += [raw for answer in ANSWERS if len(raw := b"".join(answer.pieces)) <= LONGEST]
    return [entry for entry in found if len(entry) <= LONGEST]


@st.composite
def mutated(draw: st.DrawFn, entries: list[bytes]) -> bytes:
    """One or two entries, with a few slices taken out, doubled, overwritten or set in."""
    data = draw(st.sampled_from(entries))
    if draw(st.booleans()):
        data += draw(st.sampled_from(entries))
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.integers(0, 8)))
        new = draw(st.one_of(st.sampled_from(WORDS), st.binary(max_size=4), st.just(data[at:to] * 2), st.just(b"")))
        data = data[:at] + new + data[to:]
    return data[:LONGEST]


def fuzz(target: str, seconds: float, *, first_seed: int = 0) -> int:
    """Runs a target for so much CPU time; returns how many inputs it had. Raises what the target raised, input kept."""
    check, entries, count = TARGETS[target], seeds(target), 0
    for entry in entries:
        check(entry, list(range(0, len(entry), 3)))
        check(entry, list(range(len(entry))))
    last = b""

    @settings(
        max_examples=ROUND,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=mutated(entries), cuts=st.lists(st.integers(0, LONGEST), max_size=12))
    def run(data: bytes, cuts: list[int]) -> None:
        nonlocal last, count
        last, count = data, count + 1
        check(data, cuts)

    until = time.process_time() + seconds
    while time.process_time() < until:
        first_seed += 1
        try:
            seed(first_seed)(run)()
        except Exception:
            kept = CORPUS / target / f"found-{hashlib.sha256(last).hexdigest()[:12]}"
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(last)
            print(f"{target}: failed, input kept as {kept}")
            raise
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--seconds", type=float, default=600.0, help="of CPU time for each target (600)")
    arguments = parser.parse_args()
    for target in arguments.targets or TARGETS:
        print(f"{target}: {fuzz(target, arguments.seconds, first_seed=time.time_ns() % 10**9)} inputs, no failure")


if __name__ == "__main__":
    main()
