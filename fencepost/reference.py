"""Reference pages of settings and metrics, written from the code so that they cannot drift from it."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from fencepost.settings import ENVIRONMENT_PREFIX

__all__ = ["metrics_page", "settings_page", "write_or_check"]

_DIRECTORY = Path("docs/reference")


def settings_page(title: str, model: type[BaseSettings], *, relations: str) -> str:
    """One row a setting: environment name, default, what it is for; then what is checked between them."""
    lines = [
        f"# {title}",
        "",
        "Written by `scripts/reference` from the code. Each is read from the environment; blanks around values are ignored.",
        "",
        "| name | default | what it is |",
        "|---|---|---|",
    ]
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else "host name" if field.default is PydanticUndefined else f"`{field.default}`"
        lines.append(f"| `{ENVIRONMENT_PREFIX}{name.upper()}` | {default} | {field.description} |")
    return "\n".join([*lines, "", f"Relations that are checked before anything starts: {relations}", ""])


def metrics_page(title: str, registry: CollectorRegistry, *, remarks: str) -> str:
    """One row a metric: name, type, labels, help."""
    lines = [
        f"# {title}",
        "",
        f"Written by `scripts/reference` from the code. Served at `/metrics`. {remarks}",
        "",
        "| name | type | labels | what it says |",
        "|---|---|---|---|",
    ]
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


def write_or_check(pages: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Write the pages below docs/reference, or with --check compare them. 1 if one differs."""
    paths = {_DIRECTORY / name: text for name, text in pages.items()}
    if "--check" in arguments:
        stale = [str(path) for path, text in paths.items() if not path.exists() or path.read_text() != text]
        for name in stale:
            sys.stdout.write(f"{name} is not what the code says; run scripts/reference\n")
        return 1 if stale else 0
    _DIRECTORY.mkdir(parents=True, exist_ok=True)
    for path, text in paths.items():
        path.write_text(text)
    return 0
