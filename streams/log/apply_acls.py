"""Creates ACLs (schemas.acls) through Kafka's admin API."""

from collections.abc import Iterable

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from replayground.schemas.acls import PREFIXED, Acl
from replayground.schemas.programs import OPERATOR
from replayground.schemas.run import LogSettings
from replayground.streams.log.connection import ASK_SECONDS, BrokerClient, Connection

_RESOURCES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional-id": ResourceType.TRANSACTIONAL_ID,
    # librdkafka has no CLUSTER: its BROKER is the cluster resource of the protocol.
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
    """Adds these ACLs; needs credentials that may alter ACLs. Safe to repeat. Raises NotAllowed, LogUnavailable."""
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
    # "*" below: the right holds from every host.
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
