"""Agents together: every topology played, who hears what from whom, and that each one's ids are its own, whole and exact."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from replayground.producers.agent import Agent, Model, Part
from replayground.producers.chat import Chat, ChatFormat, Message
from replayground.producers.policy import Policy, PolicyFailed, Turn, TurnRequest
from replayground.producers.topology import AgentCatalog, HandOff, Loop, Parallel, Series, Team
from replayground.producers.turns import play
from replayground.sandboxes.backends.scripted import ScriptedBackend
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.tools.registry import toolset
from replayground.sandboxes.workbench import Observation, Workbench
from replayground.sandboxes.worlds.world import WORLD_TOOLS, World
from replayground.schemas.events import (
    Address,
    AgentMessaged,
    Event,
    RolloutEnded,
    RolloutRequested,
    RolloutStarted,
    Sampling,
    ToolObserved,
    TrajectoryAssembled,
    TurnGenerated,
    VersionSpan,
)
from replayground.schemas.packed import unpack_tokens
from replayground.streams.hops.messages_to_trajectories import AssembleTrajectories, AssemblyState
from replayground.trainer.batch import counting_only, episodes_of
from tests.producers.field import no_blobs, tokenizer_json
from tests.producers.test_chat import FORGETFUL, chatml
from tests.producers.test_turns import PYTHON, request

CHAT = ChatFormat(tokenizer_json())
ROOMY = Sampling(tokens_max=4000, turns_max=6, max_tokens_per_turn=400)
AGENTS = tuple(Agent(name=name, parts=(Part(name="role", text=f"You are {name}."),)) for name in ("ann", "bob", "cyd"))

BIG = Model(name="big", servers=("http://127.0.0.1:9",), served_name="big")


def calls(tool: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


class Troupe:
    """A policy that says these texts, by agent; it remembers what each read before each turn."""

    def __init__(self, chat: Chat = CHAT, *, teaches: bool = False, **texts: list[str]) -> None:
        self._chat = chat
        self._texts = texts
        self._teaches = teaches
        self.moments: list[TurnRequest] = []

    async def next_turn(self, turn_request: TurnRequest) -> Turn:
        self.moments.append(turn_request)
        await asyncio.sleep(0)
        tokens = self._chat.turn(self._texts[turn_request.task.agent].pop(0))
        if self._teaches:
            return Turn(tokens, [], [], "stop")
        return Turn(tokens, [-0.5] * len(tokens), [VersionSpan(version=4, start=0, end=len(tokens))], "stop")


def asked(agent: str, sampling: Sampling = ROOMY, seconds: float = 60.0) -> RolloutRequested:
    wanted = request(sampling, seconds=seconds)
    return msgspec.structs.replace(wanted, task=msgspec.structs.replace(wanted.task, agent=agent))


async def played(
    wanted: RolloutRequested,
    agent_catalog: AgentCatalog,
    policy: Policy,
    models: Mapping[str, Policy] | None = None,
    chat: Chat = CHAT,
    workbench: type[Workbench] = Workbench,
    bench: Workbench | None = None,
) -> list[Event]:
    scripts = {"python": lambda arguments: str(eval(arguments["code"]))} | {name: lambda _: "" for name in WORLD_TOOLS}
    emitted: list[Event] = []
    async with Pool(ScriptedBackend(scripts), 1) as pool:
        tools = toolset(agent_catalog.tools_of(wanted.task))
        await play(
            wanted,
            policy=policy,
            bench=bench or workbench(pool, tools, World(name="w"), seed=11, owner="o"),
            chat=chat,
            system_prompt="Tools: python",
            worker="worker-1",
            emit=emitted.append,
            keep_blob=no_blobs,
            tools_hash="t",
            agent_catalog=agent_catalog,
            models=models,
        )
    assert [event.meta.seq for event in emitted] == list(range(len(emitted)))
    return emitted


def assembled(events: list[Event]) -> TrajectoryAssembled:
    hop, state = AssembleTrajectories(), AssemblyState()
    for offset, event in enumerate(events):
        outcome = hop.step(state, event, Address("messages", 0, offset))
        assert outcome.refused is None
        state = outcome.state
    trajectory, _ = outcome.events
    assert isinstance(trajectory, TrajectoryAssembled)
    return trajectory


def contexts_of(events: list[Event]) -> dict[int, list[int]]:
    """The ids of each context, joined from the messages."""
    contexts: dict[int, list[int]] = defaultdict(list)
    for event in events:
        if isinstance(event, RolloutStarted):
            contexts[0] += unpack_tokens(event.prompt_tokens)
        elif isinstance(event, (TurnGenerated, ToolObserved, AgentMessaged)):
            contexts[event.context] += unpack_tokens(event.tokens)
    return dict(contexts)


def whole(events: list[Event], *troupes: Troupe) -> TrajectoryAssembled:
    """The trajectory, after checking that every agent read, id by id, what the events say, and nothing of the others."""
    contexts: dict[int, list[int]] = defaultdict(list)
    read: list[list[int]] = []
    for event in events:
        if isinstance(event, TurnGenerated):
            read.append(list(contexts[event.context]))
        for context, tokens in contexts_of([event]).items():
            contexts[context] += tokens
    assert sorted(read) == sorted(turn_request.tokens for troupe in troupes for turn_request in troupe.moments)
    trajectory = assembled(events)
    tokens = unpack_tokens(trajectory.tokens)
    starts = [context.start for context in trajectory.contexts] or [0]
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(tokens)], strict=True)):
        assert tokens[start:end] == contexts[number]
    for segment in trajectory.segments:
        owners = [context.agent for context in trajectory.contexts if context.start <= segment.start]
        said = any(trajectory.loss_mask[segment.start : segment.end])
        assert not said or not owners or segment.agent == owners[-1]
    return trajectory


def messages(events: list[Event]) -> list[tuple[str, str, str, str, str]]:
    return [
        (e.kind, e.meta.sender, e.meta.receiver or "", e.meta.caller or "", e.content)
        for e in events
        if isinstance(e, AgentMessaged)
    ]


def end(events: list[Event]) -> tuple[str, str | None]:
    assert isinstance(events[-1], RolloutEnded)
    return events[-1].ended_by, events[-1].answer


async def test_a_series_hands_each_answer_on() -> None:
    agent_catalog = AgentCatalog.of([*AGENTS, Series(name="row", steps=("ann", "bob", "ann"))])
    troupe = Troupe(
        ann=[PYTHON, "<answer>45</answer>", "<answer>90</answer>"], bob=["<answer>twice that, please</answer>"]
    )
    events = await played(asked("row"), agent_catalog, troupe)
    assert end(events) == ("answered", "90")
    assert messages(events) == [
        ("result", "ann", "bob", "row", "45"),
        ("result", "bob", "ann", "row", "twice that, please"),
    ]
    trajectory = whole(events, troupe)
    assert [(context.agent, context.because is None) for context in trajectory.contexts] == [
        ("ann", True),
        ("bob", False),
    ]
    assert "You are bob." in CHAT.decode(unpack_tokens(trajectory.tokens)[trajectory.contexts[1].start :])
    assert troupe.moments[2].messages[-1] == Message("user", "What is 5*9?\n\nann: 45")
    assert troupe.moments[3].messages[-1] == Message("user", "bob: twice that, please")


RAISES = FORGETFUL.replace(
    "{%- set ns.last", "{%- if 'bad' in message.content %}{{ raise_exception('no') }}{%- endif %}{%- set ns.last"
)
"A template that refuses some messages of a user, as those of some reasoning models do."


async def test_a_message_that_a_template_refuses_is_the_error_of_who_wrote_it() -> None:
    """Else an agent could have its attempt repeated by what it writes to another."""
    agent_catalog = AgentCatalog.of([*AGENTS, Team(name="team", leader="ann", workers=("bob",))])
    chat = chatml(RAISES)
    for worker in ([], ["<answer>first</answer>"]):
        texts = [calls("ask", agent="bob", message="good")] * len(worker) + [calls("ask", agent="bob", message="bad")]
        troupe = Troupe(chat, ann=[*texts, "<answer>45</answer>"], bob=list(worker))
        events = await played(asked("team"), agent_catalog, troupe, chat=chat)
        assert end(events) == ("answered", "45")
        assert "cannot be read" in messages(events)[-1][-1]


async def test_a_prompt_that_a_template_refuses_is_nobodys_error() -> None:
    bad = Agent(name="bob", parts=(Part(name="role", text="<refused>"),))
    agent_catalog = AgentCatalog.of([AGENTS[0], bad, Team(name="team", leader="ann", workers=("bob",))])
    refuses = (
        "{%- for message in messages %}{%- if '<refused>' in message.content %}"
        "{{ raise_exception('no') }}{%- endif %}{%- endfor %}"
    )
    chat = chatml(refuses + FORGETFUL)
    troupe = Troupe(chat, ann=[calls("ask", agent="bob", message="good")])
    assert end(await played(asked("team"), agent_catalog, troupe, chat=chat)) == ("infra_error", None)


async def test_branches_think_at_once_and_share_one_sandbox() -> None:
    agent_catalog = AgentCatalog.of(
        [*AGENTS, Parallel(name="votes", steps=("ann", "bob")), Series(name="vote", steps=("votes", "cyd"))]
    )
    both_think = asyncio.Barrier(2)

    class AtOnce(Troupe):
        async def next_turn(self, turn_request: TurnRequest) -> Turn:
            if turn_request.task.agent != "cyd":  # nobody goes on before the other has come as far
                await asyncio.wait_for(both_think.wait(), 60)
            return await super().next_turn(turn_request)

    troupe = AtOnce(
        ann=[PYTHON, "<answer>45</answer>"], bob=[PYTHON, "<answer>54</answer>"], cyd=["<answer>45</answer>"]
    )
    events = await played(asked("vote"), agent_catalog, troupe)
    assert end(events) == ("answered", "45")
    assert ("task", "user", "bob", "user", "What is 5*9?") in messages(events)
    assert messages(events)[-1] == ("result", "votes", "cyd", "vote", "ann: 45\nbob: 54")
    trajectory = whole(events, troupe)
    assert [context.agent for context in trajectory.contexts] == ["ann", "bob", "cyd"]
    assert len({event.call_id for event in events if isinstance(event, ToolObserved)}) == 2


async def test_a_loop_ends_when_the_judge_accepts_or_rounds_are_over() -> None:
    agent_catalog = AgentCatalog.of([*AGENTS, Loop(name="polish", body="ann", judge="bob", rounds_max=2)])
    drafts = [f"<answer>{number}</answer>" for number in (1, 2, 3)]
    first = Troupe(ann=list(drafts), bob=["<answer>more</answer>", "<answer>Accept</answer>"])
    events = await played(asked("polish"), agent_catalog, first)
    assert end(events) == ("answered", "2")
    assert [kind for kind, *_ in messages(events)] == ["result", "remarks", "result"]
    whole(events, first)
    second = Troupe(ann=list(drafts), bob=["<answer>more</answer>", "<answer>more</answer>"])
    assert end(await played(asked("polish"), agent_catalog, second)) == ("answered", "2")


async def test_a_task_is_handed_over_and_back() -> None:
    agent_catalog = AgentCatalog.of([*AGENTS, HandOff(name="desk", agents=("ann", "bob"))])
    troupe = Troupe(
        ann=[calls("hand_off", agent="bob", message="a sum"), "<answer>45</answer>"],
        bob=[PYTHON, calls("hand_off", agent="ann", message="it is 45")],
    )
    events = await played(asked("desk"), agent_catalog, troupe)
    assert end(events) == ("answered", "45")
    assert messages(events) == [
        ("hand_off", "ann", "bob", "user", "a sum"),
        ("hand_off", "bob", "ann", "user", "it is 45"),
    ]
    whole(events, troupe)


async def test_a_leader_asks_workers_who_read_nothing_else() -> None:
    agent_catalog = AgentCatalog.of([*AGENTS, Team(name="office", leader="ann", workers=("bob", "cyd"))])
    troupe = Troupe(
        ann=[
            calls("ask", agent="bob", message="Multiply 5 and 9."),
            calls("ask", agent="zoe", message="?"),
            calls("ask", agent="bob", message="Are you sure?"),
            "<answer>45</answer>",
        ],
        bob=[PYTHON, "<answer>45</answer>", "<answer>yes</answer>"],
    )
    events = await played(asked("office"), agent_catalog, troupe)
    assert end(events) == ("answered", "45")
    assert messages(events) == [
        ("delegation", "ann", "bob", "user", "Multiply 5 and 9."),
        ("reply", "bob", "ann", "ann", "45"),
        ("delegation", "ann", "bob", "user", "Are you sure?"),
        ("reply", "bob", "ann", "ann", "yes"),
    ]
    bobs = [turn_request for turn_request in troupe.moments if turn_request.task.agent == "bob"]
    assert bobs[0].task.prompt == "Multiply 5 and 9."
    assert "What is 5*9?" not in CHAT.decode(bobs[-1].tokens)
    refused = next(event for event in events if isinstance(event, ToolObserved) and event.is_error)
    assert "bob" in refused.content
    trajectory = whole(events, troupe)
    assert [context.agent for context in trajectory.contexts] == ["ann", "bob"]
    assert [utterance.role for utterance in trajectory.transcript].count("agent") == 4


async def test_whose_tokens_count_can_be_chosen() -> None:
    agent_catalog = AgentCatalog.of([*AGENTS, Team(name="office", leader="ann", workers=("bob",))])
    troupe = Troupe(ann=[calls("ask", agent="bob", message="5*9?"), "<answer>45</answer>"], bob=["<answer>45</answer>"])
    events = await played(asked("office"), agent_catalog, troupe)
    trajectory = whole(events, troupe)
    for agent in ("ann", "bob"):
        (episode,) = episodes_of(counting_only(trajectory, (agent,)), 10_000, advantage=1.0)
        said = [unpack_tokens(e.tokens) for e in events if isinstance(e, TurnGenerated) and e.agent == agent]
        assert episode.tokens[episode.sampled].tolist() == [token for turn in said for token in turn]
    assert len(episodes_of(trajectory, 10_000)) == 2


async def test_a_worker_that_cannot_go_on_is_told_to_its_leader() -> None:
    workers = [msgspec.structs.replace(AGENTS[1], turns_max=1), msgspec.structs.replace(AGENTS[2], tokens_max=10)]
    agent_catalog = AgentCatalog.of([AGENTS[0], *workers, Team(name="office", leader="ann", workers=("bob", "cyd"))])
    for name, reason in (("bob", "no answer in 1 turns"), ("cyd", "does not fit into 10 tokens")):
        troupe = Troupe(ann=[calls("ask", agent=name, message="5*9?"), "<answer>45</answer>"], bob=[PYTHON], cyd=[])
        events = await played(asked("office"), agent_catalog, troupe)
        assert end(events) == ("answered", "45")
        assert reason in messages(events)[-1][-1]
        whole(events, troupe)


async def test_an_agent_that_cannot_go_on_ends_the_rest() -> None:
    agent_catalog = AgentCatalog.of(
        [*AGENTS, Series(name="row", steps=("ann", "bob")), Parallel(name="votes", steps=("ann", "bob"))]
    )
    idle = await played(asked("row"), agent_catalog, Troupe(ann=["<answer>45</answer>"], bob=["I wonder."]))
    assert end(idle) == ("agent_error", None)
    limited = await played(
        asked("row", msgspec.structs.replace(ROOMY, turns_max=1)), agent_catalog, Troupe(ann=[PYTHON], bob=[])
    )
    assert end(limited) == ("turn_limit", None)
    apart = await played(asked("votes"), agent_catalog, Troupe(ann=["I wonder."], bob=[PYTHON] * 5))
    assert end(apart) == ("agent_error", None)
    for events in (idle, limited, apart):
        assembled(events)


async def test_a_branch_is_called_off_but_never_in_the_middle_of_a_tool() -> None:
    """bob gives up while cyd's tool is running: the call ends first, and the leader goes on with the same sandbox."""
    calling, may_end, cut_off = asyncio.Event(), asyncio.Event(), False

    class SlowOnce(Workbench):
        async def call(self, tool: str, arguments: Mapping[str, Any], session: str = "") -> Observation:
            nonlocal cut_off
            calling.set()
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                cut_off = True
                raise
            return await super().call(tool, arguments, session)

    class GivesUp(Troupe):
        async def next_turn(self, turn_request: TurnRequest) -> Turn:
            if turn_request.task.agent == "bob":
                await calling.wait()
                asyncio.get_running_loop().call_later(0.2, may_end.set)
            return await super().next_turn(turn_request)

    votes, office = Parallel(name="votes", steps=("bob", "cyd")), Team(name="office", leader="ann", workers=("votes",))
    troupe = GivesUp(
        ann=[calls("ask", agent="votes", message="5*9?"), PYTHON, "<answer>45</answer>"],
        bob=["I wonder."],
        cyd=[PYTHON] * 4,
    )
    events = await played(asked("office"), AgentCatalog.of([*AGENTS, votes, office]), troupe, workbench=SlowOnce)
    assert end(events) == ("answered", "45")
    assert not cut_off
    assert [event.meta.receiver for event in events if isinstance(event, ToolObserved)] == ["cyd", "ann"]
    assert "votes gave no answer" in messages(events)[-1][-1]


