"""Named SQL: reads ``-- name: x`` blocks from the .sql file beside a store, so that SQL lives as SQL."""

from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

__all__ = ["load_statements"]

_MARK = "-- name: "


def load_statements(package: str, filename: str) -> Mapping[str, str]:
    """The statements of ``filename`` in ``package``, by name, comments kept (they show in pg_stat_activity).

    Raises ``ValueError`` for a name given twice or a block without SQL.
    """
    text = files(package).joinpath(filename).read_text(encoding="utf-8")
    statements: dict[str, str] = {}
    for block in text.split(_MARK)[1:]:
        name, _, body = block.partition("\n")
        if name in statements or not body.strip():
            raise ValueError(f"{filename}: statement {name!r} is empty or named twice")
        statements[name.strip()] = f"-- fencepost:{name.strip()}\n{body.strip().rstrip(';')}"
    return MappingProxyType(statements)
