"""``python -m benchmarks NAME``: run one benchmark, print its tables, write its JSON."""

import argparse
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from benchmarks.acceptance import acceptance
from benchmarks.consumer import consumer
from benchmarks.drain import drain
from benchmarks.jobs import jobs
from benchmarks.lab import BenchmarkFailed, Lab, open_lab
from benchmarks.latency import latency
from benchmarks.memory import memory
from benchmarks.poll import poll
from benchmarks.report import Report
from benchmarks.routes import routes
from benchmarks.soak import soak
from benchmarks.streams import streams
from benchmarks.writers import writers
from fencepost.devservices import ServicesError

_NAIVE_SHARE: Final = 60
# Has services of its own, which it kills and restarts, and an exit code of its own.
_SOAK: Final = "soak"
_QUICK: Final[dict[str, float]] = {"repeats": 1, "rows": 20_000, "large_rows": 40, "seconds": 2.0, "history": 20_000, "claims": 200}
# A history has to be long to mean something.
_FULL: Final[dict[str, float]] = {
    "repeats": 3,
    "rows": 300_000,
    "large_rows": 400,
    "seconds": 8.0,
    "history": 1_000_000,
    "claims": 2_000,
}
# By benchmark and whether it is to be quick, where it differs from the rest.
_OWN: Final[dict[tuple[str, bool], dict[str, float]]] = {
    ("poll", False): {"rows": 1_000_000},
    # The bare loop's larger page takes 24,000 rows at once, and a rate needs several marks.
    ("drain", True): {"rows": 60_000},
    ("acceptance", False): {"repeats": 5, "seconds": 5.0},
    ("jobs", True): {"rows": 2_000},
    ("jobs", False): {"rows": 40_000},
    ("streams", True): {"rows": 2_000, "streams": 50},
    ("streams", False): {"rows": 100_000, "streams": 1_000},
    ("routes", True): {"rows": 20, "seconds": 0.5, "waiters": 50},
    ("routes", False): {"repeats": 9, "rows": 300, "seconds": 1.0, "waiters": 1_000},
    ("consumer", True): {"rows": 10_000},
    ("consumer", False): {"rows": 100_000},
}


def main() -> int:
    """Exit code: 0 when it ran, 1 when a side failed, a service could not be had or the soak found a broken promise."""
    options = _parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if options.benchmark == _SOAK:
            return soak(options)
        with open_lab() as lab:
            report = _BENCHMARKS[options.benchmark](lab, options)
    except (BenchmarkFailed, ServicesError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    report.write(options.json)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("benchmark", choices=sorted([*_BENCHMARKS, _SOAK]))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, figures and ratios to this file")
    parser.add_argument("--repeats", type=int, help="repeats of every side, taken in turn (default: 3; acceptance 5; routes 9)")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run? The numbers mean little")
    rows = (
        "rows of the backlog (default: drain and memory 300,000; poll 1,000,000; jobs 40,000; consumer 100,000); "
        "routes: first requests (300)"
    )
    parser.add_argument("--rows", type=int, help=rows)
    parser.add_argument("--history", type=int, help="jobs: finished and as many future jobs behind a claim (default: 1,000,000)")
    parser.add_argument("--claims", type=int, help="jobs: claims of a repeat, of each database (default: 2,000)")
    parser.add_argument("--large-rows", type=int, help="memory, consumer: rows of 1 MB (default: 400)")
    window = "latency, writers, acceptance, consumer, routes: a window (default: 8; acceptance 5; routes 1)"
    parser.add_argument("--seconds", type=float, help=window)
    parser.add_argument("--concurrency", type=int, help="consumer: one by one and of the bare commits (default: 10)", default=10)
    parser.add_argument("--streams", type=int, help="streams: idle ones that stay open (default: 1,000)")
    parser.add_argument("--waiters", type=int, help="routes: requests that wait at once (default: 1,000)")
    parser.add_argument("--writers", type=int, help="writers: how many (default: 16)", default=16)
    parser.add_argument("--wakeup", choices=["listen", "poll"], default="listen", help="latency: the relay's setting")
    parser.add_argument("--minutes", type=float, help="soak: how long faults go on (default: 3)", default=3.0)
    parser.add_argument("--brokers", type=int, choices=[1, 3], help="soak: how many (default: 1)", default=1)
    parser.add_argument("--seed", type=int, help="soak: of the faults and the writers (default: a new one)")
    options = parser.parse_args()
    defaults = (_QUICK if options.quick else _FULL) | _OWN.get((options.benchmark, options.quick), {})
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def _drain(lab: Lab, options: argparse.Namespace) -> Report:
    return drain(lab, repeats=options.repeats, rows=options.rows, naive_rows=max(options.rows // _NAIVE_SHARE, 500))


def _latency(lab: Lab, options: argparse.Namespace) -> Report:
    return latency(lab, repeats=options.repeats, seconds=options.seconds, writers=(1, 4, 16), wakeup=options.wakeup)


def _writers(lab: Lab, options: argparse.Namespace) -> Report:
    return writers(lab, repeats=options.repeats, seconds=options.seconds, count=options.writers, wakeups=("listen", "poll"))


def _poll(lab: Lab, options: argparse.Namespace) -> Report:
    return poll(lab, repeats=options.repeats, rows=options.rows)


def _memory(lab: Lab, options: argparse.Namespace) -> Report:
    return memory(lab, repeats=options.repeats, rows=options.rows, large_rows=options.large_rows)


def _acceptance(lab: Lab, options: argparse.Namespace) -> Report:
    return acceptance(lab, repeats=options.repeats, seconds=options.seconds)


def _jobs(lab: Lab, options: argparse.Namespace) -> Report:
    return jobs(lab, repeats=options.repeats, rows=options.rows, history=options.history, claims=options.claims)


def _consumer(lab: Lab, options: argparse.Namespace) -> Report:
    chosen = {name: getattr(options, name) for name in ("repeats", "rows", "large_rows", "seconds", "concurrency")}
    return consumer(lab, **chosen)


def _routes(lab: Lab, options: argparse.Namespace) -> Report:
    return routes(lab, repeats=options.repeats, seconds=options.seconds, waiters=options.waiters, rows=options.rows)


def _streams(lab: Lab, options: argparse.Namespace) -> Report:
    return streams(lab, repeats=options.repeats, seconds=options.seconds, count=options.streams, rows=options.rows)


_BENCHMARKS: Final[dict[str, Callable[[Lab, argparse.Namespace], Report]]] = {
    "acceptance": _acceptance,
    "consumer": _consumer,
    "drain": _drain,
    "jobs": _jobs,
    "latency": _latency,
    "memory": _memory,
    "poll": _poll,
    "routes": _routes,
    "streams": _streams,
    "writers": _writers,
}


def _interrupt(_signal_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
