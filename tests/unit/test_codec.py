"""Which codec a lineage has: the service's, or one of its own data key, which is unwrapped when it is needed first."""

import pytest

from fencepost.codec import PLAIN, DataKeyCodec, PayloadCodec, lineage_codec


class Marks:
    """Puts a mark before a payload."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark

    def encode(self, payload: bytes) -> bytes:
        return self._mark + payload

    def decode(self, payload: bytes) -> bytes:
        if not payload.startswith(self._mark):
            raise ValueError("another mark")
        return payload.removeprefix(self._mark)


class WithKeys(Marks):
    """A data key is the mark of its lineage, wrapped by nothing."""

    unwrapped = 0

    def new_data_key(self) -> bytes:
        return b"fresh"

    def with_data_key(self, wrapped: bytes) -> PayloadCodec:
        self.unwrapped += 1
        if wrapped == b"lost":
            raise ValueError("no key of this codec wrapped it")
        if wrapped == b"odd":
            raise KeyError("the key itself")
        return Marks(wrapped)


@pytest.mark.parametrize(
    ("codec", "wrapped"), [(PLAIN, b"key"), (Marks(b"service"), b"key"), (WithKeys(b"service"), None), (PLAIN, None)]
)
def test_without_a_data_key_or_a_codec_for_it_the_services_is_the_lineages(codec: PayloadCodec, wrapped: bytes | None) -> None:
    assert lineage_codec(codec, wrapped) is codec


def test_a_data_key_is_unwrapped_when_it_is_needed_and_once() -> None:
    service = WithKeys(b"service")
    assert isinstance(service, DataKeyCodec)
    codec = lineage_codec(service, b"key")
    assert service.unwrapped == 0
    assert [codec.decode(codec.encode(b"said")) for _ in range(3)] == [b"said"] * 3
    assert codec.encode(b"said") == b"keysaid"
    assert service.unwrapped == 1


def test_a_data_key_that_cannot_be_unwrapped_is_a_payload_that_cannot_be_read() -> None:
    codec = lineage_codec(WithKeys(b"service"), b"lost")
    for use in (codec.decode, codec.encode):
        with pytest.raises(ValueError, match="no key"):
            use(b"servicesaid")


def test_whatever_the_author_s_codec_raises_at_a_data_key_it_is_one_that_cannot_be_unwrapped_and_tells_no_key() -> None:
    codec = lineage_codec(WithKeys(b"service"), b"odd")
    for use in (codec.decode, codec.encode):
        with pytest.raises(ValueError, match=r"^the data key cannot be unwrapped: KeyError$") as caught:
            use(b"servicesaid")
        assert caught.value.__cause__ is None
