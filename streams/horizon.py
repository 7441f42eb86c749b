"""Which keys a hop remembers: the newest of each partition, in the order of their first message.

    first message of a key ─► newest ● ● ● ● ● ● ● ● oldest ─► closed: forgotten
                                 ▲                     └─────► open: back to the newest, up to 64 times; then given up
                                 └──────────────────────────┘

A key is closed when no further message is expected for it. It is remembered until enough newer keys have begun, so that
repeats are recognised. So a hop holds its open keys and a fixed number of closed ones, however long the run is.

The order is stored beside the states, in blocks, under reserved keys. A commit writes the blocks that were added to,
then the bounds, then the states and deletions. If it is killed in between, the stored order may name keys without a
state, which is harmless. A state that the order does not name would never be forgotten.
"""

from collections import deque
from collections.abc import Callable

import msgspec
from msgspec import Struct

type Stored = Callable[[bytes], bytes | None]
"Reads the state of a key as it was last written; None when it has none."

RESERVED = "\0"
"prefix of the keys under which the order is stored; a stage rejects events whose key begins with it"

# A commit rewrites the last block, however few keys were added to it.
BLOCK_ENTRIES = 64
TURNS_MAX = 64
"""how often an open key goes back to the newest before it is given up: enough for a rollout of an hour beside many
short ones; a group that a late repeat left incomplete is still removed eventually"""


class Entry(Struct, frozen=True, array_like=True, gc=False):
    """A remembered key."""

    key: bytes
    offset: int
    "of its first message"
    turns: int = 0
    "how often it was the oldest and still open"


class Block(Struct):
    """Entries with consecutive numbers; None where the key was forgotten or has a later number now."""

    entries: list[Entry | None]


class OrderBounds(Struct):
    """The numbers in use: oldest … next - 1."""

    oldest: int = 0
    next: int = 0


class OrderWrites(Struct, frozen=True):
    """What a commit stores of an order: `before` the states, and `after` them, each in the given sequence."""

    before: list[tuple[bytes, Struct | None]]
    after: list[tuple[bytes, Struct | None]]
    ends: OrderBounds
    "as they are when everything is stored"


class KeyOrder:
    """The keys of one partition: as stored, and as changed since."""

    def __init__(self, partition: int, stored: Stored, block_entries: int = BLOCK_ENTRIES) -> None:
        self._partition = partition
        self._block_entries = block_entries
        ends = _decode(stored(self._ends_key), OrderBounds) or OrderBounds()
        self._oldest, self._next = ends.oldest, ends.next
        self._stored_ends = ends
        self._entries: deque[Entry | None] = deque()
        "from the oldest stored number on: a block that is rewritten must name its keys until their states are deleted"
        self._numbers: dict[bytes, int] = {}
        for number in range(self._oldest // self._block_entries, -(-self._next // self._block_entries)):
            self._load(number, _decode(stored(self._block_key(number)), Block) or Block([]))

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, key: bytes) -> bool:
        return key in self._numbers

    def add(self, entry: Entry) -> None:
        """Adds a key as the newest. It must not be in the order."""
        assert entry.key not in self._numbers, "a key with two numbers would leave an entry that is never forgotten"
        self._numbers[entry.key] = self._next
        self._entries.append(entry)
        self._next += 1

    def oldest(self) -> Entry:
        """The oldest key. The order must not be empty."""
        assert self._numbers, "an empty order has no oldest key"
        # Gaps come from _load: the key has a later number, or was forgotten.
        while (entry := self._entries[self._oldest - self._stored_ends.oldest]) is None:
            self._oldest += 1
        return entry

    def drop_oldest(self) -> None:
        del self._numbers[self.oldest().key]
        self._oldest += 1

    def changes(self) -> OrderWrites | None:
        """What is not stored yet; None when nothing has changed."""
        stored, ends = self._stored_ends, OrderBounds(self._oldest, self._next)
        assert stored.oldest <= ends.oldest <= ends.next, "numbers only grow"
        assert len(self._entries) == ends.next - stored.oldest, "entries start at the oldest number that is stored"
        if stored == ends:
            return None
        first_used = self._oldest // self._block_entries
        added = range(max(first_used, stored.next // self._block_entries), -(-self._next // self._block_entries))
        # The stored oldest number moves only in the next commit. This one deletes the states of forgotten keys, and the
        # order must name them until that is done.
        ends_until_deleted = OrderBounds(stored.oldest, self._next)
        return OrderWrites(
            before=[*((self._block_key(n), self._block(n)) for n in added), (self._ends_key, ends_until_deleted)],
            after=[(self._block_key(n), None) for n in range(stored.oldest // self._block_entries, first_used)],
            ends=ends,
        )

    def mark_stored(self, writes: OrderWrites) -> None:
        """Call it when `writes` are stored."""
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
        # Negative for the part of the block that is older than what is kept in memory: it is written as None.
        first = number * self._block_entries - self._stored_ends.oldest
        places = range(first, min(first + self._block_entries, len(self._entries)))
        return Block([self._entries[place] if place >= 0 else None for place in places])

    def _load(self, block_number: int, block: Block) -> None:
        first = block_number * self._block_entries
        for number in range(max(first, self._oldest), min(first + self._block_entries, self._next)):
            entry = block.entries[number - first] if number - first < len(block.entries) else None
            self._entries.append(entry)
            if entry is not None:
                # A key that went back to the newest is stored twice; the later number counts.
                if entry.key in self._numbers:
                    self._entries[self._numbers[entry.key] - self._oldest] = None
                self._numbers[entry.key] = number


def _decode[State: Struct](data: bytes | None, kind: type[State]) -> State | None:
    return None if data is None else msgspec.msgpack.decode(data, type=kind)
