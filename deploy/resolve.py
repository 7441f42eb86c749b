"""Resolves a requested config for one start of a field or a run: fills in addresses, ports and folders, and keeps the
result as field.json or run.json in its folder.

The programs of a stack read only that file. A field keeps its ports from start to start while they are free; a run gets
new ones. No secret is ever written: a password is a reference (env:NAME, file:PATH) that a client resolves.
"""

import copy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from replayground.consumers.config import TracesSettings
from replayground.deploy.config import FIELD_SECTIONS, Config, parse_config, read_toml
from replayground.deploy.local.folder import FieldFolder, RunFolder, write_whole
from replayground.deploy.local.ports import choose_ports, is_free
from replayground.deploy.programs import PROGRAMS_OF_FIELD, PROGRAMS_OF_RUN, Program
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Position
from replayground.schemas.programs import OPERATOR
from replayground.schemas.run import FIELD, LogSettings, Run

_LOOPBACK = "127.0.0.1"


class RequestedConfig(Struct, frozen=True, kw_only=True):
    """A config file as the user wrote it, checked."""

    source: str
    "the config file"
    raw: dict[str, Any]
    "what it said, paths made absolute"
    seed: int = 0

    @property
    def of_field(self) -> dict[str, Any]:
        return {name: section for name, section in self.raw.items() if name in FIELD_SECTIONS}

    @property
    def of_run(self) -> dict[str, Any]:
        return {name: section for name, section in self.raw.items() if name not in FIELD_SECTIONS}


class ResolvedConfig(Struct, frozen=True, kw_only=True):
    """The config of one start of a field or a run, with every address, port and folder filled in."""

    run_id: str
    "schemas.run.FIELD for the field"
    asked: RequestedConfig
    "only its sections of the field, or only those of the run"
    config: Config
    "`asked` with every address and folder filled in"
    log: LogSettings
    blobs_url: str
    blobs_also_read: tuple[str, ...]
    page_url: str
    "the web page and HTTP interface of the traces program"
    ports: dict[str, int]
    "by the setting that names each of them: local.kafka_port, vllm.port …"
    health_ports: dict[str, int]
    "of /healthz and /metrics, by program"
    start_number: int = 0
    "how often the run was resumed before"
    positions: tuple[Position, ...] = ()
    "the end of every partition when the run started first"
    for_one_command: bool = False
    "whether the command that started the field stops it when it has ended"

    def run_of(self, worker: str, program: str = OPERATOR) -> Run:
        """The Run that a program is started with."""
        return Run(
            run_id=self.run_id,
            seed=self.asked.seed,
            job=self.config.job,
            log=self.log,
            blobs_url=self.blobs_url,
            blobs_also_read=self.blobs_also_read,
            program=program,
            worker=worker,
            start_number=self.start_number,
            start=self.positions,
        )

    @property
    def has_log(self) -> bool:
        """False for a field of which only the traces program is started."""
        return self.run_id != FIELD or self.config.traces.follow

    @property
    def is_embedded(self) -> bool:
        """True for a field with a broker and a registry of its own."""
        return not self.config.log.bootstrap_servers


def read_request(source: Path, seed: int = 0) -> RequestedConfig:
    """Reads and checks a config file. Raises BadInput."""
    raw = read_toml(source)
    config = parse_config(raw, source)
    _require_no_secret(config, source)
    return RequestedConfig(source=str(source), raw=raw, seed=seed)


