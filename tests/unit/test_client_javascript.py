"""What the JavaScript client makes of each answer: the Python client's table again, on a network and a clock of the test's own."""

import re
from typing import Any, Final

import pytest

from producer_sdk.http import frames
from producer_sdk.http.problems import MEDIA_TYPE, PROBLEMS, problem_body
from producer_sdk.http.store import CUT_OFFSET, Place
from tests.support.javascript import run_javascript

#: Runs conversations, each a list of answers: ``null`` is a connection that cannot be made, a body is a list of pieces, one
#: that ends in ``null`` breaks, and a number moves the clock. Timers fire at once and move the clock; chance takes the most.
STAGE: Final = """
let now = 1_000_000;
Date.now = () => now;
Math.random = () => 1;
globalThis.setTimeout = (call, ms) => { const timer = { ms, call }; timers.add(timer); queueMicrotask(fire); return timer; };
globalThis.clearTimeout = (timer) => timers.delete(timer);
const timers = new Set();
let pauses = [];
const fire = () => {
  for (const timer of [...timers]) {
    if (String(timer.call).includes(".abort()")) continue; // for how long a connection may be silent
    timers.delete(timer);
    pauses.push(timer.ms);
    now += timer.ms;
    timer.call();
  }
};
const bodyOf = (pieces) => new ReadableStream({
  pull(controller) {
    const piece = pieces.shift();
    if (piece === undefined) controller.close();
    else if (piece === null) controller.error(new TypeError("terminated"));
    else if (typeof piece === "number") { now += piece; this.pull(controller); }
    else controller.enqueue(new TextEncoder().encode(piece));
  },
}, { highWaterMark: 0 });
const converse = async ({ answers, streams, options: { url = "http://shop/orders", ...options } }) => {
  pauses = [];
  const requests = [];
  const seen = [];
  globalThis.fetch = async (request) => {
    requests.push([request.method, Object.fromEntries(request.headers), await request.text()]);
    const answer = answers.shift();
    if (answer === null) throw new TypeError("fetch failed");
    const [status, headers, body] = answer;
    if (!body.length) headers["content-length"] ??= "0";
    return new Response([204, 303].includes(status) ? null : bodyOf([...body]), { status, headers });
  };
  try {
    const all = { key: "k-1", json: { a: 1 }, ...options };
    if (streams) for await (const frame of durable.stream(url, all)) seen.push(frame);
    else {
      const { headers, ...answer } = await durable.send(url, all);
      seen.push(answer);
    }
  } catch (error) {
    seen.push([error.name, error.slug ?? error.monitor ?? error.answer?.status ?? error.message, error.status ?? null]);
  }
  return { seen, pauses, requests };
};
const results = [];
for (const conversation of input) results.push(await converse(conversation));
return results;
"""

Answer = tuple[int, dict[str, str], list[str | int | None]] | None
SSE: Final = {"content-type": "text/event-stream"}
PROBLEM: Final = {"content-type": MEDIA_TYPE}
DONE: Final[Answer] = (201, {"content-type": "application/json"}, ["7"])
RESULT: Final = frames.final("result", b"7").decode()
LATER: Final = {slug for slug, problem in PROBLEMS.items() if problem.retry_after is not None}


def conversation(*answers: Answer, streams: bool = False, **options: Any) -> dict[str, Any]:
    return {"answers": list(answers), "streams": streams, "options": options}


def converse(*conversations: dict[str, Any]) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = run_javascript(STAGE, list(conversations))
    return said


def talk(*answers: Answer, **options: Any) -> dict[str, Any]:
    [said] = converse(conversation(*answers, **options))
    return said


def chunk(attempt: int, offset: int, data: bytes | None = b"1") -> str:
    return frames.progress(Place(attempt, offset), data).decode()


def body_of(slug: str) -> list[str | int | None]:
    return [problem_body(PROBLEMS[slug], status=None if PROBLEMS[slug].status else 422).decode()]


def statuses(seen: list[Any]) -> list[Any]:
    return [frame["type"] for frame in seen]


