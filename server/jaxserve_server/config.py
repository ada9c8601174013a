"""What the server is told at start: one field per command-line flag."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError


def _flag(default: Any, help_text: str, **extra: Any) -> Any:
    """A dataclass field whose metadata the command line turns into a flag."""
    return field(default=default, metadata={"help": help_text, **extra})


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP side of `jaxserve serve`; the engine's side is `jaxserve.EngineArgs`."""

    host: str = _flag("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = _flag(8000, "port to listen on; 0 picks a free one and prints it")
    served_model_name: tuple[str, ...] = _flag(
        (), "the name that requests use, in place of MODEL; repeatable, the first is the default"
    )
    api_key: tuple[str, ...] = _flag(
        (), "a key that clients must send as `Authorization: Bearer KEY`; give the flag once for each key"
    )
    api_keys_file: str | None = _flag(
        None, "a file with one key a line (empty lines and lines that begin with # are skipped)"
    )
    allowed_origins: tuple[str, ...] = _flag(
        (), "a web origin that browsers may call from, such as https://example.org, or *; repeatable"
    )
    root_path: str = _flag("", "serve every route under this prefix too, such as /llm behind a proxy")
    ssl_certfile: str | None = _flag(None, "PEM certificate chain; serves HTTPS")
    ssl_keyfile: str | None = _flag(None, "PEM private key of --ssl-certfile, when it is in another file")
    drain_timeout: float = _flag(
        30.0, "seconds that running requests get to finish after SIGTERM before they are ended with an error"
    )
    log_format: str = _flag("text", "log lines as text or as one JSON object each", choices=("text", "json"))
    log_requests: bool = _flag(
        False, "log one line per request: route, status, token counts, time; never prompts or outputs"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in 0..65535, not {self.port}")
        if self.drain_timeout < 0:
            raise ConfigError(f"drain_timeout must not be negative, not {self.drain_timeout}")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path must begin with /, not {self.root_path!r}")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("ssl_keyfile needs ssl_certfile")
        if not all((*self.api_key, *self.served_model_name)):
            raise ConfigError("api_key and served_model_name must not be empty")

    def keys(self) -> tuple[bytes, ...]:
        """Every key that opens the server; empty means that no key is asked for."""
        keys = list(self.api_key)
        if self.api_keys_file is not None:
            lines = [line.strip() for line in Path(self.api_keys_file).read_text("utf-8").splitlines()]
            from_file = [line for line in lines if line and not line.startswith("#")]
            if not from_file:
                raise ConfigError(f"{self.api_keys_file} holds no key")
            for number, key in enumerate(lines, 1):
                if len(key.split()) > 1 and not key.startswith("#"):
                    raise ConfigError(f"{self.api_keys_file} line {number}: one key a line, nothing else")
            keys += from_file
        return tuple(key.encode() for key in keys)