@pytest.mark.parametrize(("name", "sessions"), [("office", ["bob", "ann"]), ("ann", [""])])
async def test_agents_of_one_rollout_have_a_session_each(name: str, sessions: list[str]) -> None:
    seen: list[str] = []

    class Watched(Workbench):
        async def call(self, tool: str, arguments: Mapping[str, Any], session: str = "") -> Observation:
            seen.append(session)
            return await super().call(tool, arguments, session)

    agent_catalog = AgentCatalog.of([*AGENTS, Team(name="office", leader="ann", workers=("bob",))])
    asks = [calls("ask", agent="bob", message="5*9?")] if name == "office" else []
    troupe = Troupe(ann=[*asks, PYTHON, "<answer>45</answer>"], bob=[PYTHON, "<answer>45</answer>"])
    assert end(await played(asked(name), agent_catalog, troupe, workbench=Watched)) == ("answered", "45")
    assert seen == sessions


@pytest.mark.parametrize("said", ["I wonder.", "<answer>45</answer>", PYTHON])
async def test_an_agent_that_gives_up_leaves_its_sandbox_to_the_next(said: str) -> None:
    scripts = {"python": lambda arguments: "45"} | {name: lambda _: "" for name in WORLD_TOOLS}
    names: list[str | None] = []
    async with Pool(ScriptedBackend(scripts), 1) as pool:
        for _ in range(2):
            bench = Workbench(pool, toolset(["python"]), World(name="w"), seed=11, owner="o")
            await played(asked("ann"), AgentCatalog.of(AGENTS), Troupe(ann=[PYTHON, said, *[PYTHON] * 4]), bench=bench)
            names.append(bench.sandbox_id)
    assert names[0] == names[1] is not None


