"""What a long test is at, for whoever watches it. What came of it is told by its result."""

import sys
from datetime import datetime


def tell(doing: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {doing}", file=sys.stderr, flush=True)
