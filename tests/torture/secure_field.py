"""A field on a secured cluster of three brokers (deploy.local.cluster), with a tenant for each prefix.

Every program of a tenant comes with credentials of its own and has the rights that the table gives it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from confluent_kafka import KafkaException

from replayground.deploy.local.cluster import ADMIN, NODES, RunningCluster, running_cluster
from replayground.schemas.acls import acls
from replayground.schemas.errors import LogUnavailable
from replayground.schemas.programs import ACCESS, OPERATOR
from replayground.schemas.run import JobSettings, Run
from replayground.streams.log.apply_acls import apply_acls
from replayground.streams.log.connect import open_log
from replayground.streams.log.connection import BrokerClient, Connection

_PATIENCE_SECONDS = 180.0


@dataclass(frozen=True)
class SecureField:
    running: RunningCluster
    blobs_url: str

    def run_of(self, tenant: str, program: str = OPERATOR, user: str = "{program}", run_id: str = "run") -> Run:
        """A program of a tenant. `user` names another program to come with that one's credentials."""
        return Run(
            run_id=run_id,
            seed=0,
            job=JobSettings(),
            log=self.running.cluster.log_settings(tenant + user, tenant),
            blobs_url=self.blobs_url,
            program=program,
        )

    @property
    def admin(self) -> Run:
        return msgspec.structs.replace(self.run_of(""), log=self.running.cluster.log_settings(ADMIN))

    def is_in_sync(self) -> bool:
        """Whether every partition has all its replicas in sync, so that the loss of one broker can be borne. Starts
        brokers that gave up on a busy machine."""
        self.running.start_fallen()
        try:
            with BrokerClient(Connection(self.admin.log, OPERATOR)).client() as admin:
                topics = admin.list_topics(timeout=10.0).topics.values()
        except (LogUnavailable, KafkaException):  # while a broker starts, none may answer
            return False
        partitions = [partition for topic in topics for partition in topic.partitions.values()]
        return bool(partitions) and all(len(p.isrs) == len(p.replicas) == len(NODES) for p in partitions)


@contextmanager
def secure_field(folder: Path, tenants: Sequence[str]) -> Iterator[SecureField]:
    """Ready to be used: topics, ACLs and schemas are there."""
    users = [f"{tenant}{access.program}" for tenant in tenants for access in ACCESS]
    with running_cluster(folder / "cluster", users) as running:
        field = SecureField(running, (folder / "blobs").as_uri())
        _await(lambda: _has_acls(field, tenants), "the cluster takes ACLs")
        for tenant in tenants:
            _await(lambda tenant=tenant: _has_topics(field, tenant), f"topics of {tenant}")  # type: ignore[misc]
        _await(running.registry_answers, "the registry answers")
        for tenant in tenants:
            _await(lambda tenant=tenant: _has_schemas(field, tenant), f"schemas of {tenant}")  # type: ignore[misc]
        yield field


def _has_acls(field: SecureField, tenants: Sequence[str]) -> bool:
    try:
        for tenant in tenants:
            apply_acls(field.admin.log, acls(tenant, f"User:{tenant}{{program}}"))
    except LogUnavailable:
        return False
    return True


def _has_topics(field: SecureField, tenant: str) -> bool:
    with closing(open_log(field.run_of(tenant))) as log:
        try:
            log.make_topics()
        except LogUnavailable:
            return False
    return True


def _has_schemas(field: SecureField, tenant: str) -> bool:
    with closing(open_log(field.run_of(tenant))) as log:
        try:
            log.codec.register_all()
        except LogUnavailable:
            return False
    return True


def _await(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + _PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < until, f"not within {_PATIENCE_SECONDS:g} s: {what}"
        time.sleep(0.2)
