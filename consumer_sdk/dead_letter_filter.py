"""Which dead letters an operator means: one filter for listing, counting, redriving and discarding them."""

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import datetime, timedelta
from typing import Annotated, Final
from uuid import UUID

import typer

from consumer_sdk.delivery import DeadReason
from consumer_sdk.inspection import LARGEST_ID, SMALLEST_ID, check_text, smallest_id

__all__ = [
    "AFTER", "OPEN", "ConsumerName", "ErrorClass", "ErrorCode", "EventType", "LetterFilter", "NewerThan", "OlderThan", "TenantName",
    "TopicName", "WhichReason", "age",
]  # fmt: skip

OPEN: Final = ("dead", "redriving")
#: Help of ``--after``.
AFTER: Final = "Go on behind this one."
_AGE: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(s|min|m|h|d)")
_UNIT_SECONDS: Final = {"s": 1, "min": 60, "m": 60, "h": 3_600, "d": 86_400}
_OLDEST: Final = timedelta(days=3_660)


def age(text: str) -> timedelta:
    """``30s``, ``45min`` or ``45m``, ``2h``, ``1.5d``: at most ten years. Raises ``typer.BadParameter``."""
    found = _AGE.fullmatch(text)
    if found is None:
        raise typer.BadParameter("say how long, as 30s, 45min, 2h or 3d")
    return min(timedelta(seconds=float(found[1]) * _UNIT_SECONDS[found[2]]), _OLDEST)


ConsumerName = Annotated[str | None, typer.Option(help="Only this consumer's.")]
TenantName = Annotated[str | None, typer.Option(help="Only this tenant's; '' means messages without one.")]
TopicName = Annotated[str | None, typer.Option(help="Only messages of this topic.")]
EventType = Annotated[str | None, typer.Option(help="Only messages of this type.")]
WhichReason = Annotated[DeadReason | None, typer.Option(help="Only those given up for this reason.")]
ErrorClass = Annotated[str | None, typer.Option(help="Only those whose last error had this class, whole, as `summary` shows it.")]
ErrorCode = Annotated[str | None, typer.Option(help="Only those whose last error had this code.")]
OlderThan = Annotated[
    timedelta | None, typer.Option(parser=age, metavar="AGE", help="Only those given up longer ago: 45min, 2h, 3d.")
]
NewerThan = Annotated[timedelta | None, typer.Option(parser=age, metavar="AGE", help="Only those given up since: 45min, 2h, 3d.")]


@dataclass(frozen=True, kw_only=True)
class LetterFilter:
    """None: any; an empty tenant: messages without one. Ages: since a message was first given up, by the database's clock."""

    consumer: str | None
    tenant: str | None
    topic: str | None
    event_type: str | None
    dead_reason: DeadReason | None
    error_class: str | None
    error_code: str | None
    older_than: timedelta | None
    newer_than: timedelta | None

    def __post_init__(self) -> None:
        check_text(
            consumer=self.consumer, tenant=self.tenant or None, topic=self.topic, event_type=self.event_type,
            error_class=self.error_class, error_code=self.error_code,
        )  # fmt: skip

    @property
    def says_anything(self) -> bool:
        """Whether it leaves any dead letter out."""
        return any(part is not None for part in astuple(self))

    def arguments(
        self, states: Sequence[str] | None, *, now: datetime, after: UUID | None = None, newest_first: bool = False
    ) -> tuple[object, ...]:
        """$1..$10 of the statements. ``now`` is the database's; ``after`` is where the page before ended, in the same order."""
        lower = SMALLEST_ID if self.newer_than is None else smallest_id(now - self.newer_than)
        upper = LARGEST_ID if self.older_than is None else smallest_id(now - self.older_than)
        if after is not None:
            lower, upper = (lower, min(upper, after)) if newest_first else (max(lower, after), upper)
        return (
            self.consumer, self.tenant, self.topic, self.event_type, self.dead_reason, self.error_class, self.error_code,
            None if states is None else list(states), lower, upper,
        )  # fmt: skip
