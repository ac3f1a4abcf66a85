"""Streams: what a crowd of idle ones costs, how fast one is drained, and how soon a stored chunk reaches its client."""

import time
from statistics import median
from typing import Any, Final

import psutil
import psycopg

from benchmarks import stream_rows
from benchmarks.lab import BenchmarkFailed, Lab, Worker, cpu_seconds
from benchmarks.measure import summary_ms
from benchmarks.report import Report
from fencepost.devservices import free_port

__all__ = ["streams"]

_TENANT: Final = "bench"
_RATE: Final = 100.0
_BUSY: Final = 20
_CHUNK_BYTES: Final = 100
_SETTLE_SECONDS: Final = 2.0
_MIB: Final = 1024 * 1024


def streams(lab: Lab, *, repeats: int, seconds: float, count: int, rows: int) -> Report:
    """One server for all. ``count`` idle streams stay open while twenty others get chunks; ``rows`` chunks are drained."""
    report = Report(benchmark="streams", machine=lab.machine())
    port = free_port()
    with (
        lab.database() as url,
        psycopg.connect(url, autocommit=True) as connection,
        lab.worker("stream_server", database_url=url, port=port, streams=count + 2 * _BUSY) as server,
    ):
        with lab.worker("stream_clients", port=port, streams=_BUSY, prefix="warm"):
            before = _rss(server)
        with lab.worker("stream_clients", port=port, streams=count, prefix="idle") as idle:
            time.sleep(_SETTLE_SECONDS)
            report.figures[f"idle_{count}_streams"] = _idle(server, before, seconds, count)
            delays = _delays(lab, url, connection, port, seconds=seconds * repeats)
            idle.run()
        report.figures["chunk_to_client_ms"] = {"rate_per_second": _RATE, "streams": count + _BUSY, **summary_ms(delays)}
        rates = [_drain(lab, connection, port, rows, f"drain{number}") for number in range(repeats)]
        report.figures["drain"] = {
            "chunks": rows, "chunk_bytes": _CHUNK_BYTES, "chunks_per_second": median(rates), "least": min(rates), "most": max(rates)
        }  # fmt: skip
    return report


def _rss(server: Worker) -> float:
    return float(psutil.Process(server.pid).memory_info().rss) / _MIB


def _idle(server: Worker, before: float, seconds: float, count: int) -> dict[str, float]:
    """Memory beyond that of a server without them, and the share of a core."""
    began, cpu = time.monotonic(), cpu_seconds(server.pid)
    time.sleep(seconds)
    share = (cpu_seconds(server.pid) - cpu) / (time.monotonic() - began)
    grown = _rss(server) - before
    return {"rss_mib": grown, "rss_kib_each": grown * 1024 / count, "cpu_share_of_one_core": share}


def _delays(lab: Lab, url: str, connection: "psycopg.Connection[Any]", port: int, *, seconds: float) -> list[float]:
    """Milliseconds from publishing to arrival, beside the idle crowd."""
    known = set(stream_rows.lineages(connection))
    with lab.worker("stream_clients", port=port, streams=_BUSY, prefix="busy") as busy:
        roots = [root for root in stream_rows.lineages(connection) if root not in known]
        for root in roots:
            stream_rows.begin(connection, _TENANT, root, chunks=0, data=b"")
        parameters = {"database_url": url, "tenant": _TENANT, "roots": roots, "rate": _RATE, "seconds": seconds}
        with lab.worker("stream_publisher", padding="x" * _CHUNK_BYTES, **parameters) as publisher:
            stored: int = publisher.run()
        delays: list[float] = busy.run()
    if len(delays) != stored:
        raise BenchmarkFailed(f"{stored} chunks were stored and {len(delays)} arrived")
    return [delay * 1_000 for delay in delays]


def _drain(lab: Lab, connection: "psycopg.Connection[Any]", port: int, rows: int, key: str) -> float:
    """Chunks a second of one stream, from the request to its result."""
    known = set(stream_rows.lineages(connection))
    with lab.worker("stream_clients", port=port, streams=1, prefix=f"{key}-") as starter:
        starter.run()
    (root,) = (root for root in stream_rows.lineages(connection) if root not in known)
    stream_rows.begin(connection, _TENANT, root, chunks=rows, data=b'"' + b"x" * (_CHUNK_BYTES - 2) + b'"')
    stream_rows.finish(connection, root)
    with lab.worker("stream_drain", port=port, key=f"{key}-0") as drain:
        found: dict[str, float] = drain.run()
    if found["chunks"] != rows:
        raise BenchmarkFailed(f"{rows} chunks were stored and {found['chunks']:g} arrived")
    return found["chunks"] / found["seconds"]
