"""A Kafka cluster of three nodes on this machine, secured like a cluster for several tenants: for tests and torture.

Clients connect by SASL_SSL with SCRAM-SHA-512, nodes authenticate to each other by certificate, StandardAuthorizer
refuses what no ACL allows, and every topic has three replicas of which two must be in sync. A node may be killed and
started again at any time. The registry stores its schemas on the cluster, by SASL_SSL too.
"""

import base64
import datetime
import ipaddress
import os
import secrets
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from replayground.deploy.local import registry
from replayground.deploy.local.java import java_command
from replayground.deploy.local.kafka import LOGGING, class_path
from replayground.deploy.local.ports import choose_ports
from replayground.deploy.local.registry import SchemaRegistry
from replayground.schemas.errors import ReplaygroundError
from replayground.schemas.run import LogSettings, SecuritySettings

NODES = (1, 2, 3)
MECHANISM: Final = "SCRAM-SHA-512"
ADMIN = "admin"
"a super user: creates topics and ACLs"
_REGISTRY = "registry"
_NODE = "node"
"common name of the nodes' certificate"
_DAYS = 30
_JAAS = "org.apache.kafka.common.security.scram.ScramLoginModule required"


@dataclass(frozen=True)
class Cluster:
    """Folder and ports of the nodes and the registry."""

    folder: Path
    ports: dict[str, int]
    heap_mebibytes: int = 256

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"127.0.0.1:{self.ports[f'client-{node}']}" for node in NODES)

    @property
    def schema_registry(self) -> SchemaRegistry:
        return SchemaRegistry(
            self.bootstrap_servers,
            self.ports["registry"],
            self.ports["management"],
            settings_file=self.folder / "registry.properties",
        )

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.pem"

    def node_folder(self, node: int) -> Path:
        return self.folder / f"node-{node}"

    def log_settings(self, user: str = "{program}", prefix: str = "") -> LogSettings:
        """Settings for clients that log in as `user`; {program} stands for the name of the program."""
        security = SecuritySettings(
            protocol="sasl_ssl",
            ca_file=str(self.ca_file),
            mechanism=MECHANISM,
            username=user,
            password=f"file:{self.folder}/passwords/{user}",
        )
        return LogSettings(
            bootstrap_servers=self.bootstrap_servers,
            registry_url=self.schema_registry.url,
            topic_prefix=prefix,
            replication=3,
            min_in_sync=2,
            security=security,
        )


def make_cluster(folder: Path, users: Sequence[str]) -> Cluster:
    """Writes certificates, passwords and settings, and formats the storage, for a cluster with these users. Blocks for
    seconds. Raises ReplaygroundError."""
    names = [f"{listener}-{node}" for node in NODES for listener in ("client", "internal", "controller")]
    cluster = Cluster(folder.absolute(), choose_ports(dict.fromkeys([*names, "registry", "management"], 0)))
    folder.mkdir(parents=True, exist_ok=True)
    passwords = _write_passwords(cluster, [ADMIN, _REGISTRY, *users])
    _write_certificates(cluster)
    _write_private(cluster.folder / "registry.properties", _registry_properties(cluster, passwords[_REGISTRY]))
    for node in NODES:
        cluster.node_folder(node).mkdir(exist_ok=True)
        _write_private(cluster.node_folder(node) / "kafka.properties", node_properties(cluster, node))
    _format(cluster, passwords)
    return cluster


def command(cluster: Cluster) -> list[str]:
    """The command that starts a node; run it in the folder of the node."""
    arguments = [*LOGGING, *class_path(), "kafka.Kafka", "kafka.properties"]
    return java_command("kafka", cluster.heap_mebibytes, arguments)


