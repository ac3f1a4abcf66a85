"""The reference pages say what the code says."""

from pathlib import Path

import pytest

import consumer_sdk.reference
import producer_sdk.http.reference
import relay.reference

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGES = relay.reference.pages() | consumer_sdk.reference.pages() | producer_sdk.http.reference.pages()


@pytest.mark.parametrize("page", PAGES)
def test_a_reference_page_is_what_the_code_says(page: str) -> None:
    assert (REFERENCE / page).read_text() == PAGES[page], "run scripts/reference"


@pytest.mark.parametrize("page", ["settings.md", "worker-settings.md", "consumer-settings.md", "route-settings.md"])
def test_every_setting_says_why_its_default_is_what_it_is(page: str) -> None:
    rows = [line for line in PAGES[page].splitlines() if line.startswith("| `FENCEPOST_")]
    assert len(rows) > 9
    assert all(len(row.split("|")[3].strip()) > 20 for row in rows)
