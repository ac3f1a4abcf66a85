"""What the client makes of each answer, without a network: the table of its contract."""

import json
from datetime import UTC, datetime
from typing import Any, Final

import pytest

from fencepost.retry_after import parse_retry_after
from producer_sdk.http import frames
from producer_sdk.http.client import (
    Activity,
    AnswerNotReady,
    Attempt,
    Chunk,
    DurableAnswer,
    DurableProblem,
    Frame,
    Patience,
    Result,
    Truncated,
    UnexpectedAnswer,
    new_key,
)
from producer_sdk.http.client.conversation import Again, Conversation
from producer_sdk.http.problems import MEDIA_TYPE, PROBLEMS, problem_body
from producer_sdk.http.store import CUT_OFFSET, Place
from tests.support.javascript import run_javascript

NOW: Final = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
PROBLEM: Final = {"content-type": MEDIA_TYPE}
STREAM_SLUGS: Final = ("stream-cursor-invalid", "stream-cursor-gone")
LATER: Final = {slug for slug, problem in PROBLEMS.items() if problem.retry_after is not None}
FOREIGN: Final = b'{"type":"https://example.com/out-of-credit","title":"Out of credit","status":403}'


class Time:
    """A clock that stands until it is moved, and chance that always takes the most."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def talking(time: Time | None = None, **patience: float) -> Conversation:
    chosen = Patience(**patience)
    return Conversation(key="k-1", patience=chosen, clock=time or Time(), now=lambda: NOW, jitter=lambda _least, most: most)


def body_of(slug: str, **members: Any) -> bytes:
    return problem_body(PROBLEMS[slug], status=None if PROBLEMS[slug].status else 422, members=members)


def again(step: DurableAnswer | Again) -> float:
    assert isinstance(step, Again), step
    return step.seconds


def fed(conversation: Conversation, *pieces: bytes) -> list[Frame | Again]:
    return [frame for piece in pieces for frame in conversation.fed(piece)]


def opened(conversation: Conversation | None = None) -> Conversation:
    conversation = conversation or talking()
    conversation.opened()
    return conversation


# Plain answers


@pytest.mark.parametrize("slug", sorted(PROBLEMS.keys() - LATER))
def test_a_problem_without_retry_after_is_final(slug: str) -> None:
    """R17"""
    status = PROBLEMS[slug].status
    with pytest.raises(DurableProblem) as raised:
        talking().answered(status, PROBLEM, body_of(slug, error_type="OutOfStock"))
    problem = raised.value
    assert (problem.slug, problem.status, problem.title) == (slug, status, PROBLEMS[slug].title)
    assert problem.type == PROBLEMS[slug].uri
    assert problem.extensions == {"code": PROBLEMS[slug].code, "error_type": "OutOfStock"}


@pytest.mark.parametrize("slug", sorted(LATER))
def test_a_problem_with_retry_after_is_asked_again(slug: str) -> None:
    """R15, R16"""
    headers = PROBLEM | {"retry-after": "1"}
    assert 1.0 <= again(talking().answered(PROBLEMS[slug].status, headers, body_of(slug))) <= 1.25


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_workflows_own_failure_is_final_whatever_its_status(status: int) -> None:
    """R17: a status that a proxy may give as well is told apart by the type."""
    with pytest.raises(DurableProblem) as raised:
        talking().answered(status, PROBLEM, problem_body(PROBLEMS["workflow-failed"], status=status))
    assert raised.value.status == status


@pytest.mark.parametrize("status", [502, 503, 504])
@pytest.mark.parametrize("headers", [{}, {"content-type": "text/html"}, PROBLEM], ids=["bare", "page", "problem"])
def test_a_gateway_that_has_no_answer_is_asked_again(status: int, headers: dict[str, str]) -> None:
    """R15"""
    assert again(talking().answered(status, headers, FOREIGN)) == 0.2


@pytest.mark.parametrize(
    ("status", "headers", "content"),
    [
        (201, {"content-type": "application/json"}, b'{"id":1}'), (200, {}, b""), (202, {}, b"{}"), (204, {}, b""),
        (401, {}, b""), (403, PROBLEM, FOREIGN), (500, {"content-type": "text/plain"}, b"Internal Server Error"),
        (422, PROBLEM, b"not json"), (422, PROBLEM, b"[]"), (422, PROBLEM, b"[" * 50_000), (422, PROBLEM, b'{"type":null}'),
        (422, {"content-type": "application/json"}, body_of("request-invalid")),
        (301, {"location": "/elsewhere"}, b""), (303, {"location": "/done"}, b""), (307, {"location": "/x"}, b""),
    ],
)  # fmt: skip
def test_every_other_answer_is_the_answer(status: int, headers: dict[str, str], content: bytes) -> None:
    """R17: nothing is taken for a durable route's that does not say so."""
    conversation = talking()
    answer = conversation.answered(status, headers, content)
    assert answer == DurableAnswer(status, headers, content, "k-1", replayed=False)
    assert conversation.monitor is None


