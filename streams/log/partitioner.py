"""murmur2 as Kafka's Java client computes it: every client puts a key on the same partition."""

_MASK = 0xFFFF_FFFF
_SEED = 0x9747_B28C
_MULTIPLIER = 0x5BD1_E995


def murmur2(data: bytes) -> int:
    """32-bit murmur2 with Kafka's seed."""
    # Python integers have no fixed size: each product is cut to 32 bits, as Java does by overflow.
    value = _SEED ^ len(data)
    whole = len(data) & ~3
    for start in range(0, whole, 4):
        word = int.from_bytes(data[start : start + 4], "little") * _MULTIPLIER & _MASK
        word = (word ^ word >> 24) * _MULTIPLIER & _MASK
        value = value * _MULTIPLIER & _MASK ^ word
    # One to three bytes are left, read as one little-endian number.
    if rest := data[whole:]:
        value = (value ^ int.from_bytes(rest, "little")) * _MULTIPLIER & _MASK
    value = (value ^ value >> 13) * _MULTIPLIER & _MASK
    return value ^ value >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """The partition that the Java client, librdkafka's murmur2_random and aiokafka choose for a key."""
    # Kafka clears the sign bit, since its hash is a signed integer.
    return (murmur2(key) & 0x7FFF_FFFF) % partitions