def test_every_problem_without_retry_after_is_final_and_every_other_is_asked_again() -> None:
    """R15, R16, R17"""
    said = converse(
        *(conversation((PROBLEMS[slug].status, PROBLEM, body_of(slug))) for slug in PROBLEMS.keys() - LATER),
        *(conversation((PROBLEMS[slug].status, PROBLEM | {"retry-after": "1"}, body_of(slug)), DONE) for slug in LATER),
    )
    final, later = said[: -len(LATER)], said[-len(LATER) :]
    expected = [[["DurableProblem", slug, PROBLEMS[slug].status]] for slug in PROBLEMS.keys() - LATER]
    assert [one["seen"] for one in final] == expected
    assert {(one["seen"][0]["status"], *one["pauses"]) for one in later} == {(201, 1250)}


def test_a_workflows_own_failure_is_final_whatever_its_status() -> None:
    """R17"""
    failure = problem_body(PROBLEMS["workflow-failed"], status=503).decode()
    assert talk((503, PROBLEM, [failure]))["seen"] == [["DurableProblem", "workflow-failed", 503]]


def test_gateways_and_broken_connections_are_asked_again_later_and_later() -> None:
    """R15: with the same bytes under the same key."""
    said = talk(None, (502, {}, ["<html>"]), (503, PROBLEM, ["{"]), (504, {}, []), (201, {}, ["{", None]), DONE)
    assert said["pauses"] == [200, 400, 800, 1600, 3200]
    assert said["seen"] == [{"status": 201, "text": "7", "key": "k-1", "replayed": False}]
    headers = {"content-type": "application/json", "idempotency-key": "k-1"}
    assert said["requests"] == [["POST", headers, '{"a":1}']] * 6


@pytest.mark.parametrize(
    ("asked", "pause"),
    [("1", 1250), ("0", 450), ("3600", 60_250), ("9" * 30, 60_250), ("soon", 200), ("-1", 200), ("5 Nov", 200), ("1.5", 200)],
)
def test_how_long_retry_after_asks_to_wait(asked: str, pause: float) -> None:
    """9.2-8"""
    assert talk((202, {"retry-after": asked}, ["{}"]), DONE)["pauses"] == [pause]


@pytest.mark.parametrize(
    "answer",
    [
        DONE, (204, {}, []), (202, {}, ["{}"]), (401, {}, []), (500, {}, ["oops"]), (303, {"location": "/x"}, []),
        (403, PROBLEM, ['{"type":"https://example.com/credit"}']), (422, PROBLEM, ["not json"]), (422, PROBLEM, ["null"]),
    ],
    ids=str,
)  # fmt: skip
def test_every_other_answer_is_the_answer(answer: Answer) -> None:
    """R17"""
    assert answer is not None
    said = talk(answer)
    text = "".join(str(piece) for piece in answer[2])
    assert said["seen"] == [{"status": answer[0], "text": text, "key": "k-1", "replayed": False}]
    assert said["pauses"] == []


def test_a_head_whose_end_may_be_missing_is_no_answer() -> None:
    """R15: what Chromium gives for ``HTTP/1.1 202 Acc``, without TLS. With TLS it gives an error, and HTTP/2 needs no length."""
    cuts: list[Answer] = [(202, {"content-length": length}, []) for length in ("", "2", "20")]
    assert talk(*cuts, DONE)["pauses"] == [200, 400, 800]
    [said] = converse(conversation(cuts[0], url="https://shop/orders"))
    assert (said["seen"][0]["status"], said["pauses"]) == (202, [])


@pytest.mark.parametrize("name", ["Idempotent-Replayed", "X-Idempotent-Replayed"])
def test_an_answer_tells_that_another_request_began_the_operation(name: str) -> None:
    """R18"""
    assert talk((201, {name: "true"}, ["7"]))["seen"][0]["replayed"]


