"""Opens the log a run is told of."""

from schemas.blobs import Blobs
from schemas.codec import Codec
from schemas.registry import ConfluentRegistry
from schemas.run import Run
from streams.log.kafka import KafkaLog


def codec_of(run: Run) -> Codec:
    return Codec(ConfluentRegistry(run.registry_url), Blobs(run.blobs_url))


def open_log(run: Run) -> KafkaLog:
    """The run's log, typed. Nothing is asked of the broker yet."""
    return KafkaLog(run.bootstrap_servers, codec_of(run))
