"""One consumer process at work on a topic that was full before: how fast, what it spends, and how large it grows."""

import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import psycopg
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.lab import BenchmarkFailed, Lab, Service
from benchmarks.measure import Mark, rate_between_marks
from benchmarks.meter import Meter
from benchmarks.statement_count import StatementCount

__all__ = ["Consumed", "ConsumerProcess", "consume", "must_be_whole", "peak_mib"]

_HANDLERS: Final = "benchmarks.order_messages"
_LOOK_SECONDS: Final = 0.1
_STILL_SECONDS: Final = 60.0
_ANSWER_SECONDS: Final = 10.0
_MICRO: Final = 1_000_000
_KIB_A_MIB: Final = 1024

Outcome = Literal["handled", "duplicate"]


@dataclass(kw_only=True)
class Consumed:
    """A topic that was consumed. CPU is microseconds a message, and None where it cannot be seen."""

    rate: float
    consumer_us: float
    postgres_us: float | None
    kafka_us: float | None
    wal_bytes: float
    statements: float | None


class ConsumerProcess(Service):
    """``fencepost consumer run`` with handlers of this benchmark. It is asked from the moment that it answers, which is before it
    has partitions."""

    def __init__(self, lab: Lab, url: str, topic: str, *, handlers: str, group: str, **settings: object) -> None:
        chosen = {"database_url": url, "kafka_bootstrap_servers": lab.kafka, "consumer_topics": topic, "consumer_group": group}
        super().__init__(
            lab, "consumer", ["consumer", "run", f"{_HANDLERS}:{handlers}"], chosen | settings, port_setting="consumer_http_port"
        )

    def messages(self, outcome: Outcome) -> int:
        """How many have come to that. Everything else is left out of the answer: a scrape takes the consumer's time."""
        name = "fencepost_consumer_messages_total"
        address = f"http://127.0.0.1:{self._port}/metrics?name[]={name}"
        with urllib.request.urlopen(address, timeout=_ANSWER_SECONDS) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return int(sum(sample.value for sample in samples if sample.labels["outcome"] == outcome))

    def _is_ready(self) -> bool:
        try:
            self.messages("handled")
        except OSError:
            return False
        return True


def consume(
    lab: Lab, url: str, topic: str, *, rows: int, handlers: str, group: str, outcome: Outcome = "handled", **settings: object
) -> Consumed:
    """Consume the topic's ``rows`` messages with a new process. Everything is counted from the last look that found none done."""
    with ExitStack() as stack:
        connection = stack.enter_context(psycopg.connect(url, autocommit=True))
        statements = StatementCount(connection)
        consumer = stack.enter_context(ConsumerProcess(lab, url, topic, handlers=handlers, group=group, **settings))
        looks = _Looks(consumer, outcome)
        meter, cpu = Meter(lab, connection), consumer.cpu()
        while looks.done == 0:
            meter, cpu = Meter(lab, connection), consumer.cpu()
            looks.look()
        while looks.done < rows:
            looks.look()
        spent, cpu = meter.each(rows), consumer.cpu() - cpu
        counted = statements.each(rows)
    must_be_whole(url, rows)
    return Consumed(rate=looks.rate(), consumer_us=cpu / rows * _MICRO, statements=counted, **spent)


class _Looks:
    """What a consumer has done at each look. One that stands still fails the benchmark."""

    def __init__(self, consumer: ConsumerProcess, outcome: Outcome) -> None:
        self._consumer = consumer
        self._outcome: Outcome = outcome
        self._none_at = self._moved_at = time.time()
        self._marks: list[Mark] = []
        self.done = 0

    def look(self) -> None:
        time.sleep(_LOOK_SECONDS)
        done, now = self._consumer.messages(self._outcome), time.time()
        self._consumer.check()
        if done > self.done:
            self._marks.append(Mark(now, done - self.done))
            self.done, self._moved_at = done, now
        elif done == 0:
            self._none_at = now
        if now - self._moved_at > _STILL_SECONDS:
            raise BenchmarkFailed(f"the consumer stands still after {done} messages; its log ends:\n{self._consumer.log_tail()}")

    def rate(self) -> float:
        """Messages a second since the last look that found none done."""
        return rate_between_marks([Mark(self._none_at, 0), *self._marks])


def must_be_whole(url: str, rows: int) -> None:
    """Raise unless each message has come to one row of the domain, and to one of the ledger."""
    statement = """
    SELECT count(*), count(DISTINCT event_id),
           (SELECT count(*) FROM fencepost.effects WHERE operation = 'fencepost.message' AND state = 'succeeded') FROM orders
    """
    with psycopg.connect(url) as connection:
        row = connection.execute(statement).fetchone()
    if row != (rows, rows, rows):
        raise BenchmarkFailed(f"rows, distinct ones and those of the ledger are {row} for {rows} messages")


def peak_mib(lab: Lab, url: str, topic: str, *, group: str, seconds: float) -> dict[str, Any]:
    """How large a consumer has ever been after some seconds with a slow handler and a topic that stays full."""
    with ConsumerProcess(lab, url, topic, handlers="slow", group=group) as consumer:
        looks = _Looks(consumer, "handled")
        while looks.done == 0:
            looks.look()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            looks.look()
        return {"peak_rss_mib": _high_water_mib(consumer), "messages_per_second": looks.rate()}


def _high_water_mib(consumer: Service) -> float:
    """The kernel's own high water, which misses no moment; what there is now, where it keeps none."""
    status = Path(f"/proc/{consumer.pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [int(line.split()[1]) / _KIB_A_MIB for line in lines if line.startswith("VmHWM:")]
    return found[0] if found else consumer.rss_mib()