def test_patience_ends_before_a_pause_that_would_outlast_it() -> None:
    """R15"""
    pending: Answer = (202, {"retry-after": "4", "location": "/operations/1"}, ["{}"])
    said = talk(pending, pending, pending, DONE, timeoutMs=10_000)
    assert said["seen"] == [["AnswerNotReady", "/operations/1", None]]
    assert said["pauses"] == [4250, 4250]


def test_the_frames_of_a_stream_across_its_requests() -> None:
    """S3, S7, S18, S19, S24"""
    said = talk(
        (
            200,
            SSE,
            ["retry: 500\n\n", chunk(0, 0), frames.activity(b'"live"').decode() + chunk(0, 1), "event: progress\nid: 0.2\n"],
        ),
        (200, {"content-type": "Text/Event-Stream; charset=utf-8"}, [chunk(0, 1) + frames.attempt(2).decode(), None]),
        (202, {"retry-after": "1"}, ["{}"]),
        (200, SSE, [frames.attempt(2).decode(), chunk(2, 0) + frames.PING.decode(), frames.pending().decode()]),
        (200, SSE, [chunk(2, CUT_OFFSET, None), "event: weather\ndata: fine\n\n" + RESULT + chunk(2, 5)]),
        streams=True,
    )
    assert said["seen"] == [
        {"type": "progress", "id": "0.0", "data": 1}, {"type": "activity", "data": "live"},
        {"type": "progress", "id": "0.1", "data": 1}, {"type": "attempt", "number": 2},
        {"type": "progress", "id": "2.0", "data": 1}, {"type": "truncated"}, {"type": "result", "data": 7, "text": "7"},
    ]  # fmt: skip
    assert [request[1].get("last-event-id") for request in said["requests"]] == [None, "0.1", "0.1", "0.1", "2.0"]
    assert {request[1]["idempotency-key"] for request in said["requests"]} == {"k-1"}
    assert {request[1]["accept"] for request in said["requests"]} == {"text/event-stream, application/problem+json"}
    assert said["pauses"] == [500, 500, 1250, 1250]


def test_a_stream_that_breaks_waits_no_longer_than_itself_asked_for() -> None:
    """What an answer before it asked for is over."""
    said = talk((202, {"retry-after": "5"}, []), (200, SSE, [chunk(0, 0)]), (200, SSE, [RESULT]), streams=True)
    assert said["pauses"] == [5250, 200]


def test_a_resume_may_get_a_plain_answer() -> None:
    """STREAM-22"""
    said = talk(
        (200, SSE, [chunk(0, 0), None]), (202, {"retry-after": "1"}, ["{}"]), (410, PROBLEM, body_of("erased")), streams=True
    )
    assert said["seen"] == [{"type": "progress", "id": "0.0", "data": 1}, ["DurableProblem", "erased", 410]]


@pytest.mark.parametrize("slug", ["stream-cursor-invalid", "stream-cursor-gone"])
def test_a_cursor_that_the_server_does_not_take_is_given_up_once(slug: str) -> None:
    """S23"""
    refusal: Answer = (PROBLEMS[slug].status, PROBLEM, body_of(slug))
    said = talk((200, SSE, [chunk(0, 0), chunk(0, 1)]), refusal, (200, SSE, [chunk(0, 0)]), refusal, streams=True)
    assert statuses(said["seen"][:-1]) == ["progress", "progress", "attempt", "progress"]
    assert said["seen"][-1] == ["DurableProblem", slug, PROBLEMS[slug].status]
    assert [request[1].get("last-event-id") for request in said["requests"]] == [None, "0.1", None, "0.0"]


@pytest.mark.parametrize(
    ("body", "status"), [(b'{"type":"x"}', 500), (b'{"status":"402"}', 500), (b'{"status":true}', 500), (b'{"status":402}', 402)]
)
def test_a_problem_frame_ends_the_stream(body: bytes, status: int) -> None:
    """9.3-12: what came before it in one piece is not lost."""
    said = talk((200, SSE, [chunk(0, 0) + frames.final("problem", body).decode()]), streams=True)
    assert said["seen"][0]["type"] == "progress"
    assert (said["seen"][1][0], said["seen"][1][2]) == ("DurableProblem", status)


