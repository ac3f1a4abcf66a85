"""The operator's commands as people run them: under their own roles, on a healthy system and a wrong one."""

import asyncio
import json
import os
import secrets
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from fencepost.devservices import Services
from tests.support.relay_process import RelayFactory
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

ROLES = ("fencepost_relay", "fencepost_operator", "fencepost_producer")


async def fencepost(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run the command line; exit code and all that it said."""
    names = {f"FENCEPOST_{name.upper()}": value for name, value in environment.items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fencepost", *arguments, env={**os.environ, "COLUMNS": "200", **names},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    assert "Traceback" not in output.decode(), output.decode()
    return process.returncode, output.decode()


@pytest.fixture
async def logins(services: Services, database_url: str) -> AsyncIterator[dict[str, str]]:
    """An address for a user of each role, and for one without any."""
    connection = await asyncpg.connect(database_url)
    parts = urlsplit(database_url)
    addresses: dict[str, str] = {}
    users: list[str] = []
    for role in (*ROLES, ""):
        user, password = f"test_{uuid.uuid4().hex[:12]}", secrets.token_hex(8)
        await connection.execute(f"CREATE USER {user} PASSWORD '{password}'")
        if role:
            await connection.execute(f"GRANT {role} TO {user}")
        users.append(user)
        addresses[role] = parts._replace(netloc=f"{user}:{password}@{parts.hostname}:{parts.port}").geturl()
    yield addresses
    for user in users:
        await connection.execute(f"DROP USER {user}")
    await connection.close()


async def test_check_says_what_each_role_lacks_in_a_row_and_never_fails_itself(logins: dict[str, str], kafka: str) -> None:
    found: dict[str, dict[str, str]] = {}
    for role, address in logins.items():
        _, output = await fencepost("check", "--json", database_url=address, kafka_bootstrap_servers=kafka)
        found[role] = {row["name"]: row["status"] for row in json.loads(output)}
    assert {name: status for name, status in found["fencepost_relay"].items() if status not in {"ok", "warn"}} == {}
    assert found["fencepost_operator"]["privileges"] == "fail"
    assert "fail" in found["fencepost_producer"].values()
    assert "fail" in found[""].values()


async def test_an_operator_sees_lanes_and_events_and_not_their_payloads(
    logins: dict[str, str], database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    name = await topic(partitions=3)
    connection = await asyncpg.connect(database_url)
    event_id = await connection.fetchval("SELECT fencepost.enqueue($1, 'order.placed', 'secret-key', 'secret-payload')", name)
    relay = start_relay(logins["fencepost_relay"], kafka)
    await relay.wait_ready()

    async def delivered() -> bool:
        return bool(await connection.fetchval("SELECT bool_and(delivered) FROM fencepost.delivery"))

    await eventually(delivered, message="the event is delivered")
    await connection.close()

    code, output = await fencepost("trace", str(event_id), "--json", database_url=logins["fencepost_operator"])
    story: dict[str, Any] = json.loads(output)
    assert code == 0
    assert story["delivered"] is True
    assert story["on_kafka"]["first_offset"] == story["on_kafka"]["last_offset"] == 0
    assert story["receipt"]["row_count"] == 1
    assert "secret" not in output
    code, output = await fencepost("trace", f" {event_id} ", database_url=logins["fencepost_operator"])
    assert (code, "(1 row)" in output, "at offset 0\n" in output) == (0, True, True)
    code, output = await fencepost("status", "--json", database_url=logins["fencepost_operator"])
    assert code == 0
    assert {lane["lease_owner"] for lane in json.loads(output)["lanes"]} == {json.loads(output)["relays"][0]["relay_id"]}
    code, _ = await fencepost("trace", str(uuid.uuid4()), database_url=logins["fencepost_operator"])
    assert code == 1


async def test_a_lane_that_waits_for_a_topic_is_named_at_once_with_what_to_do(
    database_url: str, kafka: str, start_relay: RelayFactory
) -> None:
    missing = f"missing-{uuid.uuid4().hex[:8]}"
    connection = await asyncpg.connect(database_url)
    await connection.execute("SELECT fencepost.enqueue($1, 't', 'k', 'p')", missing)
    await connection.close()
    relay = start_relay(database_url, kafka)
    await relay.wait_ready()

    async def said() -> bool:
        _, output = await fencepost("status", database_url=database_url)
        return f"waits for topic {missing}" in output and "Create it" in output

    await eventually(said, message="status names the topic")


@pytest.mark.parametrize(
    "command",
    [
        ("migrate",),
        ("relay", "run"),
        ("status",),
        ("trace", str(uuid.UUID(int=1))),
        ("check",),
        ("worker", "run", "examples.durable_job:handlers"),
        ("runs", "list"),
        ("runs", "show", str(uuid.UUID(int=1))),
        ("diagnose", "stuck-leases"),
        ("diagnose", "double-completion"),
        ("diagnose", "duplicates", "--tenant", "a"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("address", ["postgresql://u:s3cret#PW@127.0.0.1:5432/db", "postgresql+asyncpg://u:s3cret@127.0.0.1/db"])
async def test_a_wrong_address_ends_every_command_with_one_line_that_does_not_quote_it(
    command: tuple[str, ...], address: str
) -> None:
    code, output = await fencepost(*command, database_url=address, kafka_bootstrap_servers="127.0.0.1:1")
    assert code == 2
    assert "FENCEPOST_DATABASE_URL" in output
    assert command == ("check",) or "(or --database-url)" in output
    assert "s3cret" not in output


async def test_what_a_consumer_was_not_told_is_named_with_its_options() -> None:
    code, output = await fencepost("consumer", "run", "nowhere:app", database_url="", kafka_bootstrap_servers="127.0.0.1:1")
    assert code == 2
    for named in ("DATABASE_URL (or --database-url)", "CONSUMER_TOPICS (or --topics)", "CONSUMER_GROUP (or --group)"):
        assert f"FENCEPOST_{named}" in output
