"""Which dead letters an operator means: ages, ranges of ids, and what is refused."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import pytest
import typer

from consumer_sdk.dead_letter_filter import LetterFilter, age
from consumer_sdk.inspection import LARGEST_ID, SMALLEST_ID, smallest_id

NOW: Final = datetime(2026, 11, 30, 3, 0, tzinfo=UTC)
HOUR: Final = timedelta(hours=1)


def which(**parts: Any) -> LetterFilter:
    return LetterFilter(**(dict.fromkeys(LetterFilter.__dataclass_fields__) | parts))


def bounds(given: LetterFilter, *, after: UUID | None = None, newest_first: bool = False) -> tuple[object, ...]:
    return given.arguments(["dead"], now=NOW, after=after, newest_first=newest_first)[-2:]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("45min", 2_700), ("45m", 2_700), ("2h", 7_200), ("1.5d", 129_600), ("999999999d", 3_660 * 86_400)],
)
def test_an_age_says_its_unit(text: str, seconds: float) -> None:
    assert age(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "5", "h", "-1h", "1 h", "1h30min", "1w", "nan", "1e3s", "٣h"])
def test_an_age_that_says_nothing_clear_is_wrong_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        age(text)


def test_nothing_said_is_every_id() -> None:
    assert bounds(which()) == (SMALLEST_ID, LARGEST_ID)
    assert not which().says_anything


def test_ages_are_ranges_of_ids() -> None:
    assert bounds(which(older_than=HOUR)) == (SMALLEST_ID, smallest_id(NOW - HOUR))
    assert bounds(which(newer_than=HOUR)) == (smallest_id(NOW - HOUR), LARGEST_ID)


def test_a_cursor_narrows_the_range_and_never_widens_it() -> None:
    within, before = smallest_id(NOW - HOUR / 2), smallest_id(NOW - HOUR * 2)
    newer = which(newer_than=HOUR)
    assert bounds(newer, after=within) == (within, LARGEST_ID)
    assert bounds(newer, after=before) == bounds(newer)
    assert bounds(newer, after=within, newest_first=True) == (smallest_id(NOW - HOUR), within)
    older = which(older_than=HOUR)
    assert bounds(older, after=within, newest_first=True) == bounds(older)


def test_an_empty_tenant_is_one_and_other_blanks_are_wrong_usage() -> None:
    assert which(tenant="").says_anything
    assert which(tenant="").arguments(None, now=NOW)[1] == ""
    for part in ("consumer", "topic", "event_type", "error_class", "error_code"):
        with pytest.raises(typer.BadParameter, match=part):
            which(**{part: " "})
