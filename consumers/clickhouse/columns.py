"""The columns of the trace store's two tables, and what each of them means. Filled by `rows`, created by `migrations`.

    events     one light row for each message of the log: envelope and figures. Lists, curves and counts read this.
    payloads   one row for each message, too: the whole event as JSON, its texts, and beside them what is shown with
               texts, so that a view of turns or trajectories reads one table and joins nothing

Both have the same order, so a question about one run reads no rows of the others. A kind of event leaves most columns
at their default; ClickHouse stores such columns sparsely, for next to nothing.
"""

from dataclasses import dataclass
from typing import Literal

Table = Literal["events", "payloads"]
TABLES_STORED: tuple[Table, ...] = ("payloads", "events")
"""in the order of inserting: what `events` has is complete"""

ORDER = "run_id, type, topic, partition, offset"


@dataclass(frozen=True)
class Column:
    """A column, and the tables that have it."""

    name: str
    kind: str
    meaning: str
    tables: tuple[Table, ...] = TABLES_STORED

    @property
    def definition(self) -> str:
        meaning = self.meaning.replace("\\", "\\\\").replace("'", "\\'")
        # `index` is a keyword of CREATE TABLE: all names are quoted.
        return f"`{self.name}` {self.kind} COMMENT '{meaning}'"


def _columns(tables: tuple[Table, ...], *columns: tuple[str, str, str]) -> tuple[Column, ...]:
    return tuple(Column(name, kind, meaning, tables) for name, kind, meaning in columns)


_NAME = "LowCardinality(String)"
_NAME_OR_NULL = "LowCardinality(Nullable(String))"

