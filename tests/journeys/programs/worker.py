"""An agent for the chaos runs: asks without pause and prints every answer it received whole.

Arguments: unix|tcp, requests a second. A failed request is asked again as a new one. Asked to end, it ends between two
requests: an answer it received and did not print would be missing in the sums. Standard library only.
"""

import json
import random
import signal
import sys
import time

from racer import ask, connect, say


def main() -> None:
    kind, rate = sys.argv[1], float(sys.argv[2])
    sock, chance = None, random.Random(kind)
    asked_to_end: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.append(True))
    say(ready=True)
    while not asked_to_end:
        next_at = time.monotonic() + 1 / rate
        try:
            if sock is None:
                sock = connect(kind)
                sock.settimeout(20)
            status, answer = ask(sock, chance.choice((10, 100, 1000)))
            if status == 200:
                whole = json.loads(answer)
                say(
                    id=whole["id"],
                    tokens_in=whole["usage"]["prompt_tokens"],
                    tokens_out=whole["usage"]["completion_tokens"],
                )
            else:
                say(status=status)
        except (TimeoutError, OSError, ValueError, IndexError, KeyError) as failure:
            say(failed=repr(failure))
            if sock is not None:
                sock.close()
            sock = None
            time.sleep(0.05)
        time.sleep(max(0.0, next_at - time.monotonic()))


if __name__ == "__main__":
    main()
