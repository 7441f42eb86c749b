"""The log on Kafka, by confluent-kafka: idempotent murmur2 producers, read-committed readers, KIP-447 transactions."""

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import structlog
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_STORED,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.admin._metadata import TopicMetadata
from confluent_kafka.cimpl import NewTopic

from replayground.schemas.codec import Codec
from replayground.schemas.errors import (
    BadInput,
    Fenced,
    LogBroken,
    LogUnavailable,
    NotAllowed,
    Rebalanced,
    ReplaygroundError,
)
from replayground.schemas.events import Address, Event, Position
from replayground.schemas.programs import OPERATOR
from replayground.schemas.run import LogSettings
from replayground.schemas.topics import COMPACTED_SOON, FOREVER, PARTITIONS, TOPIC_BY_NAME, TOPICS, Topic, topic_of
from replayground.streams.log.access import AccessGuard
from replayground.streams.log.connection import ASK_SECONDS, AuthenticationFailures, BrokerClient, Connection
from replayground.streams.log.protocol import (
    Delivery,
    GroupLag,
    RawMessage,
    Reader,
    Tombstone,
    UnreadMessages,
    beyond_end,
    decode_delivery,
    runs_of,
)

logger = structlog.get_logger()

_SETTLE_SECONDS = 3.0
_OFFSETS_SECONDS = 1.0
"Limit of a first ListOffsets request; each further try waits twice as long, so that a busy broker is heard too."
_CONNECT_SECONDS = 1.0
_TRANSACTION_SECONDS = 60.0
"transaction.timeout.ms: after this the coordinator aborts a transaction whose producer is silent"
_POLL_BYTES_MAX = 16 * 1024 * 1024
"A poll returns once it has read this much; decoded events are several times as large."
_EVENTS_TRIED = 5
"of each partition, by which a registry is known to belong to the log"
_CONSUMED_AT_ONCE = 250
_ASKERS_MAX = 32
"Groups whose positions are asked for again and again; each keeps a connection, and a field has had any number of groups."
_READ_AHEAD_OFFSETS = 512
"""Wanted offsets closer together than this are read in one sweep: a seek costs about as much as so many messages."""


def _producer_settings(connection: Connection, refusals: AuthenticationFailures) -> dict[str, Any]:
    return connection.settings(refusals) | {
        "acks": "all",
        "enable.idempotence": True,
        "partitioner": "murmur2_random",
        "compression.type": "lz4",
        "linger.ms": 20,  # a fraction of the broker's work at 5 ms; flush and commit do not wait for it
        "queue.buffering.max.kbytes": 64 * 1024,
        "message.max.bytes": 1024 * 1024,
    }


def _consumer_settings(connection: Connection, refusals: AuthenticationFailures, group: str) -> dict[str, Any]:
    return connection.settings(refusals) | {
        "group.id": connection.name(group),
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "session.timeout.ms": 10_000,
        # A program may be busy with one batch for minutes; a rollout worker with all slots busy still polls, for nothing.
        "max.poll.interval.ms": 20 * 60 * 1000,
        # messages come one by one: fetched twenty times a second instead, they cost the broker a fraction of its work
        "fetch.min.bytes": 64 * 1024,
        "fetch.wait.max.ms": 50,
        # librdkafka fetches ahead until one of two bounds is reached; with its own, 100,000 messages, a reader of a long log
        # of small ones holds tens of megabytes that a reader of a short one does not
        "queued.min.messages": 4_000,
        # once a bound is reached; with its own, a second, a fast reader waits most of the time for a fetch that was put off
        "fetch.queue.backoff.ms": 10,
        # one fetch may exceed the second bound, and by as much as it was compressed: so it is kept small
        "fetch.message.max.bytes": 256 * 1024,
        "queued.max.messages.kbytes": 4 * 1024,
    }


def _nameless_group(connection: Connection) -> str:
    """For a consumer that shares nothing and commits nothing. It begins as the program's groups do, so that the same ACL
    covers it: the broker is asked for the coordinator of any group."""
    return f"{connection.program}-reader-{uuid.uuid4()}"


