"""How the clients of one program reach the brokers: addresses, credentials, the prefix of names, and what a refusal means.

Everything that is sent has the prefix, everything that a program sees has not.
"""

import re
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from replayground.schemas.errors import BadInput, LogUnavailable, NotAllowed, ReplaygroundError
from replayground.schemas.programs import OPERATOR
from replayground.schemas.run import LogSettings, SecuritySettings
from replayground.schemas.secrets import for_program, read_secret

ASK_SECONDS = 20.0
_TRY_SECONDS = 1.0
_TRIES_WHEN_REFUSED = 2
"a broker that dies during a handshake looks like one that refuses us: one of the others must refuse us too"

_AUTHENTICATION_ERRORS = {KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError.SASL_AUTHENTICATION_FAILED}
_AUTHORIZATION_ERRORS = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
}


class AuthenticationFailures:
    """Remembers an authentication failure. librdkafka reports it only in a callback and keeps retrying."""

    def __init__(self) -> None:
        self.newest: KafkaError | None = None

    def note(self, error: KafkaError) -> None:
        if error.code() in _AUTHENTICATION_ERRORS:
            self.newest = error


class Connection:
    """The settings of every client of one program."""

    def __init__(self, log: LogSettings, program: str) -> None:
        _require_prefix(log.topic_prefix)
        self.log = log
        self.program = program
        self._prefix = log.topic_prefix

    def name(self, plain: str) -> str:
        """A topic, group or transactional id as the brokers know it."""
        return self._prefix + plain

    def plain(self, name: str) -> str:
        """A topic as programs know it."""
        return name[len(self._prefix) :]

    def settings(self, refusals: AuthenticationFailures) -> dict[str, Any]:
        """What every client of librdkafka is given. Reads the password: call it when a client is made."""
        return {
            "bootstrap.servers": self.log.bootstrap_servers,
            # librdkafka prints a line at every failed connection, 20 in a second. A command ends by one that says the same.
            "log_level": 2 if self.program == OPERATOR else 3,
            "socket.keepalive.enable": True,
            "error_cb": refusals.note,
            **self._security(),
        }

    def _security(self) -> dict[str, str]:
        security = self.log.security
        found = {
            "security.protocol": security.protocol,
            "ssl.ca.location": for_program(security.ca_file, self.program),
            "ssl.certificate.location": for_program(security.certificate_file, self.program),
            "ssl.key.location": for_program(security.key_file, self.program),
        }
        if security.protocol.startswith("sasl"):
            found["sasl.mechanism"] = security.mechanism
            found["sasl.username"] = self.user
            found["sasl.password"] = self.password()
        return {name: value for name, value in found.items() if value}

    @property
    def user(self) -> str:
        return for_program(self.log.security.username, self.program)

    def password(self) -> str:
        """Raises BadInput when it is not where the settings say."""
        return read_secret(self.log.security.password, self.program, "password in [log.security]")

    def error(self, error: KafkaError, doing: str) -> ReplaygroundError:
        """A broker's error as the exception that programs handle."""
        if error.code() in _AUTHORIZATION_ERRORS:
            return NotAllowed(
                f"program {self.program} as {self._who()} is not allowed to {doing}: {error.str()}. Apply the ACLs that "
                "`replayground acls` prints, or correct the username in [log.security]"
            )
        return LogUnavailable(f"cannot {doing}: {error}")

    def require_known(self, admin: AdminClient, refusals: AuthenticationFailures) -> None:
        """Returns when the brokers answer this client. Raises NotAllowed soon when they do not accept who it is, and
        LogUnavailable after a while when they do not answer."""
        until = time.monotonic() + ASK_SECONDS
        refused = 0
        while True:
            try:
                admin.list_topics(timeout=_TRY_SECONDS)
                return
            except KafkaException as error:
                admin.poll(0)  # serves the callback
                refused += refusals.newest is not None
                if refusals.newest is not None and refused >= _TRIES_WHEN_REFUSED:
                    raise NotAllowed(
                        f"the brokers at {self.log.bootstrap_servers} do not accept program {self.program} as {self._who()}: "
                        f"{refusals.newest.str()}. Check [log.security]: protocol, ca_file, mechanism, username, password"
                    ) from error
                if time.monotonic() > until:
                    raise LogUnavailable(
                        f"the brokers at {self.log.bootstrap_servers} do not answer: {error}"
                    ) from error

    def _who(self) -> str:
        return f"user {self.user}" if self.user else "nobody (no username is set)"


class BrokerClient:
    """A client for metadata requests. After a failed request the next one uses a new client: librdkafka can lose all its
    brokers when one that is starting reports an empty cluster."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._client: AdminClient | None = None

    @contextmanager
    def client(self) -> Iterator[AdminClient]:
        """Raises NotAllowed and LogUnavailable."""
        try:
            if self._client is None:
                refusals = AuthenticationFailures()
                client = AdminClient(self._connection.settings(refusals))
                self._connection.require_known(client, refusals)
                self._client = client
            yield self._client
        except LogUnavailable:
            self._client = None
            raise

    def require_known(self) -> None:
        """Checks again whether the brokers accept this program's credentials."""
        self._client = None
        with self.client():
            pass


def ssl_context(security: SecuritySettings, program: str) -> ssl.SSLContext | None:
    """For clients that are not librdkafka; None where nothing is encrypted."""
    if not security.protocol.endswith("ssl"):
        return None
    try:
        context = ssl.create_default_context(cafile=for_program(security.ca_file, program) or None)
        if security.certificate_file:
            files = for_program(security.certificate_file, program), for_program(security.key_file, program) or None
            context.load_cert_chain(*files)
    except OSError as error:
        raise BadInput(f"a file of [log.security] cannot be used: {error}") from error
    return context


def _require_prefix(prefix: str) -> None:
    if prefix and not re.fullmatch(r"[A-Za-z0-9._-]{0,99}[._-]", prefix):
        raise BadInput(
            f"topic_prefix {prefix!r} cannot be used: letters, digits, '.', '_' and '-' are, 100 at most, and it ends with one "
            "of the last three, so that no prefix looks like the beginning of another name"
        )