@pytest.mark.parametrize("name", ["idempotent-replayed", "x-idempotent-replayed"])
def test_an_answer_tells_that_another_request_began_the_operation(name: str) -> None:
    """R18"""
    answer = talking().answered(201, {name: "true"}, b"7")
    assert isinstance(answer, DurableAnswer)
    assert answer.replayed
    assert answer.json() == 7


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ("1", 1.25), ("0", 0.45), ("59", 59.25), ("3600", 60.25), ("9" * 30, 60.25), (" 2 ", 2.25),
        ("Mon, 30 Nov 2026 12:00:05 GMT", 5.25), ("Monday, 30-Nov-26 12:00:05 GMT", 5.25), ("Mon Nov 30 12:00:05 2026", 5.25),
        ("Mon, 30 Nov 2026 11:00:00 GMT", 0.45), ("Fri, 01 Jan 2100 00:00:00 GMT", 60.25),
        ("", 0.2), ("soon", 0.2), ("-1", 0.2), ("1.5", 0.2), ("1, 1", 0.2), ("5 Nov", 0.2), ("9" * 60, 0.2), ("²", 0.2),
        ("Mon, 31 Nov 2026 12:00:05 GMT", 0.2),
    ],
)  # fmt: skip
def test_how_long_retry_after_asks_to_wait(asked: str, seconds: float) -> None:
    """9.2-8: seconds and dates, a past one is now, what cannot be read asks for nothing, and no more than the policy allows. What
    has a Retry-After is never final."""
    assert again(talking().answered(202, {"retry-after": asked}, b"")) == pytest.approx(seconds)


RETRY_AFTERS: Final = [
    "1", "0", "3600", "9" * 30, "Mon, 30 Nov 2026 12:00:05 GMT", "Monday, 30-Nov-26 12:00:05 GMT", "Mon Nov 30 12:00:05 2026",
    "Sunday, 06-Nov-94 08:49:37 GMT", "Sunday, 06-Nov-76 08:49:37 GMT", "Sunday, 06-Nov-77 08:49:37 GMT",
    "Sun Nov  6 08:49:37 2033", "Mon, 30 Nov 2026 11:00:00 GMT", "Fri, 01 Jan 2100 00:00:00 GMT", "Mon, 30 Nov 2026 12:00:60 GMT",
    "", "soon", "-1", "1.5", "1, 1", "5 Nov", "2026-11-30T12:00:05Z", "Mon, 31 Nov 2026 12:00:05 GMT",
    "Mon, 30 Nov 2026 24:00:00 GMT", "Mon, 30 nov 2026 12:00:05 GMT", "Mon, 00 Nov 2026 12:00:05 GMT",
    "Sun, 29 Feb 2032 12:00:00 GMT", "Sat, 29 Feb 2031 12:00:00 GMT",
]  # fmt: skip


def test_the_javascript_client_reads_retry_after_alike() -> None:
    """9.2-8"""
    script = "return input.texts.map((text) => durable.parseRetryAfter(text, input.now));"
    said = run_javascript(script, {"texts": RETRY_AFTERS, "now": NOW.timestamp() * 1000})
    expected = [parse_retry_after(text, now=NOW) for text in RETRY_AFTERS]
    assert dict(zip(RETRY_AFTERS, said, strict=True)) == {
        text: None if seconds is None else pytest.approx(seconds * 1000)
        for text, seconds in zip(RETRY_AFTERS, expected, strict=True)
    }


def test_pauses_grow_while_nothing_answers_and_are_short_again_once_a_server_speaks() -> None:
    """R15"""
    conversation = talking(timeout_seconds=10_000)
    pauses = [conversation.broken("ConnectError").seconds for _ in range(8)]
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert again(conversation.answered(503, {}, b"")) == 10.0
    conversation.answered(202, {"retry-after": "1"}, b"")
    assert conversation.broken("ConnectError").seconds == 0.2