def node_properties(cluster: Cluster, node: int) -> str:
    ports = cluster.ports
    voters = ",".join(f"{number}@127.0.0.1:{ports[f'controller-{number}']}" for number in NODES)
    client, internal = f"127.0.0.1:{ports[f'client-{node}']}", f"127.0.0.1:{ports[f'internal-{node}']}"
    # Three listeners: clients by password, nodes among themselves by certificate, and the Raft quorum.
    return _properties(
        {
            "process.roles": "broker,controller",
            "node.id": node,
            "controller.quorum.voters": voters,
            "listeners": f"CLIENT://{client},INTERNAL://{internal},CONTROLLER://127.0.0.1:{ports[f'controller-{node}']}",
            "advertised.listeners": f"CLIENT://{client},INTERNAL://{internal}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "INTERNAL",
            "listener.security.protocol.map": "CLIENT:SASL_SSL,INTERNAL:SSL,CONTROLLER:SSL",
            "sasl.enabled.mechanisms": MECHANISM,
            f"listener.name.client.{MECHANISM.lower()}.sasl.jaas.config": f"{_JAAS};",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(cluster.folder / "node.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(cluster.ca_file),
            "listener.name.internal.ssl.client.auth": "required",
            "listener.name.controller.ssl.client.auth": "required",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            # ACLs are generated for our programs only, not for the registry (decision 0019).
            "super.users": f"User:CN={_NODE};User:{ADMIN};User:{_REGISTRY}",
            "log.dirs": "log",
            "auto.create.topics.enable": "false",
            # Two in sync: one node may be down without loss and without stopping writes.
            "default.replication.factor": 3,
            "min.insync.replicas": 2,
            "offsets.topic.replication.factor": 3,
            "transaction.state.log.replication.factor": 3,
            "transaction.state.log.min.isr": 2,
            "share.coordinator.state.topic.replication.factor": 3,
            "share.coordinator.state.topic.min.isr": 2,
            "offsets.topic.num.partitions": 4,
            "transaction.state.log.num.partitions": 4,
            "group.initial.rebalance.delay.ms": 0,
            "log.retention.ms": -1,
            # A killed node is detected within seconds. Not sooner, or a node on a busy machine would be fenced.
            "broker.heartbeat.interval.ms": 500,
            "broker.session.timeout.ms": 6000,
            "replica.lag.time.max.ms": 10000,
            # A broker gives up and exits when it is not caught up by then; two busy cores took more than its one minute.
            "initial.broker.registration.timeout.ms": 300_000,
        }
    )


class RunningCluster:
    """Nodes and registry as children of this process; they die with it. Use it from the main thread only."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._registry: subprocess.Popen[bytes] | None = None
        for node in NODES:
            self.start(node)

    def start(self, node: int) -> None:
        folder = self.cluster.node_folder(node)
        self._nodes[node] = _spawn(command(self.cluster), folder, folder / "kafka.out")

    def kill(self, node: int) -> None:
        """Kills a node with SIGKILL and waits until it has ended."""
        self._nodes[node].kill()
        self._nodes[node].wait()

    def start_fallen(self) -> None:
        """Starts nodes that ended by themselves, as the supervisor of a real cluster does."""
        for node, process in self._nodes.items():
            if process.poll() is not None:
                self.start(node)

    def start_registry(self) -> None:
        folder = self.cluster.folder
        self._registry = _spawn(registry.command(self.cluster.schema_registry), folder, folder / "registry.out")

    def registry_answers(self) -> bool:
        """True when the registry answers. Starts it if it is not running."""
        # Apicurio exits when a broker does not know the topic yet that it has just created.
        if self._registry is None or self._registry.poll() is not None:
            self.start_registry()
        try:
            with urllib.request.urlopen(f"{self.cluster.schema_registry.url}/subjects", timeout=5.0) as response:
                return bool(response.status == 200)
        except urllib.error.HTTPError as refusal:
            refusal.close()
            return False
        except OSError:
            return False

    def close(self) -> None:
        """Kills all processes; the data is thrown away with the test."""
        processes = [*self._nodes.values(), *([] if self._registry is None else [self._registry])]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@contextmanager
def running_cluster(folder: Path, users: Sequence[str]) -> Iterator[RunningCluster]:
    """Starts a cluster without waiting for it; kills it when the block ends."""
    running = RunningCluster(make_cluster(folder, users))
    try:
        yield running
    finally:
        running.close()


def _spawn(arguments: list[str], folder: Path, output: Path) -> "subprocess.Popen[bytes]":
    # pdeathsig is sent when the thread that forked ends, hence the main thread only.
    wrapped = ["setpriv", "--pdeathsig", "KILL", "--", *arguments]
    with output.open("ab") as file:
        return subprocess.Popen(wrapped, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def _format(cluster: Cluster, passwords: dict[str, str]) -> None:
    """Formats the storage of every node, with the SCRAM credentials of the users. Raises ReplaygroundError."""
    # Credentials can also be created by an admin client, but that one would have to log in first.
    cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    users = [f"--add-scram={MECHANISM}=[name={name},password={password}]" for name, password in passwords.items()]
    arguments = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", "-c", "kafka.properties", *users]
    # Side by side: each starts a Java machine.
    formatting = [
        subprocess.Popen(
            java_command("kafka", 128, [*class_path(), *arguments]),
            cwd=cluster.node_folder(node),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for node in NODES
    ]
    for process in formatting:
        told = process.communicate()[0].decode(errors="replace").strip()
        if process.returncode != 0:
            raise ReplaygroundError(f"Kafka could not format its storage below {cluster.folder}: {told[-500:]}")


def _write_passwords(cluster: Cluster, users: Sequence[str]) -> dict[str, str]:
    folder = cluster.folder / "passwords"
    folder.mkdir(exist_ok=True)
    passwords = {user: secrets.token_hex(16) for user in users}
    for user, password in passwords.items():
        _write_private(folder / user, password + "\n")
    return passwords


def _registry_properties(cluster: Cluster, password: str) -> str:
    client = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": MECHANISM,
        "sasl.jaas.config": f'{_JAAS} username="{_REGISTRY}" password="{password}";',
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(cluster.ca_file),
    }
    parts = ("admin", "producer", "consumer")
    return _properties(
        {
            "apicurio.kafkasql.security.protocol": "SASL_SSL",
            **{f"apicurio.kafkasql.{part}.{name}": value for part in parts for name, value in client.items()},
        }
    )


def _write_certificates(cluster: Cluster) -> None:
    """Writes a certificate authority and one certificate that all nodes share."""
    authority_key, node_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = _name("Replayground test authority")
    authority = _certificate(authority_name, authority_key, authority_name, authority_key, is_authority=True)
    node = _certificate(_name(_NODE), node_key, authority_name, authority_key, is_authority=False)
    pem = serialization.Encoding.PEM
    private = node_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    cluster.ca_file.write_bytes(authority.public_bytes(pem))
    _write_private(cluster.folder / "node.pem", (private + node.public_bytes(pem)).decode())


def _certificate(subject: x509.Name, key: Any, issuer: x509.Name, signer: Any, *, is_authority: bool) -> Any:
    now = datetime.datetime.now(datetime.UTC)
    addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_key_usage(is_authority), critical=True)
        .sign(signer, hashes.SHA256())
    )


def _key_usage(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _properties(settings: dict[str, object]) -> str:
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def _write_private(path: Path, text: str) -> None:
    # Created with its final mode: a file that is made readable first could be opened before chmod.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
