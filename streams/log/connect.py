"""Opens the log a run is told of."""

from schemas.blobs import open_blobs
from schemas.codec import Codec
from schemas.registry import ConfluentRegistry
from schemas.run import Run
from streams.log.kafka import KafkaLog


def registry_of(run: Run) -> ConfluentRegistry:
    return ConfluentRegistry(run.log.registry_url, run.log.security, run.program, run.log.topic_prefix)


def codec_of(run: Run) -> Codec:
    return Codec(registry_of(run), open_blobs(run))


def open_log(run: Run) -> KafkaLog:
    """The run's log, typed, for run.program. Nothing is asked of the broker yet. Raises BadInput when a secret is missing."""
    return KafkaLog(run.log, codec_of(run), run.program)
