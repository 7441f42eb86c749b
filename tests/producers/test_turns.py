"""The turn loop: what is emitted, in which order, with which ids, and every way a rollout can end."""

import asyncio
import re
from collections.abc import Callable

import msgspec
import pytest

from replayground.producers.attempt import AttemptWriter, close_unplayed
from replayground.producers.chat import ChatFormat
from replayground.producers.policy import PolicyFailed, RequestRefused, Turn, TurnRequest, TurnTooLong
from replayground.producers.turns import play
from replayground.sandboxes.backends.scripted import ScriptedBackend
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.protocol import SandboxFailed
from replayground.sandboxes.tools.registry import toolset
from replayground.sandboxes.workbench import Workbench
from replayground.sandboxes.worlds.checks import Check
from replayground.sandboxes.worlds.world import WORLD_TOOLS, World
from replayground.schemas.errors import LogUnavailable
from replayground.schemas.events import (
    Event,
    Meta,
    RolloutEnded,
    RolloutRequested,
    RolloutStarted,
    Sampling,
    Task,
    ToolCalled,
    ToolObserved,
    TurnGenerated,
    VersionSpan,
)
from replayground.schemas.ids import now_microseconds
from replayground.schemas.packed import unpack_logprobs, unpack_tokens
from tests.producers.field import RUN_ID, no_blobs, tokenizer_json

PYTHON = '<tool_call>{"name": "python", "arguments": {"code": "5*9"}}</tool_call>'
CHAT = ChatFormat(tokenizer_json())
WORLD = World(name="w")


def request(
    sampling: Sampling | None = None, version: int | None = None, seconds: float = 60.0, world: str = '{"name": "w"}'
) -> RolloutRequested:
    return RolloutRequested(
        meta=Meta(
            id="request-1",
            run_id=RUN_ID,
            session_id="train",
            task_id="task-1",
            group_id="group-1",
            trajectory_id="0190a6a0-0000-7000-8000-000000000001",
            category="request",
            topic="rollouts",
            sender="scheduler",
            timestamp=0,
            purpose="train",
        ),
        task=Task(
            prompt="What is 5*9?",
            reference="45",
            agent="stockroom",
            toolset=["python"],
            world=world,
            scorers=["exact_match"],
            group_size=8,
            split="train",
        ),
        index=3,
        seed=11,
        sampling=sampling or Sampling(),
        deadline=now_microseconds() + int(seconds * 1e6),
        required_version=version,
    )


class Scripted:
    """A policy that says these texts; it remembers the prompts it was given."""

    def __init__(self, *texts: str | Exception, versions: tuple[int, ...] = (4,), cut_off: bool = False) -> None:
        self._texts = list(texts)
        self._versions = versions
        self._cut_off = cut_off
        self.moments: list[TurnRequest] = []

    async def next_turn(self, turn_request: TurnRequest) -> Turn:
        self.moments.append(turn_request)
        await asyncio.sleep(0)
        text = self._texts.pop(0) if len(self._texts) > 1 else self._texts[0]
        if isinstance(text, Exception):
            raise text
        tokens = CHAT.turn(text)[: -1 if self._cut_off else None][: turn_request.tokens_max]
        first = len(tokens) // 2
        spans = [VersionSpan(version=self._versions[0], start=0, end=first)] if len(self._versions) > 1 else []
        spans.append(VersionSpan(version=self._versions[-1], start=first if spans else 0, end=len(tokens)))
        return Turn(tokens, [-0.5] * len(tokens), spans, "length" if self._cut_off else "stop")


async def played(
    policy: Scripted,
    asked: RolloutRequested | None = None,
    python: Callable[..., str] = lambda arguments: str(eval(arguments["code"])),
    world: World = WORLD,
    commands: Callable[..., str] = lambda arguments: "",
) -> list[Event]:
    scripts = {"python": python, **{name: lambda arguments: "" for name in WORLD_TOOLS}, "run_command": commands}
    emitted: list[Event] = []
    async with Pool(ScriptedBackend(scripts), 1) as pool:
        await play(
            asked or request(),
            policy=policy,
            bench=Workbench(pool, toolset(["python"]), world, seed=11, owner="o"),
            chat=CHAT,
            system_prompt="Tools: python",
            worker="worker-1",
            emit=emitted.append,
            keep_blob=no_blobs,
            tools_hash="t",
        )
    return emitted


CHECKED = World(
    name="w",
    checks=(
        Check(name="report", kind="file", path="report.txt"),
        Check(name="tests", kind="command", command="pytest"),
        Check(name="rows", kind="tables"),
    ),
)


