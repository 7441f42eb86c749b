"""A stopped trainer, a vLLM that is away, a trace store far behind, a stopped broker: all catch up without help (P8).

One run of the example job on the whole stack; the long form is `python -m tests.torture pressure`."""

import pytest

from tests.torture.broker_away import EVENT_BYTES
from tests.torture.pressure import MEBIBYTE, Sizes, Verdict, press

pytestmark = pytest.mark.timeout(1800)  # the whole stack, on a machine that may be busy

QUEUE_BYTES_MAX = 64 * MEBIBYTE
"of a producer: queue.buffering.max.kbytes in streams.log.kafka"
SIZES = Sizes(steps=2, backlog_events=3000, producer_events=1500, vllm_away_seconds=None)


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Verdict:
    return press(tmp_path_factory.mktemp("pressure"), SIZES)


def test_the_run_ends_by_itself_with_all_its_steps(verdict: Verdict) -> None:
    assert verdict.steps == verdict.steps_wanted == SIZES.steps


def test_sampling_stops_at_the_staleness_budget(verdict: Verdict) -> None:
    assert verdict.groups_over_budget == 0, "the budget was exceeded, or never used up"
    assert verdict.requests_when_full == 0
    assert verdict.groups_asked >= 8


def test_a_server_that_is_away_counts_against_nobody(verdict: Verdict) -> None:
    assert verdict.retry_max > verdict.retries_max
    assert verdict.ends["infra_error"] > 0
    assert verdict.ends["cancelled"] == verdict.ends["deadline"] == 0
    assert verdict.attempts_unasked == 0, "a request was played more than once"


def test_the_trace_store_has_all_of_the_log(verdict: Verdict) -> None:
    assert verdict.trace_rows == verdict.log_events > SIZES.backlog_events


def test_memory_stays_bounded(verdict: Verdict) -> None:
    assert verdict.memory_growth_bytes.keys() >= {"scheduler", "rollouts", "streams", "feeder", "cut"}
    assert verdict.programs_too_large == [], (verdict.memory_bytes_peak, verdict.memory_growth_bytes)


def test_a_producer_waits_for_its_broker_and_loses_nothing(verdict: Verdict) -> None:
    produced = verdict.produced
    assert produced.once_and_in_order
    assert produced.found == produced.wanted == SIZES.producer_events
    assert produced.waiting_max * EVENT_BYTES <= QUEUE_BYTES_MAX
    assert produced.memory_bytes_peak <= 128 * MEBIBYTE + 2 * QUEUE_BYTES_MAX
