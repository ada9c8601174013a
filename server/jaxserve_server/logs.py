"""Log lines: text for people, or one JSON object each. Nothing that a client sends can begin a line."""

from __future__ import annotations

import json
import logging
import re
import sys
import textwrap
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

# Of the HTTP request that is being answered; every line that is written for it carries it.
current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PLAIN = re.compile(r"[^\s\"'=]+")


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    request_id = current_request_id.get()
    known = {} if request_id is None else {"request_id": request_id}
    return {**known, **getattr(record, "fields", {})}


class TextFormatter(logging.Formatter):
    """`time level message key=value ...` in UTC; control characters escaped, tracebacks indented."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        fields = "".join(f" {key}={_shown(str(value))}" for key, value in _fields(record).items())
        line = f"{when} {record.levelname:<7} {_escaped(record.getMessage() + fields)}"
        if not record.exc_info:
            return line
        # An exception's text may hold a client's: no line of it is left to look like ours.
        traceback = "\n".join(map(_escaped, self.formatException(record.exc_info).split("\n")))
        return f"{line}\n{textwrap.indent(traceback, '    ', lambda _: True)}"


def _shown(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else json.dumps(value)


class JsonFormatter(logging.Formatter):
    """One object a line: ts, level, logger, message, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            **_fields(record),
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
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