def test_the_pause_is_never_the_same_for_all_clients() -> None:
    conversation = Conversation(key="k", patience=Patience(), clock=Time())
    assert len({conversation.answered(202, {"retry-after": "1"}, b"") for _ in range(20)}) > 10


def test_patience_ends_before_a_pause_that_would_outlast_it() -> None:
    """R15: the caller keeps the key, and knows where to look."""
    time = Time()
    conversation = talking(time, timeout_seconds=10)
    pending = {"retry-after": "1", "location": "/durable/operations/1"}
    conversation.answered(202, pending, b"")
    time.now += 8.7
    conversation.answered(202, pending, b"")
    time.now += 0.1
    with pytest.raises(AnswerNotReady, match="status 503") as raised:
        conversation.answered(503, {"retry-after": "1"}, b"")
    assert (raised.value.key, raised.value.monitor) == ("k-1", "/durable/operations/1")


def test_only_a_run_that_goes_on_says_where_it_can_be_looked_at() -> None:
    conversation = talking(timeout_seconds=1)
    with pytest.raises(AnswerNotReady) as raised:
        conversation.answered(503, {"retry-after": "9", "location": "/status-page"}, b"")
    assert raised.value.monitor is None


def test_patience_ends_while_an_answer_trickles() -> None:
    time = Time()
    conversation = talking(time, timeout_seconds=10)
    conversation.check_patience("the answer does not end")
    time.now += 10
    with pytest.raises(AnswerNotReady, match="does not end"):
        conversation.check_patience("the answer does not end")


def test_each_new_operation_has_a_new_key() -> None:
    """R14, R21"""
    assert len({new_key() for _ in range(100)}) == 100


def test_errors_and_answers_do_not_show_what_they_carry() -> None:
    """An answer's body and headers hold what is the user's alone."""
    answer = talking().answered(201, {"set-cookie": "secret"}, b"private")
    assert "secret" not in repr(answer)
    assert "private" not in repr(answer)


# Streams


def test_the_frames_of_a_stream() -> None:
    """S3, S6, S11"""
    stream = [
        frames.RETRY, frames.progress(Place(0, 0), b'{"t":"a"}'), frames.PING, frames.activity(b'{"t":"b"}'), frames.attempt(1),
        frames.progress(Place(1, 0), b"2"), frames.progress(Place(1, CUT_OFFSET), None), frames.final("result", b'{"n":\n1}'),
    ]  # fmt: skip
    expected = [
        Chunk("0.0", {"t": "a"}), Activity({"t": "b"}), Attempt(1), Chunk("1.0", 2), Truncated(), Result({"n": 1}, b'{"n":\n1}'),
    ]  # fmt: skip
    assert fed(opened(), *stream) == expected
    assert fed(opened(), b"".join(stream)) == expected
    assert fed(opened(), *(bytes([byte]) for byte in b"".join(stream))) == expected


def test_what_came_before_a_problem_in_one_piece_is_not_lost() -> None:
    conversation, seen = opened(), []
    with pytest.raises(DurableProblem):  # noqa: PT012 - what was given before counts
        for frame in conversation.fed(frames.progress(Place(0, 0), b"1") + frames.final("problem", body_of("failed"))):
            seen.append(frame)  # noqa: PERF402 - the rest of it raises
    assert seen == [Chunk("0.0", 1)]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (problem_body(PROBLEMS["workflow-failed"], status=402), 402), (body_of("erased"), 410), (b'{"type":"x"}', 500),
        (b'{"status":"402"}', 500), (b'{"status":true}', 500), (b'{"status":200}', 500),
    ],
)  # fmt: skip
def test_a_problem_frames_status_is_its_own(body: bytes, status: int) -> None:
    """9.3-12"""
    with pytest.raises(DurableProblem) as raised:
        fed(opened(), frames.final("problem", body))
    assert raised.value.status == status


