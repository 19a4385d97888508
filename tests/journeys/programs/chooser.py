"""An agent that asks for one model after the other, and prints every answer it received whole.

Arguments: requests a second, then the models. A failed request is asked again as a new one. Asked to end, it ends
between two requests. Standard library only.
"""

import json
import os
import random
import signal
import sys
import time
import urllib.error
import urllib.request
from typing import Any


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def ask(model: str, tokens: int) -> dict[str, Any]:
    body = {"model": model, "max_tokens": tokens, "messages": [{"role": "user", "content": "Hello"}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        whole: dict[str, Any] = json.load(answer)
        return whole


def main() -> None:
    rate, models = float(sys.argv[1]), sys.argv[2:]
    chance = random.Random(os.getpid())
    asked_to_end: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.append(True))
    say(ready=True)
    while not asked_to_end:
        next_at = time.monotonic() + 1 / rate
        model, tokens = chance.choice(models), chance.randint(3, 9)
        try:
            whole = ask(model, tokens)
            usage = whole["usage"]
            say(
                asked=model,
                model=whole["model"],
                wanted=tokens,
                tokens_in=usage["prompt_tokens"],
                tokens_out=usage["completion_tokens"],
            )
        except urllib.error.HTTPError as refused:
            say(asked=model, status=refused.code, text=refused.read().decode(errors="replace")[:300])
        except (OSError, ValueError, KeyError) as failure:
            say(asked=model, failed=repr(failure))
            time.sleep(0.05)
        time.sleep(max(0.0, next_at - time.monotonic()))


if __name__ == "__main__":
    main()
