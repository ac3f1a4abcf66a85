"""The reference pages say what the code says."""

from pathlib import Path

import pytest

from relay.reference import metrics_page, settings_page

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize(("page", "text"), [("settings.md", settings_page()), ("metrics.md", metrics_page())])
def test_a_reference_page_is_what_the_code_says(page: str, text: str) -> None:
    assert (REFERENCE / page).read_text() == text, "run scripts/reference"


def test_every_setting_says_why_its_default_is_what_it_is() -> None:
    rows = [line for line in settings_page().splitlines() if line.startswith("| `FENCEPOST_")]
    assert len(rows) > 10
    assert all(len(row.split("|")[3].strip()) > 20 for row in rows)
