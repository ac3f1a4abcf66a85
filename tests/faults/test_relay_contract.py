"""The relay as its operator meets it: probes, exit codes, settings, a quiet fleet, what a batch costs, and how it wakes up."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Final

import asyncpg
import httpx
import pytest

from fencepost.devservices import free_port
from producer_sdk import Event
from producer_sdk.asyncpg import enqueue
from tests.support.fleet import LONG_LEASE, metric, metric_reaches, problems
from tests.support.ledger import Ledger
from tests.support.outbox import Outbox
from tests.support.records import read_all
from tests.support.relay_process import RelayFactory, RelayProcess
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

RING: Final = 'fencepost_wakeups_total{kind="ring"}'
LANES: Final = 8
ROUNDS: Final = 20
#: Renewed in every five seconds, and not over because a machine is slow.
QUIET_LEASE: Final = {"lease_seconds": 20, "publish_deadline_seconds": 10, "lease_margin_seconds": 2}
#: Longer than any test: whoever waits for it fails.
NO_POLL: Final = {"poll_interval_ms": 60_000}
START_SECONDS: Final = 30

# fmt: off
NAMES: Final = frozenset({
    "fencepost_batch_bytes", "fencepost_batch_rows", "fencepost_database_errors", "fencepost_delivery_seconds",
    "fencepost_horizon_age_seconds", "fencepost_horizon_age_transactions", "fencepost_lane_claims",
    "fencepost_lane_generation", "fencepost_lane_losses", "fencepost_lane_releases", "fencepost_lanes_owned",
    "fencepost_lanes_stopped", "fencepost_late_rows", "fencepost_listening", "fencepost_oldest_undelivered_seconds",
    "fencepost_phase_seconds", "fencepost_producer_rebuilds", "fencepost_publish_seconds", "fencepost_published_bytes",
    "fencepost_published_rows", "fencepost_relay_build", "fencepost_stale_marks_refused", "fencepost_waiting_rows",
    "fencepost_wakeups",
})
# fmt: on


async def armed(outbox: Outbox) -> bool:
    """Whether writers of every lane ring."""
    now = int(time.time() * 1000)
    return all([await doorbell(outbox, lane) > now for lane in range(LANES)])


async def doorbell(outbox: Outbox, lane: int) -> int:
    return int(await outbox.connection.fetchval(f"SELECT last_value FROM fencepost.doorbell_{lane}"))


async def asleep(outbox: Outbox, relay: RelayProcess) -> None:
    """Wait until the relay holds every lane, listens and has armed the bell."""
    await metric_reaches(relay, "fencepost_lanes_owned", LANES)
    await metric_reaches(relay, "fencepost_listening", 1)
    await eventually(lambda: armed(outbox), message="the bell is armed")


# -- probes, metrics, exit codes -----------------------------------------------------------------------------------------


async def test_a_relay_that_works_is_live_and_ready(database_url: str, kafka: str, start_relay: RelayFactory) -> None:
    relay = start_relay(database_url, kafka, **LONG_LEASE)
    await relay.wait_ready()

    assert await problems(relay, "/livez") == []
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{relay.url}/elsewhere")).status_code == httpx.codes.NOT_FOUND


async def test_every_series_tells_what_happened(
    database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """OPS-2."""
    ledger = await Ledger(database_url, await topic()).open()
    late = Event(topic=ledger.topic, type="late", key="key-1", payload=b"late")
    async with Outbox(database_url) as outbox, Outbox(database_url) as writer:
        relay = start_relay(database_url, kafka, **LONG_LEASE)
        await outbox.settled(**{await relay_name(outbox): LANES})
        async with writer.connection.transaction():
            await enqueue(writer.connection, late)
            await ledger.fill(300, keys=["key-1", "key-2"])

            async def flowed() -> bool:
                return await outbox.undelivered() == 0

            await eventually(flowed, message="the open transaction holds nobody up")
        await eventually(lambda: has(outbox, str(late.event_id)), message="the late row is delivered")
        generations = await outbox.generations()

        samples = await relay.metrics()
        assert samples[f'fencepost_published_rows_total{{outcome="acknowledged",topic="{ledger.topic}"}}'] == 301
        assert samples["fencepost_batch_rows_sum"] == 301
        assert samples["fencepost_late_rows_total"] == 1
        assert samples["fencepost_lane_claims_total"] == samples["fencepost_lanes_owned"] == LANES
        for lane, generation in generations.items():
            assert samples[f'fencepost_lane_generation{{lane="{lane}"}}'] == generation
        for name in ("lane_losses", "lane_releases", "stale_marks_refused", "producer_rebuilds"):
            assert samples[f"fencepost_{name}_total"] == 0
        assert min(samples.values()) >= 0
        suffixes = ("_total", "_sum", "_count", "_bucket", "_created", "_info")
        families = {name.partition("{")[0] for name in samples}
        bare = {next((name.removesuffix(suffix) for suffix in suffixes if name.endswith(suffix)), name) for name in families}
        assert bare <= NAMES, "nothing undocumented appears"


async def relay_name(outbox: Outbox) -> str:
    async def named() -> str:
        return next(iter((await outbox.owners()).values()), "").partition("/")[0]

    return await eventually(named, message="a relay holds lanes")


async def has(outbox: Outbox, event_id: str) -> bool:
    return event_id in await outbox.delivered()


async def test_a_stop_ends_with_exit_code_0_and_frees_the_lanes(database_url: str, kafka: str, start_relay: RelayFactory) -> None:
    async with Outbox(database_url) as outbox:
        relay = start_relay(database_url, kafka, **LONG_LEASE)
        await metric_reaches(relay, "fencepost_lanes_owned", LANES)
        relay.terminate()

        assert await relay.wait() == 0
        assert await outbox.owners() == {}
        assert await outbox.connection.fetchval("SELECT count(*) FROM fencepost.relays") == 0


async def test_a_relay_waits_for_its_database_and_its_broker_and_can_be_stopped_meanwhile(
    database_url: str, start_relay: RelayFactory
) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    without_database = start_relay(f"postgresql://user@{nobody}/nowhere", nobody, **LONG_LEASE)
    without_broker = start_relay(database_url, nobody, **LONG_LEASE)

    await eventually(lambda: says(without_database, "database: no answer"), START_SECONDS)
    await eventually(lambda: says(without_broker, "kafka: no answer"), START_SECONDS)
    for relay in (without_database, without_broker):
        assert await problems(relay, "/livez") == []
        relay.terminate()
        assert await relay.wait() == 0
    async with Outbox(database_url) as outbox:
        assert set((await outbox.generations()).values()) == {0}, "a relay that cannot publish claims nothing"


async def says(relay: RelayProcess, problem: str) -> bool:
    return problem in (await problems(relay) or [])


async def run_relay(**environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a relay to its end with these settings only."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FENCEPOST_")}
    chosen = {f"FENCEPOST_{name.upper()}": value for name, value in environment.items()}

    def run() -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "fencepost", "relay", "run"]
        return subprocess.run(command, env=kept | chosen, capture_output=True, text=True, timeout=START_SECONDS, check=False)

    return await asyncio.to_thread(run)


def assert_refused(done: "subprocess.CompletedProcess[str]", *named: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for name in named:
        assert name in done.stderr


VALID: Final = {"database_url": "postgresql://user@127.0.0.1:1/db", "kafka_bootstrap_servers": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"database_url": None}, ["FENCEPOST_DATABASE_URL"], id="required and missing"),
        pytest.param({"kafka_bootstrap_servers": " , "}, ["FENCEPOST_KAFKA_BOOTSTRAP_SERVERS"], id="required and blank"),
        pytest.param({"lease_seconds": "soon"}, ["FENCEPOST_LEASE_SECONDS"], id="no number"),
        pytest.param(
            {"lease_seconds": "30", "publish_deadline_seconds": "120"},
            ["FENCEPOST_LEASE_SECONDS", "FENCEPOST_PUBLISH_DEADLINE_SECONDS", "122"],
            id="a lease shorter than the publish deadline",
        ),
    ],
)
async def test_settings_that_cannot_work_end_the_start_with_one_line(changes: Mapping[str, str | None], named: list[str]) -> None:
    settings = {name: value for name, value in {**VALID, **changes}.items() if value is not None}

    assert_refused(await run_relay(**settings), *named)


async def test_a_wrong_password_is_not_printed(database_url: str, kafka: str) -> None:
    wrong = database_url.replace("://postgres:", "://postgres:wrong-", 1)
    done = await run_relay(database_url=wrong, kafka_bootstrap_servers=kafka, http_port="0")

    assert_refused(done, "FENCEPOST_DATABASE_URL")
    assert "wrong-" not in done.stderr


async def test_a_database_without_the_schema_is_refused(empty_database_url: str, kafka: str) -> None:
    done = await run_relay(database_url=empty_database_url, kafka_bootstrap_servers=kafka, http_port="0")

    assert_refused(done, "fencepost migrate")


async def test_an_outbox_that_was_restored_into_another_cluster_is_not_published(database_url: str, kafka: str) -> None:
    async with Outbox(database_url) as outbox:
        await outbox.connection.execute("UPDATE fencepost.installation SET system_identifier = 1")
        done = await run_relay(database_url=database_url, kafka_bootstrap_servers=kafka, http_port="0")

        assert_refused(done, "fencepost lanes rebase")
        assert set((await outbox.generations()).values()) == {0}


async def test_a_taken_port_is_named(database_url: str, kafka: str, start_relay: RelayFactory) -> None:
    relay = start_relay(database_url, kafka, **LONG_LEASE)
    await relay.wait_ready()

    done = await run_relay(database_url=database_url, kafka_bootstrap_servers=kafka, http_port=str(relay.http_port))

    assert_refused(done, "FENCEPOST_HTTP_PORT", str(relay.http_port))


# -- a quiet fleet, and what a batch costs -------------------------------------------------------------------------------


async def calls(outbox: Outbox) -> dict[str, int]:
    """Statement -> how often it ran in this database."""
    rows = await outbox.connection.fetch(
        "SELECT substring(query FROM '-- fencepost:(\\w+)') AS name, sum(calls)::int AS calls FROM pg_stat_statements"
        " WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database()) GROUP BY 1"
    )
    return {row["name"]: row["calls"] for row in rows if row["name"]}


async def count_statements(outbox: Outbox) -> None:
    try:
        await outbox.connection.execute("CREATE EXTENSION pg_stat_statements")
    except asyncpg.PostgresError as error:
        pytest.skip(f"this server counts no statements: {error}")


async def test_an_idle_fleet_shares_its_lanes_and_is_quiet(database_url: str, kafka: str, start_relay: RelayFactory) -> None:
    """LEASE-8."""
    async with Outbox(database_url) as outbox:
        await count_statements(outbox)
        relays = [start_relay(database_url, kafka, relay_name=name, **QUIET_LEASE) for name in ("one", "other")]
        await outbox.settled(one=4, other=4)
        for relay in relays:  # which is when they have read the cursors as well
            await metric_reaches(relay, "fencepost_lanes_owned", LANES / 2)
        generations = await outbox.generations()
        before = await calls(outbox)

        async def many_rounds() -> bool:
            ran = await calls(outbox)
            renewed = ran.get("renew", 0) - before.get("renew", 0)
            return ran["fleet"] >= before["fleet"] + ROUNDS and renewed >= len(relays)

        await eventually(many_rounds, 60, message="the relays looked at each other often, and renewed their leases")

        after = await calls(outbox)
        assert await outbox.generations() == generations
        for statement in ("claim", "release", "mark", "cursors"):
            assert after.get(statement, 0) == before.get(statement, 0), f"{statement} ran on an idle fleet"
        for relay in relays:
            assert await metric(relay, "fencepost_stale_marks_refused_total") == 0
            assert await metric(relay, "fencepost_lane_losses_total") == 0


async def test_a_batch_costs_one_poll_and_at_most_one_mark(
    database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    ledger = await Ledger(database_url, await topic()).open()
    await ledger.fill(4_000, keys=["key-1"])
    async with Outbox(database_url) as outbox:
        await count_statements(outbox)
        relay = start_relay(database_url, kafka, batch_rows=100, **LONG_LEASE)
        await outbox.drained()
        ran = await calls(outbox)

        batches = await outbox.receipts()
        assert batches == 40
        assert ran["mark"] <= batches
        idle_polls = 10 + await metric(relay, 'fencepost_wakeups_total{kind="poll"}')
        assert ran["poll"] <= batches + idle_polls
        updated = await outbox.connection.fetchval("SELECT n_tup_upd + n_tup_del FROM pg_stat_user_tables WHERE relname = 'outbox'")
        assert updated == 0, "rows of the outbox are written once"
    ledger.check(await read_all(kafka, ledger.topic))


# -- waking up -----------------------------------------------------------------------------------------------------------


async def test_an_enqueue_wakes_a_sleeping_relay(
    database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    ledger = await Ledger(database_url, await topic()).open()
    async with Outbox(database_url) as outbox:
        relay = start_relay(database_url, kafka, **NO_POLL, **LONG_LEASE)
        await asleep(outbox, relay)
        rings = await metric(relay, RING)
        await ledger.fill(1)
        await outbox.drained(20)

        assert await metric(relay, RING) > rings


async def test_a_row_inserted_without_the_function_goes_at_the_next_poll(
    database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    name = await topic()
    async with Outbox(database_url) as outbox:
        relay = start_relay(database_url, kafka, poll_interval_ms=200, **LONG_LEASE)
        await asleep(outbox, relay)
        rings = await metric(relay, RING)
        await outbox.connection.execute(
            "INSERT INTO fencepost.outbox (topic, event_type, key, payload) VALUES ($1, 'raw', 'key', 'payload')", name
        )
        await outbox.drained(20)

        assert await metric(relay, RING) == rings
    (record,) = await read_all(kafka, name)
    assert (record.key, record.value) == (b"key", b"payload")


async def test_a_relay_at_work_is_not_rung_and_after_it_the_first_row_rings(
    database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """WRITE-2."""
    ledger = await Ledger(database_url, await topic()).open()
    heard: list[str] = []
    async with Outbox(database_url) as outbox:

        def hear(_connection: object, _pid: int, _channel: str, payload: object) -> None:
            heard.append(str(payload))

        await outbox.connection.add_listener("fencepost_doorbell", hear)
        relay = start_relay(database_url, kafka, **NO_POLL, **LONG_LEASE)
        await asleep(outbox, relay)

        async def disarmed() -> bool:
            await ledger.fill(100)
            return not any([await doorbell(outbox, lane) > 1 for lane in range(LANES)])

        await eventually(disarmed, 30, message="the bell is off while rows stream in")
        heard.clear()
        for _ in range(10):
            await ledger.fill(100)
        await outbox.connection.execute("SELECT 1")
        assert len(heard) < LANES * 5, "ten transactions over all lanes did not ring each"

        await outbox.drained()
        await asleep(outbox, relay)
        await eventually(lambda: armed(outbox))
        rings = await metric(relay, RING)
        await ledger.fill(1)
        await outbox.drained(20)
        assert await metric(relay, RING) > rings
    ledger.check(await read_all(kafka, ledger.topic))


async def test_a_writer_that_enqueued_before_the_bell_was_armed_and_commits_later_is_not_missed(
    database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    name = await topic()
    heard: list[str] = []
    async with Outbox(database_url) as outbox, Outbox(database_url) as writer:
        await outbox.connection.add_listener("fencepost_doorbell", lambda *call: heard.append(str(call[-1])))
        async with writer.connection.transaction():
            await enqueue(writer.connection, Event(topic=name, type="test", key="key", payload=b"early"))
            relay = start_relay(database_url, kafka, **NO_POLL, **LONG_LEASE)
            await asleep(outbox, relay)
        # The poll that everybody else waits for is a minute away.
        await outbox.drained(20)
        assert heard == [], "the writer did not ring"
    assert [record.value for record in await read_all(kafka, name)] == [b"early"]


async def test_the_flag_of_a_sleeping_relay_is_renewed_before_it_runs_out(
    database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    ledger = await Ledger(database_url, await topic()).open()
    async with Outbox(database_url) as outbox:
        relay = start_relay(database_url, kafka, **NO_POLL, **LONG_LEASE)
        await asleep(outbox, relay)
        first = [await doorbell(outbox, lane) for lane in range(LANES)]

        async def first_would_be_over() -> bool:
            return int(time.time() * 1000) > max(first)

        await eventually(first_would_be_over, message="the first flag is over")
        assert await armed(outbox)
        await ledger.fill(1)
        await outbox.drained(20)


async def test_without_listen_rows_are_found_by_polling(
    database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """DB-11, as far as one connection shows it: no listener, no session state."""
    ledger = await Ledger(database_url, await topic()).open()
    async with Outbox(database_url) as outbox:
        start_relay(database_url, kafka, wakeup="poll", **LONG_LEASE)
        for _ in range(3):
            await ledger.fill(10)
            await outbox.drained(20)

        names = await outbox.connection.fetch("SELECT application_name FROM pg_stat_activity WHERE datname = current_database()")
        assert "fencepost-listen" not in {row["application_name"] for row in names}
        assert {await doorbell(outbox, lane) for lane in range(LANES)} == {1}


async def test_the_flag_of_a_dead_relay_runs_out(
    database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    name = await topic()
    heard: list[str] = []
    async with Outbox(database_url) as outbox:
        await outbox.connection.add_listener("fencepost_doorbell", lambda *call: heard.append(str(call[-1])))
        relay = start_relay(database_url, kafka, **LONG_LEASE)
        await asleep(outbox, relay)
        relay.kill()

        lane = await outbox.connection.fetchval("SELECT fencepost.lane_of('key')")
        now = await outbox.connection.fetchval("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
        assert 0 < await doorbell(outbox, lane) - now <= 10_000, "a flag that nobody renews ends within ten seconds"

        for flag, rings in ((now - 1, 0), (now + 60_000, 1)):
            await outbox.connection.execute(f"SELECT setval('fencepost.doorbell_{lane}', {flag})")
            async with outbox.connection.transaction():
                await enqueue(outbox.connection, Event(topic=name, type="test", key="key", payload=b""))
            await outbox.connection.execute("SELECT 1")
            assert len(heard) == rings
