"""``fencepost check``: a preflight that finds a wrong set-up and says how to mend it."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Literal

import typer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError

from fencepost import wire
from fencepost.console import Inspector, JsonOutput, print_json
from fencepost.errors import ConfigurationError, FencepostError
from fencepost.tables import print_rows
from migrations import migration_states
from relay.inspection import inspecting
from relay.settings import RelaySettings, load_settings, unknown_variables

__all__ = ["Finding", "check"]

_SETTINGS: Final = "settings"
_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_RECENT_ROWS: Final = 200
_RECENT_RUNS: Final = 1_000
# Where a run's events go, unless its command names another topic.
_RUNS_TOPIC: Final = "fencepost.runs"
_CONNECTIONS: Final = 5
_LARGEST_BATCH: Final = wire.MAX_PAYLOAD_BYTES + wire.MAX_HEADERS_BYTES + wire.MAX_KEY_BYTES + 8_192
_CLOCK_SECONDS: Final = 5.0
_OLDEST_POSTGRES: Final = 140_000


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One look. ``remedy`` says what to do; empty when all is well."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""


def check(
    topic: Annotated[
        list[str] | None, typer.Option(help="A topic to look at besides those of recent rows and runs. Repeatable.")
    ] = None,
    as_json: JsonOutput = False,
) -> None:
    """Look at settings, database and broker before a relay starts, or when one misbehaves.

    Reads the same FENCEPOST_* settings as `fencepost relay run`. Exit code 1 if anything fails, 2 if the
    settings do; warnings do not count.

    Examples:

      fencepost check

      fencepost check --topic orders --topic payments --json
    """
    findings = asyncio.run(_all(topic or []))
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        print_rows(["check", "status", "what was found", "what to do"], [tuple(asdict(f).values()) for f in findings], whole=2)
    failed = [finding.name for finding in findings if finding.status == "fail"]
    if failed:
        raise typer.Exit(2 if failed == [_SETTINGS] else 1)


async def _all(topics: Sequence[str]) -> list[Finding]:
    try:
        settings = load_settings()
    except ConfigurationError as error:
        return [Finding(name=_SETTINGS, status="fail", detail=str(error), remedy="correct the environment")]
    findings = [Finding(name=_SETTINGS, status="ok", detail="valid, and their relations hold")]
    unknown = unknown_variables()
    findings += (
        [_look("variables", not unknown, f"no such setting: {', '.join(unknown)}", "correct or unset them", severe=False)]
        if unknown
        else []
    )
    seen, of_runs = set(topics), set[str]()
    try:
        async with inspecting(settings.database_url.get_secret_value()) as inspector:
            findings += [finding async for finding in _database(inspector, settings)]
            if not any(finding.status == "fail" for finding in findings):
                seen |= {row["topic"] for row in await inspector.rows("recent_topics", _RECENT_ROWS)}
                of_runs = await _topics_of_runs(inspector)
    except FencepostError as error:
        findings.append(Finding(name="database", status="fail", detail=str(error), remedy="mend this first; later checks need it"))
    findings += await _kafka(settings, sorted(seen), of_runs=sorted(of_runs - seen))
    return findings


async def _topics_of_runs(inspector: Inspector) -> set[str]:
    """Those of the newest runs; the default one, where there is no run yet, or none that may be read."""
    [readable] = await inspector.rows("may_read_runs")
    rows = await inspector.rows("run_topics", _RECENT_RUNS) if readable["granted"] else []
    return {row["topic"] for row in rows} or {_RUNS_TOPIC}


async def _database(inspector: Inspector, settings: RelaySettings) -> AsyncIterator[Finding]:
    server = (await inspector.rows("server"))[0]
    yield _look("database version", server["version"] >= _OLDEST_POSTGRES, server["version_text"], "PostgreSQL 14 or newer")
    yield _look(
        "primary", not server["in_recovery"], "writable" if not server["in_recovery"] else "a replica", "connect to the primary"
    )
    if not server["has_schema"]:
        yield Finding(name="schema", status="fail", detail="no schema fencepost", remedy="run `fencepost migrate`")
        return
    yield await _schema(settings)
    missing = [row["what"] for row in await inspector.rows("missing_privileges")]
    yield _look(
        "privileges", not missing, "lacks " + ", ".join(missing) if missing else f"{server['role']} may relay",
        f"GRANT fencepost_relay TO {server['role']}",
    )  # fmt: skip
    cache = (await inspector.rows("sequence_cache"))[0]["seqcache"]
    yield _look("sequence cache", cache == 1, f"CACHE {cache}", "ALTER SEQUENCE fencepost.outbox_id_seq CACHE 1")
    orphans = [str(row["lane"]) for row in await inspector.rows("orphan_lanes")]
    yield _look(
        "lanes of rows", not orphans, f"rows in unknown lanes {', '.join(orphans)}" if orphans else "every row's lane exists",
        "these rows are not published: they were inserted with a lane of their own; leave lane out of INSERT",
    )  # fmt: skip
    async for finding in _server(inspector, server, settings):
        yield finding


async def _server(inspector: Inspector, server: Any, settings: RelaySettings) -> AsyncIterator[Finding]:
    behind_pooler = inspector.connection.get_server_pid() != server["backend_pid"]
    yield _look(
        "pooler", not (behind_pooler and settings.wakeup == "listen"),
        "behind a connection pooler" if behind_pooler else "a direct connection",
        "set FENCEPOST_WAKEUP=poll, or connect directly", severe=False,
    )  # fmt: skip
    limit = server["connection_limit"]
    limit = server["max_connections"] if limit is None or limit < 0 else limit
    yield _look(
        "connections", limit >= _CONNECTIONS, f"{limit} allowed, {_CONNECTIONS} needed by each relay",
        f"ALTER ROLE {server['role']} CONNECTION LIMIT {_CONNECTIONS} or more",
    )  # fmt: skip
    loose = [f"{row['role']} in {row['database']}" for row in await inspector.rows("asynchronous_roles")]
    if server["synchronous_commit"] == "off":
        loose.insert(0, "this connection")
    yield _look(
        "synchronous_commit", not loose, f"off for {', '.join(loose)}" if loose else "on where it is set by default",
        "a commit that a crash loses may have been published: turn it on, or set FENCEPOST_WAIT_FOR_FLUSH=true", severe=False,
    )  # fmt: skip
    durable = server["fsync"] == "on" and server["full_page_writes"] == "on"
    yield _look("durability", durable, f"fsync {server['fsync']}, full_page_writes {server['full_page_writes']}", "turn both on")
    skew = abs(time.time() - server["clock"])
    yield _look(
        "clock", skew < _CLOCK_SECONDS, f"{skew:.1f} s between this host and the database",
        "synchronise the clocks: leases do not depend on it, latency metrics do", severe=False,
    )  # fmt: skip


async def _schema(settings: RelaySettings) -> Finding:
    states = await migration_states(settings.database_url.get_secret_value())
    pending = [state.migration.title for state in states if state.applied_at is None]
    return _look("schema", not pending, f"pending: {', '.join(pending)}" if pending else "current", "run `fencepost migrate`")


async def _kafka(settings: RelaySettings, topics: Sequence[str], *, of_runs: Sequence[str]) -> list[Finding]:
    client = AIOKafkaAdminClient(bootstrap_servers=settings.kafka_bootstrap_servers, request_timeout_ms=10_000)
    try:
        await client.start()
        try:
            findings = [Finding(name="kafka", status="ok", detail="a broker answers")]
            findings += [finding for topic in topics for finding in await _topic(client, topic, missing=_needed)]
            return findings + [finding for topic in of_runs for finding in await _topic(client, topic, missing=_needed_by_runs)]
        finally:
            await client.close()
    except (KafkaError, OSError, TimeoutError) as error:
        await client.close()
        remedy = "is Kafka up, and FENCEPOST_KAFKA_BOOTSTRAP_SERVERS right? Rows wait meanwhile and are not lost"
        detail = f"{settings.kafka_bootstrap_servers} does not answer ({type(error).__name__})"
        return [Finding(name="kafka", status="fail", detail=detail, remedy=remedy)]


def _needed(name: str) -> Finding:
    return Finding(name=name, status="fail", detail="does not exist", remedy="create it; its lanes stand still until then")


def _needed_by_runs(name: str) -> Finding:
    remedy = (
        "create it before a command is accepted: each run writes its events there, and lanes that meet one stand still, other "
        "events in them included. Not needed where no commands are accepted, or each names another topic"
    )
    return Finding(name=name, status="warn", detail="does not exist", remedy=remedy)


async def _topic(client: AIOKafkaAdminClient, topic: str, *, missing: Callable[[str], Finding]) -> list[Finding]:
    name = f"topic {topic}"
    if not _TOPIC.fullmatch(topic):
        return [Finding(name=name, status="fail", detail="no topic can have this name", remedy="use a-z A-Z 0-9 . _ - only")]
    described = (await client.describe_topics([topic]))[0]
    if described["error_code"]:
        return [missing(name)]
    leaderless = sum(partition["leader"] < 0 for partition in described["partitions"])
    replicas = min(len(partition["replicas"]) for partition in described["partitions"])
    configs = await _topic_configs(client, topic)
    in_sync = int(configs.get("min.insync.replicas", "1"))
    largest = int(configs.get("max.message.bytes", "1048588"))
    leaders = f"{leaderless} of {len(described['partitions'])} partitions without one"
    safe = "at least 2 of 3: with fewer, an acknowledged record can be lost with its leader"
    room = f"raise it to {_LARGEST_BATCH} or more, or a large row stops its lane"
    bytes_found = f"{largest}, the outbox accepts up to {_LARGEST_BATCH}"
    return [
        _look(f"{name}: leaders", not leaderless, leaders, "its lanes stand still until each has a leader"),
        _look(f"{name}: min.insync.replicas", in_sync >= 2, f"{in_sync} of {replicas} replicas", safe, severe=False),
        _look(f"{name}: max.message.bytes", largest >= _LARGEST_BATCH, bytes_found, room, severe=False),
    ]


async def _topic_configs(client: AIOKafkaAdminClient, topic: str) -> dict[str, str]:
    responses = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    return {entry[0]: entry[1] for response in responses for resource in response.resources for entry in resource[4]}


def _look(name: str, well: bool, detail: str, remedy: str, *, severe: bool = True) -> Finding:
    if well:
        return Finding(name=name, status="ok", detail=detail)
    return Finding(name=name, status="fail" if severe else "warn", detail=detail, remedy=remedy)
