"""A step that is refused: the batch is kept, the run is paused with an alarm on the log, and a resume takes it again."""

import dataclasses
import threading
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from replayground.schemas.events import ControlIssued, Meta
from replayground.trainer.config import GrpoSettings
from replayground.trainer.engines.protocol import GrpoBatch, StepRefused, StepReport
from replayground.trainer.engines.torch_engine import TorchEngine
from replayground.trainer.loop import train
from tests.trainer.field import SETTINGS, Field, everything

RUINOUS = msgspec.structs.replace(SETTINGS, grpo=GrpoSettings(learning_rate=1e38, micro_batch_tokens_max=256))


def control(field: Field, command: str) -> None:
    meta = Meta(id=f"{command}-1", run_id="run", category="control", topic="control", sender="operator", timestamp=1)
    event = ControlIssued(meta=meta, command=command, version=None, requested_by="operator", reason="")  # type: ignore[arg-type]
    field.log.append(event)


def alarms(field: Field) -> list[ControlIssued]:
    return [event for event in field.all("control") if isinstance(event, ControlIssued) and event.command == "pause"]


def test_a_refused_step_pauses_the_run_and_its_batch_is_taken_when_that_is_possible(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    plain = Field(tmp_path / "plain")
    everything(plain, tokenizer)
    with plain.training():
        plain.until_version(4)
    field = Field(tmp_path / "refused")
    everything(field, tokenizer)
    control(field, "resume")  # of something before: it does not answer the alarm
    with field.training(RUINOUS):
        field.until(lambda: len(alarms(field)) == 1)
        assert [version for version, _ in field.digests()] == [0, 1], "no version is published"
        (alarm,) = alarms(field)
        assert (alarm.requested_by, alarm.version) == ("trainer", 1)
        assert "the step is refused and the batch is kept" in alarm.reason
        assert "replayground steer resume" in alarm.reason
        field.until(lambda: field.program_metrics.detail.startswith("paused: batch 0"))
        control(field, "resume")  # nothing was mended: it is refused again
        field.until(lambda: len(alarms(field)) == 2)
    assert field.failure is None
    # Started again with settings that do not ruin the weights: the same batch, and the weights of a run without trouble.
    with field.training():
        field.until_version(4)
    assert field.digests() == plain.digests()


class FailingOnce(TorchEngine):
    """Refuses one step after it has changed the weights."""

    refused = False

    def grpo(self, batch: GrpoBatch) -> StepReport:
        if batch.index == 1 and not self.refused:
            self.refused = True
            super().grpo(dataclasses.replace(batch, advantages=[9.0, -9.0, 9.0, -9.0]))
            raise StepRefused("a machine that gave a wrong number once")
        return super().grpo(batch)


def test_after_a_resume_the_step_begins_from_the_published_weights(tmp_path: Path, tokenizer: Tokenizer) -> None:
    runs: list[list[tuple[int, str]]] = []
    for engine in (TorchEngine(SETTINGS, 0), FailingOnce(SETTINGS, 0)):
        field, stop = Field(tmp_path / type(engine).__name__), threading.Event()
        everything(field, tokenizer)
        thread = threading.Thread(
            target=train, args=(field.run, SETTINGS, field.log, field.blobs, engine, field.program_metrics, stop)
        )
        thread.start()
        try:
            if isinstance(engine, FailingOnce):
                field.until(lambda field=field: len(alarms(field)) == 1)  # type: ignore[misc]
                control(field, "resume")
            field.until_version(4)
        finally:
            stop.set()
            thread.join()
        runs.append(field.digests())
    assert runs[0] == runs[1]


def test_where_somebody_waits_for_it_a_refused_step_ends_the_work(tmp_path: Path, tokenizer: Tokenizer) -> None:
    field = Field(tmp_path)
    everything(field, tokenizer)
    work = (field.run, RUINOUS, field.log, field.blobs, TorchEngine(RUINOUS, 0), field.program_metrics)
    with pytest.raises(StepRefused, match="batch 0"):
        train(*work, threading.Event(), pauses_when_refused=False)
    assert alarms(field) == []
