"""Which keys a hop remembers: the newest of each partition, in the order of their first message.

    first message of a key ─► newest ● ● ● ● ● ● ● ● oldest ─► closed: forgotten
                                 ▲                     └─────► open: again among the newest, for a few turns; then given up
                                 └──────────────────────────┘

A key is closed when nothing more is expected of it. It is remembered until enough newer keys have begun, so that repeated
messages are recognised. A hop thus holds its open work and a fixed number of closed keys, however long the run is.

The order is stored beside the states, in blocks, under keys of its own. A commit writes the blocks that were added to, then
the ends, then the states and what is deleted. Killed in between, the stored order may name keys that have no state, which
is harmless; a state that the order does not name would never be forgotten.
"""

from collections import deque
from collections.abc import Callable

import msgspec
from msgspec import Struct

type Stored = Callable[[bytes], bytes | None]
"The state of a key as it was last written."

RESERVED = "\0"
"begins the keys under which the order is stored; no key of an event may begin so"

BLOCK_ENTRIES = 64
TURNS_MAX = 64
"""how often an open key is put back among the newest before it is given up: enough for a rollout of an hour beside many short
ones, while an incomplete group left behind by a repeated message is removed eventually"""


class Entry(Struct, frozen=True, array_like=True, gc=False):
    """A key that is remembered."""

    key: bytes
    offset: int
    "of its first message"
    turns: int = 0
    "how often it was the oldest and still open"


class Block(Struct):
    """Entries of consecutive numbers; None where one was forgotten, or is remembered under a later number."""

    entries: list[Entry | None]


class OrderBounds(Struct):
    """Which numbers are in use: oldest … next - 1."""

    oldest: int = 0
    next: int = 0


class OrderWrites(Struct, frozen=True):
    """What a commit has to store of an order: `before` the states, in this order, and `after` them."""

    before: list[tuple[bytes, Struct | None]]
    after: list[tuple[bytes, Struct | None]]
    ends: OrderBounds
    "as they will be when all of it is stored"


class KeyOrder:
    """The keys of one partition, as stored and as changed since."""

    def __init__(self, partition: int, stored: Stored, block_entries: int = BLOCK_ENTRIES) -> None:
        self._partition = partition
        self._block_entries = block_entries
        ends = _decode(stored(self._ends_key), OrderBounds) or OrderBounds()
        self._oldest, self._next = ends.oldest, ends.next
        self._stored_ends = ends
        self._entries: deque[Entry | None] = deque()
        "from the oldest number that is stored: until it is deleted there, a block that is written again must name it"
        self._numbers: dict[bytes, int] = {}
        for number in range(self._oldest // self._block_entries, -(-self._next // self._block_entries)):
            self._load(number, _decode(stored(self._block_key(number)), Block) or Block([]))

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, key: bytes) -> bool:
        return key in self._numbers

    def add(self, entry: Entry) -> None:
        """As the newest."""
        assert entry.key not in self._numbers, "a key with two numbers would leave an entry that is never forgotten"
        self._numbers[entry.key] = self._next
        self._entries.append(entry)
        self._next += 1

    def oldest(self) -> Entry:
        """Of an order that is not empty."""
        assert self._numbers, "an empty order has no oldest key"
        while (entry := self._entries[self._oldest - self._stored_ends.oldest]) is None:
            self._oldest += 1
        return entry

    def drop_oldest(self) -> None:
        del self._numbers[self.oldest().key]
        self._oldest += 1

    def changes(self) -> OrderWrites | None:
        """What was not stored yet; None when nothing has changed."""
        stored, ends = self._stored_ends, OrderBounds(self._oldest, self._next)
        assert stored.oldest <= ends.oldest <= ends.next, "numbers only grow"
        assert len(self._entries) == ends.next - stored.oldest, "entries start at the oldest number that is stored"
        if stored == ends:
            return None
        first_used = self._oldest // self._block_entries
        added = range(max(first_used, stored.next // self._block_entries), -(-self._next // self._block_entries))
        # the oldest number stays as it was until what is forgotten now has been deleted
        ends_until_deleted = OrderBounds(stored.oldest, self._next)
        return OrderWrites(
            before=[*((self._block_key(n), self._block(n)) for n in added), (self._ends_key, ends_until_deleted)],
            after=[(self._block_key(n), None) for n in range(stored.oldest // self._block_entries, first_used)],
            ends=ends,
        )

    def mark_stored(self, writes: OrderWrites) -> None:
        """These are written."""
        assert self._stored_ends.oldest <= writes.ends.oldest <= writes.ends.next <= self._next
        for _ in range(writes.ends.oldest - self._stored_ends.oldest):
            self._entries.popleft()
        self._stored_ends = writes.ends

    @property
    def _ends_key(self) -> bytes:
        return f"{RESERVED}order/{self._partition}".encode()

    def _block_key(self, number: int) -> bytes:
        return f"{RESERVED}order/{self._partition}/{number}".encode()

    def _block(self, number: int) -> Block:
        first = number * self._block_entries - self._stored_ends.oldest
        places = range(first, min(first + self._block_entries, len(self._entries)))
        return Block([self._entries[place] if place >= 0 else None for place in places])

    def _load(self, block_number: int, block: Block) -> None:
        first = block_number * self._block_entries
        for number in range(max(first, self._oldest), min(first + self._block_entries, self._next)):
            entry = block.entries[number - first] if number - first < len(block.entries) else None
            self._entries.append(entry)
            if entry is not None:
                if entry.key in self._numbers:  # it was put back among the newest
                    self._entries[self._numbers[entry.key] - self._oldest] = None
                self._numbers[entry.key] = number


def _decode[State: Struct](data: bytes | None, kind: type[State]) -> State | None:
    return None if data is None else msgspec.msgpack.decode(data, type=kind)
