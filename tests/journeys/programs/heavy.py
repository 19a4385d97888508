"""An agent with a heap that is worth paging out; it answers `GET /` and takes messages. Argument: MiB of it."""

import random
import sys

import called


class Callers(called.Callers):  # type: ignore[misc]
    heap: list[bytes] = []  # noqa: RUF012 - filled by main

    def do_GET(self) -> None:
        self.answer(f"{len(self.heap)}\n".encode())


def main() -> None:
    chance = random.Random(0)
    # Half of it is noise: what real agents have in memory zram makes a third to a half of.
    Callers.heap = [chance.randbytes(512) + bytes(512) for _ in range(int(sys.argv[1]) * 1024)]
    called.serve("127.0.0.1", Callers)


if __name__ == "__main__":
    main()
