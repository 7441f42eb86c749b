"""Settings of the stream processors, the judge and the cutter."""

from typing import Annotated

from msgspec import Meta, Struct

from replayground.streams.rules.advantage import AdvantageKind


class StreamsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Faust app: assemble, score, group. TOML section [streams]."""

    hops: tuple[str, ...] = ("assemble", "score", "group")
    "which hops this worker runs; one worker per hop at scale"
    advantage: AdvantageKind = "standardised"
    "how a reward is compared with its group: centred, standardised or leave_one_out"
    state_folder: str = "state"
    "where rocksdict keeps the tables, each worker in a folder of its own; rebuilt from the changelog when wiped"
    state_cache_bytes: int = 32 * 1024 * 1024
    "block cache of each table partition"
    session_timeout_seconds: float = 8.0
    "how long the broker waits for a dead worker before others take over"
    commit_seconds: float = 2.0
    "interval of commits: offsets and their states; a killed worker repeats at most this much"
    scorer_seconds_max: float = 30.0
    "how long a scorer of the job may take for one trajectory, which is excluded after that"
    rejects_share_max: float = 0.5
    "the worker stops with an alarm when more than this share of the last thousand messages was rejected"


class CutSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cutter. TOML section [cut]."""

    poll_seconds: float = 0.2
    "how long to wait for groups at a time"
    rejects_share_max: float = 0.5
    "the cutter stops with an alarm when more than this share of the last thousand groups cannot be read"
    snapshot_batches: int = 16
    "a snapshot of the cutter's state is written with every so many batches: a restart reads no more of them"
    snapshot_groups: int = 4096
    "also after so many groups were read, of any run, although no batch was cut: a restart reads no more of them"


class JudgeEndpointSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An OpenAI-compatible server that judges. TOML section [judge.endpoints.NAME]; a judge of the job names it."""

    url: str
    "address before /chat/completions, such as https://models.example/v1"
    key: str = ""
    "env:NAME or file:PATH of the API key; empty = none is sent"
    price_in_per_million: Annotated[float, Meta(ge=0)] = 0.0
    "cost of a million tokens that the model reads, in any one currency"
    price_out_per_million: Annotated[float, Meta(ge=0)] = 0.0
    "cost of a million tokens that the model writes"


class JudgeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The program that asks judges. TOML section [judge]. It is started only for a job with judges."""

    endpoints: dict[str, JudgeEndpointSettings] = {}
    "the servers that judge, by name; judges use `default` unless they name another"
    concurrency: Annotated[int, Meta(ge=1, le=1024)] = 8
    "requests under way at once"
    in_flight_max: Annotated[int, Meta(ge=1)] = 64
    "trajectories taken from the log and not judged yet; no more are taken meanwhile"
    timeout_seconds: Annotated[float, Meta(gt=0)] = 60.0
    "for one request; an endpoint that takes longer counts as down"
    timeouts_max: Annotated[int, Meta(ge=1)] = 3
    "an attempt is excluded when so many requests about it timed out, and the endpoint answers another question"
    tries_max: Annotated[int, Meta(ge=1)] = 3
    "how often a vote is asked for before an answer that cannot be read excludes the attempt"
    backoff_seconds: Annotated[float, Meta(gt=0)] = 1.0
    "wait after the first failure of an endpoint; it doubles with each further one"
    backoff_seconds_max: Annotated[float, Meta(gt=0)] = 30.0
    "longest wait between two requests to an endpoint that is down"
    tokens_max: Annotated[int, Meta(ge=0)] = 0
    "tokens that judges may read and write in the whole run; then attempts are excluded. 0 = no limit"
    cost_max: Annotated[float, Meta(ge=0)] = 0.0
    "the same in cost, by the prices of the endpoints. 0 = no limit"
    poll_seconds: Annotated[float, Meta(gt=0)] = 0.2
    "how long to wait for verdicts and judgements at a time"