class KafkaLog:
    """See streams.log.protocol.Log."""

    def __init__(self, log: LogSettings, codec: Codec, program: str = OPERATOR) -> None:
        self.connection = Connection(log, program)
        self._guard = AccessGuard(program)
        self.codec = codec
        self._producer: Producer | None = None
        self._refusals = AuthenticationFailures()
        "of the producer"
        self._failure: KafkaError | None = None
        self._random_access: Consumer | None = None
        self._questions = BrokerClient(self.connection)
        self._askers: dict[str, Consumer] = {}

    def append(self, event: Event, acknowledged: Callable[[Address], None] | None = None) -> None:
        self._guard.write(type(event))
        topic = topic_of(event)
        on_delivery = self._on_delivery if acknowledged is None else self._on_delivery_then(acknowledged)
        self._produce(topic.name, topic.key(event).encode(), self.codec.encode(event), on_delivery)

    def append_bytes(self, topic: str, key: bytes | None, value: bytes) -> None:
        self._guard.write_bytes(topic)
        self._produce(topic, key, value, self._on_delivery)

    def _produce(
        self, topic: str, key: bytes | None, value: bytes, on_delivery: Callable[[KafkaError | None, Message], None]
    ) -> None:
        self._raise_failure()
        producer = self._open_producer()
        name = self.connection.name(topic)
        while True:
            try:
                producer.produce(name, value, key, on_delivery=on_delivery)
                producer.poll(0)
                return
            except BufferError:  # the queue is full: back-pressure, not an error
                producer.poll(0.05)

    def flush(self, timeout_seconds: float = 30.0) -> None:
        until = time.monotonic() + timeout_seconds
        while self._producer is not None and self._producer.flush(max(0.0, min(1.0, until - time.monotonic()))):
            if self._refusals.newest is not None:
                self._refusals.newest = None
                self._questions.require_known()
            if time.monotonic() >= until:
                raise LogUnavailable(f"the broker did not acknowledge everything within {timeout_seconds:g} s")
        self._raise_failure()

    def forget_failure(self) -> None:
        """Goes on with a new producer. What the failed one held is lost: for programs that take it again from the log."""
        self._producer, self._failure = None, None

    def reader(
        self,
        topics: Sequence[str],
        group: str | None = None,
        *,
        alone: bool = False,
        start: Sequence[Position] = (),
        run_id: str | frozenset[str] | None = None,
        partitions: Sequence[int] | None = None,
    ) -> "KafkaReader":
        if group is not None:
            assert partitions is None, "a group shares all partitions"
            self.begin_group(group, topics, start)
        else:
            self._guard.read(topics)
        return KafkaReader(self.connection, self.codec, topics, group, alone, start, run_id, partitions)

    def begin_group(self, group: str, topics: Sequence[str], start: Sequence[Position] = ()) -> None:
        self._guard.consume(topics, group)
        until = time.monotonic() + ASK_SECONDS
        while not self._has_begun(group, topics, start):
            if time.monotonic() > until:
                raise LogUnavailable(f"group {group} has members, but no position on some of {', '.join(topics)}")
            time.sleep(0.2)

    def _has_begun(self, group: str, topics: Sequence[str], start: Sequence[Position]) -> bool:
        """False when another member of the group is about to give it the positions that are missing."""
        with self._questions.client() as admin:
            partitions = _partitions(self.connection, admin, topics)
            committed = self._committed_offsets(group, partitions)
            oldest = _starts(self.connection, admin, partitions)
            places = set(partitions)
            starts = {(p.topic, p.partition): p.offset for p in start if (p.topic, p.partition) in places}
            _require_before_end(self.connection, admin, starts | committed, f"group {group}")
        begins: dict[tuple[str, int], int] = {}
        for place in partitions:
            first = committed.get(place, starts.get(place, oldest[place]))
            if first < oldest[place]:
                _require_forgetful(place, first, oldest[place], f"group {group}")
                begins[place] = oldest[place]
            elif place not in committed:
                begins[place] = first
        if not begins:
            return True
        try:
            offsets = [_partition_at(self.connection, place, offset) for place, offset in begins.items()]
            self._askers[group].commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            if error.args[0].code() in _REBALANCE_ERRORS:
                # only members may commit for a group that has some: they have begun it, or are about to
                return begins.keys() <= committed.keys()
            raise self.connection.error(error.args[0], f"give group {group} a position") from error
        return True

    def end_positions(self, topics: Sequence[str]) -> list[Position]:
        with self._questions.client() as admin:
            ends = _ends(self.connection, admin, _partitions(self.connection, admin, topics))
        return [Position(topic=topic, partition=partition, offset=end) for (topic, partition), end in ends.items()]

    def transactor(self, name: str) -> "KafkaTransactor":
        self._guard.transact(name)
        return KafkaTransactor(self.connection, self.codec, name, self._guard)

    def read_at(self, addresses: Sequence[Address]) -> list[Event]:
        wanted: dict[tuple[str, int], set[int]] = defaultdict(set)
        for address in addresses:
            wanted[address.topic, address.partition].add(address.offset)
        self._guard.read({topic for topic, _ in wanted})
        found: dict[Address, Event] = {}
        for (topic, partition), offsets in wanted.items():
            for sweep in _sweeps(sorted(offsets)):
                found.update(self._sweep(topic, partition, sweep))
        if self._random_access is not None:
            self._random_access.unassign()  # an assigned consumer keeps fetching in the background
        missing = [address for address in addresses if address not in found]
        if missing:
            raise LookupError(f"no event at {missing[0]} and {len(missing) - 1} more addresses")
        return [found[address] for address in addresses]

    def group_lags(self, group: str, topics: Sequence[str]) -> dict[str, GroupLag]:
        with self._questions.client() as admin:
            partitions = _partitions(self.connection, admin, topics)
            committed = self._committed_offsets(group, partitions)
            ends = _ends(self.connection, admin, partitions)
        for place, offset in committed.items():
            if offset > ends[place]:
                raise LogUnavailable(f"{place[0]}/{place[1]} ends at {ends[place]}, before {offset}, where {group} is")
        return {
            topic: GroupLag(
                committed=sum(offset for place, offset in committed.items() if place[0] == topic),
                end=sum(end for place, end in ends.items() if place[0] == topic),
                has_begun=any(place[0] == topic for place in committed),
                lag_by_partition={
                    place[1]: max(0, end - committed.get(place, 0)) for place, end in ends.items() if place[0] == topic
                },
            )
            for topic in topics
        }

    def count(self, topics: Sequence[str]) -> dict[str, int]:
        """Committed messages of each topic up to now, counted one by one: markers of transactions are not messages."""
        self._guard.read(topics)
        counts = dict.fromkeys(topics, 0)
        reader = KafkaReader(self.connection, self.codec, topics, None)
        try:
            while not reader.caught_up():
                for message in reader.poll_messages(10_000, 1.0):
                    counts[self.connection.plain(str(message.topic()))] += 1
        finally:
            reader.close()
        return counts

    def unread(self, group: str, topics: Sequence[str]) -> dict[str, UnreadMessages]:
        with self._questions.client() as admin:
            partitions = _partitions(self.connection, admin, topics)
            committed = self._committed_offsets(group, partitions)
            starts = _starts(self.connection, admin, partitions)
            ends = _ends(self.connection, admin, partitions)
        self._guard.read(topics)
        waiting = {
            place: max(committed.get(place, 0), starts[place])
            for place in partitions
            if max(committed.get(place, 0), starts[place]) < ends[place]
        }
        written = self._written_at(waiting)
        return {
            topic: UnreadMessages(
                oldest_milliseconds=min((at for place, at in written.items() if place[0] == topic), default=None),
                expired=sum(max(0, starts[place] - offset) for place, offset in committed.items() if place[0] == topic),
            )
            for topic in topics
        }

    def messages(self, topics: Sequence[str], start: Sequence[Position] = ()) -> Iterator[RawMessage]:
        self._guard.read(topics)
        reader = KafkaReader(self.connection, self.codec, topics, None, start=start)
        try:
            while not reader.caught_up():
                for message in reader.poll_everything(10_000, 1.0):
                    yield RawMessage(_address(self.connection, message), message.key(), message.value())
        finally:
            reader.close()

    def make_topics(self) -> None:
        with self._questions.client() as admin:
            self._make_topics(admin)

    def _make_topics(self, admin: AdminClient) -> None:
        existing = self._existing_topics(admin)
        wanted = [topic for topic in TOPICS if self._guard.touches(topic.name)]
        for topic in wanted:
            if topic.name in existing:
                self._require_shape(topic, existing[topic.name])
        self._require_settings(admin, [topic for topic in wanted if topic.name in existing])
        missing = [topic for topic in wanted if topic.name not in existing]
        if missing:
            self._create(admin, {t.name: (t.partitions, t.settings) for t in missing})

    def _existing_topics(self, admin: AdminClient) -> dict[str, TopicMetadata]:
        """Topics that begin with the prefix, by the names that programs know them by."""
        found = _request(self.connection, lambda: admin.list_topics(timeout=ASK_SECONDS), "ask for topics").topics
        prefix = self.connection.log.topic_prefix
        return {self.connection.plain(name): topic for name, topic in found.items() if name.startswith(prefix)}

    def _require_shape(self, topic: Topic, found: TopicMetadata) -> None:
        if len(found.partitions) != topic.partitions:
            raise BadInput(
                f"topic {self.connection.name(topic.name)} has {len(found.partitions)} partitions where the map says "
                f"{topic.partitions}: use another topic_prefix, broker or data folder"
            )
        copies = {len(partition.replicas) for partition in found.partitions.values()}
        if copies != {self.connection.log.replication}:
            raise BadInput(
                f"topic {self.connection.name(topic.name)} has {' or '.join(map(str, sorted(copies)))} copies where [log] says "
                f"replication = {self.connection.log.replication}: set that to what the topics have, or move the "
                "partitions with kafka-reassign-partitions.sh"
            )

    def require_registry(self) -> None:
        """Raises BadInput when the newest events cannot be read with this registry, so that it is that of another log."""
        read = unread = 0
        reason: str | None = None
        reader = self.reader([topic.name for topic in TOPICS])
        try:
            reader.seek_before_end(_EVENTS_TRIED)
            while not reader.caught_up():
                for delivery in reader.poll(1000, 1.0):
                    read += delivery.event is not None
                    unread += delivery.event is None
                    reason = delivery.undecodable or reason
        finally:
            reader.close()
        if unread and not read:
            log = self.connection.log
            raise BadInput(
                f"none of the newest events on {log.bootstrap_servers} can be read with the registry at {log.registry_url} "
                f"({reason}): it is the registry of another log. Correct registry_url in [log]"
            )

    def make_changelogs(self, names: Sequence[str]) -> None:
        """Makes topics for states, keyed as the events are and kept by key, where they do not exist yet. Names have the
        prefix already: Faust makes them from the name of the group."""
        settings = {"cleanup.policy": "compact", **COMPACTED_SOON}
        with self._questions.client() as admin:
            self._create(admin, {self.connection.plain(name): (PARTITIONS, settings) for name in names})

    def _create(self, admin: AdminClient, topics: Mapping[str, tuple[int, Mapping[str, str]]]) -> None:
        """Returns when they exist, whoever made them: workers start side by side."""
        replication = self.connection.log.replication
        created = [
            NewTopic(self.connection.name(name), partitions, replication, config={**settings, **self._in_sync()})
            for name, (partitions, settings) in topics.items()
        ]
        for name, future in admin.create_topics(created, operation_timeout=ASK_SECONDS).items():
            try:
                future.result()
            except KafkaException as failure:
                error = failure.args[0]
                if error.code() == KafkaError.INVALID_REPLICATION_FACTOR:
                    raise BadInput(
                        f"topic {name} cannot have replication = {replication} of [log]: {error.str()}"
                    ) from failure
                if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise self.connection.error(error, f"make topic {name}") from failure

    def _in_sync(self) -> dict[str, str]:
        log = self.connection.log
        return {"min.insync.replicas": str(log.min_in_sync)} if log.replication > 1 else {}

    def _require_settings(self, admin: AdminClient, topics: Sequence[Topic]) -> None:
        """A topic that forgets sooner than the map says would lose what replay counts on, one that needs fewer copies in sync
        would lose events with a broker."""
        by_name = {self.connection.name(topic.name): topic for topic in topics}
        resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in by_name]
        futures = admin.describe_configs(resources, request_timeout=ASK_SECONDS) if resources else {}
        for resource, future in futures.items():
            found = _request(self.connection, future.result, f"ask for the settings of topic {resource.name}")
            for name, wanted in (by_name[resource.name].settings | self._in_sync()).items():
                if found[name].value != wanted:
                    raise BadInput(
                        f"topic {resource.name} has {name} {found[name].value} where the map says {wanted}: set it on the "
                        "broker, or use another broker or data folder"
                    )

    def close(self) -> None:
        if self._producer is not None:
            self.flush()
        if self._random_access is not None:
            self._random_access.close()
            self._random_access = None
        for asker in self._askers.values():
            asker.close()
        self._askers = {}
        self.codec.close()

    def _open_producer(self) -> Producer:
        if self._producer is None:
            self._producer = Producer(_producer_settings(self.connection, self._refusals))
            _await_connection(self._producer)
        return self._producer

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failure = error

    def _on_delivery_then(
        self, acknowledged: Callable[[Address], None]
    ) -> Callable[[KafkaError | None, Message], None]:
        def on_delivery(error: KafkaError | None, message: Message) -> None:
            self._on_delivery(error, message)
            if error is None:
                acknowledged(_address(self.connection, message))

        return on_delivery

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self.connection.error(self._failure, "write an event")

    def _sweep(self, topic: str, partition: int, offsets: list[int]) -> Iterator[tuple[Address, Event]]:
        """Reads one stretch of a partition and keeps what is wanted."""
        if self._random_access is None:
            settings = _consumer_settings(self.connection, AuthenticationFailures(), _nameless_group(self.connection))
            # short waits: a fetch that waits for data on one partition delays the next fetch
            self._random_access = Consumer(settings | {"fetch.min.bytes": 1, "fetch.wait.max.ms": 10})
        wanted = set(offsets)
        self._random_access.assign([_partition_at(self.connection, (topic, partition), offsets[0])])
        while wanted:
            messages = self._random_access.consume(min(len(wanted), _READ_AHEAD_OFFSETS), ASK_SECONDS)
            if not messages:
                raise LogUnavailable(f"{topic}/{partition} cannot be read at {min(wanted)}")
            for message in messages:
                error = message.error()
                if error is not None:
                    if error.code() == KafkaError._PARTITION_EOF:
                        return
                    raise self.connection.error(error, f"read {topic}/{partition}")
                offset = _offset(message)
                if offset in wanted:
                    wanted.remove(offset)
                    yield _address(self.connection, message), self.codec.decode(message.value() or b"", topic)
                if offset >= offsets[-1]:
                    return

    def _committed_offsets(self, group: str, partitions: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """By a consumer that joins nothing. The admin client of librdkafka 2.16 can be asked the same, and takes the process
        down when the answer is that the group's coordinator is elsewhere, as it is while a broker starts."""
        if group not in self._askers:
            while len(self._askers) >= _ASKERS_MAX:
                self._askers.pop(next(iter(self._askers))).close()
            settings = _consumer_settings(self.connection, AuthenticationFailures(), group)
            # uncommitted: else it would wait for a transaction under way
            self._askers[group] = Consumer(settings | {"isolation.level": "read_uncommitted"})
        asker = self._askers[group]
        asked = [_partition_at(self.connection, place) for place in partitions]
        doing = f"ask where group {group} is"
        try:
            found = _request(self.connection, lambda: asker.committed(asked, ASK_SECONDS), doing) if asked else []
            for place in found:
                if place.error is not None:
                    raise self.connection.error(place.error, doing)
        except LogUnavailable:
            del self._askers[group]  # as in BrokerClient
            raise
        return {
            (self.connection.plain(place.topic), place.partition): place.offset for place in found if place.offset >= 0
        }

    def _written_at(self, waiting: dict[tuple[str, int], int]) -> dict[tuple[str, int], int]:
        """When the first message from each offset on was written; a place where only markers of transactions follow has none."""
        if not waiting:
            return {}
        consumer = Consumer(
            _consumer_settings(self.connection, AuthenticationFailures(), _nameless_group(self.connection))
        )
        written: dict[tuple[str, int], int] = {}
        ended: set[tuple[str, int]] = set()
        try:
            consumer.assign([_partition_at(self.connection, place, offset) for place, offset in waiting.items()])
            while len(ended) < len(waiting):
                message = consumer.poll(ASK_SECONDS)
                if message is None:
                    raise LogUnavailable(f"the oldest of {', '.join(topic for topic, _ in waiting)} cannot be read")
                error = message.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise self.connection.error(error, "read the oldest events")
                place = (self.connection.plain(str(message.topic())), _partition(message))
                if error is None and place not in ended:
                    written[place] = message.timestamp()[1]
                ended.add(place)
        finally:
            consumer.close()
        return written


class KafkaReader:
    """See streams.log.protocol.Reader."""

    def __init__(
        self,
        connection: Connection,
        codec: Codec,
        topics: Sequence[str],
        group: str | None,
        alone: bool = False,
        start: Sequence[Position] = (),
        run_id: str | frozenset[str] | None = None,
        partitions: Sequence[int] | None = None,
    ) -> None:
        self._connection = connection
        self._codec = codec
        self._runs = runs_of(run_id)
        self._partitions_read = partitions
        self._questions = BrokerClient(connection)
        self._refusals = AuthenticationFailures()
        settings = _consumer_settings(connection, self._refusals, group or _nameless_group(connection))
        if partitions is not None and len(partitions) == 1:
            # half as much as a fetch of all partitions brings, since each fetch waits for the one before; and less ahead:
            # one partition of a topic is read to the end, however long it is, and its reader is to need no memory for that
            settings["fetch.message.max.bytes"] *= PARTITIONS // 2
            settings |= {"queued.min.messages": 2000, "queued.max.messages.kbytes": 2 * 1024}
        # a position that is no longer on the broker means events that nobody will read: that must not pass unnoticed
        keeps_everything = all(not _forgets(topic) for topic in topics)
        self._consumer = Consumer(settings | {"auto.offset.reset": "error" if keeps_everything else "earliest"})
        _await_connection(self._consumer)
        self._next: dict[tuple[str, int], int] = {}
        self._ends_seen: dict[tuple[str, int], int] = {}
        self._starts: dict[tuple[str, int], int] = {}
        "where reading was told to begin, by seek_before_end"
        self._assigned_from: int | None = None
        "where reading begins on partitions that nobody told of; None = the group assigns them"
        self._topics = list(topics)
        self._held: set[tuple[str, int]] = set()
        self._failure: ReplaygroundError | None = None
        "met behind messages that were handed out: the next poll raises it"
        if group is None:
            self._assign_all(OFFSET_BEGINNING, start)
        elif alone:
            # assigned, not joined: no session can expire, and no dead member has to be waited for
            self._assign_all(OFFSET_STORED)
        else:
            self._consumer.subscribe(
                [connection.name(topic) for topic in topics], on_lost=self._forget, on_revoke=self._forget
            )

    def poll(self, events_max: int, timeout_seconds: float) -> list[Delivery]:
        polled = self._poll_now(events_max, timeout_seconds)
        unknown_ids: set[int] = set()  # all of it was on the log before the first question
        try:
            return [
                decode_delivery(self._codec, address, message.key(), value, unknown_ids, self._runs)
                for address, message in polled
                if (value := message.value()) is not None  # a tombstone says that something was removed; it is no event
            ]
        except (
            LogUnavailable
        ):  # the registry or the blobs are away: nothing was handed out, and a commit must not pass it
            self._go_back_before(polled)
            raise

    def poll_messages(self, messages_max: int, timeout_seconds: float) -> list[Message]:
        """What has arrived, not decoded, but for tombstones."""
        return [m for m in self.poll_everything(messages_max, timeout_seconds) if m.value() is not None]

    def poll_everything(self, messages_max: int, timeout_seconds: float) -> list[Message]:
        """What has arrived, not decoded, tombstones too."""
        return [message for _, message in self._poll_now(messages_max, timeout_seconds)]

    def _poll_now(self, messages_max: int, timeout_seconds: float) -> list[tuple[Address, Message]]:
        if (earlier := self._failure) is not None:
            self._failure = None
            raise earlier
        self._hold(messages_max == 0)
        try:
            # `consume` alone would wait out the whole timeout unless messages_max arrive
            first = self._consumer.poll(timeout_seconds)
            polled = [] if first is None else [first, *self._take_fetched(messages_max - 1)]
        except KafkaException as error:
            raise self._connection.error(error.args[0], f"read {', '.join(self._topics)}") from error
        if not polled and self._refusals.newest is not None:
            self._refusals.newest = None
            self._questions.require_known()  # librdkafka retries authentication for ever
        messages: list[tuple[Address, Message]] = []
        failure: ReplaygroundError | None = None
        for message in polled:
            reported = message.error()
            if reported is None:
                address = _address(self._connection, message)
                place = (address.topic, address.partition)
                if self._starts and address.offset < self._starts.get(place, 0):
                    continue  # fetched before the seek
                self._next[place] = address.offset + 1
                messages.append((address, message))
            elif reported.code() == KafkaError._PARTITION_EOF:
                self._ends_seen[self._connection.plain(str(message.topic())), _partition(message)] = _offset(message)
            elif reported.code() == KafkaError._AUTO_OFFSET_RESET:
                failure = LogBroken(
                    f"{message.topic()}/{message.partition()} cannot be read on from where this reader stands: the broker has "
                    f"removed those events ({reported}). Restore them, or start a new run"
                )
            elif reported.fatal() or not (reported.retriable() or reported.code() in _PASSING_ERRORS):
                failure = self._connection.error(reported, f"read {message.topic() or ', '.join(self._topics)}")
        if failure is not None and not messages:
            raise failure
        # Positions are already behind these messages: raised now, the error would drop them, and a commit would pass them.
        self._failure = failure
        return messages

    def _go_back_before(self, polled: Sequence[tuple[Address, Message]]) -> None:
        firsts: dict[tuple[str, int], int] = {}
        for address, _ in polled:
            firsts.setdefault((address.topic, address.partition), address.offset)
        for place, offset in firsts.items():
            self._consumer.seek(_partition_at(self._connection, place, offset))
        self._note_sought(firsts)

    def _hold(self, hold: bool) -> None:
        """Fetches nothing more while held; heartbeats and rebalances go on as long as somebody polls.

        A partition that is taken away while it is held comes back held, whenever that is: so each is remembered until it was
        really let go."""
        if not hold and not self._held:
            return
        assigned = set(self._assignment())
        if hold:  # also what was assigned since the last time
            self._consumer.pause([_partition_at(self._connection, place) for place in assigned])
            self._held |= assigned
        else:
            self._consumer.resume([_partition_at(self._connection, place) for place in self._held & assigned])
            self._held -= assigned

    def _assignment(self) -> list[tuple[str, int]]:
        return [(self._connection.plain(place.topic), place.partition) for place in self._consumer.assignment()]

    def _take_fetched(self, messages_max: int) -> Iterator[Message]:
        """What was fetched already, as far as it fits into one poll."""
        room, bytes_taken = messages_max, 0
        while room > 0 and bytes_taken < _POLL_BYTES_MAX:
            messages = self._consumer.consume(min(room, _CONSUMED_AT_ONCE), 0.0)
            if not messages:
                return
            room -= len(messages)
            bytes_taken += sum(map(len, messages))
            yield from messages

    def commit(self, positions: Sequence[Position] | None = None) -> None:
        offsets = self.offsets() if positions is None else [self._at(position) for position in positions]
        if not offsets:
            return
        try:
            self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            if error.args[0].code() in _REBALANCE_ERRORS:
                raise Rebalanced(f"positions were not committed: {error}") from error
            raise self._connection.error(error.args[0], "commit positions") from error

    def positions(self) -> list[Position]:
        return [Position(topic=t, partition=p, offset=offset) for (t, p), offset in sorted(self._next.items())]

    def offsets(self) -> list[TopicPartition]:
        return [_partition_at(self._connection, place, offset) for place, offset in self._next.items()]

    def seek(self, positions: Iterable[Position]) -> None:
        """Not for a reader that shares its partitions: those it has are the group's to give."""
        assert self._assigned_from is not None
        sought = {(position.topic, position.partition): position.offset for position in positions}
        with self._questions.client() as admin:
            _require_before_end(self._connection, admin, sought, "this reader")
        # assigned anew: a partition that was not fetched from yet cannot be sought
        begins = {place: self._next.get(place, self._assigned_from) for place in self._assignment()} | sought
        self._consumer.assign([_partition_at(self._connection, place, offset) for place, offset in begins.items()])
        self._note_sought(sought)

    def _note_sought(self, sought: Mapping[tuple[str, int], int]) -> None:
        self._next.update(sought)
        for place in sought:
            self._ends_seen.pop(place, None)

    def seek_before_end(self, messages: int) -> None:
        assigned = self._assignment()
        starts = {place: max(0, end - messages) for place, end in self._ends(assigned).items()}
        # assigned anew: a partition that was not fetched from yet cannot be sought
        self._consumer.assign([_partition_at(self._connection, place, offset) for place, offset in starts.items()])
        self._next = dict(starts)
        self._starts = starts
        self._ends_seen.clear()

    def caught_up(self) -> bool:
        assigned = self._assignment()
        if not assigned:
            return False
        ends = self._ends(assigned)
        return all(max(self._next.get(place, -1), self._ends_seen.get(place, -1)) >= ends[place] for place in assigned)

    def _ends(self, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        # by a connection of its own: on the reader's, each answer would wait for a fetch that waits for messages
        with self._questions.client() as admin:
            return _ends(self._connection, admin, places)

    def _at(self, position: Position) -> TopicPartition:
        return _partition_at(self._connection, (position.topic, position.partition), position.offset)

    def group_metadata(self) -> object:
        return self._consumer.consumer_group_metadata()

    def close(self) -> None:
        self._consumer.close()

    def _assign_all(self, offset: int, start: Sequence[Position] = ()) -> None:
        with self._questions.client() as admin:
            known = _partitions(self._connection, admin, self._topics)
        places = [place for place in known if self._partitions_read is None or place[1] in self._partitions_read]
        self._assigned_from = offset
        starts = self._check_starts([position for position in start if (position.topic, position.partition) in places])
        assigned = [_partition_at(self._connection, place, starts.get(place, offset)) for place in places]
        self._consumer.assign(assigned)
        # a partition on which nothing has come since its start delivers nothing, and must count as read all the same
        self._next.update(starts)

    def _check_starts(self, start: Sequence[Position]) -> dict[tuple[str, int], int]:
        """Where reading begins. Raises LogBroken when events after a start are gone that should be there."""
        starts = {(p.topic, p.partition): p.offset for p in start if p.topic in self._topics}
        if not starts:
            return {}
        with self._questions.client() as admin:
            oldest = _starts(self._connection, admin, starts)
            _require_before_end(self._connection, admin, starts, "this reader")
        for place, offset in starts.items():
            if offset < oldest[place]:
                _require_forgetful(place, offset, oldest[place], "this reader")
        return {place: max(offset, oldest[place]) for place, offset in starts.items()}

    def _forget(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Revoked partitions belong to another member now: committing them from here would rewind its position."""
        for partition in partitions:
            place = (self._connection.plain(partition.topic), partition.partition)
            self._next.pop(place, None)
            self._ends_seen.pop(place, None)


type _Message = tuple[str, bytes, bytes | None]
"topic, key and value; None as value = a tombstone"


class KafkaTransactor:
    """See streams.log.protocol.Transactor.

    Commit and abort have no timeout of their own: they may take what is left of the transaction's, after which client and
    coordinator agree that it is over. A shorter one could expire while the coordinator still commits, and the two would
    disagree about the outcome.
    """

    def __init__(self, connection: Connection, codec: Codec, name: str, guard: AccessGuard) -> None:
        self._connection = connection
        self._guard = guard
        self._name = name
        self._codec = codec
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="commit")
        "where a commit that was started is waited for; its thread begins with the first one"
        self._held: list[_Message] = []
        self._producer = self._initialise()

    def commit(self, events: Sequence[Event], reader: Reader | None, tombstones: Sequence[Tombstone] = ()) -> None:
        assert reader is None or isinstance(reader, KafkaReader)
        # Before the transaction begins: what cannot be written must not leave one open.
        for tombstone in tombstones:
            self._guard.write_bytes(tombstone.topic)
        messages = self._messages(events) + [(tombstone.topic, tombstone.key, None) for tombstone in tombstones]
        try:
            self._begin(messages)
            if reader is not None:
                self._producer.send_offsets_to_transaction(reader.offsets(), reader.group_metadata(), ASK_SECONDS)
            self._producer.commit_transaction()
        except KafkaException as error:
            self._abandon(error)

    def hold(self, events: Sequence[Event]) -> None:
        # As bytes, at once: events that wait as objects leave the processor's cache and are a tenfold of memory.
        self._held += self._messages(events)

    def start_commit(self) -> Callable[[], None]:
        held, self._held = self._held, []
        try:
            self._begin(held)
        except KafkaException as error:
            self._abandon(error)
        # One call that waits, in a thread: encoding there would take turns with the caller at every message.
        committed = self._waiting.submit(self._producer.commit_transaction)

        def wait() -> None:
            try:
                committed.result()
            except KafkaException as error:
                self._abandon(error)

        return wait

    def _messages(self, events: Sequence[Event]) -> list["_Message"]:
        messages: list[_Message] = []
        for event in events:
            self._guard.write(type(event))
            topic = topic_of(event)
            messages.append((topic.name, topic.key(event).encode(), self._codec.encode(event)))
        return messages

    def _begin(self, messages: Sequence["_Message"]) -> None:
        self._producer.begin_transaction()
        for topic, key, value in messages:
            self._produce(self._connection.name(topic), value, key)

    def close(self) -> None:
        self._waiting.shutdown()
        with suppress(
            KafkaException
        ):  # closing a fenced producer raises again; commit has raised Fenced already, which must not be hidden
            self._producer.flush(1.0)

    def _initialise(self) -> Producer:
        BrokerClient(
            self._connection
        ).require_known()  # else a wrong password would be tried for as long as the next call waits
        producer = Producer(self._settings())
        _await_connection(producer)
        try:
            producer.init_transactions(_TRANSACTION_SECONDS)
        except KafkaException as error:
            raise self._connection.error(error.args[0], f"take transactional id {self._name}") from error
        return producer

    def _settings(self) -> dict[str, Any]:
        return _producer_settings(self._connection, AuthenticationFailures()) | {
            "transactional.id": self._connection.name(self._name),
            "transaction.timeout.ms": int(_TRANSACTION_SECONDS * 1000),
            # a broker that starts says at first that there is none. Other clients must then begin anew, or they would never
            # hear of it again; an open transaction of librdkafka 2.16 that does so waits until its time is up. This
            # client may lose its broker for good instead: then its next transaction fails, and it is made anew
            "metadata.recovery.strategy": "none",
        }

    def _produce(self, topic: str, value: bytes | None, key: bytes) -> None:
        while True:
            try:
                self._producer.produce(topic, value, key)
                return
            except BufferError:  # the queue is full; it drains at the latest when the transaction times out
                self._producer.poll(0.05)

    def _abandon(self, error: KafkaException) -> NoReturn:
        """Ends in Fenced, LogBroken, NotAllowed or LogUnavailable, with the transaction undone or, in doubt, done or undone."""
        self._raise_if_final(error)
        refusal = self._connection.error(error.args[0], f"write as {self._name}")
        try:
            self._producer.abort_transaction()
        except KafkaException as indefinite:
            self._raise_if_final(indefinite)  # a new producer would take the transactional id back from its new owner
            logger.warning("transaction_in_doubt", transactional_id=self._name, reason=str(indefinite))
            # The outcome of a commit that timed out is unknown. Initialising a new producer completes or aborts it.
            self._producer = self._initialise()
            raise LogUnavailable(f"the transaction ended in doubt and was abandoned: {error}") from indefinite
        if isinstance(refusal, NotAllowed):
            raise refusal from error
        raise LogUnavailable(f"the transaction was aborted: {error}") from error

    def _raise_if_final(self, error: KafkaException) -> None:
        cause: KafkaError = error.args[0]
        if cause.code() in _FENCED_ERRORS:
            raise Fenced(
                f"another instance took over {self._name}, or a transaction was held for more than "
                f"{_TRANSACTION_SECONDS:g} s: {cause}"
            ) from error
        if cause.fatal():
            raise LogBroken(f"the producer of {self._name} cannot go on: {cause}") from error


_FENCED_ERRORS = {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}
_REBALANCE_ERRORS = {
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError._ASSIGNMENT_LOST,
}
_LEADER_ERRORS = {
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
}
_PASSING_ERRORS = {KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._MAX_POLL_EXCEEDED}


def _forgets(topic: str) -> bool:
    """Whether events of the topic are removed by age or by key, so that a position may rightly be gone."""
    found = TOPIC_BY_NAME.get(topic)
    return found is not None and (found.compacted or found.retention_milliseconds != FOREVER)


def _require_forgetful(place: tuple[str, int], position: int, oldest: int, who: str) -> None:
    if not _forgets(place[0]):
        raise LogBroken(
            f"{who} is to read {place[0]}/{place[1]} from {position}, and the oldest event there is {oldest}: "
            f"{oldest - position} events were removed unread. Restore them, or start a new run"
        )


def _require_before_end(
    connection: Connection, admin: AdminClient, positions: Mapping[tuple[str, int], int], who: str
) -> None:
    """Raises LogBroken when a position is beyond the end of its partition, and stays there: a broker that has just become
    the leader may tell an older end for a moment."""
    until = time.monotonic() + _SETTLE_SECONDS
    while True:
        ends = _ends(connection, admin, positions)
        beyond = [place for place, offset in positions.items() if offset > ends[place]]
        if not beyond:
            return
        if time.monotonic() > until:
            raise LogBroken(beyond_end(beyond[0], positions[beyond[0]], ends[beyond[0]], who))
        time.sleep(0.2)


def _partitions(connection: Connection, admin: AdminClient, topics: Sequence[str]) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    known = _request(connection, lambda: admin.list_topics(timeout=ASK_SECONDS), "ask for topics").topics
    for topic in topics:
        name = connection.name(topic)
        # a broker that starts knows no topics, or no partitions of them, and a lag of nothing would be no lag
        if name not in known or known[name].error is not None or not known[name].partitions:
            _raise_unknown(connection, admin, topic, known)
        found += [(topic, partition) for partition in known[name].partitions]
    return found


def _raise_unknown(connection: Connection, admin: AdminClient, topic: str, known: Iterable[str]) -> NoReturn:
    """Topics that a program may not see are missing from the list; asked for by name, the broker says why."""
    name = connection.name(topic)
    found = _request(connection, lambda: admin.list_topics(name, timeout=ASK_SECONDS), f"ask for topic {name}").topics[
        name
    ]
    if found.error is not None and isinstance(
        refusal := connection.error(found.error, f"see topic {name}"), NotAllowed
    ):
        raise refusal
    prefixes = prefixes_of(known)
    if prefixes and connection.log.topic_prefix not in prefixes:
        raise BadInput(
            f"there are no topics with topic_prefix {connection.log.topic_prefix!r} on {connection.log.bootstrap_servers}; "
            f"there are with {', '.join(map(repr, prefixes))}: correct topic_prefix in [log], or make the topics with "
            "`replayground up`"
        )
    raise LogUnavailable(f"the broker does not know topic {topic}, or not yet")


def prefixes_of(topics: Iterable[str]) -> list[str]:
    """The prefixes under which every topic of the map is among these."""
    names = set(topics)
    first = TOPICS[0].name
    prefixes = {name[: -len(first)] for name in names if name.endswith(first)}
    return sorted(prefix for prefix in prefixes if all(prefix + topic.name in names for topic in TOPICS))


def _await_connection(client: Producer | Consumer) -> None:
    """Waits for the first connection of a new client, for a second at most. What follows reports a broker that is away."""
    # Without a connection librdkafka asks for leaders again after 1 s and for a producer id after 0.5 s, by timers. About
    # every second new client met such a timer, and each start of a program makes several clients.
    with suppress(KafkaException):
        client.list_topics(timeout=_CONNECT_SECONDS)


def _request[Result](connection: Connection, question: Callable[[], Result], doing: str) -> Result:
    """Runs a request to the broker. Raises LogUnavailable or NotAllowed."""
    try:
        return question()
    except KafkaException as error:
        raise connection.error(error.args[0], doing) from error
    except TimeoutError as error:
        raise LogUnavailable(f"cannot {doing}: no broker answers") from error


def _ends(
    connection: Connection, admin: AdminClient, partitions: Iterable[tuple[str, int]]
) -> dict[tuple[str, int], int]:
    """The next offset of each partition, in one request."""
    return _offsets(connection, admin, partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]


def _starts(
    connection: Connection, admin: AdminClient, partitions: Iterable[tuple[str, int]]
) -> dict[tuple[str, int], int]:
    """The oldest retained offset of each partition, in one request."""
    return _offsets(connection, admin, partitions, OffsetSpec.earliest())  # type: ignore[no-untyped-call]


def _offsets(
    connection: Connection, admin: AdminClient, partitions: Iterable[tuple[str, int]], which: OffsetSpec
) -> dict[tuple[str, int], int]:
    """Asks again while a partition changes its leader: the client may still know the one before."""
    places = list(partitions)
    until = time.monotonic() + ASK_SECONDS
    timeout_seconds = _OFFSETS_SECONDS
    while True:
        try:
            return _offsets_now(connection, admin, places, which, timeout_seconds)
        except _LeaderMoved as error:
            if time.monotonic() > until:
                raise LogUnavailable(str(error)) from error
            timeout_seconds = min(2 * timeout_seconds, ASK_SECONDS)
            time.sleep(0.5)
            _request(connection, lambda: admin.list_topics(timeout=ASK_SECONDS), "ask for topics")  # who leads now


class _LeaderMoved(LogUnavailable):
    """Another broker leads the partition now."""


def _offsets_now(
    connection: Connection,
    admin: AdminClient,
    partitions: Sequence[tuple[str, int]],
    which: OffsetSpec,
    timeout_seconds: float,
) -> dict[tuple[str, int], int]:
    # librdkafka 2.16 sends the request to the leader that it knows. When that broker has just died, its threads spin at
    # 100 % until the request times out (without a limit of ours: 20 s), and only a new request finds the new leader.
    wanted = {_partition_at(connection, place): which for place in partitions}
    futures = admin.list_offsets(wanted, request_timeout=timeout_seconds)
    offsets: dict[tuple[str, int], int] = {}
    for place, future in futures.items():
        doing = f"ask for the offsets of {place.topic}/{place.partition}"
        try:
            answer = _request(connection, partial(future.result, timeout=ASK_SECONDS), doing)
        except LogUnavailable as error:
            cause = error.__cause__
            if isinstance(cause, KafkaException) and cause.args[0].code() in _LEADER_ERRORS:
                raise _LeaderMoved(str(error)) from error
            raise
        offsets[connection.plain(place.topic), place.partition] = int(answer.offset)
    for (topic, partition), offset in offsets.items():
        # -1 is what a request that timed out leaves. Taken for the end, it would make a reader believe that it has caught up.
        if offset < 0:
            raise _LeaderMoved(f"the broker does not know where {topic}/{partition} ends, or not yet")
    return offsets


def _sweeps(offsets: list[int]) -> Iterator[list[int]]:
    """Sorted offsets in stretches that are worth reading through."""
    sweep = offsets[:1]
    for offset in offsets[1:]:
        if offset - sweep[-1] > _READ_AHEAD_OFFSETS:
            yield sweep
            sweep = []
        sweep.append(offset)
    yield sweep


def _offset(message: Message) -> int:
    offset = message.offset()
    assert offset is not None
    return offset


def _partition(message: Message) -> int:
    partition = message.partition()
    assert partition is not None
    return partition


def _address(connection: Connection, message: Message) -> Address:
    """Of a message without an error, which has all three."""
    return Address(connection.plain(message.topic()), message.partition(), message.offset())  # type: ignore[arg-type]


def _partition_at(connection: Connection, place: tuple[str, int], offset: int | None = None) -> TopicPartition:
    name = connection.name(place[0])
    return TopicPartition(name, place[1]) if offset is None else TopicPartition(name, place[1], offset)