def test_a_stream_goes_on_behind_the_last_id_with_the_same_key() -> None:
    """S18, S19, S24"""
    conversation = opened()
    assert conversation.headers() == {"Idempotency-Key": "k-1"}
    fed(conversation, frames.progress(Place(0, 3), b"1"), b"event: progress\ndata: 2\nid: 0.4\n")  # the last is cut off
    assert isinstance(conversation.ended(), Again)
    assert conversation.headers() == {"Idempotency-Key": "k-1", "Last-Event-ID": "0.3"}

    conversation.opened()
    resumed = fed(conversation, *(frames.progress(Place(0, offset), b"%d" % offset) for offset in (2, 3, 4)), frames.pending())
    assert resumed == [Chunk("0.4", 4), Again(1.25, "the stream's budget is over")]
    assert conversation.headers()["Last-Event-ID"] == "0.4"
    conversation.broken("ReadError")
    assert conversation.headers()["Last-Event-ID"] == "0.4"


def test_an_id_without_data_moves_the_cursor() -> None:
    """9.4-15"""
    conversation = opened()
    assert fed(conversation, b"id: 0.0\n\n") == []
    assert conversation.headers()["Last-Event-ID"] == "0.0"
    fed(conversation, b"id\n\n")
    assert "Last-Event-ID" not in conversation.headers()


def test_live_frames_leave_the_cursor_alone() -> None:
    """S11, STREAM-17"""
    conversation = opened()
    fed(conversation, frames.progress(Place(0, 0), b"1"), frames.activity(b"2"))
    assert conversation.headers()["Last-Event-ID"] == "0.0"


def test_an_attempt_is_told_once_and_its_forerunner_is_over() -> None:
    """S7, S8"""
    conversation = opened()
    assert fed(conversation, frames.progress(Place(0, 0), b"1"), frames.attempt(2)) == [Chunk("0.0", 1), Attempt(2)]
    conversation.ended()
    conversation.opened()
    again_sent = (frames.progress(Place(0, 1), b"9"), frames.attempt(2), frames.progress(Place(2, 0), b"3"))
    assert fed(conversation, *again_sent) == [Chunk("2.0", 3)]


def test_a_chunk_of_a_new_attempt_begins_it() -> None:
    """S8: should its frame have been lost, the text of the attempt before must not stay."""
    conversation = opened()
    assert fed(conversation, frames.progress(Place(1, 0), b"1")) == [Attempt(1), Chunk("1.0", 1)]


@pytest.mark.parametrize("slug", STREAM_SLUGS)
def test_a_cursor_that_the_server_does_not_take_is_given_up_once(slug: str) -> None:
    """S23, STREAM-10: the same request without the header, and the reader begins anew."""
    conversation = opened()
    fed(conversation, frames.progress(Place(0, 0), b"1"), frames.progress(Place(0, 1), b"2"))
    conversation.ended()
    again(conversation.answered(PROBLEMS[slug].status, PROBLEM, body_of(slug)))
    assert conversation.headers() == {"Idempotency-Key": "k-1"}
    conversation.opened()
    assert fed(conversation, frames.progress(Place(0, 0), b"1")) == [Attempt(0), Chunk("0.0", 1)]
    with pytest.raises(DurableProblem, match=slug):
        conversation.answered(PROBLEMS[slug].status, PROBLEM, body_of(slug))


@pytest.mark.parametrize("slug", STREAM_SLUGS)
def test_a_server_that_refuses_a_cursor_that_was_not_sent_is_not_asked_again(slug: str) -> None:
    with pytest.raises(DurableProblem, match=slug):
        talking().answered(PROBLEMS[slug].status, PROBLEM, body_of(slug))


def test_a_resume_may_get_a_plain_answer() -> None:
    """STREAM-22, S21"""
    conversation = opened()
    fed(conversation, frames.progress(Place(0, 0), b"1"))
    conversation.ended()
    pending = {"content-type": "application/json", "retry-after": "1"}
    assert again(conversation.answered(202, pending, b'{"state":"pending"}')) == 1.25
    with pytest.raises(DurableProblem, match="410 erased"):
        conversation.answered(410, PROBLEM, body_of("erased"))


def test_the_pause_of_a_stream_is_the_servers() -> None:
    """9.4-16: also where the connection breaks rather than ends, and no longer than the policy allows."""
    conversation = opened()
    fed(conversation, frames.RETRY)
    assert conversation.ended().seconds == 1.0
    assert conversation.broken("ReadError").seconds == 1.0
    conversation.opened()
    assert conversation.ended().seconds == 1.0
    fed(conversation, b"retry: 999999999\n\n")
    assert conversation.ended().seconds == 60.0


