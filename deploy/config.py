"""The config of a field and of a run: TOML files with one section per program, plus [job], [log], [blobs], [local] and
[harness].

Sections are the settings classes of the programs, so a setting exists here only if a program reads it. Addresses and
folders may be left out: deploy.resolve fills them in. FIELD_SECTIONS describe the field; a job file may contain them,
and then they must agree with the field on which the job runs. All other sections describe the run.
"""

import copy
import difflib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Struct

from replayground.consumers.config import ReloaderSettings, TracesSettings, VllmSettings
from replayground.deploy.programs import PROGRAMS_OF_RUN
from replayground.producers.config import FeederSettings, RolloutsSettings, SchedulerSettings
from replayground.schemas.errors import BadInput
from replayground.schemas.run import JobSettings, LogSettings
from replayground.streams.config import CutSettings, JudgeSettings, StreamsSettings
from replayground.trainer.config import TrainerSettings
from replayground.trainer.engines.swift_support import unsupported

DEFAULT_CONFIG = Path(__file__).parent / "config" / "stockroom.toml"


PATH_SETTINGS = (
    "job.module",
    "job.agents",
    "feeder.tasks_file",
    "trainer.model.path",
    "rollouts.tools.search.corpus",
    "rollouts.tools.search.recordings",
)
"settings that name a file or folder of the run; job.module only when it ends with .py"
# Of a run's config these are not written to the log: they may differ where the run is resumed.
FIELD_SECTIONS = ("log", "blobs", "traces", "local")


class LocalSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The embedded broker and registry, and this machine. TOML section [local]."""

    kafka_port: int = 0
    "clients of the embedded broker; 0 = any free port, here and below"
    controller_port: int = 0
    "Kafka's own, for its metadata"
    registry_port: int = 0
    "the Confluent API of the embedded registry"
    registry_management_port: int = 0
    "health of the embedded registry"
    kafka_heap_mebibytes: int = 512
    "heap of the broker's Java machine"
    registry_heap_mebibytes: int = 384
    "heap of the registry's Java machine"
    disk_free_bytes_min: int = 2 * 1024**3
    "field and runs do not start, and stop orderly, when the disk has less room than this"


class BlobsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where what is too large for the log is kept. TOML section [blobs]."""

    url: str = ""
    """empty = in the folder of the field; or a bucket, such as s3://bucket/prefix, or file:///folder. Keys and the
    address of the server are read from the environment: see schemas.blobs"""
    also_read: tuple[str, ...] = ()
    "other stores of the same kind, such as another field's, from which blobs may be read that events name there"


class HarnessSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What surrounds every program of a run. TOML section [harness]."""

    programs: tuple[str, ...] = tuple(program.name for program in PROGRAMS_OF_RUN)
    """which programs of the run are started; leave out vllm when [rollouts] and [reloader] name servers elsewhere. judge
    is started only for a job with judges"""
    restarts_max: int = 5
    "a program that had to be started again more often than this ends the run as failed"
    bind: str = "127.0.0.1"
    "address that /healthz and /metrics of every program listen on"

    heartbeat_seconds: float = 2.0
    "how often a program says on the log that it lives, and how it does"
    stall_seconds: float = 60.0
    "a program that has work waiting and takes none for this long has stalled: it logs an error and its /healthz fails"
    step_seconds_max: float = 600.0
    "a batch that waits for its step longer than this raises an alarm"
    batch_seconds_max: float = 300.0
    "enough groups for a batch that wait for it longer than this raise an alarm"
    serving_behind_seconds_max: float = 120.0
    "a server that is more than job.staleness_max versions behind for longer than this raises an alarm"
    retention_look_seconds: float = 60.0
    "how often a program looks whether the broker is about to forget what a group of the run has not read"


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a field and a run can be told."""

    job: JobSettings = JobSettings()
    feeder: FeederSettings = FeederSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    rollouts: RolloutsSettings = RolloutsSettings()
    streams: StreamsSettings = StreamsSettings()
    judge: JudgeSettings = JudgeSettings()
    cut: CutSettings = CutSettings()
    trainer: TrainerSettings = TrainerSettings()
    vllm: VllmSettings = VllmSettings()
    reloader: ReloaderSettings = ReloaderSettings()
    harness: HarnessSettings = HarnessSettings()
    log: LogSettings = LogSettings()
    blobs: BlobsSettings = BlobsSettings()
    traces: TracesSettings = TracesSettings()
    local: LocalSettings = LocalSettings()


