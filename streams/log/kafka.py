"""The log on Kafka, by confluent-kafka: idempotent murmur2 producers, read-committed readers, KIP-447 transactions."""

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from confluent_kafka.cimpl import NewTopic

from schemas.codec import Codec
from schemas.errors import BadInput, Fenced, LogBroken, LogUnavailable, Rebalanced
from schemas.events import Address, Event, Position
from schemas.topics import PARTITIONS, TOPICS, Topic, topic_of
from streams.log.protocol import Delivery, RawMessage, Reader, Standing, Unread, delivered

logger = structlog.get_logger()

_ASK_SECONDS = 20.0
_TRANSACTION_SECONDS = 60.0
"After this the coordinator aborts a transaction whose holder is silent."
_POLL_BYTES_MAX = 16 * 1024 * 1024
"A poll that has taken so much returns with what it has: as events it is several times as large."
_CONSUMED_AT_ONCE = 250
_READ_AHEAD_OFFSETS = 512
"""Wanted offsets closer together than this are read in one sweep: a seek costs about as much as so many messages."""


def _client_settings(bootstrap_servers: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": bootstrap_servers,
        "log_level": 3,
        "socket.keepalive.enable": True,
    }


def _producer_settings(bootstrap_servers: str) -> dict[str, Any]:
    return _client_settings(bootstrap_servers) | {
        "acks": "all",
        "enable.idempotence": True,
        "partitioner": "murmur2_random",
        "compression.type": "lz4",
        "linger.ms": 20,  # a fraction of the broker's work at 5; flush and commit do not wait for it
        "queue.buffering.max.kbytes": 64 * 1024,
        "message.max.bytes": 1024 * 1024,
    }


def _consumer_settings(bootstrap_servers: str, group: str) -> dict[str, Any]:
    return _client_settings(bootstrap_servers) | {
        "group.id": group,
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "session.timeout.ms": 10_000,
        "max.poll.interval.ms": 20 * 60 * 1000,  # a worker with its hands full takes nothing new until a rollout ends
        # messages come one by one: fetched twenty times a second instead, they cost the broker a fraction of its work
        "fetch.min.bytes": 64 * 1024,
        "fetch.wait.max.ms": 50,
        # one fetch may exceed the second bound, and by as much as it was compressed: so it is kept small
        "fetch.message.max.bytes": 256 * 1024,
        "queued.max.messages.kbytes": 32 * 1024,
    }


