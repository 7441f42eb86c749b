"""Applies ACLs (schemas.acls) through the brokers' admin interface."""

from collections.abc import Iterable

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from schemas.acls import PREFIXED, Acl
from schemas.programs import OPERATOR
from schemas.run import LogSettings
from streams.log.connection import ASK_SECONDS, BrokerClient, Connection

_RESOURCES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional-id": ResourceType.TRANSACTIONAL_ID,
    "cluster": ResourceType.BROKER,
}
_OPERATIONS = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Create": AclOperation.CREATE,
    "Describe": AclOperation.DESCRIBE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
    "IdempotentWrite": AclOperation.IDEMPOTENT_WRITE,
}


def apply_acls(log: LogSettings, rights: Iterable[Acl]) -> None:
    """Adds these rights; needs credentials that may alter ACLs. Safe to call again. Raises NotAllowed, LogUnavailable."""
    connection = Connection(log, OPERATOR)
    with BrokerClient(connection).client() as admin:
        _create(connection, admin, [_binding(acl) for acl in rights])


def _create(connection: Connection, admin: AdminClient, bindings: list[AclBinding]) -> None:
    for future in admin.create_acls(bindings, request_timeout=ASK_SECONDS).values():
        try:
            future.result()
        except KafkaException as error:
            raise connection.error(error.args[0], "alter ACLs") from error


def _binding(acl: Acl) -> AclBinding:
    pattern = ResourcePatternType.PREFIXED if acl.pattern == PREFIXED else ResourcePatternType.LITERAL
    return AclBinding(
        _RESOURCES[acl.resource],
        acl.name,
        pattern,
        acl.principal,
        "*",
        _OPERATIONS[acl.operation],
        AclPermissionType.ALLOW,
    )
