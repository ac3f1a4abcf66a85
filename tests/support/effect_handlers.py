"""Handlers for workers in processes of their own that charge orders at the provider of provider_process.py."""

import os
from typing import Any, Final

import httpx

from consumer_sdk import Absent, Applied, CallLimits, Effect, Handlers, Retry, RunContext

__all__ = ["LIMITS", "PROVIDER_URL", "WORKFLOW", "handlers"]

PROVIDER_URL: Final = "TEST_PROVIDER_URL"
WORKFLOW: Final = "charge_order"
LIMITS: Final = CallLimits(timeout_seconds=1.0, in_flight_seconds=1.0)
_CHARGE: Final = "provider.charge"

handlers = Handlers()


@handlers.handler(WORKFLOW, retry=Retry(base_seconds=0.05, cap_seconds=1.0))
async def charge_order(context: RunContext, order: dict[str, str]) -> object:
    async def charge(effect: Effect) -> Any:
        async with httpx.AsyncClient(base_url=os.environ[PROVIDER_URL]) as client:
            answer = await client.post("/charges", content=order["id"], headers={"Idempotency-Key": effect.key})
        return answer.raise_for_status().json()

    return await context.once(_CHARGE, request=order, call=charge, limits=LIMITS)


@handlers.reconciler(_CHARGE)
async def charge_state(effect: Effect) -> Applied | Absent | None:
    async with httpx.AsyncClient(base_url=os.environ[PROVIDER_URL]) as client:
        answer = await client.get(f"/charges/{effect.key}")
    if answer.status_code == httpx.codes.NOT_FOUND:
        return Absent()
    return Applied(answer.raise_for_status().json())