class Problem(NamedTuple):
    """One mistake in a config: the setting or section that it concerns, such as job.steps, and a sentence."""

    setting: str
    sentence: str


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file with its relative paths made absolute. Raises BadInput with the line of a mistake."""
    try:
        with path.open("rb") as file:
            raw = tomllib.load(file)
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read ({error.strerror}): name a TOML file, such as {DEFAULT_CONFIG}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is no TOML: {error}") from error
    # Checked here, since msgspec would report a setting outside of all sections as an unknown section.
    for section in raw.values():
        if not isinstance(section, dict):
            raise BadInput(f"{path}: fields stand in sections: {', '.join(f'[{name}]' for name in _fields(Config))}")
    return _with_absolute_paths(raw, path.absolute().parent)


def parse_config(raw: dict[str, Any], source: Path) -> Config:
    """Checks every field. Raises BadInput that names file, section.field and the allowed values."""
    config, problems = examine(raw)
    # Only the first problem: a command prints one line. `check` prints all of them.
    for problem in problems:
        raise BadInput(f"{source}: {problem.sentence}")
    return config


def examine(raw: dict[str, Any]) -> tuple[Config, list[Problem]]:
    """All mistakes in a config, and the config without the wrong settings, so that the rest can be checked too."""
    rest = copy.deepcopy(raw)
    problems: list[Problem] = []
    # msgspec stops at the first mistake: remove it and convert again, until what is left is valid.
    while True:
        try:
            config = msgspec.convert(rest, Config, strict=True)
            return config, [*problems, *_disagreements(config)]
        except msgspec.ValidationError as error:
            problem = _explain(str(error))
            problems.append(problem)
            _drop(rest, problem.setting)


def load_config(path: Path) -> Config:
    """Reads and checks a config file. Raises BadInput."""
    return parse_config(read_toml(path), path)


def _with_absolute_paths(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Makes relative paths absolute, in place: they are relative to the config file, and programs run elsewhere."""
    for setting in PATH_SETTINGS:
        value = setting_at(raw, setting)
        # A wrong type stays as it is: the check that follows reports it. A module may be a dotted name.
        is_path = isinstance(value, str) and value != "" and (setting != "job.module" or value.endswith(".py"))
        if is_path:
            set_setting(raw, setting, str(folder / str(value)))
    return raw


def setting_at(raw: dict[str, Any], setting: str) -> Any:
    """The value of a dotted setting such as trainer.model.path; None when it is not set."""
    *sections, name = setting.split(".")
    at: Any = raw
    for section in sections:
        at = at.get(section) if isinstance(at, dict) else None
    return at.get(name) if isinstance(at, dict) else None


def set_setting(raw: dict[str, Any], setting: str, value: Any) -> None:
    """Sets a dotted setting, and makes the sections above it."""
    *sections, name = setting.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
    raw[name] = value


def _drop(raw: dict[str, Any], setting: str) -> None:
    """Removes a setting, or the section above it if the setting lies inside a list or a table of named entries."""
    # msgspec writes [...] for the key of a table (NAME here): the entry is unknown, so the whole table is removed.
    *sections, name = re.sub(r"\[\d+\].*|\.NAME.*", "", setting).split(".")
    for section in sections:
        raw = raw[section]
    del raw[name]


def _disagreements(config: Config) -> Iterator[Problem]:
    """Mistakes that types cannot express: settings that contradict each other, and files that do not exist."""
    # Checked before anything starts: a program would report the same only after the whole stack is up.
    if config.job.staleness_target > config.job.staleness_max:
        sentence = f"job.staleness_target must be at most job.staleness_max ({config.job.staleness_max})"
        yield Problem("job.staleness_target", sentence)
    yield from _problems_of_weights_from(config.job)
    yield from _problems_of_versions_kept(config)
    yield from _problems_of_training(config)
    known = [program.name for program in PROGRAMS_OF_RUN]
    unknown = [name for name in config.harness.programs if name not in known]
    if unknown:
        sentence = f"harness.programs: there is no {unknown[0]}; allowed: {', '.join(known)}"
        yield Problem("harness.programs", sentence)
    if bool(config.log.bootstrap_servers) != bool(config.log.registry_url):
        sentence = (
            "set both log.bootstrap_servers and log.registry_url, "
            "or neither for a broker and a registry on this machine"
        )
        yield Problem("log", sentence)
    if config.feeder.tasks_file is not None and not Path(config.feeder.tasks_file).is_file():
        sentence = f"feeder.tasks_file {config.feeder.tasks_file} does not exist: name a JSONL file of tasks"
        yield Problem("feeder.tasks_file", sentence)
    if config.trainer.model.path is not None:
        yield from _problems_of_model(Path(config.trainer.model.path))


