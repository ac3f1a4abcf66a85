"""Last-Event-ID: what a stream has given is read back, and nothing else is."""

import pytest

from producer_sdk.http.cursor import START, Finished, end_id, place_id, read_cursor
from producer_sdk.http.problems import Refused
from producer_sdk.http.store import CUT_OFFSET, Place

#: No id of any stream, each for another reason.
MALFORMED = (
    "abc", "0", "0.1.2", "-1.0", "0.-1", "0.99999999999999999999", "", "0.", ".0", " 0.1", "0.1 ", "0.1\n", "+0.1", "00.1", "0.01",
    "0x1.0", "1e3.0", "0.1,0.2", "\u0660.\u0661", "2147483648.0", f"0.{CUT_OFFSET + 1}", "0.1\0", '"0.1"', "0_0.1",
)  # fmt: skip


@pytest.mark.parametrize(
    "place", [Place(0, 0), Place(0, 4), Place(17, 9999), Place(3, CUT_OFFSET), Place(2**31 - 1, 0)], ids=place_id
)
def test_the_id_of_a_chunk_is_read_back(place: Place) -> None:
    """S6, S22."""
    assert read_cursor([place_id(place)]) == place
    assert read_cursor([place_id(place)], on_monitor=True) == place


def test_without_a_cursor_the_stream_starts_at_attempt_0() -> None:
    """S20."""
    assert read_cursor([]) == START == Place(0, -1)


@pytest.mark.parametrize("number", range(len(MALFORMED)))
@pytest.mark.parametrize("on_monitor", [False, True], ids=["route", "monitor"])
def test_a_malformed_cursor_is_refused(number: int, on_monitor: bool) -> None:
    """STREAM-3, S23, T5."""
    with pytest.raises(Refused) as refused:
        read_cursor([MALFORMED[number]], on_monitor=True) if on_monitor else read_cursor([MALFORMED[number]])
    assert refused.value.slug == "stream-cursor-invalid"


def test_a_repeated_cursor_is_refused_even_where_both_say_the_same() -> None:
    """STREAM-3, S23."""
    with pytest.raises(Refused):
        read_cursor(["0.1", "0.1"])


def test_the_id_of_an_end_is_known_on_monitors_only() -> None:
    """STREAM-23."""
    assert read_cursor([end_id(2)], on_monitor=True) is Finished.FINISHED
    for line in ([end_id(2)], ["end"], ["0.END"]):
        with pytest.raises(Refused):
            read_cursor(line)
    for text in ("2147483648.end", "0.end.", "-1.end", "00.end"):
        with pytest.raises(Refused):
            read_cursor([text], on_monitor=True)
