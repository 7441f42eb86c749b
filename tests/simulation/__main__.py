"""python -m tests.simulation [first seed] [number of seeds]: simulates and says how it went."""

import sys
import time

from tests.simulation.simulator import simulate_on_all_cores


def main(arguments: list[str]) -> int:
    first = int(arguments[0]) if arguments else 0
    count = int(arguments[1]) if len(arguments) > 1 else 1
    began = time.monotonic()
    kills, places = simulate_on_all_cores(range(first, first + count))
    seconds = time.monotonic() - began
    print(
        f"{count} seeds, {kills} kills at {places} places where a program could be killed, {seconds:.1f} s: all agree"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
