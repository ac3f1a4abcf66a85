"""The payments' consumer without the ledger: it calls the provider itself, and again when that fails. The audit must tell."""

import os
from typing import Any, Final

from consumer_sdk import Effect, Message, MessageContext, MessageHandlers, Retry, Retryable
from demo.payments import CHARGE_REQUESTED, ChargeRequested, mark_declined, mark_paid
from demo.payments_consumer import CHARGE, LIMITS, PROVIDER_PORT, TOPIC
from demo.provider_client import ProviderClient, ProviderError

__all__ = ["app"]

_DECLINED: Final = 402

app = MessageHandlers()


@app.handler(CHARGE_REQUESTED, model=ChargeRequested, step="charge", retry=Retry(base_seconds=0.05, cap_seconds=1.0), attempts=100)
async def charge(message: Message[ChargeRequested], context: MessageContext) -> None:
    made = await _charged(message)
    async with context.transaction() as connection:
        if made is None:
            await mark_declined(connection, message.value, topic=os.environ[TOPIC])
        else:
            await mark_paid(connection, message.value, receipt=made["charge"], token=made["token"], topic=os.environ[TOPIC])


async def _charged(message: Message[ChargeRequested]) -> dict[str, Any] | None:
    provider = ProviderClient(int(os.environ[PROVIDER_PORT]), timeout_seconds=LIMITS.timeout_seconds)
    effect = Effect(key=message.event_id, fencing_token=1, operation=CHARGE, sends=1)
    try:
        made = (await provider.charge(effect, order=message.value.order_id, amount=message.value.amount)).result
    except Exception as error:
        if isinstance(error, ProviderError) and error.status == _DECLINED:
            return None
        raise Retryable("try_again") from error
    assert isinstance(made, dict)
    return made
