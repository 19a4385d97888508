"""The part that all agents of a density run have in common: a server socket, a history, the two steps of a turn.

Standard library of Python 3.9 or newer. `POST /turn` is one turn and answers `{"turn", "answer"}`; `GET /` answers at
once. An agent gives `serve` a function that takes the history and returns the answer's text.
"""

import gc
import http.server
import json
import os
import random
import string

HISTORY_BYTES = 200_000
INSTRUCTIONS = "You keep the books of an apiary. Look words up before you answer."
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up in the books.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


def look_up(word):
    """Looks a word up in the books."""
    return "frames of %s: 2" % word


def history():
    """A conversation of 200 KB, another one in each agent."""
    letters = string.ascii_lowercase + "     "
    messages = []
    size = 0
    while size < HISTORY_BYTES:
        text = "".join(random.choices(letters, k=2000))
        messages.append({"role": "user" if len(messages) % 2 == 0 else "assistant", "content": text})
        size += len(text)
    return messages


def recent(messages):
    """What of the history is sent with a turn: a summary of all of it, and its last words."""
    words = sum(len(message["content"].split()) for message in messages)
    system = {"role": "system", "content": "%s (%d words so far)" % (INSTRUCTIONS, words)}
    return [system] + messages[-3:]


def serve(turn):
    """Serves turns at HIVE_AGENT_PORT until the end; one at a time, as an agent does."""
    told = {"turn": 0, "messages": history()}

    class Callers(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self._answer({"turn": told["turn"]})

        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path == "/collect":
                gc.collect()
                self._answer({"turn": told["turn"]})
                return
            told["turn"] += 1
            question = {"role": "user", "content": "Turn %d: how much honey is there?" % told["turn"]}
            messages = told["messages"] = told["messages"][2:] + [question]
            text = turn(recent(messages))
            messages.append({"role": "assistant", "content": text})
            self._answer({"turn": told["turn"], "answer": text})

        def _answer(self, found):
            body = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

        def log_message(self, *words):
            pass

    class Server(http.server.HTTPServer):
        request_queue_size = 64
        allow_reuse_address = True

    Server(("127.0.0.1", int(os.environ["HIVE_AGENT_PORT"])), Callers).serve_forever()
