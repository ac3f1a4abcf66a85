"""The reference pages of settings and metrics, written from the code so that they cannot drift from it."""

import sys
from pathlib import Path

from prometheus_client import CollectorRegistry
from pydantic_core import PydanticUndefined

from relay.metrics import Metrics
from relay.settings import ENVIRONMENT_PREFIX, RelaySettings

__all__ = ["main", "metrics_page", "settings_page"]


def settings_page() -> str:
    """One row a setting: environment name, default, what it is for."""
    lines = [
        "# Settings of the relay",
        "",
        "Written by `scripts/reference` from the code. Each is read from the environment; blanks around values are ignored.",
        "",
        "| name | default | what it is |",
        "|---|---|---|",
    ]
    for name, field in RelaySettings.model_fields.items():
        default = "required" if field.is_required() else "host name" if field.default is PydanticUndefined else f"`{field.default}`"
        lines.append(f"| `{ENVIRONMENT_PREFIX}{name.upper()}` | {default} | {field.description} |")
    lines += [
        "",
        "Relations that are checked before anything starts: the publish deadline and the lease margin together are shorter than "
        "the lease; the memory budget holds the largest record in flight and one polled.",
        "",
    ]
    return "\n".join(lines)


def metrics_page() -> str:
    """One row a metric: name, type, labels, help."""
    lines = [
        "# Metrics of the relay",
        "",
        "Written by `scripts/reference` from the code. Served at `/metrics`. Topic labels are bounded: from the 201st topic on "
        "they read `(other)`. Gauges of a lane are shown by the relay that holds it.",
        "",
        "| name | type | labels | what it says |",
        "|---|---|---|---|",
    ]
    registry = Metrics(version="0", relay_id="reference").registry
    lines += [_metric_row(*described) for described in sorted(_described(registry))]
    return "\n".join([*lines, ""])


def _described(registry: CollectorRegistry) -> list[tuple[str, str, str, tuple[str, ...]]]:
    return [
        (metric.name, metric.type, metric.documentation, tuple(getattr(collector, "_labelnames", ())))
        for collector in registry._collector_to_names
        for metric in collector.describe()  # type: ignore[attr-defined]
    ]


def _metric_row(name: str, kind: str, documentation: str, labels: tuple[str, ...]) -> str:
    suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}{suffix}` | {kind} | {shown} | {documentation} |"


def main(arguments: list[str]) -> int:
    """Write the pages below docs/reference, or with --check compare them. 1 if one differs."""
    directory = Path("docs/reference")
    pages = {directory / "settings.md": settings_page(), directory / "metrics.md": metrics_page()}
    if "--check" in arguments:
        stale = [str(path) for path, text in pages.items() if not path.exists() or path.read_text() != text]
        for name in stale:
            sys.stdout.write(f"{name} is not what the code says; run scripts/reference\n")
        return 1 if stale else 0
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in pages.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
