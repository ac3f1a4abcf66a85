"""A program that calls a durable route, and starts anew where it stopped: its key is in a file before the first request is sent.

``python client_program.py FILE URL ITEM``
"""

import json
import sys
from pathlib import Path

from producer_sdk.http.client import DurableClient, new_key


def main(file: Path, url: str, item: str) -> None:
    if not file.exists():
        file.write_text(json.dumps({"key": new_key(), "order": {"item": item}}))
    operation = json.loads(file.read_text())
    with DurableClient() as client:
        answer = client.send("POST", url, json=operation["order"], key=operation["key"])
    print(answer.status)
    file.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
