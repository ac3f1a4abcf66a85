"""Retry-After as providers send it (JOB-27): seconds or a date, in GMT; anything else is ignored."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.retry import Retry
from fencepost.retry_after import parse_retry_after

NOW = datetime(2015, 10, 21, 7, 28, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7),
        ("0", 0),
        ("120", 60),
        ("1.5", None),
        ("-1", None),
        ("soon", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Wednesday, 21-Oct-15 07:28:00 GMT", 0),
        ("Wed Oct 21 07:28:00 2015", 0),
        ("Wed, 21 Oct 2015 07:28:40 GMT", 10),
        ("Wednesday, 21-Oct-15 07:28:40 GMT", 10),
        ("Wed Oct 21 07:28:40 2015", 10),
    ],
)
def test_a_providers_wish_is_read_in_every_legal_form_and_clamped_by_the_policy(value: str, seconds: float | None) -> None:
    policy = Retry(cap_seconds=300, retry_after_max_seconds=60)

    assert policy.retry_after_seconds(value, now=NOW) == seconds


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "+7",
        "7 s",
        "1e3",
        "\u0667",  # a digit, but not HTTP's
        "9" * 41,
        "Wed, 21 Oct 2015 07:28:40",
        "Wed, 21 Oct 2015 07:28:40 UTC",
        "Wed, 21 Oct 2015 07:28:40 +0200",
        "wed, 21 oct 2015 07:28:40 gmt",
        "Wed, 1 Oct 2015 07:28:40 GMT",
        "Wed, 31 Feb 2015 07:28:40 GMT",
        "Wed, 21 Oct 2015 24:28:40 GMT",
        "Wed, 21 Oct 2015 07:60:40 GMT",
        "Wed, 21 Oct 2015 07:28:61 GMT",
        "Sat, 01 Jan 0000 00:00:00 GMT",
        "Fri, 31 Dec 9999 23:59:60 GMT",
        "Wednesday, 21-Oct-2015 07:28:40 GMT",
        "Wed, 21-Oct-15 07:28:40 GMT",
        "Wed Oct  1 07:28:40 2015 GMT",
        "2015-10-21T07:28:40Z",
        "7\n",
    ],
)
def test_what_is_not_retry_after_is_ignored(value: str) -> None:
    assert parse_retry_after(value, now=NOW) is None


def test_blanks_around_a_value_and_a_day_of_one_digit_are_legal() -> None:
    assert parse_retry_after(" 7\t", now=NOW) == 7
    assert parse_retry_after("Sun Nov  1 07:28:30 2015", now=NOW) == timedelta(days=11).total_seconds()


def test_a_leap_second_is_the_last_of_its_minute() -> None:
    assert parse_retry_after("Wed, 21 Oct 2015 07:28:60 GMT", now=NOW) == 30


def test_the_zone_of_now_does_not_matter() -> None:
    elsewhere = NOW.astimezone(timezone(timedelta(hours=-7)))

    assert parse_retry_after("Wed, 21 Oct 2015 07:28:40 GMT", now=elsewhere) == 10


@pytest.mark.parametrize(
    ("now", "value", "meant"),
    [
        (NOW, "Wednesday, 21-Oct-65 07:28:30 GMT", NOW.replace(year=2065)),
        (NOW, "Wednesday, 21-Oct-65 07:28:31 GMT", NOW.replace(year=1965)),  # 50 years and a second ahead, else
        (NOW, "Wednesday, 21-Oct-94 07:28:30 GMT", NOW.replace(year=1994)),
        (datetime(2090, 1, 1, tzinfo=UTC), "Monday, 21-Oct-05 00:00:00 GMT", datetime(2105, 10, 21, tzinfo=UTC)),
        # 2000 has this day, 2100 has not.
        (datetime(1999, 1, 1, tzinfo=UTC), "Tuesday, 29-Feb-00 00:00:00 GMT", datetime(2000, 2, 29, tzinfo=UTC)),
    ],
)
def test_two_digits_mean_the_latest_such_year_that_is_not_more_than_50_years_ahead(
    now: datetime, value: str, meant: datetime
) -> None:
    assert parse_retry_after(value, now=now) == max(0, (meant - now).total_seconds())


@given(st.text(max_size=60))
def test_no_text_raises_and_no_wait_is_negative(value: str) -> None:
    found = parse_retry_after(value, now=NOW)

    assert found is None or found >= 0


@given(st.datetimes(min_value=datetime(1970, 1, 1), max_value=datetime(2060, 1, 1)))  # noqa: DTZ001 - Hypothesis wants them so
def test_the_three_forms_of_one_date_say_the_same(moment: datetime) -> None:
    forms = ("%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %d %H:%M:%S %Y")

    waits = {parse_retry_after(moment.strftime(form), now=NOW) for form in forms}

    assert waits == {max(0.0, (moment.replace(microsecond=0, tzinfo=UTC) - NOW).total_seconds())}
