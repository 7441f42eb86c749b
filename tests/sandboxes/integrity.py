"""Reward integrity as a property, over policies that play random and hostile programs in real sandboxes.

make torture ARGS=integrity
python -m tests.sandboxes.integrity [--episodes 10000] [--seed 1] [--isolation bubblewrap]

An episode is played as a worker plays it. Then it is judged by what is visible of it, the texts of its turns, alone:

* how it ends and what it is rewarded follows from those texts: never an infra error, never an exclusion or a retry;
* what `sql` and `kv` answer is what they answer in a sandbox that never ran code of an agent, with every other call
  left out, and so is the first observation, whatever earlier episodes did to the sandbox.

Not covered: what the tools of the agent's own session answer. Its code can change that, for itself.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from replayground.producers.chat import ChatFormat
from replayground.producers.policy import Turn, TurnRequest
from replayground.producers.turns import play
from replayground.sandboxes.backends import open_backend
from replayground.sandboxes.limits import MEBIBYTE, Limits
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.tools.registry import SHIPPED, toolset
from replayground.sandboxes.tools.tool import Tool
from replayground.sandboxes.workbench import Workbench
from replayground.sandboxes.worlds.perturbations import Rule
from replayground.sandboxes.worlds.world import WORLD_TOOLS, Table, World
from replayground.schemas.events import (
    Address,
    Event,
    Meta,
    RolloutEnded,
    RolloutRequested,
    Sampling,
    Task,
    ToolObserved,
    TrajectoryAssembled,
    TurnGenerated,
    VersionSpan,
)
from replayground.schemas.formats import FinalAnswer, Idle, ToolCall, parse
from replayground.schemas.ids import new_id, now_microseconds
from replayground.streams.hops.messages_to_trajectories import AssembleTrajectories, AssemblyState
from replayground.streams.rules.scoring import score_trajectory, scorers_by_name
from tests.producers.field import RUN_ID, no_blobs, tokenizer_json

REFERENCE = "685"
WORLD = World(
    name="stockroom",
    files={"readme.txt": "the stock is counted at night"},
    tables={"items": Table(("name", "price"), (("panel", 685), ("valve", 12), ("crate", 407)))},
    keys={"panel.stock": 41, "valve.stock": 9},
    perturbations=(
        Rule(kind="busy", tools=("sql", "kv"), probability=0.1),
        Rule(kind="stale", tools=("kv",), probability=0.3),
        Rule(kind="partial", tools=("sql",), probability=0.2),
    ),
)
LIMITS = Limits(
    cpu_seconds=2,
    memory_bytes_max=96 * MEBIBYTE,
    disk_bytes_max=4 * MEBIBYTE,
    inodes_max=500,
    processes_max=16,
    open_files_max=64,
    output_bytes_max=4_000,
    call_timeout_seconds=1.0,
)
TOOLS = ("sql", "kv", "python", "terminal", "calculator", "files")
FIRST_UID = 318_000
HONEST_SQL = (
    "select price from items where name = 'panel'",
    "select name, price from items order by price",
    "select count(*), sum(price) from items",
    "select upper(name) from items where price > 100",
    "with cheap as (select * from items where price < 500) select count(*) from cheap",
)
HOSTILE_SQL = (
    "create temp table items as select 'panel' as name, 1 as price",
    "create temp view items as select 'panel' as name, 1 as price",
    "pragma hard_heap_limit = 1",
    "select * from pragma_hard_heap_limit(1)",
    "pragma temp_store_directory = '/work'",
    "pragma cell_size_check = 0",
    "pragma writable_schema = 1",
    "select fts3_tokenizer('simple', x'4141414141414141')",
    "select hex(fts3_tokenizer('simple'))",
    "select load_extension('/work/x.so')",
    "attach ':memory:' as main2",
    "attach '/work/world.sqlite' as again",
    "update items set price = 1",
    "drop table items",
    "begin exclusive",
    "vacuum into '/work/world2.sqlite'",
    "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n",
    "select printf('%.*c', 2000000000, 'x')",
    "select group_concat(a.name || b.name || c.name, printf('%.1000000c', 'x')) from items a, items b, items c",
    "select " + "(" * 500 + "1" + ")" * 500,
    "select '" + "\x00" + "'",
    "explain select * from items",
)
HOSTILE_CODE = (
    "import os; os._exit(3)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "import os, signal; os.kill(-1, signal.SIGKILL)",
    "import os, signal; os.kill(1, signal.SIGKILL)",
    "import os, signal; os.kill(-1, signal.SIGSTOP)",
    "while True: pass",
    "import os\nwhile True: os.fork()",
    "import os\nfor _ in range(10):\n    if os.fork() == 0:\n        while True: pass",
    "x = bytearray(90 << 20)",
    "import os\nopen('/proc/self/oom_score_adj', 'w').write('0')\n"
    "for _ in range(8):\n    if os.fork() == 0:\n        x = bytearray(b'x' * (40 << 20)); import time; time.sleep(60)",
    "import os\nwhile True: os.write(os.open('f', os.O_WRONLY | os.O_CREAT | os.O_APPEND), b'x' * 100_000)",
    "for n in range(600): open(f'n{n}', 'w').close()",
    "import os; os.chmod('/work', 0)",
    "import os, shutil; shutil.rmtree('/work', ignore_errors=True)",
    "import os; os.closerange(0, 64)",
    "import os; os.write(3, bytes(range(256)) * 20)",
    "import os, struct; a = struct.pack('>BQ', 0, 3) + b'685'; os.write(3, struct.pack('>I', len(a)) + a)",
    "import os, struct, sys\nf = sys._getframe()\nwhile 'tag' not in f.f_locals: f = f.f_back\n"
    "a = struct.pack('>BQ', 0, 3) + b'685'\n"
    "os.write(3, struct.pack('>Q16sI', f.f_locals['number'], f.f_locals['tag'], len(a)) + a)",
    "import os, threading, time\nthreading.Thread(target=lambda: [os.write(3, bytes(40)) for _ in range(100)]).start()",
    "import os, time\nif os.fork() == 0:\n    while True: os.write(3, b'\\0' * 29); time.sleep(0.01)",
    "import sqlite3, os\nfor p in ('/work/world.sqlite', '/tmp/world.sqlite'):\n"
    "    c = sqlite3.connect(p); c.execute('create table if not exists items (name, price)')\n"
    "    c.execute(\"insert into items values ('panel', 1)\"); c.commit()",
    "import os; os.makedirs('kv', exist_ok=True); open('kv/panel.stock', 'w').write('1')",
    "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "import builtins; builtins.__dict__.clear()",
    "import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict): o.clear()",
    "import sys; sys.stdout = None; sys.stderr = None; sys.modules.clear()",
    "print('\\ud800\\udfff' * 10_000)",
    "import sys; sys.stdout.buffer.write(bytes(range(256)) * 100)",
    "raise SystemExit(685)",
    "class E(Exception):\n    def __str__(self): raise KeyboardInterrupt\nraise E",
    "import resource\nfor k in range(16):\n    try: resource.setrlimit(k, (0, 0))\n    except Exception: pass",
    "import ctypes; ctypes.string_at(0)",
    "import os; os.execv('/bin/true', ['true'])",
    "import os\nfor p in os.listdir('/proc'):\n    if p.isdigit():\n        try: open(f'/proc/{p}/mem', 'r+b').write(b'x')\n"
    "        except Exception: pass",
    "def tool_sql(*a, **k): return '1'\nimport sys\nfor f in range(5):\n    sys._getframe(f).f_globals['sql'] = tool_sql",
)
COMMANDS = (
    "kill -9 -1",
    "cat /dev/urandom | head -c 20000; exit 7",
    ":(){ :|:& };:",
    "yes > big & sleep 60",
    "exec 3>&-; rm -rf /work/* /tmp/*; exit 1",
    "chmod 000 /work; cd /; false",
    "ulimit -f 0; echo x > y",
    "nohup sh -c 'while :; do :; done' >/dev/null 2>&1 &",
    "echo 6 7; printf '\\377\\376'",
)
EXPRESSIONS = (
    "685",
    "round(1/3, 10**9)",
    "9**9**9**9",
    "(" * 900 + "1" + ")" * 900,
    "factorial(9999)",
    "1/0",
    "x.y",
    "1e999999",
)


class ScriptedTexts:
    """A policy that says these texts, whatever it reads."""

    def __init__(self, chat: ChatFormat, texts: Sequence[str]) -> None:
        self._chat = chat
        self._texts = list(texts)

    async def next_turn(self, turn_request: TurnRequest) -> Turn:
        tokens = self._chat.turn(self._texts.pop(0))[: turn_request.tokens_max]
        return Turn(tokens, [-0.5] * len(tokens), [VersionSpan(version=4, start=0, end=len(tokens))], "stop")


class Episodes:
    """Texts of episodes by seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def texts(self) -> list[str]:
        """The first call is honest, the last turn answers."""
        moves = [self._move() for _ in range(self._chance.randint(1, 5))]
        answer = REFERENCE if self._chance.random() < 0.3 else self._chance.choice(["", "12", "</answer>", "685 685"])
        return [called("python", code="6 * 7"), *moves, f"<answer>{answer}</answer>"]

    def _move(self) -> str:
        chance = self._chance
        kind = chance.random()
        if kind < 0.3:
            return called("sql", query=chance.choice(HONEST_SQL))
        if kind < 0.4:
            return called("kv", key=chance.choice(["panel.stock", "valve.stock", "nothing", "../x", "a" * 5_000]))
        if kind < 0.5:
            return called("sql", query=chance.choice(HOSTILE_SQL))
        if kind < 0.8:
            return called("python", code="\n".join(chance.sample(HOSTILE_CODE, chance.choice((1, 1, 1, 2)))))
        if kind < 0.85:
            return called("terminal", command=chance.choice(COMMANDS), timeout_seconds=1)
        if kind < 0.88:
            return called("calculator", expression=chance.choice(EXPRESSIONS))
        path = msgspec.json.encode(self._path()).decode()
        return self._broken(written("write_file", f'{{"path": {path}, "content": {self._value()}}}'))

    def _path(self) -> str:
        return self._chance.choice(
            ["a", "a/" * 3_000, "n" * 100_000, "\x00", "../../etc", "/proc/1/mem", "\U0001f600" * 999]
        )

    def _value(self) -> str:
        """A JSON value of any kind, as text: no encoder here would write all of them."""
        depth = self._chance.choice([3, 99, 150, 900, 990, 1_500, 100_000])
        lists, objects = "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth
        plain = ['"text"', "null", "true", "-1.5e308", "1e999", str(2**63), "9" * 5_000, f'"{"x" * 50_000}"', "NaN"]
        return self._chance.choice([lists, objects, *plain, '"\\ud800"', '"\\u0000"'])

    def _broken(self, text: str) -> str:
        """The text as it is, or with some characters lost, doubled or exchanged."""
        chance = self._chance
        for _ in range(chance.choice([0, 0, 1, 3])):
            at = chance.randrange(len(text))
            text = text[:at] + chance.choice(["", text[at] * 2, '"', "\\ud800", "}", "\x00", "é"]) + text[at + 1 :]
        return text


