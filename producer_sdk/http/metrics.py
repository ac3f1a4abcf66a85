"""Every metric of durable routes. Names and labels are an interface; labels are routes and closed sets."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from fencepost.recording import guarded

__all__ = ["RouteMetrics"]

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZES: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500)


class RouteMetrics:
    """One registry a ``Durable``. Methods say what happened; which series that moves is decided here."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._answers = Counter(
            "fencepost_route_answers", "Answers by route and outcome: result, pending, stream or a problem's slug",
            ["route", "outcome", "replayed"], registry=registry)  # fmt: skip
        self._seconds = Histogram(
            "fencepost_route_seconds", "From the request's arrival to its answer, or to its stream's opening",
            ["route"], buckets=_SECONDS, registry=registry)  # fmt: skip
        self._starts = Counter("fencepost_route_starts", "Runs started by route", ["route"], registry=registry)
        self._waiters = Gauge("fencepost_route_waiters", "Requests that wait for their run", registry=registry)
        self._streams = Gauge("fencepost_route_streams", "Open streams", registry=registry)
        self._stream_ends = Counter(
            "fencepost_route_stream_ends", "Ends of streams by route: result, problem, pending, client_gone, slow_client",
            ["route", "end"], registry=registry)  # fmt: skip
        self._frames = Counter(
            "fencepost_route_frames", "Frames by kind: progress, attempt, activity, dropped",
            ["kind"], registry=registry)  # fmt: skip
        self._listening = Gauge("fencepost_route_listening", "1 while the LISTEN connection is up", registry=registry)
        self._read_seconds = Histogram(
            "fencepost_route_read_seconds", "Time of a read of lineages for all who wait: how far their answers lag",
            buckets=_SECONDS, registry=registry)  # fmt: skip
        self._read_size = Histogram(
            "fencepost_route_read_lineages", "Lineages of one read", buckets=_SIZES, registry=registry)  # fmt: skip

        self._answered: dict[tuple[str, str, bool], tuple[Counter, Histogram]] = {}

    @guarded
    def answered(self, route: str, outcome: str, *, replayed: bool, seconds: float) -> None:
        series = self._answered.get((route, outcome, replayed))
        if series is None:
            series = self._answers.labels(route, outcome, str(replayed).lower()), self._seconds.labels(route)
            self._answered[route, outcome, replayed] = series
        series[0].inc()
        series[1].observe(max(seconds, 0.0))

    @guarded
    def started(self, route: str) -> None:
        self._starts.labels(route).inc()

    @guarded
    def waiters(self, number: int) -> None:
        self._waiters.set(number)

    @guarded
    def streams(self, number: int) -> None:
        self._streams.set(number)

    @guarded
    def stream_ended(self, route: str, end: str) -> None:
        self._stream_ends.labels(route, end).inc()

    @guarded
    def frames(self, kind: str, number: int = 1) -> None:
        self._frames.labels(kind).inc(number)

    @guarded
    def listening(self, up: bool) -> None:
        self._listening.set(up)

    @guarded
    def read(self, seconds: float, size: int) -> None:
        self._read_seconds.observe(seconds)
        self._read_size.observe(size)