@pytest.mark.parametrize(
    ("texts", "ended_by"), [((PYTHON, "<answer>45</answer>"), "answered"), ((PYTHON,), "turn_limit")]
)
async def test_what_the_checks_of_the_world_find_is_stored_with_the_attempt(
    texts: tuple[str, ...], ended_by: str
) -> None:
    passed = msgspec.json.encode(
        {"exit_code": 0, "output": "\ud800 2 passed".encode("utf-8", "replace").decode()}
    ).decode()
    end = last(await played(Scripted(*texts), world=CHECKED, commands=lambda arguments: passed))
    assert end.ended_by == ended_by
    report, tests, rows = end.findings
    assert (report.name, report.content, report.problem) == ("report", "", "report.txt")
    assert (tests.kind, tests.exit_code, tests.content) == ("command", 0, "? 2 passed")
    assert (rows.kind, rows.content) == ("tables", "{}")


async def test_an_attempt_that_is_cut_off_has_no_findings() -> None:
    end = last(await played(Scripted(PYTHON), request(seconds=0.0), world=CHECKED))
    assert (end.ended_by, end.findings) == ("infra_error", [])


def last(events: list[Event]) -> RolloutEnded:
    assert isinstance(events[-1], RolloutEnded)
    return events[-1]


async def test_a_bug_that_an_agent_finds_is_no_excuse() -> None:
    def broken(arguments: object) -> str:
        raise RuntimeError("nobody thought of this")

    end = last(await played(Scripted(PYTHON), python=broken))
    assert (end.ended_by, end.reason) == (
        "agent_error",
        "its call cannot be made: RuntimeError: nobody thought of this",
    )


async def test_an_answered_rollout_message_by_message() -> None:
    policy = Scripted(PYTHON, "<answer>45</answer>")
    events = await played(policy)
    kinds = [RolloutStarted, TurnGenerated, ToolCalled, ToolObserved, TurnGenerated, RolloutEnded]
    assert [type(event) for event in events] == kinds
    assert [event.meta.seq for event in events] == list(range(6))
    assert len({event.meta.attempt_id for event in events}) == 1
    assert len({event.meta.id for event in events}) == 6
    causes = ["request-1", *(event.meta.id for event in events[:-1])]
    assert [event.meta.causation_id for event in events] == causes
    for event in events:
        assert (event.meta.correlation_id, event.meta.purpose, event.meta.topic) == ("request-1", "train", "messages")
        assert (event.meta.session_id, event.meta.task_id, event.meta.group_id) == ("train", "task-1", "group-1")
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", event.meta.headers["traceparent"])
    end = last(events)
    assert (end.ended_by, end.answer, end.turns) == ("answered", "45", 2)
    assert isinstance(events[3], ToolObserved)
    assert (events[3].content, events[3].is_error) == ("45", False)
    assert events[1].meta.policy_version == 4


async def test_ids_are_only_ever_joined() -> None:
    """What the policy read in its second turn is the first prompt, what it said, and the observation: id by id."""
    policy = Scripted(PYTHON, "<answer>45</answer>")
    started, said, _, observed, answered, end = await played(policy)
    assert isinstance(started, RolloutStarted)
    assert isinstance(said, TurnGenerated)
    assert isinstance(observed, ToolObserved)
    assert isinstance(answered, TurnGenerated)
    assert isinstance(end, RolloutEnded)
    prompt, turn, seen = (unpack_tokens(data) for data in (started.prompt_tokens, said.tokens, observed.tokens))
    assert policy.moments[0].tokens == prompt
    assert policy.moments[1].tokens == prompt + turn + seen
    assert policy.moments[1].turns == [(PYTHON, "45")]
    assert unpack_logprobs(said.logprobs) == [-0.5] * len(turn)
    answer_count = len(unpack_tokens(answered.tokens))
    assert (end.tokens_sampled, end.tokens_read) == (len(turn) + answer_count, len(prompt) + len(seen))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<tool_call>{</tool_call>", "the call is not"),
        ('<tool_call>{"name": "telepathy", "arguments": {}}</tool_call>', "there is no tool"),
        ('<tool_call>{"name": "python", "arguments": {}}</tool_call>', "missing argument"),
    ],
)
async def test_a_bad_call_is_told_to_the_agent_who_may_go_on(text: str, says: str) -> None:
    events = await played(Scripted(text, "<answer>45</answer>"))
    observed = next(event for event in events if isinstance(event, ToolObserved))
    assert observed.is_error
    assert observed.error_kind == "agent"
    assert says in observed.content
    assert last(events).ended_by == "answered"