def resolve_field(folder: FieldFolder, asked: RequestedConfig, before: ResolvedConfig | None = None) -> ResolvedConfig:
    """Chooses ports and fills in addresses and folders of a field. Creates nothing. Raises BadInput."""
    # Sections of a run are dropped: a job file may also configure a new field.
    raw = asked.of_field
    config = parse_config(raw, Path(asked.source))
    wanted = {"traces.port": raw.get("traces", {}).get("port", 0), **_health_ports(PROGRAMS_OF_FIELD)}
    if not config.log.bootstrap_servers:
        names = ("kafka_port", "controller_port", "registry_port", "registry_management_port")
        wanted |= {f"local.{name}": getattr(config.local, name) for name in names}
    ports = choose_ports(_prefer_previous(wanted, before.ports if before else {}))
    # A dsn in the file wins over the folder of the field; the port does not, since 0 in the file means any.
    traces = _traces_of(folder) | raw.get("traces", {}) | {"port": ports["traces.port"]}
    # /healthz of the traces program listens on the same address as its web page.
    harness = {"bind": config.traces.bind}
    config = parse_config(raw | {"traces": traces, "harness": harness}, Path(asked.source))
    return ResolvedConfig(
        run_id=FIELD,
        asked=msgspec.structs.replace(asked, raw=raw),
        config=config,
        log=_log_settings(config.log, ports),
        blobs_url=config.blobs.url.rstrip("/") or folder.blobs_url,
        blobs_also_read=config.blobs.also_read,
        page_url=_page_url(config.traces),
        ports=ports,
        health_ports={program.name: ports[_health(program)] for program in PROGRAMS_OF_FIELD},
    )


def _traces_of(folder: FieldFolder) -> dict[str, str]:
    return {"dsn": f"chdb://{folder.path / 'traces'}", "tokens": str(folder.tokens)}


def _page_url(traces: TracesSettings) -> str:
    scheme = "https" if traces.tls_key else "http"
    return f"{scheme}://{traces.name or connectable(traces.bind)}:{traces.port}"


def resolve_run(
    folder: RunFolder, field: ResolvedConfig, asked: RequestedConfig, positions: tuple[Position, ...], start_number: int
) -> ResolvedConfig:
    """Chooses ports and fills in addresses and folders of a run on a field. Creates nothing. Raises BadInput."""
    raw = asked.of_run
    ports = choose_ports({"vllm.port": raw.get("vllm", {}).get("port", 0), **_health_ports(PROGRAMS_OF_RUN)})
    return ResolvedConfig(
        run_id=folder.run_id,
        asked=msgspec.structs.replace(asked, raw=raw),
        config=parse_config(_fill(raw, ports, folder), Path(asked.source)),
        # Log, blobs and page are those of the field, whatever the job file says: require_agreement has compared them.
        log=field.log,
        blobs_url=field.blobs_url,
        blobs_also_read=field.blobs_also_read,
        page_url=field.page_url,
        ports=ports,
        health_ports={program.name: ports[_health(program)] for program in PROGRAMS_OF_RUN},
        start_number=start_number,
        positions=positions,
    )


def config_for_log(asked: RequestedConfig) -> str:
    """The config of a run as JSON for RunStarted: every default filled in, without settings of the field or of this
    machine. Addresses of servers are kept if the user set them."""
    # Defaults are written out: a later release with other defaults must resume the run as it was.
    filled: dict[str, Any] = msgspec.to_builtins(parse_config(asked.of_run, Path(asked.source)))
    for section in FIELD_SECTIONS:
        del filled[section]
    for section, name in _OF_THE_MACHINE:
        del filled[section][name]
    for section, name in _SERVERS:
        if name not in asked.raw.get(section, {}):
            del filled[section][name]
    return msgspec.json.encode(filled).decode()


# Chosen anew on the machine that resumes the run.
_OF_THE_MACHINE = (("vllm", "port"), ("vllm", "folder"), ("reloader", "folder"), ("streams", "state_folder"))
# By default the vLLM of the run itself, on this machine; part of the run only if the user named others.
_SERVERS = (("reloader", "servers"), ("rollouts", "servers"))


def require_agreement(asked: RequestedConfig, field: ResolvedConfig) -> None:
    """Raises BadInput when a setting of the field in a job file differs from the running field."""
    ours = parse_config(asked.of_field, Path(asked.source))
    theirs = parse_config(field.asked.raw, Path(field.asked.source))
    # Only settings in the file are compared: a job file that leaves one out has nothing to say about it.
    for section, settings in asked.of_field.items():
        _require_same(f"{section}", settings, getattr(ours, section), getattr(theirs, section), asked.source)


