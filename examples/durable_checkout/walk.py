"""The first part of the story: one request after the other, each answer shown and compared with what the contract says."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final
from uuid import uuid4

import httpx

__all__ = ["Exchange", "Walk"]

_SHOWN: Final = ("location", "retry-after", "idempotent-replayed")
_MOST_AGAIN: Final = 60
_CHARACTERS: Final = 110


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A request and its answer. ``right``: whether the answer is what the contract says."""

    title: str
    request: str
    status: int
    headers: Mapping[str, str]
    body: str
    right: bool

    def lines(self) -> list[str]:
        headers = [f"    {name}: {value}" for name, value in self.headers.items()]
        mark = "" if self.right else "    <- NOT what the contract says"
        return [self.title, f"  > {self.request}", f"  < {self.status}{mark}", *headers, f"    {_cut(self.body)}", ""]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _cut(body: str) -> str:
    return body if len(body) <= _CHARACTERS else f"{body[: _CHARACTERS - 1]}…"


class Walk:
    """Goes through the answers of ``POST /orders``; ``told`` gets each line."""

    def __init__(self, client: httpx.AsyncClient, told: Callable[[str], None]) -> None:
        self.exchanges: list[Exchange] = []
        self._client = client
        self._told = told

    async def go(self) -> None:
        lamp, chair = str(uuid4()), str(uuid4())
        first = await self._order("An order", lamp, "lamp", lambda a: a.status_code == 201 and not _is_replay(a))
        await self._order(
            "The same request again: its answer byte for byte, and nothing is charged", lamp, "lamp",
            lambda a: a.status_code == 201 and _is_replay(a) and a.content == first.content,
        )  # fmt: skip
        pending = await self._order(
            "The provider charges and its answer gets lost: the order goes on when the wait is over", chair, "chair", _is_pending,
            wait=1,
        )  # fmt: skip
        await self._look("Where it can be looked at", pending.headers.get("location", "/"))
        await self._again("The same request again, as Retry-After says, until it is done", chair, "chair")
        await self._order(
            "The first key with another order", lamp, "chair",
            lambda a: _is_problem(a, 422, "idempotency-key-reused") and not _is_replay(a),
        )  # fmt: skip
        await self._order(
            "More than there is: a failure that the workflow names", str(uuid4()), "piano",
            lambda a: _is_problem(a, 422, "workflow-failed") and a.json()["error_type"] == "OutOfStock",
        )  # fmt: skip
        await self._order(
            "A card that is refused for good; the sofa is given back", str(uuid4()), "sofa",
            lambda a: _is_problem(a, 402, "workflow-failed") and a.json()["error_type"] == "CardDeclined",
        )  # fmt: skip

    async def _order(
        self, title: str, key: str, item: str, is_right: Callable[[httpx.Response], bool], *, wait: int | None = None
    ) -> httpx.Response:
        answer = await self._send(key, item, wait)
        self._keep(title, _shown_order(key, item, wait), answer, is_right(answer))
        return answer

    async def _again(self, title: str, key: str, item: str) -> None:
        for _ in range(_MOST_AGAIN):
            answer = await self._send(key, item)
            if "retry-after" not in answer.headers:
                break
            await asyncio.sleep(float(answer.headers["retry-after"]))
        self._keep(title, _shown_order(key, item), answer, answer.status_code == 201 and _is_replay(answer))

    async def _look(self, title: str, location: str) -> None:
        answer = await self._client.get(location)
        self._keep(title, f"GET {location}", answer, answer.status_code == 200 and "state" in answer.json())

    async def _send(self, key: str, item: str, wait: int | None = None) -> httpx.Response:
        preference = {} if wait is None else {"Prefer": f"wait={wait}"}
        return await self._client.post("/orders", headers={"Idempotency-Key": key, **preference}, json={"item": item})

    def _keep(self, title: str, request: str, answer: httpx.Response, right: bool) -> None:
        exchange = Exchange(
            title=title,
            request=request,
            status=answer.status_code,
            headers={name: answer.headers[name] for name in _SHOWN if name in answer.headers},
            body=answer.text,
            right=right,
        )
        self.exchanges.append(exchange)
        for line in exchange.lines():
            self._told(line)


def _shown_order(key: str, item: str, wait: int | None = None) -> str:
    preference = "" if wait is None else f"   Prefer: wait={wait}"
    return f'POST /orders {{"item": "{item}"}}   Idempotency-Key: {key[:8]}…{preference}'


def _is_replay(answer: httpx.Response) -> bool:
    return str(answer.headers.get("idempotent-replayed")) == "true"


def _is_pending(answer: httpx.Response) -> bool:
    return answer.status_code == 202 and answer.headers.get("retry-after") == "1" and "location" in answer.headers


def _is_problem(answer: httpx.Response, status: int, slug: str) -> bool:
    return answer.status_code == status and bool(answer.json().get("type") == f"urn:fencepost:durable-route:{slug}")