_PLACE = _columns(
    TABLES_STORED,
    ("topic", _NAME, "topic of the log"),
    ("partition", "Int32", "partition of the topic"),
    ("offset", "Int64", "offset in the partition"),
    ("type", _NAME, "class of the event, or undecodable"),
    ("id", "String", "id of the event; derived events that the log repeats have the same id"),
    ("run_id", _NAME, "the run it belongs to; empty where the message cannot be decoded"),
    ("session_id", _NAME_OR_NULL, "demonstrations, train, submitted, or one evaluation"),
    ("task_id", "Nullable(String)", "the task it belongs to"),
    ("group_id", "Nullable(String)", "the group it belongs to"),
    ("trajectory_id", "Nullable(String)", "the member of a group it belongs to, all attempts of it"),
    ("attempt_id", "Nullable(String)", "the attempt it belongs to"),
    ("seq", "Nullable(Int32)", "place in the attempt: 0, 1, 2 …"),
    ("sender", _NAME, "who wrote the event"),
    ("causation_id", "Nullable(String)", "the event that caused it"),
    ("timestamp", "Int64", "microseconds since the epoch, event time"),
    ("time", "DateTime64(6, 'UTC') ALIAS fromUnixTimestamp64Micro(timestamp, 'UTC')", "event time in UTC"),
    ("purpose", _NAME_OR_NULL, "train, eval, demonstrate or replay"),
    ("policy_version", "Nullable(Int64)", "the weights that were serving"),
)
_ENVELOPE = _columns(
    ("events",),
    ("category", _NAME, "what kind of traffic: task, turn, tool_call …"),
    ("receiver", _NAME_OR_NULL, "to whom it was sent"),
    ("caller", _NAME_OR_NULL, "on whose behalf"),
    ("priority", "Int32", "as its sender set it"),
    ("headers", "Map(String, String)", "carries the W3C traceparent"),
    ("correlation_id", "Nullable(String)", "the request that it answers"),
    ("idempotency_key", "Nullable(String)", "the same for repeats of one request"),
)
_SHOWN_WITH_TEXTS = _columns(
    TABLES_STORED,
    ("kind", _NAME, "of a run, a step, a weight version, a message between agents"),
    ("agent", _NAME, "which agent of the job"),
    ("tokens", "UInt32", "sampled tokens of a turn"),
    ("finish_reason", _NAME, "why a turn ended, as the server says"),
    ("context", "Int32", "which context of the attempt"),
    ("milliseconds", "Float64", "how long it took"),
    ("call_id", "String", "joins a tool call and its result"),
    ("tool", _NAME, "name of the tool"),
    ("is_error", "Bool", "whether the tool gave an error"),
    ("error_kind", _NAME_OR_NULL, "whose fault the error is: agent, tool or infra"),
    ("ended_by", _NAME, "how the attempt ended: answered, turn_limit, infra_error …"),
    ("reason", "Nullable(String)", "what went wrong, or why the run ended, or why a message was rejected"),
    ("turns", "Int32", "turns of the attempt"),
    ("tokens_sampled", "Int64", "tokens that the policy sampled"),
    ("tokens_read", "Int64", "tokens of prompts and observations"),
    ("cost", "Float64", "by the prices of the config"),
    ("index", "Int32", "place in the group, or number of the batch"),
    ("group_size", "Int32", "members of the group"),
    ("policy_version_oldest", "Nullable(Int64)", "oldest weights among the sampled tokens"),
    ("split", _NAME, "train or heldout"),
    ("tags", "Map(LowCardinality(String), String)", "labels of the task"),
    ("scorer", _NAME, "name of the scorer"),
    ("scorer_version", _NAME, "version of the scorer"),
    ("scorer_set", _NAME, "names and versions of all scorers that judge together; empty in older events"),
    ("scorers", "UInt16", "how many scorers judge the attempt"),
    ("score", "Nullable(Float64)", "of one scorer; null when it is no finite number"),
    ("weight", "Nullable(Float64)", "how much the score counts in the reward"),
    ("passed", "Nullable(Bool)", "whether the attempt passed by this scorer; null when it does not decide that"),
    ("verdict", _NAME, "scored or excluded"),
    ("excluded_because", _NAME_OR_NULL, "why it does not count"),
    ("parts", "Map(LowCardinality(String), Float64)", "named parts of the score"),
    ("trajectory_partition", "Nullable(Int32)", "where the judged trajectory stands on topic trajectories: partition"),
    ("trajectory_offset", "Nullable(Int64)", "where the judged trajectory stands on topic trajectories: offset"),
    ("judged_by", _NAME, "model or human"),
    ("model", _NAME, "the model that judged, as its endpoint calls it"),
    ("votes", "Int32", "how many were asked to judge"),
    ("scores", "Array(Float64)", "one for each vote"),
    ("tokens_in", "Int64", "tokens that the judge read"),
    ("tokens_out", "Int64", "tokens that the judge wrote"),
    ("annotator", _NAME, "the person who judged"),
    ("job", _NAME, "module of the job"),
    ("seed", "Int64", "seed of the run or the attempt"),
    ("start", "Int32", "which start of the run: 0 is the first"),
    ("started_by", _NAME, "user and machine"),
    ("code_version", _NAME, "version of the code that ran"),
)
_FIGURES = _columns(
    ("events",),
    ("version", "Nullable(Int64)", "weights made, published, loaded or held"),
    ("base_version", "Nullable(Int64)", "weights that a batch trains on, or that new weights were made from"),
    ("worker", _NAME, "name of the program or worker"),
    ("role", _NAME, "which program it is"),
    ("load", "Map(LowCardinality(String), Float64)", "named figures of a heartbeat: memory_bytes, busy_seconds …"),
    ("isolation", _NAME, "how the sandbox of the attempt is isolated"),
    ("retry", "Int32", "how often this member was asked for before"),
    ("reward_mean", "Float64", "mean reward of the group"),
    ("reward_deviation", "Float64", "standard deviation of the rewards of the group"),
    ("dropped_because", _NAME_OR_NULL, "why the group is not trained on; null when it may be"),
    ("members", "Int32", "members of the group, or trajectories of the batch"),
    ("member_trajectories", "Array(String)", "trajectory ids of the members, in order"),
    ("member_attempts", "Array(String)", "attempt ids of the members, in order"),
    ("member_groups", "Array(String)", "group ids of the members of a batch, in order"),
    ("member_rewards", "Array(Float64)", "rewards of the members, in order"),
    ("member_advantages", "Array(Float64)", "advantages of the members, in order"),
    ("member_valid", "Array(Bool)", "whether each member of the group counts"),
    ("member_passed", "Array(Nullable(Bool))", "whether each member passed; null in older events"),
    ("member_partitions", "Array(Int32)", "partition of each member's trajectory on topic trajectories"),
    ("member_offsets", "Array(Int64)", "offset of each member's trajectory on topic trajectories"),
    ("groups", "Int32", "groups of the batch"),
    ("policy_floor", "Int64", "oldest weights in the batch"),
    ("groups_stale", "Int64", "groups dropped as too old since the batch before"),
    ("groups_dropped", "Map(LowCardinality(String), Int64)", "groups passed over since the batch before, by reason"),
    ("scorer_sets", "Array(String)", "scorer sets of the groups of the batch"),
    ("batch_id", "Nullable(String)", "the batch that the step trained on"),
    ("metrics", "Map(LowCardinality(String), Float64)", "figures of the step, those that are finite numbers"),
    ("stage_seconds", "Map(LowCardinality(String), Float64)", "seconds of each stage of the step"),
    ("code_hash", _NAME, "digest of the trainer's code"),
    ("config_hash", _NAME, "digest of the trainer's config"),
    ("files", "Int32", "files of the weight version"),
    ("size_bytes", "Int64", "bytes of the weights, or of the state of a snapshot"),
    ("batches", "Array(String)", "batches that the weights grew from"),
    ("copied_from_run", _NAME, "the run that the weights were copied from; empty where this run made them"),
    ("copied_from_version", "Nullable(Int64)", "the version that the weights were copied from"),
    ("server", _NAME, "address of the server, which is its name"),
    ("digest", "String", "digest of the loaded weights"),
    ("probe_gap", "Nullable(Float64)", "greatest difference between the server's and the trainer's log-probabilities"),
    ("load_seconds", "Float64", "how long loading took"),
    ("refusal", "Nullable(String)", "why the server refused the weights; null when it serves them"),
    ("command", _NAME, "pause, resume, drain, hold, release or cancel"),
    ("requested_by", _NAME, "who gave the command, saved the query or asked for the replay"),
    ("program", _NAME, "which program's state"),
    ("positions", "String", "JSON: how far the state of a snapshot goes on the log"),
    ("stage", _NAME, "the stage that rejected the message"),
    ("origin_topic", _NAME, "topic of the rejected message"),
    ("origin_partition", "Int32", "partition of the rejected message"),
    ("origin_offset", "Int64", "offset of the rejected message"),
    ("name", "String", "name of the selection, query or alert, or the replay that is reported on"),
    ("where_sql", "String", "condition that chose the trajectories, or the whole SELECT of a saved query"),
    ("source_runs", "Array(String)", "runs that the trajectories come from"),
    ("trajectories", "Int64", "how many trajectories were chosen"),
    ("sha256", "String", "digest of what was chosen"),
    ("asked_scorers", "Array(LowCardinality(String))", "names of the scorers that the task names, or a replay asks"),
    ("bound", _NAME, "above or below: when an alert is raised"),
    ("threshold", "Float64", "of an alert"),
    ("every_seconds", "Float64", "how often an alert asks, at most"),
    ("request_id", "String", "the request that is reported on"),
    ("rejects", "Array(String)", "ids of the rejected messages that are to be written again"),
)
_TEXT = "String CODEC(ZSTD(1))"
_TEXTS = _columns(
    ("payloads",),
    ("prompt", _TEXT, "what the task asks"),
    ("reference", "Nullable(String) CODEC(ZSTD(1))", "the right answer"),
    ("answer", "Nullable(String) CODEC(ZSTD(1))", "what the attempt answered"),
    ("text", _TEXT, "what the turn says"),
    ("versions", _TEXT, "JSON: which weights sampled which tokens of the turn"),
    ("arguments", _TEXT, "arguments of the call, JSON as the agent wrote it"),
    ("content", _TEXT, "what the tool or the other agent said"),
    ("perturbation", "Nullable(String) CODEC(ZSTD(1))", "JSON of what was done to the observation on purpose"),
    ("transcript", _TEXT, "JSON: the utterances of the attempt"),
    ("evidence", _TEXT, "why the scorer judged so"),
    ("comment", _TEXT, "what the person wrote beside the verdict"),
    ("answers", "Array(String) CODEC(ZSTD(1))", "what the judging model replied"),
    ("detail", _TEXT, "why the run ended, one sentence"),
    ("config", _TEXT, "JSON: the config of the run"),
    ("body", _TEXT, "the event as JSON without its envelope; bytes in base64"),
)

COLUMNS: tuple[Column, ...] = (*_PLACE, *_ENVELOPE, *_SHOWN_WITH_TEXTS, *_FIGURES, *_TEXTS)
MEANINGS: dict[str, str] = {column.name: column.meaning for column in COLUMNS}


def columns_of(table: Table) -> tuple[Column, ...]:
    """The columns of a table, in order."""
    return tuple(column for column in COLUMNS if table in column.tables)


def stored_columns(table: Table) -> tuple[str, ...]:
    """Names of the columns that rows fill: all but those that ClickHouse computes."""
    return tuple(column.name for column in columns_of(table) if " ALIAS " not in column.kind)