def called(tool: str, **arguments: Any) -> str:
    return written(tool, msgspec.json.encode(arguments).decode())


def written(tool: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{tool}", "arguments": {arguments}}}</tool_call>'


@dataclass
class Figures:
    """What came of the episodes."""

    episodes: int = 0
    calls: int = 0
    compared: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


class Judge:
    """Plays episodes in one pool and replays their honest calls in another."""

    def __init__(self, pool: Pool, honest: Pool, tools: Mapping[str, Tool] | None = None) -> None:
        self.figures = Figures()
        self._pool = pool
        self._honest = honest
        self._tools = dict(tools or toolset(TOOLS))
        self._chat = ChatFormat(tokenizer_json())

    async def judge(self, texts: Sequence[str], seed: int) -> None:
        """Adds to the figures what came of one episode."""
        events = await self._play(texts, seed)
        said = [event.text for event in events if isinstance(event, TurnGenerated)]
        observed = [event for event in events if isinstance(event, ToolObserved)]
        self.figures.episodes += 1
        self.figures.calls += len(observed)
        self.figures.errors.update(event.error_kind or "none" for event in observed)
        self._judge_end(events, said, seed)
        # None at all when it ended before, by an infra error.
        if [event.content for event in observed[:1]] != ["42"]:
            self._violation(seed, f"the first observation was {[event.content[:200] for event in observed[:1]]}")
        await self._judge_world(said, observed, seed)

    async def _play(self, texts: Sequence[str], seed: int) -> list[Event]:
        events: list[Event] = []
        await play(
            request(seed),
            policy=ScriptedTexts(self._chat, texts),
            bench=Workbench(self._pool, self._tools, WORLD, seed=seed, owner=f"episode {seed}"),
            chat=self._chat,
            system_prompt="Tools",
            worker="worker-1",
            emit=events.append,
            keep_blob=no_blobs,
            tools_hash="t",
        )
        return events

    def _judge_end(self, events: Sequence[Event], said: Sequence[str], seed: int) -> None:
        ended = events[-1]
        assert isinstance(ended, RolloutEnded)
        self.figures.ends[ended.ended_by] += 1
        expected = expected_end(said)
        if (ended.ended_by, ended.answer) != expected:
            self._violation(seed, f"it ended by {ended.ended_by}, {ended.answer!r}, not {expected}: {ended.reason}")
        score = score_trajectory(assembled(events), "exact_match", scorers_by_name(()))
        right = expected == ("answered", REFERENCE)
        if (score.score, score.excluded_because) != (float(right), None):
            self._violation(seed, f"it was rewarded {score}")

    async def _judge_world(self, said: Sequence[str], observed: Sequence[ToolObserved], seed: int) -> None:
        """Compares what the tools apart answered to honest calls with what they answer where nobody was hostile."""
        tools = {name: SHIPPED[name] for name in ("sql", "kv")}
        async with Workbench(self._honest, tools, WORLD, seed=seed, owner=f"replay {seed}") as bench:
            for text, seen in zip(said, observed, strict=False):
                call = parse(text)
                # A call that the bench never saw does not count there.
                if not isinstance(call, ToolCall):
                    continue
                is_honest = call.tool == "kv" or call.arguments.get("query") in HONEST_SQL
                # An unknown tool takes the place of all others: the draws of perturbations depend on the place.
                answer = await bench.call(call.tool if is_honest else "left out", call.arguments)
                if is_honest:
                    self.figures.compared += 1
                    if (answer.content, answer.error_kind) != (seen.content, seen.error_kind):
                        self._violation(seed, f"{text} was answered {seen.content[:200]!r}, not {answer.content!r}")

    def _violation(self, seed: int, text: str) -> None:
        self.figures.violations.append(f"episode {seed}: {text}")


def expected_end(said: Sequence[str]) -> tuple[str, str | None]:
    """How an episode ends that said this, if nothing but its texts decides."""
    for text in said:
        match parse(text):
            case FinalAnswer(answer):
                return "answered", answer
            case Idle():
                return "agent_error", None
    return "token_limit", None


def assembled(events: Iterable[Event]) -> TrajectoryAssembled:
    hop, state = AssembleTrajectories(), AssemblyState()
    for offset, event in enumerate(events):
        outcome = hop.step(state, event, Address("messages", 0, offset))
        assert outcome.refused is None, outcome.refused
        state = outcome.state
    trajectory, _ = outcome.events
    assert isinstance(trajectory, TrajectoryAssembled)
    return trajectory


def request(seed: int) -> RolloutRequested:
    meta = Meta(
        id=f"request-{seed}",
        run_id=RUN_ID,
        session_id="train",
        task_id="task-1",
        group_id="group-1",
        trajectory_id=new_id(),
        category="request",
        topic="rollouts",
        sender="scheduler",
        timestamp=0,
        purpose="train",
    )
    task = Task(
        prompt="What does a panel cost?",
        reference=REFERENCE,
        agent="stockroom",
        toolset=list(TOOLS),
        world='{"name": "stockroom"}',
        scorers=["exact_match"],
        group_size=8,
        split="train",
    )
    sampling = Sampling(max_tokens_per_turn=1_000_000, turns_max=20, tokens_max=4_000_000)
    deadline = now_microseconds() + 3_600_000_000
    return RolloutRequested(meta=meta, task=task, index=0, seed=seed, sampling=sampling, deadline=deadline)


@contextlib.asynccontextmanager
async def opened(isolation: str = "bubblewrap", tools: Mapping[str, Tool] | None = None) -> AsyncIterator[Judge]:
    """A judge with its two pools; `tools` replace those of the same name where the episodes are played."""
    known = SHIPPED | WORLD_TOOLS
    hostile = open_backend(isolation, {**known, **(tools or {})}, LIMITS, first_uid=FIRST_UID)
    honest = open_backend(isolation, known, LIMITS, first_uid=FIRST_UID + 8)
    async with Pool(hostile, size=1, warm=0) as played, Pool(honest, size=1, warm=0) as replayed:
        yield Judge(played, replayed, toolset(TOOLS, (tools or {}).values()))


async def play_episodes(episodes: int, seed: int, isolation: str) -> Figures:
    async with opened(isolation) as judge:
        for number in range(seed, seed + episodes):
            violations = len(judge.figures.violations)
            await judge.judge(Episodes(number).texts(), number)
            for violation in judge.figures.violations[violations:]:
                print(violation, flush=True)
        return judge.figures


def told(found: Figures, seconds: float) -> str:
    errors, ends = (
        ", ".join(f"{name} {count:,}" for name, count in counted.most_common())
        for counted in (found.errors, found.ends)
    )
    return (
        f"{found.episodes:,} episodes of hostile programs in {seconds:.0f} s: {found.calls:,} calls (errors: {errors}); "
        f"ended by {ends}; {found.compared:,} answers of the world compared with those of a sandbox without hostile code; "
        f"{len(found.violations)} outcomes that the visible actions would not give"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sandboxes.integrity", description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--isolation", default="bubblewrap")
    arguments = parser.parse_args()
    began = time.monotonic()
    found = asyncio.run(play_episodes(arguments.episodes, arguments.seed, arguments.isolation))
    print(told(found, time.monotonic() - began))
    return 1 if found.violations else 0


if __name__ == "__main__":
    sys.exit(main())
