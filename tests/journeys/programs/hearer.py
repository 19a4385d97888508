"""An agent that has a sound heard: it sends a form with the file it is given, and prints the text that comes back.

Arguments: file, model, seconds between two requests (0: one). Standard library only.
"""

import http.client
import json
import os
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

BOUNDARY = "sound-of-the-hive"


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def hear(sound: bytes, model: str) -> None:
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=600)
    parts = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'.encode(),
        sound,
        f'\r\n--{BOUNDARY}\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n'.encode(),
        f"--{BOUNDARY}--\r\n".encode(),
    )
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": f"multipart/form-data; boundary={BOUNDARY}",
    }
    connection.request("POST", f"{url.path}/audio/transcriptions", b"".join(parts), headers)
    say(sent=True)
    answer = connection.getresponse()
    said = answer.read().decode()
    say(status=answer.status, text=json.loads(said).get("text", said))
    connection.close()


def main() -> None:
    sound, model, again_s = Path(sys.argv[1]).read_bytes(), sys.argv[2], float(sys.argv[3])
    hear(sound, model)
    while again_s:
        time.sleep(again_s)
        hear(sound, model)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
