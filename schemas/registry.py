"""Schema registries: a client of the Confluent API, and a registry in memory for the in-memory log.

Ids and schemas are cached, so a registry that is down does not stop a program that already knows its schemas.
"""

import json
import time
from typing import Any, Protocol

import httpx2
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from replayground.schemas.errors import BadInput, LogUnavailable, NotAllowed
from replayground.schemas.run import SecuritySettings
from replayground.schemas.secrets import for_program, read_secret

# Every version reads every other one: replay reads events of any age.
COMPATIBILITY = "FULL_TRANSITIVE"
_SCHEMA_NOT_FOUND = 40403
"error code of the API. HTTP status 404 alone may also mean a wrong address, which says nothing about the schema"
_RESTART_SECONDS_MIN = 3.0
"a registry needs at least this long from its end until it answers again"
# For a registry that has just started and still reads its schemas back.
_SETTLE_SECONDS = 2.0

_NOT_ALLOWED = {401, 403}
_CONFLICT = 409


class Registry(Protocol):
    """Maps schemas to ids and back. The first request for a schema or an id blocks on the network.

    Raises LogUnavailable when the registry is needed and does not answer, KeyError for an id without an Avro schema.
    """

    def id_of(self, subject: str, schema: dict[str, Any]) -> int: ...

    def schema_of(self, schema_id: int) -> dict[str, Any]: ...

    def close(self) -> None: ...


class ConfluentRegistry:
    """A client of any registry with the Confluent API."""

    def __init__(
        self,
        url: str,
        security: SecuritySettings = SecuritySettings(),  # noqa: B008 - it is frozen
        program: str = "operator",
        subject_prefix: str = "",
    ) -> None:
        self._client = SchemaRegistryClient({"url": url, "timeout": 20, **_security(security, program)})
        self._subject_prefix = subject_prefix
        self._ids: dict[tuple[str, str], int] = {}
        self._schemas: dict[int, dict[str, Any]] = {}
        self._settled_at = float("-inf")

    def require_compatibility(self) -> None:
        """Sets the compatibility rule for the whole registry. Raises LogUnavailable, NotAllowed."""
        self._request(lambda: self._client.set_compatibility(level=COMPATIBILITY))

    def require_compatibility_of_known(self) -> None:
        """Sets the rule only for subjects that this client registered, for a registry that others use too."""
        for subject in sorted({subject for subject, _ in self._ids}):
            self._request(lambda subject=subject: self._client.set_compatibility(subject, COMPATIBILITY))

    def id_of(self, subject: str, schema: dict[str, Any]) -> int:
        subject = self._subject_prefix + subject
        text = json.dumps(schema)
        known = self._ids.get((subject, text))
        if known is not None:
            return known
        # Registering a schema again returns the id that it has.
        schema_id: int = self._request(lambda: self._client.register_schema(subject, Schema(text, "AVRO")))
        self._ids[subject, text] = schema_id
        # So that events of this release are decoded without asking the registry.
        self._schemas.setdefault(schema_id, schema)
        return schema_id

    def schema_of(self, schema_id: int) -> dict[str, Any]:
        if schema_id not in self._schemas:
            try:
                self._schemas[schema_id] = self._fetch(schema_id)
            except KeyError:
                # A registry that has just started answers "not found" for schemas that it has not read back yet.
                # Believed too early, a good message would be rejected for good.
                if not self._settle():
                    raise
                self._schemas[schema_id] = self._fetch(schema_id)
        return self._schemas[schema_id]

    def _fetch(self, schema_id: int) -> dict[str, Any]:
        schema: Schema = self._request(lambda: self._client.get_schema(schema_id))
        # A JSON or Protobuf schema is never one of our events: unknown, not an error.
        if schema.schema_type != "AVRO":
            raise KeyError(f"{schema_id} is of type {schema.schema_type}")
        fetched: dict[str, Any] = json.loads(schema.schema_str or "null")
        return fetched

    def _settle(self) -> bool:
        """Waits for a registry that may have just started to read its schemas back. Blocks for _SETTLE_SECONDS. False
        when it cannot have restarted since the last wait: its answer is final. Raises LogUnavailable."""
        # Two requests closer together than the shortest restart saw the same process.
        if time.monotonic() - self._settled_at < _RESTART_SECONDS_MIN:
            self._settled_at = time.monotonic()
            return False
        time.sleep(_SETTLE_SECONDS)
        # If even a subject that this client registered is missing, the registry is not complete yet.
        subjects = set(self._request(self._client.get_subjects))
        if not subjects.issuperset(subject for subject, _ in self._ids):
            raise LogUnavailable("the schema registry has not yet read back schemas that were registered")
        self._settled_at = time.monotonic()
        return True

    def close(self) -> None:
        # The client has no close(); this is its only way to close connections.
        self._client.__exit__()  # type: ignore[no-untyped-call]

    def _request(self, question: Any) -> Any:
        """Raises KeyError, NotAllowed, BadInput or LogUnavailable instead of what the client raises."""
        try:
            return question()
        except SchemaRegistryError as error:
            if error.error_code == _SCHEMA_NOT_FOUND:
                raise KeyError(str(error)) from error
            if error.http_status_code in _NOT_ALLOWED:
                raise NotAllowed(
                    f"the schema registry refuses this program: {error}. Check registry_username and registry_password "
                    "in [log.security]"
                ) from error
            # Incompatible with what is registered. A retry would fail the same way.
            if error.http_status_code == _CONFLICT:
                raise BadInput(
                    f"the schema registry holds other schemas under our subjects: {error}. It is the registry of "
                    "another log, or of another release: correct registry_url in [log]"
                ) from error
            raise LogUnavailable(f"the schema registry refused: {error}") from error
        except (httpx2.HTTPError, OSError) as error:
            raise LogUnavailable(f"the schema registry does not answer: {error}") from error


def _security(security: SecuritySettings, program: str) -> dict[str, str]:
    found: dict[str, str] = {}
    if security.registry_ca_file:
        found["ssl.ca.location"] = for_program(security.registry_ca_file, program)
    if security.registry_username:
        password = read_secret(security.registry_password, program, "registry_password in [log.security]")
        found["basic.auth.user.info"] = f"{for_program(security.registry_username, program)}:{password}"
    return found


class MemoryRegistry:
    """A registry in one process. Ids count from 1, in the order of registration. Checks no compatibility."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._schemas: dict[int, dict[str, Any]] = {}

    def id_of(self, subject: str, schema: dict[str, Any]) -> int:
        # By content, whatever the subject: as in Confluent's registry, equal schemas share one id.
        schema_id = self._ids.setdefault(json.dumps(schema, sort_keys=True), len(self._ids) + 1)
        self._schemas.setdefault(schema_id, schema)
        return schema_id

    def schema_of(self, schema_id: int) -> dict[str, Any]:
        return self._schemas[schema_id]

    def close(self) -> None:
        """Does nothing: there is no connection."""
