"""Who may ask: API keys with names, their limits, and the file that they are read from.

A keys file has one key a line, and after it what is special about it::

    # one team a line
    sk-alice-1  name=alice  requests-per-minute=60  tokens-per-minute=100000  concurrency=4
    sk-bob-1    name=bob    cache-salt=bob-3f91    # a prefix cache of its own
    sk-ops-1    name=ops    admin=yes              # may use the admin listener

Fields are separated by spaces; `#` begins a comment at the start of a line or after a space.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from jaxserve.errors import ConfigError
from jaxserve_server.config import ServerConfig
from jaxserve_server.errors import ApiError


@dataclass(frozen=True)
class ApiKey:
    """One key; limits that are None do not limit. The key itself is kept as its digest only."""

    name: str  # for logs and metrics
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompts and outputs together
    concurrency: int | None = None
    cache_salt: str | None = None
    is_admin: bool = False  # may use the admin listener


API_KEY = web.RequestKey("api_key", ApiKey)
_NUMBERS = ("requests-per-minute", "tokens-per-minute", "concurrency")
_NUMBER = re.compile("[1-9][0-9]{0,14}")
_FIELDS = ("name", *_NUMBERS, "cache-salt", "admin")


def read_keys(config: ServerConfig) -> tuple[ApiKey, ...]:
    """Every key that opens the server; none means that no key is asked for.

    Raises ConfigError that names the file and the line, never a key.
    """
    keys = [ApiKey(f"api-key-{i}", _digest(key), is_admin=True) for i, key in enumerate(config.api_key, 1)]
    places = [f"--api-key number {i}" for i in range(1, len(keys) + 1)]
    if config.api_keys_file is not None:
        for number, key in _keys_of_file(config.api_keys_file):
            keys.append(key)
            places.append(f"{config.api_keys_file} line {number}")
    _check_distinct("key", [key.digest for key in keys], places)
    _check_distinct("name", [key.name for key in keys], places)
    if config.admin_port is not None and keys and not any(key.is_admin for key in keys):
        raise ConfigError("--admin-port: no key may use it; one in the keys file needs admin=yes")
    return tuple(keys)


def _check_distinct(what: str, values: Sequence[bytes | str], places: Sequence[str]) -> None:
    seen: dict[bytes | str, str] = {}
    for value, place in zip(values, places, strict=True):
        if value in seen:
            raise ConfigError(f"{place}: the same {what} as {seen[value]}")
        seen[value] = place


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _keys_of_file(path: str) -> Iterator[tuple[int, ApiKey]]:
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()  # editors may begin a file with a BOM
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--api-keys-file: {path} cannot be read: {reason}") from None
    has_key = False
    for number, line in enumerate(lines, 1):
        words = list(_words(line))
        if not words:
            continue
        has_key = True
        try:
            yield number, _key(words[0], words[1:], f"line-{number}")
        except ValueError as error:
            raise ConfigError(f"{path} line {number}: {error}") from None
    if not has_key:
        raise ConfigError(f"{path} holds no key")


def _words(line: str) -> Iterator[str]:
    for word in line.split():
        if word.startswith("#"):
            return
        yield word


def _key(key: str, words: Iterable[str], default_name: str) -> ApiKey:
    """Raises ValueError; a word that is no field may be a key, so it is never shown."""
    fields: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in _FIELDS:
            raise ValueError(f"after the key come fields of the form name=value: {', '.join(_FIELDS)}")
        if name in fields:
            raise ValueError(f"{name} is given twice")
        if not value:
            raise ValueError(f"{name} has no value")
        if name in _NUMBERS and not _NUMBER.fullmatch(value):
            raise ValueError(f"{name} must be a whole number of at least 1")
        if name == "admin" and value not in ("yes", "no"):
            raise ValueError("admin must be yes or no")
        fields[name] = value
    numbers = {name.replace("-", "_"): int(fields[name]) for name in _NUMBERS if name in fields}
    return ApiKey(
        fields.get("name", default_name),
        _digest(key),
        cache_salt=fields.get("cache-salt"),
        is_admin=fields.get("admin") == "yes",
        **numbers,
    )


def find_key(keys: Iterable[ApiKey], authorization: str) -> ApiKey:
    """The key that the Authorization header holds; raises a 401.

    `Bearer KEY`, or Basic with the key as the password and any user name, which is what browsers can send.
    """
    scheme, _, given = authorization.partition(" ")
    is_basic = scheme.lower() == "basic"
    digest = _digest(_password(given) if is_basic else given.strip())
    found = None
    for key in keys:  # all are compared, and digests of one length: the time tells nothing
        if hmac.compare_digest(key.digest, digest):
            found = key
    if found is None or not (is_basic or scheme.lower() == "bearer"):
        raise ApiError(
            401,
            "a valid API key is needed: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return found


def _password(credentials: str) -> str:
    """Of Basic credentials; empty, which is no key, where they are none."""
    try:
        decoded = base64.b64decode(credentials.strip(), validate=True)
    except (binascii.Error, ValueError):
        return ""
    return decoded.decode("utf-8", "surrogateescape").partition(":")[2]


def cache_salt_of(request: web.Request, own: str | None) -> str | None:
    """What the prefix cache is split by: the request's own salt, and its key's.

    With a salt for each key, nobody learns from the time to the first token what others have asked.
    """
    key = request.get(API_KEY)
    if key is None or key.cache_salt is None:
        # A salt that a client sends is never one that a key's salt is part of.
        return own if own is None or not own.startswith("key:") else f"own:{own}"
    return "key:" + json.dumps([key.cache_salt, own])
