"""An agent in a container that asks the model with the packages everybody uses, as they are: openai and ollama.

It asks where its environment says, then at 127.0.0.1 on each port it is given, and prints what came of each.
"""

import json
import os
import socket
import sys
import time
from typing import Any

import ollama
import openai

HELLO = [{"role": "user", "content": "Hello, how are you today?"}]


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def chat(way: str, of_openai: Any, of_ollama: ollama.Client) -> None:
    whole = of_openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5)
    chunks = list(
        of_openai.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=7, stream=True, stream_options={"include_usage": True}
        )
    )
    say(way=f"openai by {way}", tokens=whole.usage.completion_tokens)
    say(way=f"openai stream by {way}", tokens=chunks[-1].usage.completion_tokens)
    told = of_ollama.chat(model="tiny", messages=HELLO, options={"num_predict": 3})
    say(way=f"ollama by {way}", tokens=told.eval_count)


def wait_for(port: int) -> None:
    while socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.01)


def main() -> None:
    say(interfaces=sorted(os.listdir("/sys/class/net")), uid=os.getuid())
    chat("environment", openai.OpenAI(), ollama.Client())
    for port in map(int, sys.argv[1:]):
        wait_for(port)
        hive = f"http://127.0.0.1:{port}"
        chat(str(port), openai.OpenAI(base_url=f"{hive}/v1"), ollama.Client(host=hive))
    say(done=True)


if __name__ == "__main__":
    main()