def _problems_of_weights_from(job: JobSettings) -> Iterator[Problem]:
    try:
        copied = job.copied_version
    except BadInput as error:
        yield Problem("job.weights_from", f"job.weights_from: {error}")
        return
    if copied is not None and job.demonstrations > 0:
        sentence = "job.weights_from takes the place of the cold start: set job.demonstrations to 0"
        yield Problem("job.demonstrations", sentence)


def _problems_of_versions_kept(config: Config) -> Iterator[Problem]:
    stale, skipped = config.job.staleness_max + 1, config.reloader.skipped_versions_max + 2
    if 0 < config.job.versions_kept < max(stale, skipped):
        sentence = (
            f"job.versions_kept must be 0 (all) or at least {max(stale, skipped)}: trajectories of {stale} "
            f"versions may still be trained on (job.staleness_max + 1), and servers may be brought to {skipped} "
            "versions (reloader.skipped_versions_max + 2)"
        )
        yield Problem("job.versions_kept", sentence)


def _problems_of_training(config: Config) -> Iterator[Problem]:
    if config.trainer.engine == "swift" and (reason := unsupported(config.trainer)):
        yield Problem("trainer.engine", f"trainer.engine swift: {reason}, or set it to torch")
    sampling = config.feeder.sampling
    # Agents may sample otherwise on their own: the trainer leaves out what it cannot learn from, and says so.
    if config.job.evaluates_only:
        return
    if sampling.top_p != 1:
        sentence = (
            f"feeder.sampling.top_p must be 1 and not {sampling.top_p:g}: GRPO needs log-probabilities of the whole "
            "distribution; sample at a lower temperature instead"
        )
        yield Problem("feeder.sampling.top_p", sentence)
    if not sampling.temperature > 0:
        sentence = "feeder.sampling.temperature must be above 0: attempts at one task would all be the same"
        yield Problem("feeder.sampling.temperature", sentence)


def _problems_of_model(folder: Path) -> Iterator[Problem]:
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        yield Problem(
            "trainer.model.path",
            f"trainer.model.path {folder} is no model folder (it has no {', no '.join(missing)}): name a "
            "folder with config.json, tokenizer.json and *.safetensors, or leave the field out",
        )


def _explain(problem: str) -> Problem:
    """Translates a message of msgspec into the terms of a TOML file."""
    # Such as "Object contains unknown field `stps` - at `$.job`".
    what, _, where = problem.replace("[...]", ".NAME").partition(" - at `$")
    path = [part for part in where.rstrip("`").lstrip(".").split(".") if part]
    section = ".".join(path)
    lacking = re.fullmatch(r"Object missing required field `(.*)`", what)
    if lacking is not None:
        return Problem(section, f"[{section}] lacks the field {lacking.group(1)}: add it")
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what)
    if unknown is None:
        return Problem(section, f"{section}: {what.replace('`', '')}")
    name, allowed = unknown.group(1), list(_fields(_settings_at(path)))
    setting = ".".join([*path, name])
    # They were [local] settings before fields and runs were separated (decision 0020).
    if path == ["local"] and name in ("programs", "restarts_max"):
        return Problem(setting, f"[local] {name} describes a run, not the field: set it in [harness]")
    close = difflib.get_close_matches(name, allowed, 1)
    hint = f"did you mean {close[0]}? " if close else ""
    if not path:
        listed = ", ".join(f"[{section}]" for section in allowed)
        return Problem(setting, f"there is no section [{name}]; {hint}allowed: {listed}")
    return Problem(setting, f"[{section}] has no field {name}; {hint}allowed: {', '.join(allowed)}")


def _settings_at(path: list[str]) -> Any:
    settings: Any = Config
    for part in path:
        settings = get_args(settings)[-1] if part == "NAME" else get_type_hints(settings)[part]
    return settings


def _fields(settings: Any) -> tuple[str, ...]:
    return tuple(settings.__struct_fields__)
