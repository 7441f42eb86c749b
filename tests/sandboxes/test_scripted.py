"""Recorded observations, seen again."""

from typing import Any

import pytest

from replayground.sandboxes.backends import open_backend
from replayground.sandboxes.backends.scripted import RecordedObservations, ScriptedBackend
from replayground.sandboxes.protocol import SandboxFailed, ToolResult

RECORDS: list[dict[str, Any]] = [
    {"call_id": "a", "tool": "search", "arguments": '{"query": "valve", "page": 1}'},
    {"call_id": "b", "tool": "search", "arguments": {"page": 1, "query": "valve"}},
    {"call_id": "b", "content": "two", "is_error": False, "error_kind": None, "milliseconds": 3.0},
    {"call_id": "a", "content": "one", "is_error": False, "error_kind": None, "milliseconds": 2.0},
    {"call_id": "c", "tool": "kv", "arguments": {"key": "x"}},
    {"call_id": "c", "content": "error: not found", "is_error": True, "error_kind": "agent", "milliseconds": 1.0},
    {"call_id": "d", "tool": "kv", "arguments": {"key": "never observed"}},
]


async def test_recorded_calls_are_answered_in_order_and_in_each_lease_anew() -> None:
    sandbox = await ScriptedBackend(recording=RecordedObservations.of_records(RECORDS)).open(0)
    search = {"page": 1, "query": "valve"}
    for lease in range(2):
        said = [(await sandbox.call("search", search, f"{lease}-{number}")).content for number in range(3)]
        assert said == ["two", "one", "one"]
        missing = await sandbox.call("kv", {"key": "x"}, f"{lease}-k")
        assert missing == ToolResult("error: not found", True, "agent", 1.0)
        assert await sandbox.reset()


async def test_a_call_that_was_not_recorded_is_an_infra_error_that_names_it() -> None:
    recording = RecordedObservations([("search", {"query": "valve"}, ToolResult("one", False, None, 1.0))])
    backend = open_backend("scripted", {}, recording=recording)
    sandbox = await backend.open(0)
    with pytest.raises(SandboxFailed, match=r'no call \["search",\{"query":"panel"\}\]; it has 1 different calls'):
        await sandbox.call("search", {"query": "panel"}, "a")


async def test_functions_come_before_the_recording() -> None:
    recording = RecordedObservations([("echo", {}, ToolResult("recorded", False, None, 1.0))])
    sandbox = await ScriptedBackend({"echo": lambda arguments: "made"}, recording).open(0)
    assert (await sandbox.call("echo", {}, "a")).content == "made"


def test_an_observation_of_no_call_is_refused() -> None:
    with pytest.raises(ValueError, match="an observation of the call z, but not the call"):
        RecordedObservations.of_records([{"call_id": "z", "content": "x"}])


def test_unknown_isolation_is_named() -> None:
    with pytest.raises(ValueError, match="there is no isolation 'docker'; known: bubblewrap, gvisor, scripted"):
        open_backend("docker", {})
