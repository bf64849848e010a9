"""API keys: where they are read from, and which caller a presented key belongs to.

Keeps digests alone: no key is kept, logged, shown or repeated in an error. Comparing takes the same
time whichever key is presented. Does not know HTTP; that is `key_guard`.

A file of keys is a YAML or JSON list:

    - name: team-a            # in logs and metrics
      key: sk-...             # or sha256: its digest in hex; then the file holds no secret
      requests_per_s: 50      # this and all below it may be left out
      burst: 100
      tokens_per_min: 200000
      priority: 1
      tenant: team            # its callers share cached prefixes; by default the name
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from deployments.config import AdmissionConfig, ConfigError, nearest_name
from serve_app.callers import ANONYMOUS, Caller

logger = logging.getLogger(__name__)

KEYS_VARIABLE = "CHUNKSERVE_API_KEYS"
"""Keys by commas, each as `key` or `name:key`; a key that holds a colon needs a name."""
CHECK_PERIOD_S = 1.0
"""Between two looks at whether the file has changed."""


NO_KEY = hashlib.sha256(b"").digest()


def digest_of(key: bytes) -> bytes:
    """What is kept of a key. A header carries bytes, so a key is bytes; in files it is UTF-8."""
    return hashlib.sha256(key).digest()


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key's digest and whose it is."""

    digest: bytes = field(repr=False)
    caller: Caller


class Keys(Protocol):
    """Who may call."""

    def find(self, presented: bytes | None) -> Caller | None:
        """Whose key this is; None: nobody's. `presented` is None where a request brought none."""
        ...


class NoKeys:
    """Everybody may call, under one name. See Keys."""

    def find(self, presented: bytes | None) -> Caller | None:
        """See Keys."""
        return ANONYMOUS


class KeyRing:
    """A fixed set of keys. See Keys.

    Raises:
        ConfigError: there is none, one is empty, or a name or a key stands twice.
    """

    def __init__(self, records: Sequence[KeyRecord]) -> None:
        if not records:
            raise ConfigError("there are no API keys in it; leave it out to serve without keys")
        if empty := [record.caller.name for record in records if record.digest == NO_KEY]:
            raise ConfigError(f"the API key of {empty[0]} is empty; give it one or leave it out")
        names = Counter(record.caller.name for record in records)
        if doubled := sorted(name for name, count in names.items() if count > 1):
            raise ConfigError(f"API keys with the same name: {', '.join(doubled)}; rename them")
        by_digest: dict[bytes, str] = {}
        for record in records:
            other = by_digest.setdefault(record.digest, record.caller.name)
            if other != record.caller.name:
                raise ConfigError(f"{other} and {record.caller.name} have the same API key")
        self._records = tuple(records)

    def find(self, presented: bytes | None) -> Caller | None:
        """See Keys. Compares with every key, found or not."""
        if presented is None:
            return None
        digest = digest_of(presented)
        found = None
        for record in self._records:
            if hmac.compare_digest(digest, record.digest):
                found = record.caller
        return found


class KeysFile:
    """The keys of a file and some fixed ones, reread when the file changes. See Keys.

    A file that has become unreadable changes nothing: the keys read before it go on to hold, and
    the log says why.

    Raises:
        ConfigError: the file cannot be used at the start.
    """

    def __init__(self, path: Path, fixed: Sequence[KeyRecord], clock: Callable[[], float]) -> None:
        self._path = path
        self._fixed = fixed
        self._clock = clock
        self._version = self._find_version()
        self._ring = self._read()
        self._check_at_s = clock() + CHECK_PERIOD_S

    def find(self, presented: bytes | None) -> Caller | None:
        """See Keys."""
        self._reread_if_changed()
        return self._ring.find(presented)

    def _reread_if_changed(self) -> None:
        now_s = self._clock()
        if now_s < self._check_at_s:
            return
        self._check_at_s = now_s + CHECK_PERIOD_S
        version = self._find_version()
        if version == self._version:
            return
        self._version = version
        try:
            self._ring = self._read()
        except ConfigError as error:
            logger.error("API keys stay as they were: %s", error)
            return
        logger.info("API keys were read again from %s", self._path)

    def _find_version(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> KeyRing:
        try:
            return KeyRing([*read_keys_file(self._path), *self._fixed])
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from None


def make_keys(
    config: AdmissionConfig, environment: Mapping[str, str], clock: Callable[[], float]
) -> Keys:
    """The keys a service is configured with, of its file and of its environment.

    Raises:
        ConfigError: they cannot be used; never shows a key.
    """
    fixed = parse_key_list(environment[KEYS_VARIABLE]) if KEYS_VARIABLE in environment else []
    if config.keys_file is not None:
        return KeysFile(config.keys_file, fixed, clock)
    if KEYS_VARIABLE not in environment:
        return NoKeys()
    try:
        return KeyRing(fixed)
    except ConfigError as error:
        raise ConfigError(f"${KEYS_VARIABLE}: {error}") from None


def parse_key_list(text: str) -> list[KeyRecord]:
    """The keys of $CHUNKSERVE_API_KEYS. A key without a name is named after its digest, which stays
    the same however the list is ordered.
    """
    records = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, key = item.partition(":") if ":" in item else ("", "", item)
        digest = digest_of(key.encode())
        name = name or f"key-{digest.hex()[:8]}"
        records.append(KeyRecord(digest, Caller(name, salt=name)))
    return records


def read_keys_file(path: Path) -> list[KeyRecord]:
    """The keys of a YAML or JSON list.

    Raises:
        ConfigError: says which entry is at fault and why, without showing what stands there.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text") from None
    except yaml.YAMLError as error:
        # Its own text quotes the line at fault, and a key may stand there.
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            f"is not valid YAML{f' (line {mark.line + 1})' if mark else ''}"
        ) from None
    if not isinstance(data, list):
        raise ConfigError("must be a list of API keys, each with a name and a key or sha256")
    return [_record(item, position) for position, item in enumerate(data, start=1)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.@ -]+$")
    key: SecretStr | None = Field(default=None, min_length=1)
    sha256: SecretStr | None = None
    requests_per_s: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    burst: int | None = Field(default=None, ge=1)
    tokens_per_min: int | None = Field(default=None, ge=1)
    priority: int = Field(default=0, ge=0)
    tenant: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_secret(self) -> _Entry:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("needs either key or sha256")
        self.digest()
        return self

    def digest(self) -> bytes:
        """The digest of the key, computed or given."""
        if self.sha256 is None:
            assert self.key is not None
            return digest_of(self.key.get_secret_value().encode())
        try:
            digest = bytes.fromhex(self.sha256.get_secret_value())
        except ValueError:
            digest = b""
        if len(digest) != hashlib.sha256().digest_size:
            raise ValueError("sha256 must be 64 hexadecimal digits")
        return digest


def _record(data: Any, position: int) -> KeyRecord:
    try:
        entry = _Entry.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"entry {position}: {_explain(error)}") from None
    caller = Caller(
        name=entry.name,
        priority=entry.priority,
        salt=entry.tenant or entry.name,
        requests_per_s=entry.requests_per_s,
        tokens_per_min=entry.tokens_per_min,
        burst=entry.burst,
    )
    return KeyRecord(entry.digest(), caller)


def _explain(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_context=False, include_url=False)[0]
    field_name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        # A key that slipped into the place of a name must not be shown, either.
        return f"has an unknown key; {nearest_name(field_name, list(_Entry.model_fields))}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{field_name}: {message}" if field_name else message
