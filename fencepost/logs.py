"""JSON logs on standard error: one object a line, keys ``event``, ``level``, ``time`` and the event's own. No row content."""

import logging
import sys

import structlog

__all__ = ["configure_logs"]


def configure_logs(level: str, **bound: str) -> None:
    """Set up structlog, and the standard library's loggers behind it, from warnings on. Every line carries ``bound``."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**bound)
    logging.basicConfig(level=logging.WARNING, handlers=[_ToStructlog()], force=True)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


class _ToStructlog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(record.levelno, "library_log", logger=record.name, message=record.getMessage())
