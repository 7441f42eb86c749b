"""How old experience may be, and how far sampling may run ahead of training (GRPO.md)."""


def staleness(training_version: int, oldest_sampled_version: int) -> int:
    """Versions between what is trained and what sampled the oldest token. Negative when sampling was ahead."""
    return training_version - oldest_sampled_version


def admitted(training_version: int, oldest_sampled_version: int | None, staleness_max: int) -> bool:
    """A trajectory that no versioned policy sampled is never trained on."""
    if oldest_sampled_version is None:
        return False
    return staleness(training_version, oldest_sampled_version) <= staleness_max


def groups_allowed(versions_trained: int, staleness_target: int, groups_per_batch: int) -> int:
    """Upper bound of accepted and running groups: pace instead of discarding."""
    return (staleness_target + versions_trained + 1) * groups_per_batch