BAD_FRAMES: Final = [
    "event: progress\nid: 0.0\ndata: {\n\n", "event: progress\ndata: 1\n\n", "event: progress\nid: 0\ndata: 1\n\n",
    "event: progress\nid: a.b\ndata: 1\n\n", "event: progress\nid: 0.-1\ndata: 1\n\n", "event: truncated\ndata: {}\n\n",
    "event: attempt\ndata: 1\n\n", "event: attempt\ndata: {}\n\n", "event: problem\ndata: []\n\n",
    "event: problem\ndata: <html>\n\n",
    "event: result\ndata: {\n\n", "event: pending\ndata: 1\n\n", "event: activity\ndata: NO\n\n",
]  # fmt: skip


def test_a_frame_that_no_durable_route_sends_is_a_typed_error() -> None:
    said = converse(*(conversation((200, SSE, [frame]), streams=True) for frame in BAD_FRAMES))
    assert [(one["seen"][0][0], one["pauses"]) for one in said] == [("UnexpectedAnswer", [])] * len(BAD_FRAMES)


def test_a_stream_and_a_plain_route_are_not_taken_for_one_another() -> None:
    stream, plain = converse(conversation((200, SSE, [RESULT])), conversation((401, {}, []), streams=True))
    assert stream["seen"][0][0] == "UnexpectedAnswer"
    assert plain["seen"] == [["NoStream", 401, None]]


def test_patience_counts_from_the_newest_frame_and_pings_are_none() -> None:
    """A ping says that the connection lives, not that the operation goes on."""
    ping = frames.PING.decode()
    lively: list[str | int | None] = [piece for offset in range(4) for piece in (chunk(0, offset), 8_000, ping)]
    said = talk((200, SSE, [*lively, RESULT]), streams=True, timeoutMs=10_000)
    assert statuses(said["seen"]) == ["progress"] * 4 + ["result"]

    said = talk((200, SSE, [chunk(0, 0), 9_000, ping, 1_000, ping, RESULT]), streams=True, timeoutMs=10_000)
    assert statuses(said["seen"][:-1]) == ["progress"]
    assert said["seen"][-1][0] == "AnswerNotReady"
    assert "without news" in said["seen"][-1][1]


def test_an_answer_that_trickles_ends_with_the_patience() -> None:
    said = talk((201, {}, ["7", 9_000, "7", 1_000, "7"]), timeoutMs=10_000)
    assert said["seen"][0][0] == "AnswerNotReady"


