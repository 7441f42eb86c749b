"""Settings of the stream processors and the cutter."""

from msgspec import Struct

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
