"""The table from how a lineage stands to what its client is told; and the table of problems itself."""

import dataclasses
import json
from typing import Any
from uuid import UUID, uuid4

import pytest
from structlog.testing import capture_logs

from fencepost.codec import PLAIN
from producer_sdk.http.answers import Answer, RunHeaders, pending_answer, problem_answer, result_answer
from producer_sdk.http.problems import PROBLEMS, problem_body, reference_page
from producer_sdk.http.store import Standing

STANDING = Standing(
    monitor_id=uuid4(), run_id=uuid4(), iteration=0, state="completed", parked=False, dead_reason=None, error_code=None,
    output=b'{"b":1,"a":1.0,"n":12345678901234567890}', failure=None, erased=False, answer=None, stream_attempt=None,
)  # fmt: skip
SECRET = "hunter2"


def standing(**values: Any) -> Standing:
    return dataclasses.replace(STANDING, **values)


def failed(**failure: Any) -> Standing:
    return standing(state="failed", output=None, dead_reason="not_retryable", failure=json.dumps(failure).encode())


class KeyIsGone(Exception):
    """What a cryptographic library raises is no ``ValueError``."""


class Unreadable:
    """A codec that raises this where it cannot read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def encode(self, payload: bytes) -> bytes:
        return payload

    def decode(self, payload: bytes) -> bytes:
        raise self.error


def told(of: Standing, codec: Any = PLAIN, status: int = 201) -> Answer:
    answer = result_answer(of, codec, success_status=status)
    assert answer is not None
    return answer


def test_a_result_is_its_stored_bytes() -> None:
    """R10, ROUTE-2, T1: member order, 1.0 and every digit as the workflow left them."""
    answer = told(STANDING)
    assert (answer.status, answer.body, answer.media_type) == (201, STANDING.output, "application/json")


def test_what_a_route_has_shaped_stands_before_the_result() -> None:
    """A present= function's answer is what every replay sends."""
    assert told(standing(answer=b'"shaped"')).body == b'"shaped"'


def test_no_result_is_null() -> None:
    """A workflow that returns None."""
    assert told(standing(output=None)).body == b"null"


@pytest.mark.parametrize("state", ["queued", "running", "continued"])
def test_a_live_run_has_no_final_answer(state: str) -> None:
    """R26, R48: a parked run is live too."""
    assert result_answer(standing(state=state, output=None), PLAIN, success_status=200) is None
    assert result_answer(standing(state="queued", output=None, parked=True), PLAIN, success_status=200) is None


@pytest.mark.parametrize(
    ("of", "slug", "status"),
    [
        (standing(state="cancelled", output=None), "cancelled", 409),
        (standing(state="failed", output=None, dead_reason="cost_exhausted"), "terminated", 500),
        (standing(state="failed", output=None, dead_reason="deadline_exceeded"), "timed-out", 500),
        (standing(state="failed", output=None, dead_reason="attempts_exhausted"), "attempts-exhausted", 500),
        (standing(state="failed", output=None, dead_reason="ambiguous"), "ambiguous", 500),
        (standing(state="failed", output=None, dead_reason="not_retryable", error_code="key_error"), "failed", 500),
        (standing(state="failed", output=None, dead_reason="something_new"), "failed", 500),
        (standing(erased=True, output=None), "erased", 410),
        (standing(state="cancelled", erased=True, output=None), "erased", 410),
        (failed(type="OutOfStock", details={"left": 0}, status=422), "workflow-failed", 422),
        (failed(type="Gone", details=None, status=410), "workflow-failed", 410),
        (failed(nothing="that is known"), "result-unavailable", 500),
    ],
)
def test_every_end_has_its_own_answer(of: Standing, slug: str, status: int) -> None:
    """ROUTE-25, ROUTE-30, T3, T5, T6, R45, R48, 9.2-10: final, that is, without Retry-After."""
    answer = told(of)
    assert (answer.outcome, answer.status) == (slug, status)
    assert "retry-after" not in dict(answer.headers)
    assert json.loads(answer.body)["status"] == status


