"""Where a partition is gone on with, and when its messages are handled with care: by the note beside the group's offset."""

from typing import Any

import pytest

from consumer_sdk.starts import Start, note_of, start_of

TOPIC = "9f2a"
ME = "0123456789abcdef"


def begun(note: str | None, **given: Any) -> Start:
    """Where this process begins, of offsets 10 to 90, after somebody committed 50."""
    asked: dict[str, Any] = {"incarnation": TOPIC, "beginning": 10, "end": 90, "reset": "earliest", "process": ME} | given
    return start_of(committed=None if note is None else (50, note), **asked)


@pytest.mark.parametrize(
    ("note", "unclean"),
    [
        (note_of(TOPIC, held_by=None), False),
        (note_of(TOPIC, held_by=ME), False),
        (note_of(TOPIC, held_by="another"), True),
        (note_of(TOPIC, held_by=""), True),
        (f"{TOPIC} held", True),
        (f"{TOPIC} left", False),
        ("", False),
        ("somebody's own words", False),
    ],
)
def test_with_care_after_another_process_that_has_not_let_go(note: str, unclean: bool) -> None:
    """Whoever gets back what it held itself has not ended; a note of an older version tells no process."""
    assert begun(note) == Start(50, unclean, end=90)


def test_a_group_without_an_offset_begins_where_it_is_told() -> None:
    assert begun(None) == Start(10, end=90)
    assert begun(None, reset="latest") == Start(90, end=90)


@pytest.mark.parametrize("held_by", [None, ME, "another"])
def test_of_another_incarnation_all_is_new(held_by: str | None) -> None:
    start = begun(note_of("old", held_by=held_by))

    assert (start.offset, start.unclean, start.surprise) == (10, False, "the topic was made anew")


@pytest.mark.parametrize(("end", "beginning"), [(40, 10), (90, 60)])
def test_what_is_not_there_any_more_is_no_place_to_begin(end: int, beginning: int) -> None:
    start = begun(note_of(TOPIC, held_by="another"), end=end, beginning=beginning)

    assert (start.offset, start.unclean) == (beginning, True)
    assert start.surprise is not None
