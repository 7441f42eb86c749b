"""Wakes ten times a second and records when it could not: `python -I -S heartbeat.py`. See witness.py.

Descriptor 0 is a pipe that the worker holds open; when it closes, this process ends. Descriptor 1 is a file in memory
that both map. It holds the number of silences, the time of the last beat, and the latest silences as pairs of times.
"""

import mmap
import select
import struct
import time

BEAT_SECONDS = 0.1
# A beat that is later than this by itself is a silence; shorter ones are what a busy machine always has.
SILENCE_SECONDS_MIN = 0.2
SILENCES_KEPT = 64
HEAD = struct.Struct("Qd")  # how many silences so far, the last beat
SILENCE = struct.Struct("dd")  # from, to
BYTES = HEAD.size + SILENCES_KEPT * SILENCE.size


def main() -> None:
    memory = mmap.mmap(1, BYTES)
    poller = select.poll()
    poller.register(0, select.POLLIN)
    silences = 0
    beat = time.monotonic()
    HEAD.pack_into(memory, 0, silences, beat)
    while not poller.poll(BEAT_SECONDS * 1000):
        due, beat = beat + BEAT_SECONDS, time.monotonic()
        if beat - due > SILENCE_SECONDS_MIN:
            # Before the number, so that a reader that sees the number finds the silence.
            SILENCE.pack_into(memory, HEAD.size + silences % SILENCES_KEPT * SILENCE.size, due, beat)
            silences += 1
        HEAD.pack_into(memory, 0, silences, beat)


if __name__ == "__main__":
    main()
