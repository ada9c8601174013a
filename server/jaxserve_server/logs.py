"""Log lines: text for people, or one JSON object each."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


class TextFormatter(logging.Formatter):
    """`time level message key=value ...`; control characters escaped: nobody forges lines."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = f"{when} {record.levelname:<7} {_escaped(record.getMessage() + fields)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line: ts, level, logger, message, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(log_format: str) -> None:
    """Log jaxserve at INFO and everything else at WARNING, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("jaxserve", "jaxserve_server", "jaxserve_checkpoints"):
        logging.getLogger(name).setLevel(logging.INFO)
    # Clients that speak no HTTP are not our errors.
    logging.getLogger("jaxserve_server.http").setLevel(logging.CRITICAL)
