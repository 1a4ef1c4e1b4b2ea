"""The service's log on standard error: lines of JSON, or of text for people."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from compiled_mtp.server.config import ServerConfig

# Lines of other packages below this level are not ours to show: torch logs counters at exit.
_OTHERS = logging.WARNING
_OWN = ("compiled_mtp", "uvicorn")


def start_log(config: ServerConfig) -> None:
    """Send records to standard error in the form and from the level that `config` names."""
    is_text = config.log_format == "text" or (config.log_format == "auto" and sys.stderr.isatty())
    level = getattr(logging, config.log_level.upper())
    logging.basicConfig(level=max(level, _OTHERS), handlers=[TextLog() if is_text else JsonLog()])
    for name in _OWN:
        logging.getLogger(name).setLevel(level)


class JsonLog(logging.StreamHandler[Any]):
    """Writes every record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a message that is a JSON object, as in the access log, becomes part of it."""
        message = record.getMessage()
        line: dict[str, Any] = {"level": record.levelname, "logger": record.name}
        line |= _fields_of(message) or {"message": message}
        if record.exc_info:
            line["traceback"] = logging.Formatter().formatException(record.exc_info)
        return json.dumps({"time": round(record.created, 3), **line})


class TextLog(logging.StreamHandler[Any]):
    """Writes records for people: the time, the level unless it is INFO, the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; the fields of the access log in the order in which a reader looks for them."""
        message = record.getMessage()
        if fields := _fields_of(message):
            known = ("method", "path", "status", "seconds", "request_id")
            method, path, status, seconds, request_id = (fields.pop(name, "-") for name in known)
            fields.pop("first_byte_s", None)
            rest = f" {json.dumps(fields)}" if fields else ""
            message = f"{method} {path} {status} in {seconds} s ({request_id}){rest}"
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {level}{message}"
        if record.exc_info:
            line += f"\n{logging.Formatter().formatException(record.exc_info)}"
        return line


def _fields_of(message: str) -> dict[str, Any] | None:
    """Return the object that a message is, None for other messages."""
    if not message.startswith("{"):
        return None
    try:
        found: dict[str, Any] = json.loads(message)
    except ValueError:
        return None
    return found