async def test_a_failing_server_is_nobodys_fault_in_a_team() -> None:
    class Failing(Troupe):
        async def next_turn(self, turn_request: TurnRequest) -> Turn:
            if turn_request.task.agent == "bob":
                raise PolicyFailed("no server")
            return await super().next_turn(turn_request)

    agent_catalog = AgentCatalog.of([*AGENTS, Team(name="office", leader="ann", workers=("bob",))])
    events = await played(asked("office"), agent_catalog, Failing(ann=[calls("ask", agent="bob", message="?")]))
    assert end(events) == ("infra_error", None)


async def test_a_deadline_ends_all_branches() -> None:
    class Slow(Troupe):
        async def next_turn(self, turn_request: TurnRequest) -> Turn:
            if turn_request.task.agent == "ann" and not self._texts["ann"]:
                await asyncio.sleep(300)
            return await super().next_turn(turn_request)

    agent_catalog = AgentCatalog.of([*AGENTS, Parallel(name="votes", steps=("ann", "bob"))])
    events = await played(asked("votes", seconds=2.0), agent_catalog, Slow(ann=[PYTHON], bob=["<answer>1</answer>"]))
    assert end(events) == ("deadline", None)


async def test_two_agents_that_wait_for_each_other_are_found_out() -> None:
    agent_catalog = AgentCatalog.of(
        [
            *AGENTS,
            HandOff(name="desk", agents=("ann", "bob")),
            Team(name="office", leader="bob", workers=("ann",)),
            Series(name="both", steps=("desk", "office")),
        ]
    )
    troupe = Troupe(
        ann=[calls("hand_off", agent="bob", message="you"), calls("hand_off", agent="bob", message="no, you")],
        bob=[calls("ask", agent="ann", message="you"), "<answer>nobody</answer>", "<answer>nobody</answer>"],
    )
    events = await played(asked("both"), agent_catalog, troupe)
    assert any("while it waits" in content for *_, content in messages(events))
    assert end(events) == ("answered", "nobody")