def test_a_mapped_failure_shows_type_and_details() -> None:
    """ROUTE-5, R24, T3"""
    body = json.loads(told(failed(type="OutOfStock", details={"left": 0}, status=422)).body)
    assert (body["error_type"], body["error_details"]) == ("OutOfStock", {"left": 0})


@pytest.mark.parametrize("error", [ValueError(SECRET), KeyError(SECRET), RuntimeError(SECRET), KeyIsGone(SECRET)], ids=repr)
@pytest.mark.parametrize(
    "of",
    [STANDING, standing(answer=b"1"), failed(type="OutOfStock", details=None, status=422)],
    ids=["result", "shaped", "failure"],
)
def test_what_the_codec_cannot_read_is_unavailable(of: Standing, error: Exception) -> None:
    """ROUTE-30, R45: whatever it raises, of which the log names the class."""
    with capture_logs() as logs:
        answer = told(of, Unreadable(error))
    assert (answer.outcome, answer.status) == ("result-unavailable", 500)
    assert logs == [{"event": "stored_payload_not_read", "error": type(error).__name__, "log_level": "error"}]


def test_pending_is_202_and_not_to_be_kept() -> None:
    """T2, R16, 9.2-8: whole seconds."""
    answer = pending_answer()
    headers = dict(answer.headers)
    assert (answer.status, headers["cache-control"]) == (202, "no-store")
    assert headers["retry-after"].isdigit()


@pytest.mark.parametrize("slug", sorted(PROBLEMS))
def test_the_shape_of_a_problem(slug: str) -> None:
    """ROUTE-34, R22, 9.3-11: type, code, status, title and detail are the type's, whatever has happened."""
    answer, row = problem_answer(slug), PROBLEMS[slug]
    body = json.loads(answer.body)
    assert body == {
        "type": f"urn:fencepost:durable-route:{slug}", "title": row.title, "status": row.status, "detail": row.detail,
        "code": f"fencepost.durable_route.{slug.replace('-', '_')}",
    }  # fmt: skip
    assert (answer.media_type, answer.status) == ("application/problem+json", row.status)
    assert dict(answer.headers)["cache-control"] == "no-store"


def test_only_what_may_be_sent_again_says_so() -> None:
    """R15, R16, R17: no problem of 500 or 504 asks for a retry, and 503 and 429 do."""
    assert {slug for slug, row in PROBLEMS.items() if row.retry_after is not None} == {"in-progress", "rate-limited", "unavailable"}
    assert not {row.status for row in PROBLEMS.values()} & {502, 504}
    assert len({row.title + row.detail for row in PROBLEMS.values()}) == len(PROBLEMS)


def test_members_are_added_and_replace_nothing_that_is_fixed() -> None:
    """9.3-11"""
    body = json.loads(problem_body(PROBLEMS["workflow-failed"], status=418, members={"error_type": "Teapot", "error_details": "é"}))
    assert (body["status"], body["error_type"], body["error_details"]) == (418, "Teapot", "é")


def test_the_page_of_problems_holds_each_of_them() -> None:
    """R22: one place; tests.unit.test_reference holds the page against it."""
    page = reference_page()
    assert all(f"| `{slug}` |" in page and row.detail in page for slug, row in PROBLEMS.items())


def test_markers_and_monitor() -> None:
    """R18, R46, T2, 9.1-5, 9.2-7"""
    run_id = UUID(int=7)
    replayed = RunHeaders(location="/operations/1", replayed=True, run_id=run_id)
    assert dict(replayed.of(pending_answer())) == {
        "idempotent-replayed": "true", "x-idempotent-replayed": "true", "fencepost-run-id": str(run_id),
        "location": "/operations/1", "link": '</operations/1>; rel="status"',
    }  # fmt: skip
    assert "location" not in dict(replayed.of(told(STANDING)))
    assert list(RunHeaders(location="/operations/1", replayed=False).of(told(STANDING))) == []


def test_an_answer_never_holds_an_error_message() -> None:
    """SEC-3, R23: the store has none to give; what a newer engine might add is not shown."""
    answer = told(failed(type="OutOfStock", details=None, status=422, message=SECRET))
    assert SECRET.encode() not in answer.body
