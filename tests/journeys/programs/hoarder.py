"""A program that takes memory and holds it. Arguments: MiB, seconds. It says when it has all, and when it lets go."""

import json
import sys
import time


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    mb, seconds = int(sys.argv[1]), float(sys.argv[2])
    held = bytearray(mb << 20)
    for page in range(0, len(held), 4096):
        held[page] = 1
    say(holds_mb=mb)
    time.sleep(seconds)
    say(lets_go=True)


main()