async def test_agents_see_their_own_tools_and_write_calls_their_own_way() -> None:
    role = Part(name="tools", source="tools")
    agent_catalog = AgentCatalog.of(
        [Agent(name="ann", parts=(role,), format="xml"), Agent(name="bob", tools=(), parts=(role,))]
    )
    xml = '<tool name="python"><arg name="code">5*9</arg></tool>'
    events = await played(
        asked("ann"), agent_catalog, Troupe(ann=[PYTHON.replace("tool_call", "tool "), xml, "<answer>45</answer>"])
    )
    wrong, right = (event for event in events if isinstance(event, ToolObserved))
    assert (wrong.is_error, wrong.error_kind) == (True, "agent")
    assert '<tool name="TOOL"><arg name="ARGUMENT">VALUE</arg></tool>' in wrong.content
    assert right.content == "45"
    both = AgentCatalog.of([*agent_catalog.agents.values(), Series(name="row", steps=("ann", "bob"))])
    events = await played(asked("row"), both, Troupe(ann=["<answer>1</answer>"], bob=[PYTHON, "<answer>45</answer>"]))
    (refused,) = (event for event in events if isinstance(event, ToolObserved))
    assert "there is no tool 'python'" in refused.content


async def test_a_plain_word_is_an_answer_where_that_is_agreed() -> None:
    agent_catalog = AgentCatalog.of([Agent(name="ann", plain_answers=True)])
    assert end(await played(asked("ann"), agent_catalog, Troupe(ann=["It is 45.\n"]))) == ("answered", "It is 45.")