def _require_same(path: str, settings: dict[str, Any], ours: Any, theirs: Any, source: str) -> None:
    for name, value in settings.items():
        our, their = getattr(ours, name), getattr(theirs, name)
        if isinstance(value, dict) and isinstance(our, Struct):
            _require_same(f"{path}.{name}", value, our, their, source)
        elif our != their:
            raise BadInput(
                f"{source}: {path}.{name} is {our!r} and the field has {their!r}: leave it out, or stop the field "
                "(`replayground down`) and start it with this file (`replayground up FILE`)"
            )


def connectable(bind: str) -> str:
    """The address at which a server that listens on `bind` is reached from this machine."""
    return _LOOPBACK if bind in ("", "0.0.0.0", "::") else bind


def save(folder: FieldFolder | RunFolder, resolved: ResolvedConfig) -> None:
    """Writes field.json or run.json. The folder must exist."""
    write_whole(folder.file, msgspec.json.format(msgspec.json.encode(resolved)).decode() + "\n")


def load(folder: FieldFolder | RunFolder) -> ResolvedConfig:
    """The resolved config of the last start. Raises BadInput."""
    return load_file(folder.file)


def load_file(path: Path) -> ResolvedConfig:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ResolvedConfig)
    # Decoding errors too: the file may be of another release.
    except (OSError, msgspec.MsgspecError) as error:
        raise BadInput(f"{path} is no file of a field or a run: {error}") from error


def _log_settings(asked: LogSettings, ports: dict[str, int]) -> LogSettings:
    if asked.bootstrap_servers:
        return asked
    return msgspec.structs.replace(
        asked,
        bootstrap_servers=f"{_LOOPBACK}:{ports['local.kafka_port']}",
        registry_url=f"http://{_LOOPBACK}:{ports['local.registry_port']}/apis/ccompat/v7",
    )


def _fill(raw: dict[str, Any], ports: dict[str, int], folder: RunFolder) -> dict[str, Any]:
    """The config with folders and server addresses of this machine; what the user set is kept."""
    server = f"http://{_LOOPBACK}:{ports['vllm.port']}"
    known: dict[str, dict[str, Any]] = {
        "vllm": {"folder": str(folder.path / "state" / "vllm")},
        "reloader": {"servers": [server], "folder": str(folder.path / "state" / "reloader")},
        "rollouts": {"servers": [server]},
        "streams": {"state_folder": str(folder.path / "state" / "streams")},
    }
    filled = {section: known.get(section, {}) | raw.get(section, {}) for section in {**known, **raw}}
    # Always replaced: 0 in the file means any free port, and any other number is what choose_ports returns.
    filled["vllm"]["port"] = ports["vllm.port"]
    return copy.deepcopy(filled)


def _prefer_previous(wanted: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """Replaces 0 (any port) by the port of the last start if it is free."""
    # Bookmarks of the web page and addresses in other people's clients stay valid.
    kept = {name: before[name] for name, port in wanted.items() if port == 0 and name in before}
    return wanted | {name: port for name, port in kept.items() if is_free(port)}


def _health_ports(programs: tuple[Program, ...]) -> dict[str, int]:
    return {_health(program): 0 for program in programs}


def _health(program: Program) -> str:
    return f"health port of {program.name}"


def _require_no_secret(config: Config, source: Path) -> None:
    """Raises BadInput for a password that is not a reference."""
    # The [log] section is written to field.json and to every run.json, in plain text.
    security = config.log.security
    references = {
        "log.security.password": security.password,
        "log.security.registry_password": security.registry_password,
        # An address of a chat program is all that one needs to write there.
        "traces.webhook": config.traces.webhook,
    }
    # Those of the run, which are written to the log in plain text, too.
    references |= {f"judge.endpoints.{name}.key": endpoint.key for name, endpoint in config.judge.endpoints.items()}
    if config.traces.dsn.startswith("clickhouse"):
        references["the password in traces.dsn"] = urlsplit(config.traces.dsn).password or ""
    if config.traces.sql_dsn:
        references["the password in traces.sql_dsn"] = urlsplit(config.traces.sql_dsn).password or ""
    for setting, value in references.items():
        if value and not value.startswith(("env:", "file:")):
            raise BadInput(
                f"{source}: {setting} must not be written down: give env:NAME for a variable of the environment or "
                "file:PATH for a file that holds it"
            )
