"""What many tests need: a real broker and registry, started once and ended with the session."""

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings

from replayground.deploy.local.stack import LogAddresses, local_log
from replayground.schemas.run import JobSettings, Run

# A busy machine is no reason to fail: no assertions on time.
settings.register_profile("without_deadline", deadline=None)
settings.load_profile("without_deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--isolation", default="bubblewrap", help="what the tests of tools run in: bubblewrap or gvisor")


@pytest.fixture(scope="session")
def kafka_addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LogAddresses]:
    with local_log(tmp_path_factory.mktemp("log")) as addresses:
        yield addresses


@pytest.fixture(scope="session")
def kafka_run(kafka_addresses: LogAddresses) -> Run:
    """A run on the session's broker."""
    return Run(
        run_id="tests",
        seed=0,
        job=JobSettings(),
        log=kafka_addresses.log,
        blobs_url=kafka_addresses.blobs_url,
    )


@pytest.fixture(scope="module", autouse=True)
def collect_garbage() -> Iterator[None]:
    """What a module leaves open (a socket, a transport) is an error of that module: without this, the collector reports it in
    whichever test happens to run when it next starts."""
    yield
    gc.collect()
    # What is still alive is not looked at again: libraries that stay loaded made every later collection take seconds.
    gc.freeze()