async def test_a_template_that_rewrites_begins_a_new_context() -> None:
    """bob is spoken to twice; his template forgets what he thought, so his second part is a context of its own."""
    chat = chatml(FORGETFUL)
    agent_catalog = AgentCatalog.of([*AGENTS, Loop(name="polish", body="ann", judge="bob", rounds_max=2)])
    troupe = Troupe(
        chat,
        ann=["<answer>1</answer>", "<answer>2</answer>"],
        bob=["<think>hm</think>\n<answer>more</answer>", "<answer>accept</answer>"],
    )
    events = await played(asked("polish"), agent_catalog, troupe, chat=chat)
    assert end(events) == ("answered", "2")
    trajectory = whole(events, troupe)
    assert [context.agent for context in trajectory.contexts] == ["ann", "bob", "bob"]
    assert "rewrites" in (trajectory.contexts[2].because or "")
    assert "<think>" in chat.decode(contexts_of(events)[1])
    assert "<think>" not in chat.decode(contexts_of(events)[2])
    assert len(episodes_of(trajectory, 10_000, advantage=1.0)) == 3


async def test_a_teacher_beside_the_policy_is_read_and_never_trained_on() -> None:
    agent_catalog = AgentCatalog.of(
        [
            AGENTS[0],
            msgspec.structs.replace(AGENTS[1], model="big"),
            Team(name="office", leader="ann", workers=("bob",)),
            BIG,
        ]
    )
    policy = Troupe(ann=[calls("ask", agent="bob", message="5*9?"), "<answer>45</answer>"])
    teacher = Troupe(teaches=True, bob=["<answer>45</answer>"])
    events = await played(asked("office"), agent_catalog, policy, {"big": teacher})
    trajectory = whole(events, policy, teacher)
    assert trajectory.policy_version_oldest == 4
    assert len(trajectory.logprobs) == len(trajectory.tokens)
    (episode,) = episodes_of(trajectory, 10_000, advantage=1.0)
    anns = [unpack_tokens(e.tokens) for e in events if isinstance(e, TurnGenerated) and e.agent == "ann"]
    assert episode.tokens[episode.sampled].tolist() == [token for turn in anns for token in turn]
    assert trajectory.tokens_sampled == sum(map(len, anns))


@pytest.mark.parametrize("purpose", ["train", "demonstrate"])
async def test_who_speaks_depends_on_the_purpose(purpose: str) -> None:
    agent = msgspec.structs.replace(AGENTS[0], teacher="big")
    wanted = asked("ann")
    wanted = msgspec.structs.replace(wanted, meta=msgspec.structs.replace(wanted.meta, purpose=purpose))
    policy, teacher = Troupe(ann=["<answer>policy</answer>"]), Troupe(teaches=True, ann=["<answer>teacher</answer>"])
    events = await played(wanted, AgentCatalog.of([agent, BIG]), policy, {"big": teacher})
    assert end(events) == ("answered", "teacher" if purpose == "demonstrate" else "policy")


async def test_a_model_that_the_worker_does_not_know_ends_before_it_begins() -> None:
    agent = msgspec.structs.replace(AGENTS[0], model="big")
    events = await played(asked("ann"), AgentCatalog.of([agent, BIG]), Troupe())
    assert [type(event) for event in events] == [RolloutStarted, RolloutEnded]
    assert end(events) == ("infra_error", None)