def test_a_stream_that_only_opens_is_asked_less_and_less() -> None:
    conversation = talking()
    pauses = []
    for _ in range(4):
        conversation.opened()
        pauses.append(conversation.ended().seconds)
    assert pauses == [0.2, 0.4, 0.8, 1.6]
    conversation.opened()
    fed(conversation, frames.progress(Place(0, 0), b"1"))
    assert conversation.ended().seconds == 0.2


@pytest.mark.parametrize(
    ("data", "seconds"),
    [
        (b"{}", 1.25), (b'{"retry_after": 3}', 3.25), (b'{"retry_after": 0}', 0.45), (b'{"retry_after": "3"}', 1.25),
        (b'{"retry_after": -1}', 1.25), (b'{"retry_after": 1e9}', 60.25),
    ],
)  # fmt: skip
def test_how_long_a_pending_frame_asks_to_wait(data: bytes, seconds: float) -> None:
    [step] = fed(opened(), b"event: pending\ndata: " + data + b"\n\n")
    assert isinstance(step, Again)
    assert step.seconds == seconds


def test_patience_counts_from_the_newest_frame_and_pings_are_none() -> None:
    time = Time()
    conversation = opened(talking(time, timeout_seconds=10))
    for offset in range(5):
        time.now += 8
        assert fed(conversation, frames.PING, frames.progress(Place(0, offset), b"1"))
    time.now += 9
    assert fed(conversation, frames.PING) == []
    time.now += 1
    with pytest.raises(AnswerNotReady, match="without news"):
        fed(conversation, frames.PING)


def test_a_stream_that_is_always_pending_ends_with_the_patience() -> None:
    time = Time()
    conversation = opened(talking(time, timeout_seconds=10))
    with pytest.raises(AnswerNotReady, match="budget"):  # noqa: PT012 - how often it is asked is not the point
        for _ in range(10):
            fed(conversation, frames.pending())
            conversation.opened()
            time.now += 1.25


def test_what_the_reader_does_with_a_frame_is_not_counted() -> None:
    time = Time()
    conversation = opened(talking(time, timeout_seconds=10))
    for _ in conversation.fed(frames.progress(Place(0, 0), b"1") + frames.progress(Place(0, 1), b"1")):
        time.now += 1_000
    assert isinstance(conversation.ended(), Again)


@pytest.mark.parametrize(
    "frame",
    [
        b"event: progress\nid: 0.0\ndata: {\n\n", b"event: progress\ndata: 1\n\n", b"event: progress\nid: 0\ndata: 1\n\n",
        b"event: progress\nid: a.b\ndata: 1\n\n", b"event: progress\nid: 0.-1\ndata: 1\n\n", b"event: truncated\ndata: {}\n\n",
        b"event: progress\nid: 0." + b"9" * 20 + b"\ndata: 1\n\n", b"event: attempt\ndata: 1\n\n", b"event: attempt\ndata: {}\n\n",
        b'event: attempt\ndata: {"attempt": "x"}\n\n', b"event: problem\ndata: []\n\n", b"event: problem\ndata: <html>\n\n",
        b"event: result\ndata: {\n\n", b"event: result\ndata: " + b"[" * 50_000 + b"\n\n", b"event: pending\ndata: 1\n\n",
        b"event: activity\ndata: NO\n\n",
    ],
    ids=str,
)  # fmt: skip
def test_a_frame_that_no_durable_route_sends_is_a_typed_error(frame: bytes) -> None:
    with pytest.raises(UnexpectedAnswer):
        fed(opened(), frame)


def test_events_of_other_names_are_passed_over() -> None:
    """A newer server may send more."""
    assert fed(opened(), b"event: weather\ndata: <fine>\n\n", b"data: x\n\n") == []


def test_nothing_after_the_last_frame_counts() -> None:
    conversation = opened()
    assert fed(conversation, frames.final("result", b"1") + frames.progress(Place(0, 0), b"2")) == [Result(1, b"1")]


def test_a_problem_that_has_odd_members_is_read_as_far_as_it_goes() -> None:
    """9.3-11: members of a wrong type are ignored."""
    body = json.dumps({"type": PROBLEMS["failed"].uri, "status": "500", "title": 7}).encode()
    with pytest.raises(DurableProblem) as raised:
        talking().answered(500, PROBLEM, body)
    assert (raised.value.status, raised.value.slug, raised.value.detail) == (500, "failed", "")