class KafkaLog:
    """See streams.log.protocol.Log."""

    def __init__(self, bootstrap_servers: str, codec: Codec) -> None:
        self._bootstrap_servers = bootstrap_servers
        self.codec = codec
        self._producer: Producer | None = None
        self._failure: KafkaError | None = None
        self._random_access: Consumer | None = None
        self._questions = _Questions(bootstrap_servers)
        self._askers: dict[str, Consumer] = {}

    def append(self, event: Event, acknowledged: Callable[[Address], None] | None = None) -> None:
        topic = topic_of(event)
        on_delivery = self._on_delivery if acknowledged is None else self._on_delivery_then(acknowledged)
        self._produce(topic.name, topic.key(event).encode(), self.codec.encode(event), on_delivery)

    def append_bytes(self, topic: str, key: bytes | None, value: bytes) -> None:
        self._produce(topic, key, value, self._on_delivery)

    def _produce(
        self, topic: str, key: bytes | None, value: bytes, on_delivery: Callable[[KafkaError | None, Message], None]
    ) -> None:
        self._raise_failure()
        producer = self._opened_producer()
        while True:
            try:
                producer.produce(topic, value, key, on_delivery=on_delivery)
                producer.poll(0)
                return
            except BufferError:  # the queue is full: back-pressure, not an error
                producer.poll(0.05)

    def flush(self, timeout_seconds: float = 30.0) -> None:
        if self._producer is not None and self._producer.flush(timeout_seconds):
            raise LogUnavailable(f"the broker did not acknowledge everything within {timeout_seconds:g} s")
        self._raise_failure()

    def forget_failure(self) -> None:
        """Goes on with a new producer. What the failed one held is lost: for programs that take it again from the log."""
        self._producer, self._failure = None, None

    def reader(self, topics: Sequence[str], group: str | None = None, *, alone: bool = False) -> "KafkaReader":
        return KafkaReader(self._bootstrap_servers, self.codec, topics, group, alone)

    def transactor(self, name: str) -> "KafkaTransactor":
        return KafkaTransactor(self._bootstrap_servers, self.codec, name)

    def read_at(self, addresses: Sequence[Address]) -> list[Event]:
        wanted: dict[tuple[str, int], set[int]] = defaultdict(set)
        for address in addresses:
            wanted[address.topic, address.partition].add(address.offset)
        found: dict[Address, Event] = {}
        for (topic, partition), offsets in wanted.items():
            for sweep in _sweeps(sorted(offsets)):
                found.update(self._sweep(topic, partition, sweep))
        if self._random_access is not None:
            self._random_access.unassign()  # else it would go on fetching what nobody asked for
        missing = [address for address in addresses if address not in found]
        if missing:
            raise LookupError(f"no event at {missing[0]} and {len(missing) - 1} more addresses")
        return [found[address] for address in addresses]

    def standing(self, group: str, topics: Sequence[str]) -> dict[str, Standing]:
        with self._questions.client() as admin:
            partitions = self._partitions(admin, topics)
            committed = self._committed(group, partitions)
            ends = _ends(admin, partitions)
        for place, offset in committed.items():
            if offset > ends[place]:
                raise LogUnavailable(f"{place[0]}/{place[1]} ends at {ends[place]}, before {offset}, where {group} is")
        return {
            topic: Standing(
                committed=sum(offset for place, offset in committed.items() if place[0] == topic),
                end=sum(end for place, end in ends.items() if place[0] == topic),
            )
            for topic in topics
        }

    def count(self, topics: Sequence[str]) -> dict[str, int]:
        """Committed messages of each topic up to now, counted one by one: markers of transactions are not messages."""
        counts = dict.fromkeys(topics, 0)
        reader = KafkaReader(self._bootstrap_servers, self.codec, topics, None)
        try:
            while not reader.caught_up():
                for message in reader.poll_messages(10_000, 1.0):
                    counts[str(message.topic())] += 1
        finally:
            reader.close()
        return counts

    def unread(self, group: str, topics: Sequence[str]) -> dict[str, Unread]:
        with self._questions.client() as admin:
            partitions = self._partitions(admin, topics)
            committed = self._committed(group, partitions)
            starts, ends = _starts(admin, partitions), _ends(admin, partitions)
        waiting = {
            place: max(committed.get(place, 0), starts[place])
            for place in partitions
            if max(committed.get(place, 0), starts[place]) < ends[place]
        }
        written = self._written(waiting)
        return {
            topic: Unread(
                oldest_milliseconds=min((at for place, at in written.items() if place[0] == topic), default=None),
                expired=sum(max(0, starts[place] - offset) for place, offset in committed.items() if place[0] == topic),
            )
            for topic in topics
        }

    def messages(self, topics: Sequence[str]) -> Iterator[RawMessage]:
        reader = KafkaReader(self._bootstrap_servers, self.codec, topics, None)
        try:
            while not reader.caught_up():
                for message in reader.poll_everything(10_000, 1.0):
                    yield RawMessage(_address(message), message.key(), message.value())
        finally:
            reader.close()

    def make_topics(self) -> None:
        with self._questions.client() as admin:
            self._make_topics(admin)

    def _make_topics(self, admin: AdminClient) -> None:
        existing = _asked(lambda: admin.list_topics(timeout=_ASK_SECONDS)).topics
        for topic in TOPICS:
            if topic.name in existing and len(existing[topic.name].partitions) != topic.partitions:
                raise BadInput(
                    f"topic {topic.name} has {len(existing[topic.name].partitions)} partitions where the map says "
                    f"{topic.partitions}: use another broker or data folder"
                )
        self._require_settings(admin, [topic for topic in TOPICS if topic.name in existing])
        missing = [topic for topic in TOPICS if topic.name not in existing]
        if missing:
            _create(admin, [NewTopic(t.name, t.partitions, replication_factor=1, config=t.settings) for t in missing])

    def make_changelogs(self, names: Sequence[str]) -> None:
        """Makes topics for states, keyed as the events are and kept by key, where they do not exist yet."""
        with self._questions.client() as admin:
            settings = {"cleanup.policy": "compact"}
            _create(admin, [NewTopic(name, PARTITIONS, replication_factor=1, config=settings) for name in names])

    def _require_settings(self, admin: AdminClient, topics: Sequence[Topic]) -> None:
        """A topic that forgets sooner than the map says would lose what replay counts on."""
        by_name = {topic.name: topic for topic in topics}
        resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in by_name]
        futures = admin.describe_configs(resources, request_timeout=_ASK_SECONDS) if resources else {}
        for resource, future in futures.items():
            found = _asked(future.result)
            for name, wanted in by_name[resource.name].settings.items():
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

    def _opened_producer(self) -> Producer:
        if self._producer is None:
            self._producer = Producer(_producer_settings(self._bootstrap_servers))
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
                acknowledged(_address(message))

        return on_delivery

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise LogUnavailable(f"an event was not written: {self._failure}")

    def _sweep(self, topic: str, partition: int, offsets: list[int]) -> Iterator[tuple[Address, Event]]:
        """Reads one stretch of a partition and keeps what is wanted."""
        if self._random_access is None:
            settings = _consumer_settings(self._bootstrap_servers, f"random-access-{uuid.uuid4()}")
            # a fetch that still waits for its last partition would hold the next one back
            self._random_access = Consumer(settings | {"fetch.min.bytes": 1, "fetch.wait.max.ms": 10})
        wanted = set(offsets)
        self._random_access.assign([TopicPartition(topic, partition, offsets[0])])
        while wanted:
            messages = self._random_access.consume(min(len(wanted), _READ_AHEAD_OFFSETS), _ASK_SECONDS)
            if not messages:
                raise LogUnavailable(f"{topic}/{partition} cannot be read at {min(wanted)}")
            for message in messages:
                error = message.error()
                if error is not None:
                    if error.code() == KafkaError._PARTITION_EOF:
                        return
                    _raise_unavailable(error)
                offset = _offset(message)
                if offset in wanted:
                    wanted.remove(offset)
                    yield _address(message), self.codec.decode(message.value() or b"", topic)
                if offset >= offsets[-1]:
                    return

    def _partitions(self, admin: AdminClient, topics: Sequence[str]) -> list[tuple[str, int]]:
        known = _asked(lambda: admin.list_topics(timeout=_ASK_SECONDS)).topics
        for topic in topics:
            # a broker that starts knows no topics, or no partitions of them, and a lag of nothing would be no lag
            if topic not in known or known[topic].error is not None or not known[topic].partitions:
                raise LogUnavailable(f"the broker does not know topic {topic}, or not yet")
        return [(topic, partition) for topic in topics for partition in known[topic].partitions]

    def _committed(self, group: str, partitions: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """By a consumer that joins nothing. The admin client of librdkafka 2.16 can be asked the same, and takes the process
        down when the answer is that the group's coordinator is elsewhere, as it is while a broker starts."""
        if group not in self._askers:
            settings = _consumer_settings(self._bootstrap_servers, group)
            # uncommitted: else it would wait for a transaction under way
            self._askers[group] = Consumer(settings | {"isolation.level": "read_uncommitted"})
        asker = self._askers[group]
        asked = [TopicPartition(*partition) for partition in partitions]
        try:
            found = _asked(lambda: asker.committed(asked, _ASK_SECONDS)) if asked else []
            for place in found:
                if place.error is not None:
                    _raise_unavailable(place.error)
        except LogUnavailable:
            del self._askers[group]  # as with _Questions
            raise
        return {(place.topic, place.partition): place.offset for place in found if place.offset >= 0}

    def _written(self, waiting: dict[tuple[str, int], int]) -> dict[tuple[str, int], int]:
        """When the first message from each offset on was written; a place where only markers of transactions follow has none."""
        if not waiting:
            return {}
        consumer = Consumer(_consumer_settings(self._bootstrap_servers, f"unread-{uuid.uuid4()}"))
        written: dict[tuple[str, int], int] = {}
        ended: set[tuple[str, int]] = set()
        try:
            consumer.assign([TopicPartition(*place, offset) for place, offset in waiting.items()])
            while len(ended) < len(waiting):
                message = consumer.poll(_ASK_SECONDS)
                if message is None:
                    raise LogUnavailable(f"the oldest of {', '.join(topic for topic, _ in waiting)} cannot be read")
                error = message.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    _raise_unavailable(error)
                place = (str(message.topic()), _partition(message))
                if error is None and place not in ended:
                    written[place] = message.timestamp()[1]
                ended.add(place)
        finally:
            consumer.close()
        return written


class _Questions:
    """A client for questions to the broker. After one that was not answered, the next is asked by a new client: librdkafka
    can lose its brokers when one that starts, or was taken for dead, says that there are none."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._client: AdminClient | None = None

    @contextmanager
    def client(self) -> Iterator[AdminClient]:
        if self._client is None:
            self._client = AdminClient(_client_settings(self._bootstrap_servers))
        try:
            yield self._client
        except LogUnavailable:
            self._client = None
            raise


class KafkaReader:
    """See streams.log.protocol.Reader."""

    def __init__(
        self, bootstrap_servers: str, codec: Codec, topics: Sequence[str], group: str | None, alone: bool = False
    ) -> None:
        self._codec = codec
        self._questions = _Questions(bootstrap_servers)
        self._consumer = Consumer(_consumer_settings(bootstrap_servers, group or f"reader-{uuid.uuid4()}"))
        self._next: dict[tuple[str, int], int] = {}
        self._ends_seen: dict[tuple[str, int], int] = {}
        self._starts: dict[tuple[str, int], int] = {}
        "where reading was told to begin, by seek_before_end"
        self._topics = list(topics)
        self._held: set[tuple[str, int]] = set()
        if group is None:
            self._assign_all(OFFSET_BEGINNING)
        elif alone:
            # assigned, not joined: no session can expire, and no dead member has to be waited for
            self._assign_all(OFFSET_STORED)
        else:
            self._consumer.subscribe(self._topics, on_lost=self._forget, on_revoke=self._forget)

    def poll(self, events_max: int, timeout_seconds: float) -> list[Delivery]:
        polled = self._polled(events_max, timeout_seconds)
        unknown_ids: set[int] = set()  # all of it was on the log before the first question
        try:
            return [
                delivered(self._codec, address, message.key(), value, unknown_ids)
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
        return [message for _, message in self._polled(messages_max, timeout_seconds)]

    def _polled(self, messages_max: int, timeout_seconds: float) -> list[tuple[Address, Message]]:
        self._hold(messages_max == 0)
        try:
            # `consume` alone would wait out the whole timeout unless messages_max arrive
            first = self._consumer.poll(timeout_seconds)
            polled = [] if first is None else [first, *self._fetched(messages_max - 1)]
        except KafkaException as failure:
            raise LogUnavailable(f"cannot read {', '.join(self._topics)}: {failure}") from failure
        messages: list[tuple[Address, Message]] = []
        for message in polled:
            error = message.error()
            if error is None:
                address = _address(message)
                place = (address.topic, address.partition)
                if self._starts and address.offset < self._starts.get(place, 0):
                    continue  # was on its way when another place was sought
                self._next[place] = address.offset + 1
                messages.append((address, message))
            elif error.code() == KafkaError._PARTITION_EOF:
                self._ends_seen[str(message.topic()), _partition(message)] = _offset(message)
            elif error.fatal() or not (error.retriable() or error.code() in _PASSING_ERRORS):
                _raise_unavailable(error)
        return messages

    def _go_back_before(self, polled: Sequence[tuple[Address, Message]]) -> None:
        firsts: dict[tuple[str, int], int] = {}
        for address, _ in polled:
            firsts.setdefault((address.topic, address.partition), address.offset)
        self.seek(Position(topic=t, partition=p, offset=offset) for (t, p), offset in firsts.items())

    def _hold(self, hold: bool) -> None:
        """Fetches nothing more while held; heartbeats and rebalances go on as long as somebody polls.

        A partition that is taken away while it is held comes back held, whenever that is: so each is remembered until it was
        really let go."""
        if not hold and not self._held:
            return
        assigned = {(place.topic, place.partition) for place in self._consumer.assignment()}
        if hold:  # also what was assigned since the last time
            self._consumer.pause([TopicPartition(*place) for place in assigned])
            self._held |= assigned
        else:
            self._consumer.resume([TopicPartition(*place) for place in self._held & assigned])
            self._held -= assigned

    def _fetched(self, messages_max: int) -> Iterator[Message]:
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
        offsets = self.offsets() if positions is None else [_topic_partition(position) for position in positions]
        if not offsets:
            return
        try:
            self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            if error.args[0].code() in _REBALANCE_ERRORS:
                raise Rebalanced(f"positions were not committed: {error}") from error
            raise LogUnavailable(f"positions were not committed: {error}") from error

    def positions(self) -> list[Position]:
        return [Position(topic=t, partition=p, offset=offset) for (t, p), offset in sorted(self._next.items())]

    def offsets(self) -> list[TopicPartition]:
        return [TopicPartition(topic, partition, offset) for (topic, partition), offset in self._next.items()]

    def seek(self, positions: Iterable[Position]) -> None:
        for position in positions:
            self._consumer.seek(_topic_partition(position))
            self._next[position.topic, position.partition] = position.offset
            self._ends_seen.pop((position.topic, position.partition), None)

    def seek_before_end(self, messages: int) -> None:
        assigned = [(partition.topic, partition.partition) for partition in self._consumer.assignment()]
        starts = {place: max(0, end - messages) for place, end in self._ends(assigned).items()}
        # assigned anew: a partition that was not fetched from yet cannot be sought
        self._consumer.assign([TopicPartition(*place, offset) for place, offset in starts.items()])
        self._next = dict(starts)
        self._starts = starts
        self._ends_seen.clear()

    def caught_up(self) -> bool:
        assigned = [(partition.topic, partition.partition) for partition in self._consumer.assignment()]
        if not assigned:
            return False
        ends = self._ends(assigned)
        return all(max(self._next.get(place, -1), self._ends_seen.get(place, -1)) >= ends[place] for place in assigned)

    def _ends(self, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        # by a connection of its own: on the reader's, each answer would wait for a fetch that waits for messages
        with self._questions.client() as admin:
            return _ends(admin, places)

    def group_metadata(self) -> object:
        return self._consumer.consumer_group_metadata()

    def close(self) -> None:
        self._consumer.close()

    def _assign_all(self, offset: int) -> None:
        partitions: list[TopicPartition] = []
        for name in self._topics:
            topic = _asked(lambda name=name: self._consumer.list_topics(name, timeout=_ASK_SECONDS)).topics[name]  # type: ignore[misc]
            if topic.error is not None or not topic.partitions:
                raise LogUnavailable(f"topic {name} cannot be read: {topic.error or 'it has no partitions yet'}")
            partitions += [TopicPartition(name, partition, offset) for partition in topic.partitions]
        self._consumer.assign(partitions)

    def _forget(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """What was taken away belongs to another member now: committing it from here would undo its work."""
        for partition in partitions:
            self._next.pop((partition.topic, partition.partition), None)
            self._ends_seen.pop((partition.topic, partition.partition), None)


class KafkaTransactor:
    """See streams.log.protocol.Transactor.

    What ends a transaction is given no time of its own: it may take what is left of the transaction's, after which the client
    and the coordinator agree that it is over. A time of our own could end in between, with the two of two minds.
    """

    def __init__(self, bootstrap_servers: str, codec: Codec, name: str) -> None:
        self._settings = _producer_settings(bootstrap_servers) | {
            "transactional.id": name,
            "transaction.timeout.ms": int(_TRANSACTION_SECONDS * 1000),
            # a broker that starts says at first that there is none. Other clients must then begin anew, or they would never
            # hear of it again; an open transaction of librdkafka 2.16 that does so waits until its time is up. This
            # client may lose its broker for good instead: then its next transaction fails, and it is made anew
            "metadata.recovery.strategy": "none",
        }
        self._codec = codec
        self._producer = self._initialised()

    def commit(self, events: Sequence[Event], reader: Reader) -> None:
        assert isinstance(reader, KafkaReader)
        # before the transaction begins: an event that cannot be encoded must not leave one open
        messages = [(topic_of(event), event, self._codec.encode(event)) for event in events]
        try:
            self._producer.begin_transaction()
            for topic, event, value in messages:
                self._produce(topic.name, value, topic.key(event).encode())
            self._producer.send_offsets_to_transaction(reader.offsets(), reader.group_metadata(), _ASK_SECONDS)
            self._producer.commit_transaction()
        except KafkaException as error:
            self._abandon(error)

    def close(self) -> None:
        with suppress(KafkaException):  # of a producer that was fenced: commit has told, and that must be heard
            self._producer.flush(1.0)

    def _initialised(self) -> Producer:
        producer = Producer(self._settings)
        try:
            producer.init_transactions(_TRANSACTION_SECONDS)
        except KafkaException as error:
            raise LogUnavailable(
                f"transactional id {self._settings['transactional.id']} was not granted: {error}"
            ) from error
        return producer

    def _produce(self, topic: str, value: bytes, key: bytes) -> None:
        while True:
            try:
                self._producer.produce(topic, value, key)
                return
            except BufferError:  # the queue is full; it empties at the latest when the transaction's time is up
                self._producer.poll(0.05)

    def _abandon(self, error: KafkaException) -> NoReturn:
        """Ends in Fenced, LogBroken or LogUnavailable, with the transaction undone or, in doubt, done or undone."""
        self._raise_if_final(error)
        try:
            self._producer.abort_transaction()
        except KafkaException as indefinite:
            self._raise_if_final(indefinite)  # a new producer would take the id back from whoever has it now
            logger.warning("transaction.in_doubt", name=self._settings["transactional.id"], reason=str(indefinite))
            # of a commit that timed out nobody knows the end: a new producer waits for it, or aborts what was open
            self._producer = self._initialised()
            raise LogUnavailable(f"the transaction ended in doubt and was abandoned: {error}") from indefinite
        raise LogUnavailable(f"the transaction was aborted: {error}") from error

    def _raise_if_final(self, error: KafkaException) -> None:
        cause: KafkaError = error.args[0]
        if cause.code() in _FENCED_ERRORS:
            raise Fenced(
                f"another instance took over {self._settings['transactional.id']}, or a transaction was held for more than "
                f"{_TRANSACTION_SECONDS:g} s: {cause}"
            ) from error
        if cause.fatal():
            raise LogBroken(f"the producer of {self._settings['transactional.id']} cannot go on: {cause}") from error


_FENCED_ERRORS = {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}
_REBALANCE_ERRORS = {
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError._ASSIGNMENT_LOST,
}
_PASSING_ERRORS = {KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._MAX_POLL_EXCEEDED}


def _create(admin: AdminClient, topics: list[NewTopic]) -> None:
    """Returns when they exist, whoever made them: workers start side by side."""
    for future in admin.create_topics(topics, operation_timeout=_ASK_SECONDS).values():
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                _raise_unavailable(error.args[0])


def _asked[Answer](question: Callable[[], Answer]) -> Answer:
    """The broker's answer. Raises LogUnavailable."""
    try:
        return question()
    except KafkaException as error:
        raise LogUnavailable(f"the broker refused or did not answer: {error}") from error


def _raise_unavailable(error: KafkaError) -> NoReturn:
    raise LogUnavailable(f"the broker reports: {error}")


def _ends(admin: AdminClient, partitions: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """The next offset of each partition, in one question."""
    return _offsets(admin, partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]


def _starts(admin: AdminClient, partitions: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """The oldest offset of each partition that has not been forgotten, in one question."""
    return _offsets(admin, partitions, OffsetSpec.earliest())  # type: ignore[no-untyped-call]


def _offsets(
    admin: AdminClient, partitions: Iterable[tuple[str, int]], which: OffsetSpec
) -> dict[tuple[str, int], int]:
    futures = admin.list_offsets({TopicPartition(*partition): which for partition in partitions})
    offsets = {
        (place.topic, place.partition): int(_asked(partial(future.result, timeout=_ASK_SECONDS)).offset)
        for place, future in futures.items()
    }
    for (topic, partition), offset in offsets.items():
        if offset < 0:  # not known: a reader that took it for the end would believe it has read everything
            raise LogUnavailable(f"the broker does not know where {topic}/{partition} ends, or not yet")
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


def _address(message: Message) -> Address:
    """Of a message without an error, which has all three."""
    return Address(message.topic(), message.partition(), message.offset())  # type: ignore[arg-type]


def _topic_partition(position: Position) -> TopicPartition:
    return TopicPartition(position.topic, position.partition, position.offset)
