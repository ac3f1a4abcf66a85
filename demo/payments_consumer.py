"""Charges each order once: the handler and the reconciler of the payments example.

The charge goes out through the effect ledger. The order's end, its event and the message's outcome commit together.
"""

import os
from typing import Any, Final, cast

from consumer_sdk import (
    Absent,
    Applied,
    CallLimits,
    Effect,
    EffectFailed,
    Message,
    MessageContext,
    MessageHandlers,
    Retry,
)
from demo.payments import CHARGE_REQUESTED, ChargeRequested, mark_declined, mark_paid
from demo.provider_client import ProviderClient

__all__ = ["CHARGE", "LIMITS", "PROVIDER_PORT", "TOPIC", "app"]

#: The ledger's name of the effect.
CHARGE: Final = "provider.charge"
#: Environment: the provider's port, and the topic that orders' ends are published to.
PROVIDER_PORT: Final = "PAYMENTS_PROVIDER_PORT"
TOPIC: Final = "PAYMENTS_TOPIC"
#: The provider charges no request later than the client waits for it; the second on top is for two clocks.
LIMITS: Final = CallLimits(timeout_seconds=2.0, in_flight_seconds=1.0)
_DECLINED: Final = "http_402"
#: A provider in a bad mood is asked again and again before an order becomes a dead letter.
_ATTEMPTS: Final = 100
_RETRY: Final = Retry(base_seconds=0.05, cap_seconds=1.0)

app = MessageHandlers()


@app.handler(CHARGE_REQUESTED, model=ChargeRequested, step="charge", retry=_RETRY, attempts=_ATTEMPTS)
async def charge(message: Message[ChargeRequested], context: MessageContext) -> None:
    order, topic = message.value, os.environ[TOPIC]

    async def call(effect: Effect) -> Applied:
        return await _provider().charge(effect, order=order.order_id, amount=order.amount)

    try:
        made = cast(dict[str, Any], await context.once(CHARGE, request=order.model_dump(), call=call, limits=LIMITS))
    except EffectFailed as error:
        if error.code != _DECLINED:
            raise
        async with context.transaction() as connection:
            await mark_declined(connection, order, topic=topic)
        return
    async with context.transaction() as connection:
        await mark_paid(connection, order, receipt=made["charge"], token=made["token"], topic=topic)


@app.reconciler(CHARGE)
async def charge_state(effect: Effect) -> Applied | Absent | None:
    return await _provider().charge_state(effect)


def _provider() -> ProviderClient:
    return ProviderClient(int(os.environ[PROVIDER_PORT]), timeout_seconds=LIMITS.timeout_seconds)
