"""python -m tests.simulation [first seed] [number of seeds]: simulates and says how it went."""

import logging
import sys
import time

import structlog

from tests.simulation.simulator import simulate_and_check


def main(arguments: list[str]) -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    first = int(arguments[0]) if arguments else 0
    count = int(arguments[1]) if len(arguments) > 1 else 1
    began = time.monotonic()
    kills, places = simulate_and_check(range(first, first + count))
    seconds = time.monotonic() - began
    print(
        f"{count} seeds, {kills} kills at {places} places where a program could be killed, {seconds:.1f} s: all agree"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
