"""Opens the log of a run."""

from replayground.schemas.blobs import open_blobs
from replayground.schemas.codec import Codec
from replayground.schemas.registry import ConfluentRegistry
from replayground.schemas.run import Run
from replayground.streams.log.kafka import KafkaLog


def registry_of(run: Run) -> ConfluentRegistry:
    return ConfluentRegistry(run.log.registry_url, run.log.security, run.program, run.log.topic_prefix)


def codec_of(run: Run) -> Codec:
    return Codec(registry_of(run), open_blobs(run))


def open_log(run: Run) -> KafkaLog:
    """The log of a run, with the rights of run.program. Does not connect to the brokers yet. Raises BadInput."""
    return KafkaLog(run.log, codec_of(run), run.program)
