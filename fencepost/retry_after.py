"""Reads Retry-After: whole seconds, or a date in any of HTTP's three forms (RFC 9110, 10.2.3 and 5.6.7), always in GMT.

What is neither is ignored, not guessed. How long to wait at most is the policy's to say: ``fencepost.retry``.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

__all__ = ["parse_retry_after"]

# The longest form of a date has 33 characters.
_LONGEST: Final = 40
_FAR_YEARS: Final = 50

_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTH: Final = f"(?P<month>{'|'.join(_MONTHS)})"
_DAY_NAME: Final = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_LONG_DAY_NAME: Final = "(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
_TIME: Final = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
_SECONDS: Final = re.compile(r"\d+", re.ASCII)
_DATES: Final = tuple(
    re.compile(form, re.ASCII)
    for form in (
        rf"{_DAY_NAME}, (?P<day>\d\d) {_MONTH} (?P<year>\d{{4}}) {_TIME} GMT",  # IMF-fixdate
        rf"{_LONG_DAY_NAME}, (?P<day>\d\d)-{_MONTH}-(?P<year>\d\d) {_TIME} GMT",  # RFC 850
        rf"{_DAY_NAME} {_MONTH} (?P<day>\d\d| \d) {_TIME} (?P<year>\d{{4}})",  # asctime
    )
)


def parse_retry_after(value: str, *, now: datetime) -> float | None:
    """Seconds to wait from ``now``, which has a zone; 0 for a date that has passed, None for what is not Retry-After."""
    if len(value) > _LONGEST:
        return None
    value = value.strip(" \t")
    if _SECONDS.fullmatch(value):
        return float(value)
    for form in _DATES:
        if found := form.fullmatch(value):
            return _until(found.groupdict(), now.astimezone(UTC))
    return None


def _until(parts: Mapping[str, str], now: datetime) -> float | None:
    month = _MONTHS.index(parts["month"]) + 1
    day, hour, minute, second = (int(parts[name]) for name in ("day", "hour", "minute", "second"))
    year = int(parts["year"])
    if len(parts["year"]) == 2:
        year = _full_year(year, (month, day, hour, minute, second), now)
    if second > 60:
        return None
    try:
        # Added, since a leap second is the 60th of its minute and no datetime has one.
        moment = datetime(year, month, day, hour, minute, tzinfo=UTC) + timedelta(seconds=second)
    except (ValueError, OverflowError):
        return None
    return max(0.0, (moment - now).total_seconds())


def _full_year(two_digits: int, rest: tuple[int, ...], now: datetime) -> int:
    """The latest year that ends so, and whose date is no more than 50 years ahead."""
    year = now.year - now.year % 100 + 100 + two_digits
    # Compared as fields: a date 50 years from 29 February need not exist.
    while (year - _FAR_YEARS, *rest) > now.timetuple()[:6]:
        year -= 100
    return year
