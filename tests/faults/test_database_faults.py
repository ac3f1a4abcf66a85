"""Whatever happens to the database or the way to it, the relay keeps to its leases, loses nothing and comes back by itself."""

import asyncio
import re

from fencepost.devservices import Services
from fencepost.statements import load_statements
from tests.support.fleet import LONG_LEASE, SHORT_LEASE, metric, metric_reaches, problems
from tests.support.kafka_proxy import PRODUCE, KafkaProxy
from tests.support.ledger import Ledger
from tests.support.outbox import Outbox
from tests.support.records import read_all
from tests.support.relay_process import RelayFactory
from tests.support.tcp_proxy import TcpProxy
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

LISTENING = "fencepost_listening"
LOSSES = "fencepost_lane_losses_total"
RINGS = 'fencepost_wakeups_total{kind="ring"}'
NO_ANSWER = "database: no answer"
TERMINATIONS = 5
SAMPLES = 100


async def terminate(outbox: Outbox, application: str) -> int:
    """End every session of this application in this database; how many there were."""
    ended = await outbox.connection.fetch(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE $1",
        application,
    )
    return len(ended)


async def test_rows_flow_while_the_listening_connection_is_gone_and_it_comes_back(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """DB-2."""
    kafka = own_services.bootstrap_servers
    ledger = await Ledger(own_database_url, await own_topic()).open()
    async with Outbox(own_database_url) as outbox:
        relay = start_relay(own_database_url, kafka, **LONG_LEASE)
        await metric_reaches(relay, LISTENING, 1)
        for _ in range(2):
            assert await terminate(outbox, "fencepost-listen") == 1
            await ledger.fill(1)
            await outbox.drained(10)
            await metric_reaches(relay, LISTENING, 1)

            async def listens() -> bool:
                return await outbox.is_true(
                    "SELECT count(*) = 1 FROM pg_stat_activity"
                    " WHERE datname = current_database() AND application_name = 'fencepost-listen'"
                )

            await eventually(listens, message="there is a listening session again")
    ledger.check(await read_all(kafka, ledger.topic))


async def test_sessions_that_end_while_a_huge_transaction_is_drained_make_no_row_go_twice(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """DB-13."""
    kafka = own_services.bootstrap_servers
    ledger = await Ledger(own_database_url, await own_topic()).open()
    await ledger.fill(10_000)
    async with Outbox(own_database_url) as outbox:
        relay = start_relay(own_database_url, kafka, batch_rows=20, **LONG_LEASE)
        for _ in range(TERMINATIONS):
            await outbox.progress(3)
            assert await terminate(outbox, "fencepost-relay") > 0
        assert await outbox.undelivered() > 0, "all of it in mid-drain"
        await outbox.drained()

        assert await outbox.marked_rows() == len(ledger.committed)
    assert relay.running
    assert await metric(relay, LOSSES) == 0
    assert ledger.check(await read_all(kafka, ledger.topic)).repeats == 0


async def test_a_restart_of_the_database_in_mid_drain_makes_no_row_go_twice(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    kafka = own_services.bootstrap_servers
    ledger = await Ledger(own_database_url, await own_topic()).open()
    await ledger.fill(10_000)
    relay = start_relay(own_database_url, kafka, batch_rows=20, **LONG_LEASE)
    async with Outbox(own_database_url) as outbox:
        await outbox.progress(3)
    await asyncio.to_thread(own_services.postgres.restart)
    async with Outbox(own_database_url) as outbox:
        await outbox.drained()
        assert await outbox.marked_rows() == len(ledger.committed)
    assert relay.running
    assert await metric(relay, LOSSES) == 0
    assert ledger.check(await read_all(kafka, ledger.topic)).repeats == 0


async def test_marks_that_a_crash_of_the_database_takes_back_do_not_stay_open(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """Marks commit asynchronously. One that is lost with the server's last moments costs a repeat, not a lane."""
    kafka = own_services.bootstrap_servers
    ledger = await Ledger(own_database_url, await own_topic()).open()
    # Longer than the crash; its renewals find out.
    relay = start_relay(own_database_url, kafka, lease_seconds=16, publish_deadline_seconds=8)
    await relay.wait_ready()
    async with Outbox(own_database_url) as outbox:
        await outbox.settled(**{await _name(outbox): 8})
        await outbox.connection.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
        await outbox.connection.execute("SELECT pg_reload_conf()")
        await ledger.fill(200)
        await outbox.drained()
    await asyncio.to_thread(own_services.postgres.restart, immediate=True)
    async with Outbox(own_database_url) as outbox:
        await outbox.connection.execute("ALTER SYSTEM RESET wal_writer_delay")
        await outbox.connection.execute("SELECT pg_reload_conf()")
        await outbox.drained(20)
    ledger.check(await read_all(kafka, ledger.topic))


async def _name(outbox: Outbox) -> str:
    async def named() -> str:
        return next(iter((await outbox.owners()).values()), "").partition("/")[0]

    return await eventually(named, message="a relay holds lanes")


async def test_a_relay_without_its_database_sends_nothing_past_its_lease_and_comes_back(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """LEASE-11."""
    kafka = own_services.bootstrap_servers
    ledger = await Ledger(own_database_url, await own_topic()).open()
    async with KafkaProxy(kafka) as proxy, Outbox(own_database_url) as outbox:
        relay = start_relay(own_database_url, proxy.address, batch_rows=20, **SHORT_LEASE)
        await ledger.fill(6_000)
        await outbox.progress(3)
        own_services.postgres.pause()
        try:
            await metric_reaches(relay, LOSSES, 8)
            sent = proxy.received[PRODUCE]

            async def unready() -> bool:
                return NO_ANSWER in (await problems(relay) or [])

            await eventually(unready, message="the relay is not ready")
            assert await problems(relay, "/livez") == [], "a restart would not help"
            assert proxy.received[PRODUCE] == sent
        finally:
            own_services.postgres.resume()
        await outbox.drained()
        await relay.wait_ready()
        assert await outbox.marked_rows() == len(ledger.committed)
    assert relay.running
    ledger.check(await read_all(kafka, ledger.topic))


async def test_connections_that_the_network_cuts_silently_are_replaced(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """DB-10, DB-2: a wait for the database is bounded, and heals."""
    kafka = own_services.bootstrap_servers
    ledger = await Ledger(own_database_url, await own_topic()).open()
    async with TcpProxy(own_database_url) as proxy, Outbox(own_database_url) as outbox:
        relay = start_relay(proxy.url, kafka, batch_rows=20, **SHORT_LEASE)
        await ledger.fill(4_000)
        await outbox.progress(3)
        proxy.silence()
        await outbox.drained()
        await relay.wait_ready()
        assert await outbox.marked_rows() == len(ledger.committed)
    ledger.check(await read_all(kafka, ledger.topic))


async def test_no_transaction_is_open_while_the_broker_is_awaited(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """DB-1."""
    kafka = own_services.bootstrap_servers
    ledger = await Ledger(own_database_url, await own_topic()).open()
    async with KafkaProxy(kafka) as proxy, Outbox(own_database_url) as outbox:
        relay = start_relay(own_database_url, proxy.address, **LONG_LEASE)
        await outbox.settled(**{await _name(outbox): 8})
        proxy.answering.clear()
        await ledger.fill(2_000)
        await eventually(lambda: proxy.forwarded[PRODUCE] > 0, message="a batch is on its way")
        for _ in range(SAMPLES):
            await outbox.connection.execute("SELECT pg_current_xact_id()")
            sessions = await outbox.connection.fetch(
                "SELECT state, age(backend_xmin) AS behind FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE 'fencepost%'"
            )
            assert sessions
            assert not [session for session in sessions if str(session["state"]).startswith("idle in transaction")]
            assert max(session["behind"] or 0 for session in sessions) < SAMPLES / 2, "the horizon moves on"
        proxy.answering.set()
        await outbox.drained()
    assert relay.running
    assert ledger.check(await read_all(kafka, ledger.topic)).repeats == 0


async def test_a_mark_that_waits_for_a_lock_beyond_its_timeout_is_written_once(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    kafka = own_services.bootstrap_servers
    ledger = await Ledger(own_database_url, await own_topic()).open()
    lease = {"lease_seconds": 4, "publish_deadline_seconds": 2, "lease_margin_seconds": 0.3}
    async with Outbox(own_database_url) as outbox, Outbox(own_database_url) as locker:
        relay = start_relay(own_database_url, kafka, batch_rows=20, **lease)
        await outbox.settled(**{await _name(outbox): 8})
        async with locker.connection.transaction():
            await locker.connection.execute("LOCK TABLE fencepost.receipts IN SHARE MODE")
            await ledger.fill(1_000)
            await metric_reaches(relay, 'fencepost_database_errors_total{statement="mark"}', 1)
        await outbox.drained()

        assert await outbox.marked_rows() == len(ledger.committed)
    assert relay.running
    assert await metric(relay, LOSSES) == 0, "renewals do not depend on marks"
    assert ledger.check(await read_all(kafka, ledger.topic)).repeats == 0


async def test_a_database_that_turns_read_only_ends_readiness_and_is_followed_back(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """DB-9."""
    kafka = own_services.bootstrap_servers
    ledger = await Ledger(own_database_url, await own_topic()).open()
    async with Outbox(own_database_url) as outbox:
        relay = start_relay(own_database_url, kafka, **SHORT_LEASE)
        await ledger.fill(100)
        await outbox.drained()
        await relay.wait_ready()
        before = await sessions(outbox)
        await outbox.connection.execute("SET default_transaction_read_only = off")
        await outbox.connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        await outbox.connection.execute("SELECT pg_reload_conf()")
        try:

            async def unready() -> bool:
                return NO_ANSWER in (await problems(relay) or [])

            await eventually(unready, message="the relay is not ready")
        finally:
            await outbox.connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
            await outbox.connection.execute("SELECT pg_reload_conf()")
        await relay.wait_ready()
        await ledger.fill(100)
        await outbox.drained()

        assert not before & await sessions(outbox), "the connections were replaced"
    assert relay.running
    ledger.check(await read_all(kafka, ledger.topic))


async def sessions(outbox: Outbox) -> set[int]:
    """Process ids of the relay's sessions but the listening one."""
    rows = await outbox.connection.fetch(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'fencepost-relay'"
    )
    return {row["pid"] for row in rows}


def test_leases_are_told_by_the_database_clock_alone() -> None:
    """A host's clock, however wrong, has no way into a lease: no statement takes a time, and none uses now()."""
    for name, statement in load_statements("relay", "statements.sql").items():
        code = re.sub(r"--[^\n]*", "", statement).lower()
        assert "now()" not in code, name
        assert not re.search(
            r"\$\d+::timestamp|current_timestamp|localtimestamp|statement_timestamp|transaction_timestamp", code
        ), name
        if "lease_expires_at >" in code or "lease_expires_at <" in code:
            assert "clock_timestamp()" in code, name
