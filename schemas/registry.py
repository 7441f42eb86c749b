"""Schema registries: one that speaks the Confluent API, and one in memory that ships with the in-memory log.

Ids are cached in the process: a registry that is down does not stop a program that knows its schemas.
"""

import json
import time
from typing import Any, Protocol

import httpx2
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from schemas.errors import BadInput, LogUnavailable, NotAllowed
from schemas.run import SecuritySettings
from schemas.secrets import for_program, read_secret

COMPATIBILITY = "FULL_TRANSITIVE"
_SCHEMA_NOT_FOUND = 40403
"the API's own code: a bare 404 may as well come from a wrong address, and then nothing is known of the schema"
_RESTART_SECONDS_MIN = 3.0
"no registry is killed and answers again within this time"
_SETTLE_SECONDS = 2.0


_NOT_ALLOWED = {401, 403}
_CONFLICT = 409


class Registry(Protocol):
    """Knows the id of every schema. May block on the network the first time a schema or id is asked for.

    Raises LogUnavailable when it must ask and nobody answers, KeyError for an id under which no Avro schema is registered.
    """

    def id_of(self, subject: str, schema: dict[str, Any]) -> int: ...

    def schema_of(self, schema_id: int) -> dict[str, Any]: ...

    def close(self) -> None: ...


class ConfluentRegistry:
    """Any registry with the Confluent API, by URL."""

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
        """Sets the global rule: replay reads events of any age, so no version may break any other."""
        self._request(lambda: self._client.set_compatibility(level=COMPATIBILITY))

    def require_compatibility_of_known(self) -> None:
        """Sets the rule for the subjects that were registered through this client, on a registry that others use too."""
        for subject in sorted({subject for subject, _ in self._ids}):
            self._request(lambda subject=subject: self._client.set_compatibility(subject, COMPATIBILITY))

    def id_of(self, subject: str, schema: dict[str, Any]) -> int:
        subject = self._subject_prefix + subject
        text = json.dumps(schema)
        known = self._ids.get((subject, text))
        if known is not None:
            return known
        schema_id: int = self._request(lambda: self._client.register_schema(subject, Schema(text, "AVRO")))
        self._ids[subject, text] = schema_id
        self._schemas.setdefault(schema_id, schema)
        return schema_id

    def schema_of(self, schema_id: int) -> dict[str, Any]:
        if schema_id not in self._schemas:
            try:
                self._schemas[schema_id] = self._fetch(schema_id)
            except KeyError:
                if not self._settle():
                    raise
                self._schemas[schema_id] = self._fetch(schema_id)
        return self._schemas[schema_id]

    def _fetch(self, schema_id: int) -> dict[str, Any]:
        schema: Schema = self._request(lambda: self._client.get_schema(schema_id))
        if schema.schema_type != "AVRO":
            raise KeyError(f"{schema_id} is of type {schema.schema_type}")
        fetched: dict[str, Any] = json.loads(schema.schema_str or "null")
        return fetched

    def _settle(self) -> bool:
        """Gives a registry that may have just started time to read its schemas back, for it answers before it has them
        all. False when it was given that time already, so that it is believed. Raises LogUnavailable."""
        if time.monotonic() - self._settled_at < _RESTART_SECONDS_MIN:
            self._settled_at = time.monotonic()
            return False
        time.sleep(_SETTLE_SECONDS)
        subjects = set(self._request(self._client.get_subjects))
        if not subjects.issuperset(subject for subject, _ in self._ids):
            raise LogUnavailable("the schema registry has not read back the schemas that it was given")
        self._settled_at = time.monotonic()
        return True

    def close(self) -> None:
        self._client.__exit__()  # type: ignore[no-untyped-call]  # its only way to let go of its connections

    def _request(self, question: Any) -> Any:
        try:
            return question()
        except SchemaRegistryError as error:
            if error.error_code == _SCHEMA_NOT_FOUND:
                raise KeyError(str(error)) from error
            if error.http_status_code in _NOT_ALLOWED:
                raise NotAllowed(
                    f"the schema registry refuses this program: {error}. Check registry_username and registry_password in "
                    "[log.security]"
                ) from error
            if error.http_status_code == _CONFLICT:
                raise BadInput(
                    f"the schema registry holds other schemas under our subjects: {error}. It is the registry of another log, "
                    "or of another release: correct registry_url in [log]"
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
    """A registry for one process. Ids count from 1 in the order of registration."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._schemas: dict[int, dict[str, Any]] = {}

    def id_of(self, subject: str, schema: dict[str, Any]) -> int:
        schema_id = self._ids.setdefault(json.dumps(schema, sort_keys=True), len(self._ids) + 1)
        self._schemas.setdefault(schema_id, schema)
        return schema_id

    def schema_of(self, schema_id: int) -> dict[str, Any]:
        return self._schemas[schema_id]

    def close(self) -> None:
        """Nothing to let go of."""
