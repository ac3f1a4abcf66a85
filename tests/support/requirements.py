"""Which test proves which requirement of durable routes: the page is written from what the tests say of themselves.

A test names the numbers it proves in its docstring: "R18, R19: ...". ``scripts/requirements`` writes the page, and fails where a
number has no test.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

__all__ = ["REQUIREMENTS", "page", "proofs"]

_TESTS: Final = Path(__file__).parents[1]
_NUMBER: Final = re.compile(r"\b([RSCTL][1-9]\d?)\b")
_RANGE: Final = re.compile(r"\b([RSCTL])([1-9]\d?) to \1([1-9]\d?)\b")

REQUIREMENTS: Final[Mapping[str, str]] = {
    "R1": "the route's work runs as a run that the Idempotency-Key names",
    "R2": "the first request starts the run and waits for its result",
    "R3": "a retry attaches to the run, gets its result, and repeats no effect",
    "R4": "a request that outlives its wait gets a pending answer, and a retry collects",
    "R5": "the run is committed before the wait",
    "R6": "a design record of routes, and one of streams",
    "R7": "the clock starts before the body is read",
    "R8": "principal, workflow, success status, failure statuses and wait are said by the author",
    "R9": "POST /orders: 201, and 422 for OutOfStock",
    "R10": "an outcome renders itself",
    "R11": "an author can render it another way",
    "R12": "no route without a principal",
    "R13": "the tenant is part of the key",
    "R14": "a client's key is random, one for each operation",
    "R15": "what a client sends again, with the same bytes and key",
    "R16": "Retry-After: not finished, or cannot start yet",
    "R17": "a problem without Retry-After is final, and known by its type",
    "R18": "the replay markers on answers about a run that this request did not start",
    "R19": "idempotency-key-reused names no run",
    "R20": "a key binds its request: another gets 422 and starts nothing",
    "R21": "a new operation takes a new key",
    "R22": "type, code and detail of a problem are fixed",
    "R23": "no message, key, scope or input in a problem",
    "R24": "a mapped failure shows its type and details",
    "R25": "a mapped failure ends the run at its first attempt",
    "R26": "a finished run answers at once, a live one is waited for",
    "R27": "one LISTEN connection for each process",
    "R28": "the process's cap of waiting requests; 0 waits for nobody",
    "R29": "the wait ends 2 s before the request's deadline",
    "R30": "reads end 1 s before it; a late one is pending with the run's headers",
    "R31": "a start that is late is pending without them, and may still commit",
    "R32": "both margins count from the arrival",
    "R33": "a layer that collects answers is noticed",
    "R34": "a deadline that leaves no time to start is misconfigured, and starts nothing",
    "R35": "a route needs several seconds, said where it is configured",
    "R36": "a wait beyond the deadline is refused at registration",
    "R37": "the newest run of a lineage answers",
    "R38": "however it came about: replay, continue-as-new, another workflow",
    "R39": "a lineage of any length costs one read",
    "R40": "a long lineage that lives is pending",
    "R41": "a long lineage that has ended gives its result",
    "R42": "a lineage cannot loop",
    "R43": "a read that fails is pending: the run exists",
    "R44": "retries of a run cost a reader nothing",
    "R45": "erased is 410; a result that cannot be read is 500",
    "R46": "the run's id is shown only where the author wants it",
    "R47": "an input over the cap is 413; without a database 503",
    "R48": "a parked run is pending",
    "R49": "spans and logs tell the outcome and no payload",
    "S1": "a stream answers with server-sent events that can be resumed",
    "S2": "POST /answers streams a workflow",
    "S3": "stored chunks in order, then exactly one final frame",
    "S4": "the start commits before the stream opens",
    "S5": "a ping every 5 s",
    "S6": "an id is attempt and offset, and names no run",
    "S7": "an attempt frame where the reader starts over",
    "S8": "a reader clears at an attempt frame",
    "S9": "10,000 chunks, then a marker at the greatest offset",
    "S10": "live chunks are activity frames",
    "S11": "an activity frame has no id",
    "S12": "live chunks are not stored and not sent again",
    "S13": "a higher attempt of an activity supersedes",
    "S14": "a slow reader loses live frames",
    "S15": "a live chunk does not follow its step's stored text",
    "S16": "live only where the author turns it on",
    "S17": "tokens live, turns durable",
    "S18": "the cursor is the last id; final frames have none",
    "S19": "a resume is the same request with Last-Event-ID",
    "S20": "it gives what follows; without it everything",
    "S21": "a resume may get a plain answer",
    "S22": "Last-Event-ID 0.3 gives 0.4, then the result",
    "S23": "a malformed or repeated cursor is 400 and starts nothing",
    "S24": "delivery is at least once, told apart by ids",
    "S25": "EventSource reads by a signed link",
    "S26": "the order of checks; before the run is known, answers are plain",
    "S27": "the headers of a stream, and the status inside the problem frame",
    "S28": "full slots, or a late start, are 202 with Retry-After: 1",
    "S29": "erased and unreadable are plain answers",
    "S30": "a stream carries the replay markers",
    "S31": "wait and success status do not touch a stream",
    "S32": "a stream's budget ends it with a pending frame",
    "S33": "a short budget drains what is stored",
    "S34": "slots of the process; 0 streams nothing",
    "S35": "slots of a principal",
    "S36": "no connection for each stream; one read a second for all",
    "S37": "under a layer that collects bodies a stream is misconfigured, and starts nothing",
    "S38": "a lineage of any length streams to its end",
    "S39": "a client that does not read loses its stream and nothing else",
    "S40": "a replay's chunks are followed",
    "S41": "a cursor counts within the lineage of the key",
    "S42": "erasure takes every run's chunks",
    "S43": "no chunk in spans and logs",
    "S44": "chunks pass through the codec",
    "S45": "gapless offsets, the first copy stays, pages read when there is room, listening before the first read",
    "C1": "under a layer that caches answers pending is 409",
    "C2": "a duplicate in flight is told to come again",
    "C3": "a changed request is told so, cached or not",
    "C4": "principals share no answer",
    "C5": "one warning where Authorization meets such a layer",
    "C6": "answers are marked as not to be stored",
    "C7": "a client that leaves holds no lock",
    "C8": "inside routers, groups and other layers the answers are the same",
    "C9": "such a layer is found at start-up",
    "T1": "success: the route's status and the output",
    "T2": "pending: 202, Retry-After and the run's headers",
    "T3": "failures, mapped and not",
    "T4": "statuses of keys",
    "T5": "statuses of cursors, erasure, size, configuration and availability",
    "T6": "each end has its own problem",
    "T7": "the frames",
    "L1": "PostgreSQL is what it runs on; without it 503",
    "L2": "keys are found without a walk over shards",
    "L3": "a monitor, and Location",
    "L4": "server-made values in the input change no fingerprint",
    "L5": "an expired key starts nothing",
    "L6": "whatever its run ended in",
    "L7": "erasure of the whole lineage",
    "L8": "a lower cap refuses no retry",
    "L9": "a run that is tried again repeats no effect",
    "L10": "a run has its tenant, its route and the request's trace",
    "L11": "runs outlive their keys",
    "L12": "no logger shows a secret",
    "L13": "one status for a run, whoever asks",
    "L14": "a retry after a replay gets the replay's answer",
    "L15": "a key's window is the route's",
    "L16": "the start is part of the handler's transaction",
    "L17": "Prefer: wait and respond-async",
    "L18": "metrics by route and outcome",
    "L19": "failures are mapped by class; others have a default",
    "L20": "keys and fingerprints are HMACs, and the secret can be replaced",
    "L21": "OpenAPI shows the whole contract",
    "L22": "a plain HTML form can carry a key",
    "L23": "the limits that the prose names: derived failures, one listener, arrival time, caps, links and codecs",
}


def proofs() -> Mapping[str, list[str]]:
    """The tests of each number, as file and function."""
    found: dict[str, list[str]] = {number: [] for number in REQUIREMENTS}
    for path in sorted(_TESTS.rglob("test_*.py")):
        for name, text in _said(path):
            for number in sorted(_numbers(text) & found.keys()):
                found[number].append(f"{path.relative_to(_TESTS.parent)}::{name}")
    return found


def page() -> str:
    """The table, one row a number."""
    lines = [
        "# Requirements of durable routes",
        "",
        "Written by `scripts/requirements` from tests' own words: R, JSON answers; S, streams; C, layers that cache; T, statuses",
        "and frames; L, limits of the system that the requirements come from. Run one by `scripts/test FILE -k NAME`.",
        "",
        "| | what holds | proven by |",
        "|---|---|---|",
    ]
    for number, tests in proofs().items():
        shown = "<br>".join(f"[`{_name(test)}`](../../{test.partition('::')[0]})" for test in tests[:4])
        more = f"<br>and {len(tests) - 4} more" if len(tests) > 4 else ""
        lines.append(f"| {number} | {REQUIREMENTS[number]} | {shown}{more} |")
    return "\n".join([*lines, ""])


def _name(test: str) -> str:
    return test.partition("::")[2].removeprefix("test_").replace("_", " ")


def _said(path: Path) -> Iterator[tuple[str, str]]:
    """Every test function of a file, with what it says of itself."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name, ast.get_docstring(node) or ""


def _numbers(text: str) -> set[str]:
    ranges = (f"{letter}{number}" for letter, first, last in _RANGE.findall(text) for number in range(int(first), int(last) + 1))
    return {*_NUMBER.findall(text), *ranges}
