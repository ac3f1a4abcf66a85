"""How live chunks are packed: in order, none lost, none over what a notification takes."""

import json

from hypothesis import given
from hypothesis import strategies as st

from consumer_sdk.live import live_chunk, payloads

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=9_000)


@given(st.lists(texts, max_size=30))
def test_payloads_hold_every_chunk_in_order_and_fit(contents: list[str]) -> None:
    chunks = [live_chunk({"index": index}, "data", json.dumps(text, ensure_ascii=False)) for index, text in enumerate(contents)]

    made = payloads(chunks)

    assert all(len(payload.encode()) < 8_000 for payload in made)
    told = [chunk for payload in made for chunk in json.loads(payload)]
    assert [chunk["index"] for chunk in told] == list(range(len(contents)))
    for chunk, text in zip(told, contents, strict=True):
        short = len(json.dumps(text, ensure_ascii=False).encode()) <= 7_000
        assert chunk == {"index": chunk["index"]} | ({"data": text} if short else {"truncated": True})


def test_no_chunks_make_no_payloads() -> None:
    assert payloads([]) == []
