"""What the services spend: CPU of the database and the broker, bytes of the write-ahead log."""

from typing import Any

import psycopg

from benchmarks import backlog
from benchmarks.lab import Lab
from benchmarks.measure import each_us

__all__ = ["Meter"]


class Meter:
    """Counts from when it is made."""

    def __init__(self, lab: Lab, connection: "psycopg.Connection[Any]") -> None:
        self._lab = lab
        self._connection = connection
        self._wal = backlog.wal_bytes(connection)
        self._postgres, self._kafka = lab.postgres_cpu(), lab.kafka_cpu()

    def each(self, count: int) -> dict[str, Any]:
        """``postgres_us`` and ``kafka_us``, None where they cannot be seen, and ``wal_bytes``; for each of ``count``."""
        return {
            "postgres_us": each_us(self._postgres, self._lab.postgres_cpu(), count),
            "kafka_us": each_us(self._kafka, self._lab.kafka_cpu(), count),
            "wal_bytes": (backlog.wal_bytes(self._connection) - self._wal) / count,
        }
