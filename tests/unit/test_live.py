"""Live chunks: in their place, once, bounded, and never after the text that replaces them."""

import base64
import json
import uuid
from typing import Any

import pytest
from structlog.testing import capture_logs

from consumer_sdk.live import live_chunk, payloads
from producer_sdk.http.live import Live
from producer_sdk.http.store import Chunk, LineageKey, Place

KEY = LineageKey(uuid.UUID(int=1), "acme")


def payload(data: Any, before: tuple[int, int], *, key: LineageKey = KEY, step: str = "answer", **more: Any) -> str:
    value = {
        "root": str(key.root_run_id), "tenant": key.tenant_id, "step": step, "occurrence": 0, "attempt": 1, "index": 0,
        "before": before, "data": data,
    }  # fmt: skip
    return json.dumps([value | more])


def stored(attempt: int, offset: int, step: str = "answer") -> Chunk:
    return Chunk(place=Place(attempt, offset), step=step, occurrence=0, data=b"1")


def data_of(frames: list[bytes]) -> list[Any]:
    return [json.loads(frame)["data"] for frame in frames]


class Heard:
    """A lineage's queue, and what was told of it."""

    def __init__(self) -> None:
        self.rings = 0
        self.dropped = 0
        self.live = Live(dropped=self._drop)
        self._following = self.live.follow(KEY, self._ring)
        self.queue = self._following.__enter__()

    def _ring(self) -> None:
        self.rings += 1

    def _drop(self) -> None:
        self.dropped += 1


def test_a_live_chunk_says_which_step_and_attempt_it_is_of() -> None:
    """S10, S13."""
    heard = Heard()
    heard.live.hear(payload({"text": "Hel"}, (0, 0), attempt=2, index=5))
    (frame,) = heard.queue.take(Place(0, -1))
    assert json.loads(frame) == {"step": "answer", "occurrence": 0, "attempt": 2, "index": 5, "data": {"text": "Hel"}}
    assert heard.rings == 1
    assert heard.queue.take(Place(0, -1)) == []


def test_a_live_chunk_reaches_its_own_lineage_only() -> None:
    """STREAM-5, S16: run ids are unique within a tenant."""
    heard = Heard()
    heard.live.hear(payload("foreign", (0, 0), key=KEY._replace(tenant_id="other")))
    heard.live.hear(payload("other", (0, 0), key=LineageKey(uuid.UUID(int=2), "acme")))
    assert heard.queue.take(Place(9, 9)) == []
    assert heard.rings == 0


def test_a_live_chunk_waits_for_what_was_stored_before_it() -> None:
    """S15."""
    heard = Heard()
    heard.live.hear(payload("after two", (0, 2)))
    heard.live.hear(payload("next attempt", (1, 0)))
    assert heard.queue.take(Place(0, -1)) == []
    assert data_of(heard.queue.take(Place(0, 1))) == ["after two"]
    assert heard.queue.take(Place(0, 5)) == []
    assert data_of(heard.queue.take(Place(1, -1))) == ["next attempt"]


def test_a_live_chunk_never_follows_the_stored_text_of_its_step() -> None:
    """S15: another step's is another matter, and so is what the step says after its text."""
    heard = Heard()
    heard.live.hear(payload("too late", (0, 0)))
    heard.live.hear(payload("of another step", (0, 0), step="plan"))
    heard.live.hear(payload("of the next turn", (0, 1)))
    heard.queue.stored(stored(0, 0))
    assert data_of(heard.queue.take(Place(0, 0))) == ["of another step", "of the next turn"]
    assert heard.dropped == 1


def test_a_live_chunk_of_an_earlier_attempt_is_dropped() -> None:
    """S12, S13."""
    heard = Heard()
    heard.live.hear(payload("old", (0, 3)))
    assert heard.queue.take(Place(1, -1)) == []
    assert heard.dropped == 1


def test_a_full_queue_drops_what_comes() -> None:
    """S14."""
    heard = Heard()
    for number in range(300):
        heard.live.hear(payload(number, (0, 0)))
    assert data_of(heard.queue.take(Place(0, -1))) == list(range(256))
    assert (heard.rings, heard.dropped) == (256, 44)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "1",
        "{}",
        '{"root": 1}',
        payload(1, (0, 0)).replace('"tenant"', '"x"'),
        payload(1, (0, 0)).replace("[0, 0]", "0"),
        "{" * 9_000,
    ],
    ids=range(8),
)
def test_what_cannot_be_read_is_passed(text: str) -> None:
    """S14: it comes from a newer worker, or from nobody of ours."""
    heard = Heard()
    heard.live.hear(text)
    assert heard.rings == 0


def test_a_chunk_that_was_too_large_says_so() -> None:
    """S45."""
    heard = Heard()
    [value] = json.loads(payload(0, (0, 0), truncated=True))
    del value["data"]
    heard.live.hear(json.dumps([value]))
    assert json.loads(heard.queue.take(Place(0, -1))[0])["truncated"] is True


def test_an_encoded_chunk_is_decoded() -> None:
    """S44."""

    class Reversing:
        def encode(self, payload: bytes) -> bytes:
            return payload[::-1]

        decode = encode

    live = Live()
    with live.follow(KEY, lambda: None, Reversing()) as queue:
        [value] = json.loads(payload(0, (0, 0), encoded=base64.b64encode(b'"cilbup"').decode()))
        del value["data"]
        live.hear(json.dumps([value]))
        assert data_of(queue.take(Place(0, -1))) == ["public"]
    assert not live.followed


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyError])
def test_a_chunk_that_the_codec_cannot_read_keeps_back_no_other(error: type[Exception]) -> None:
    """S14, S44: whatever the codec raises."""

    class Failing:
        def encode(self, payload: bytes) -> bytes:
            return payload

        def decode(self, payload: bytes) -> bytes:
            if payload == b"1":
                raise error("secret")
            return payload

    live = Live()
    with live.follow(KEY, lambda: None, Failing()) as queue, capture_logs() as logs:
        sent = [json.loads(payload(None, (0, 0), encoded=base64.b64encode(data).decode()))[0] for data in (b"1", b"2")]
        live.hear(json.dumps(sent))
        assert data_of(queue.take(Place(0, -1))) == [2]
    assert logs == [{"event": "live_chunk_not_read", "error": error.__name__, "log_level": "warning"}]


def test_what_a_worker_sends_in_one_notification_is_read_one_by_one() -> None:
    """S10: and one that cannot be read keeps back no other."""
    heard = Heard()
    envelope = json.loads(payload("", (0, 0)))[0]
    del envelope["data"]
    chunks = [live_chunk(envelope, "data", '"Hel"'), '{"root": 7}', live_chunk(envelope, "data", '"lo"')]
    [sent] = payloads(chunks)
    heard.live.hear(sent)
    assert data_of(heard.queue.take(Place(0, -1))) == ["Hel", "lo"]
    heard.live.hear("no JSON")
    assert heard.rings == 2
