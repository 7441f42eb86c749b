"""pass@k and pass^k, unbiased, over tasks with several attempts each (docs/learning.md)."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class PassRate:
    """A mean over tasks, the number of tasks in it, and the number left out for having fewer than k attempts."""

    value: float
    tasks: int
    tasks_left_out: int


def pass_at_k_of_task(attempts: int, successes: int, k: int) -> float:
    """Probability that at least one of k attempts, drawn without replacement, succeeds."""
    # Unbiased, unlike 1 - (1 - p)^k with an estimated p.
    return 1.0 - comb(attempts - successes, k) / comb(attempts, k)


def pass_hat_k_of_task(attempts: int, successes: int, k: int) -> float:
    """Probability that all of k attempts, drawn without replacement, succeed."""
    return comb(successes, k) / comb(attempts, k)


def pass_at_k(tasks: Iterable[tuple[int, int]], k: int) -> PassRate:
    """Mean pass@k over tasks, each given as (attempts, successes)."""
    kept: list[float] = []
    left_out = 0
    for attempts, successes in tasks:
        # The estimator is undefined for fewer than k attempts.
        if attempts < k:
            left_out += 1
        else:
            kept.append(pass_at_k_of_task(attempts, successes, k))
    return PassRate(sum(kept) / len(kept) if kept else 0.0, len(kept), left_out)
