"""What the server is told at start: one field per command-line flag."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.sampling_params import MAX_STOP_STRINGS

DEFAULT_STOP_STRINGS = 4  # of a request

# A scheme, a host, maybe a port, as browsers write it: no path, nothing in upper case.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/:@?#A-Z]+)(:\d{1,5})?")


def _flag(default: Any, help_text: str, **extra: Any) -> Any:
    """A dataclass field whose metadata the command line turns into a flag."""
    return field(default=default, metadata={"help": help_text, **extra})


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP side of `jaxserve serve`; the engine's side is `jaxserve.EngineArgs`."""

    host: str = _flag("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = _flag(8000, "port to listen on; 0 picks a free one and prints it", metavar="PORT")
    served_model_name: tuple[str, ...] = _flag(
        (), "the name that requests use, in place of MODEL; repeatable, the first is the default"
    )
    api_key: tuple[str, ...] = _flag(
        (),
        "a key that clients must send as `Authorization: Bearer KEY`; give the flag once for each key",
        metavar="KEY",
    )
    api_keys_file: str | None = _flag(
        None,
        "a file with one key a line, and after it `name=` for the log and the key's limits: "
        "`requests-per-minute=` `tokens-per-minute=` `concurrency=` `cache-salt=` `admin=yes`; "
        "# begins a comment",
        metavar="FILE",
    )
    metrics_without_key: bool = _flag(False, "answer /metrics without a key, as the probes are")
    allowed_origins: tuple[str, ...] = _flag(
        (),
        "a web origin that browsers may call from, such as https://example.org, or *; repeatable",
        metavar="ORIGIN",
    )
    root_path: str = _flag(
        "", "serve every route under this prefix too, such as /llm behind a proxy", metavar="PREFIX"
    )
    ssl_certfile: str | None = _flag(None, "PEM certificate chain; serves HTTPS", metavar="FILE")
    ssl_keyfile: str | None = _flag(
        None, "PEM private key of --ssl-certfile, when it is in another file", metavar="FILE"
    )
    admin_port: int | None = _flag(
        None,
        "also listen on this port of the loopback interface for /reset_prefix_cache and /server_info; "
        "0 picks a free one and prints it; with keys, for those of --api-key and those with admin=yes",
        metavar="PORT",
    )
    max_stop_strings: int = _flag(
        DEFAULT_STOP_STRINGS,
        f"strings that `stop` of a request may list, up to {MAX_STOP_STRINGS}; OpenAI's API takes 4",
    )
    request_timeout: float | None = _flag(
        None,
        "seconds that a request may take, waiting included, before it is stopped with an error "
        "(default: no limit)",
        metavar="SECONDS",
    )
    step_timeout: float = _flag(
        600.0,
        "seconds that one step of the engine may take before the server counts as dead and ends; "
        "compiling is not counted",
        metavar="SECONDS",
    )
    drain_timeout: float = _flag(
        30.0,
        "seconds that running requests get to finish after SIGTERM before they are ended with an error",
        metavar="SECONDS",
    )
    log_format: str = _flag("text", "log lines as text or as one JSON object each", choices=("text", "json"))
    log_requests: bool = _flag(
        False, "log one line per request: route, status, token counts, time; never prompts or outputs"
    )
    otlp_traces_endpoint: str | None = _flag(
        None,
        "send a trace of each request there, such as http://collector:4318/v1/traces; "
        "needs the extra otel (pip install '.[otel]')",
        metavar="URL",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in 0..65535, not {self.port}")
        if self.admin_port is not None and not 0 <= self.admin_port <= 65535:
            raise ConfigError(f"admin_port must be in 0..65535, not {self.admin_port}")
        if not 0 <= self.drain_timeout < math.inf:
            raise ConfigError(f"drain_timeout must not be negative, not {self.drain_timeout}")
        if not 1 <= self.max_stop_strings <= MAX_STOP_STRINGS:
            raise ConfigError(
                f"max_stop_strings must be in 1..{MAX_STOP_STRINGS}, not {self.max_stop_strings}"
            )
        for name in ("request_timeout", "step_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConfigError(f"{name} must be above 0, not {seconds}")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins: {origin!r} is neither * nor an origin such as https://example.org"
                )
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path must begin with /, not {self.root_path!r}")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("ssl_keyfile needs --ssl-certfile")
        for name in ("api_key", "served_model_name"):
            if not all(getattr(self, name)):
                raise ConfigError(f"{name} must not be empty")