def test_a_stream_of_two_byte_order_marks_has_one() -> None:
    """STREAM-16: the second is the name of a field that nobody knows, so the first block has no type."""
    said = talk((200, SSE, ["\ufeff\ufeff" + chunk(0, 0) + chunk(0, 1) + RESULT]), streams=True)
    assert [frame.get("id") for frame in said["seen"]] == ["0.1", None]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"headers": {"idempotency-key": "other"}}, "TypeError"), ({"headers": {"Last-Event-ID": "0.0"}}, "TypeError"),
        ({"body": "x"}, "TypeError"), ({"key": "k\nl"}, "TypeError"),
        ({"key": None}, "TypeError"), ({"key": ""}, "TypeError"), ({"method": "GET"}, "TypeError"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_the_callers_fault_at_once(options: dict[str, Any], error: str) -> None:
    said = talk(None, DONE, **options)
    assert said["seen"][0][0] == error
    assert said["requests"] == []


@pytest.mark.parametrize(
    ("options", "headers", "body"),
    [
        ({"json": {"b": [1, "é"]}}, {"content-type": "application/json"}, '{"b":[1,"é"]}'),
        ({"json": {}, "headers": {"Content-Type": "a/b+json", "x": "y"}}, {"content-type": "a/b+json", "x": "y"}, "{}"),
    ],
)  # fmt: skip
def test_what_is_sent(options: dict[str, Any], headers: dict[str, str], body: str) -> None:
    assert talk(DONE, **options)["requests"] == [["POST", headers | {"idempotency-key": "k-1"}, body]]


def test_each_new_operation_has_a_new_key() -> None:
    """R14, R21"""
    keys = run_javascript("return Array.from({ length: 100 }, () => durable.newKey());", None)
    assert len(set(keys)) == 100
    assert all(re.fullmatch("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", key) for key in keys)


ABORTS: Final = """
const seen = [];
for (const when of ["before", "waiting", "reading", "pausing"]) {
  const control = new AbortController();
  const abort = () => control.abort(new Error("left"));
  let cancelled = false;
  globalThis.fetch = (_request, { signal }) => new Promise((resolve, reject) => {
    signal.addEventListener("abort", () => reject(signal.reason));
    if (when === "waiting") abort();
    if (when === "pausing") { setTimeout(abort, 20); resolve(new Response("", { status: 202, headers: { "retry-after": "50" } })); }
    if (when === "reading") {
      const start = (controller) => {
        signal.addEventListener("abort", () => { cancelled = true; controller.error(signal.reason); });
        setTimeout(abort, 20);
      };
      resolve(new Response(new ReadableStream({ start }), { headers: { "content-type": "text/event-stream" } }));
    }
  });
  if (when === "before") abort();
  try {
    const options = { json: 1, signal: control.signal, timeoutMs: when === "waiting" ? 1 : 300_000 };
    for await (const frame of durable.stream("http://shop/", options)) seen.push(frame);
  } catch (error) {
    seen.push([when, error.message, cancelled]);
  }
}
return seen;
"""


def test_a_signal_ends_it_wherever_it_is() -> None:
    expected = [["before", "left", False], ["waiting", "left", False], ["reading", "left", True], ["pausing", "left", False]]
    assert run_javascript(ABORTS, None) == expected


LEAVES: Final = """
let cancelled = false;
const pull = (controller) => controller.enqueue(new TextEncoder().encode("event: progress\\nid: 0.0\\ndata: 1\\n\\n"));
const cancel = () => { cancelled = true; };
const headers = { "content-type": "text/event-stream" };
globalThis.fetch = async () => new Response(new ReadableStream({ pull, cancel }), { headers });
for await (const frame of durable.stream("http://shop/", { json: 1 })) break;
return cancelled;
"""


def test_who_leaves_a_stream_closes_its_connection() -> None:
    assert run_javascript(LEAVES, None) is True


OWN_FETCH: Final = """
globalThis.fetch = () => { throw new Error("not this one"); };
const requests = [];
const fetch = async (request) => { requests.push(request.url); return new Response("7"); };
const answer = await durable.send("http://shop/orders", { json: 1, fetch });
return [answer.text, requests];
"""


def test_a_page_may_give_a_fetch_of_its_own() -> None:
    """One that shows that it is connecting, say."""
    assert run_javascript(OWN_FETCH, None) == ["7", ["http://shop/orders"]]


SILENCE: Final = """
let requests = 0;
const silences = [];
globalThis.setTimeout = (call, ms) => {
  if (String(call).includes(".abort()")) silences.push(ms);
  if (ms < 1_000 || requests < 2) queueMicrotask(call);
};
globalThis.clearTimeout = () => {};
globalThis.fetch = (_request, { signal }) => new Promise((resolve, reject) => {
  requests += 1;
  signal.addEventListener("abort", () => reject(signal.reason));
  if (requests > 1) resolve(new Response("7"));
});
const answer = await durable.send("http://shop/", { json: 1, timeoutMs: input });
return [answer.text, requests, silences[0]];
"""


def test_a_connection_that_says_nothing_for_too_long_is_given_up() -> None:
    assert run_javascript(SILENCE, 300_000) == ["7", 2, 70_000]
    text, requests, silence = run_javascript(SILENCE, 4_000)
    assert (text, requests) == ("7", 2)
    assert 3_000 < silence <= 4_000
