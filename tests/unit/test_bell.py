"""Whether a transaction may have enqueued before the bell was armed is read from a snapshot's text."""

import pytest

from relay.bell import transactions_in_progress


@pytest.mark.parametrize(
    ("snapshot", "below", "expected"),
    [
        ("100:100:", 100, False),
        ("90:100:90", 95, True),
        ("90:100:90", 91, True),
        ("90:100:90", 90, False),
        ("90:100:90,97", 90, False),
        ("95:100:95,97", 97, True),
        ("4294967300:4294967310:4294967301", 4294967305, True),
    ],
)
def test_only_transactions_older_than_the_flag_count(snapshot: str, below: int, expected: bool) -> None:
    assert transactions_in_progress(snapshot, below) is expected