async def test_every_other_end() -> None:
    assert last(await played(Scripted("I wonder."))).ended_by == "agent_error"
    end = last(await played(Scripted(PYTHON), request(Sampling(turns_max=3))))
    assert (end.ended_by, end.turns) == ("turn_limit", 3)
    end = last(await played(Scripted(PYTHON), request(Sampling(tokens_max=60, turns_max=50))))
    assert end.ended_by == "token_limit"
    assert end.tokens_sampled + end.tokens_read <= 60
    assert last(await played(Scripted(PolicyFailed("no server")))).ended_by == "infra_error"
    assert "no server" in (last(await played(Scripted(PolicyFailed("no server")))).reason or "")
    assert last(await played(Scripted(RuntimeError("a bug in a job")))).ended_by == "infra_error"


async def test_a_context_that_the_server_refuses_is_the_agents_doing_after_its_first_turn() -> None:
    refused = RequestRefused("HTTP 400: longer than the maximum model length")
    assert last(await played(Scripted(refused))).ended_by == "infra_error", "the task itself may be too long"
    assert last(await played(Scripted(PYTHON, refused))).ended_by == "agent_error"
    assert last(await played(Scripted(PYTHON, PolicyFailed("no server")))).ended_by == "infra_error"


async def test_a_turn_without_end_is_the_agents_doing_after_its_first_turn() -> None:
    endless = TurnTooLong("sampled for 120 s")
    assert last(await played(Scripted(endless))).ended_by == "infra_error", "nothing could be trained on"
    assert last(await played(Scripted(PYTHON, endless))).ended_by == "agent_error"


async def test_a_failing_sandbox_is_nobodys_fault() -> None:
    def broken(arguments: object) -> str:
        raise SandboxFailed("it died")

    assert last(await played(Scripted(PYTHON), python=broken)).ended_by == "infra_error"


async def test_a_log_that_fails_is_not_hidden() -> None:
    with pytest.raises(LogUnavailable):
        await played(Scripted(LogUnavailable("gone")))


async def test_a_deadline_that_has_passed_ends_before_the_first_turn() -> None:
    policy = Scripted(PYTHON)
    events = await played(policy, request(seconds=-1.0))
    assert [type(event) for event in events] == [RolloutStarted, RolloutEnded]
    assert last(events).ended_by == "infra_error", "nobody was free for it: not the agent's fault"
    assert not policy.moments


async def test_a_deadline_stops_a_slow_policy() -> None:
    class Slow(Scripted):
        def __init__(self, *texts: str, quick_turns: int) -> None:
            super().__init__(*texts)
            self.quick_turns = quick_turns

        async def next_turn(self, turn_request: TurnRequest) -> Turn:
            if len(self.moments) >= self.quick_turns:
                await asyncio.sleep(30)
            return await super().next_turn(turn_request)

    assert last(await played(Slow(PYTHON, quick_turns=1), request(seconds=1.0))).ended_by == "deadline"
    end = last(await played(Slow(PYTHON, quick_turns=0), request(seconds=0.05)))
    assert end.ended_by == "infra_error", "an agent that never had the word is not to blame"


async def test_a_turn_of_another_version_than_required_counts_for_nothing() -> None:
    assert last(await played(Scripted("<answer>45</answer>"), request(version=4))).ended_by == "answered"
    for versions in ((5,), (4, 5), (3, 4)):
        end = last(await played(Scripted("<answer>45</answer>", versions=versions), request(version=4)))
        assert end.ended_by == "infra_error"
        assert "asked for" in (end.reason or "")
    assert last(await played(Scripted("<answer>45</answer>", versions=(4, 5)))).ended_by == "answered"


async def test_a_turn_that_was_cut_off_is_closed_by_us() -> None:
    policy = Scripted(PYTHON, "<answer>45</answer>", cut_off=True)
    events = await played(policy)
    observed = next(event for event in events if isinstance(event, ToolObserved))
    assert unpack_tokens(observed.tokens)[0] == CHAT.end
    assert last(events).ended_by == "answered"


async def test_an_observation_that_does_not_fit_is_recorded_and_not_read() -> None:
    events = await played(Scripted(PYTHON), request(Sampling(tokens_max=100)), python=lambda arguments: "9" * 500)
    observed = next(event for event in events if isinstance(event, ToolObserved))
    assert (len(observed.content), observed.tokens) == (500, b"")
    assert last(events).ended_by == "token_limit"


def test_an_attempt_that_is_not_played_still_begins_and_ends() -> None:
    emitted: list[Event] = []
    close_unplayed(AttemptWriter(request(), emitted.append, "attempt-x"), "scheduler", "cancelled", "given up")
    assert [event.meta.seq for event in emitted] == [0, 1]
    assert {event.meta.attempt_id for event in emitted} == {"attempt-x"}
    assert all(msgspec.to_builtins(event, builtin_types=(bytes,)) for event in emitted)
