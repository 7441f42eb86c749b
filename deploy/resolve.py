"""What a start of a run comes to: config, seed, addresses and ports, kept as run.json in the data folder.

The supervisor's programs read that file and nothing else. A resumed run keeps its config and seed and gets new ports.
"""

import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from deploy.config import Config, LocalSettings, parse_config, read_toml
from deploy.local.folder import RunFolder, create_run_folder, open_run_folder, runs_newest_first, write_whole
from deploy.local.ports import choose_ports
from deploy.programs import PROGRAMS
from schemas.errors import BadInput
from schemas.run import Run


class Asked(Struct, frozen=True, kw_only=True):
    """What a person asked for: the same again is the same run."""

    source: str
    "the config file"
    raw: dict[str, Any]
    "what it said"
    seed: int

    def is_same_run(self, other: "Asked") -> bool:
        """Ports, heaps and heartbeats may change between two starts of a run; nothing else may."""
        return self.seed == other.seed and _essence(self.raw) == _essence(other.raw)


class Resolved(Struct, frozen=True, kw_only=True):
    """One start of one run."""

    run_id: str
    asked: Asked
    config: Config
    "what was asked, with every address and folder filled in"
    bootstrap_servers: str
    registry_url: str
    blobs_url: str
    ports: dict[str, int]
    "by the field that names each of them: local.kafka_port, vllm.port …"
    health_ports: dict[str, int]
    "of /healthz and /metrics, by program"

    def run_of(self, worker: str) -> Run:
        """What a program is told."""
        return Run(
            run_id=self.run_id,
            seed=self.asked.seed,
            job=self.config.job,
            bootstrap_servers=self.bootstrap_servers,
            registry_url=self.registry_url,
            blobs_url=self.blobs_url,
            worker=worker,
        )

    @property
    def page_url(self) -> str:
        """The web page and HTTP interface of the traces program."""
        return f"http://127.0.0.1:{self.config.traces.port}"


def ask(source: Path, seed: int) -> Asked:
    """Reads and checks a config file. Raises BadInput."""
    raw = read_toml(source)
    parse_config(raw, source)
    return Asked(source=str(source), raw=raw, seed=seed)


def local_settings(asked: Asked) -> LocalSettings:
    """What the config says of the local stack."""
    return parse_config(asked.raw, Path(asked.source)).local


def choose_folder(runs: Path, asked: Asked, resume: bool | None) -> tuple[RunFolder, bool]:
    """The folder of the newest unfinished run that was asked for alike, and True; or that of a new one, and False.

    With resume=True there must be such a run, with resume=False none is looked for. Nothing is made. Raises BadInput.
    """
    if resume is not False:
        for path in runs_newest_first(runs):
            if _is_unfinished(path) and load(folder := open_run_folder(path)).asked.is_same_run(asked):
                return folder, True
    if resume:
        raise BadInput(f"no unfinished run of {asked.source} with seed {asked.seed} in {runs}: start one with --new")
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(asked.source).stem}-seed{asked.seed}"
    return RunFolder(runs.absolute() / name), False


def resolve(folder: RunFolder, asked: Asked) -> Resolved:
    """Chooses ports and fills in addresses and folders. Nothing is made. Raises BadInput."""
    local = local_settings(asked)
    ports = choose_ports(
        {
            "local.kafka_port": local.kafka_port,
            "local.controller_port": local.controller_port,
            "local.registry_port": local.registry_port,
            "local.registry_management_port": local.registry_management_port,
            "vllm.port": asked.raw.get("vllm", {}).get("port", 0),
            "traces.port": asked.raw.get("traces", {}).get("port", 0),
            **{_health(program.name): 0 for program in PROGRAMS},
        }
    )
    config = parse_config(_filled(asked.raw, ports, folder), Path(asked.source))
    return Resolved(
        run_id=folder.run_id,
        asked=asked,
        config=config,
        bootstrap_servers=f"127.0.0.1:{ports['local.kafka_port']}",
        registry_url=f"http://127.0.0.1:{ports['local.registry_port']}/apis/ccompat/v7",
        blobs_url=f"{config.blobs.url.rstrip('/')}/{folder.run_id}" if config.blobs.url else folder.blobs_url,
        ports=ports,
        health_ports={program.name: ports[_health(program.name)] for program in PROGRAMS},
    )


def save(folder: RunFolder, resolved: Resolved, *, is_new: bool) -> None:
    """Writes run.json, and makes the folder of a new run. Raises BadInput."""
    text = msgspec.json.format(msgspec.json.encode(resolved)).decode() + "\n"
    if is_new:
        create_run_folder(folder, text)
    else:
        write_whole(folder.run_file, text)


def load(folder: RunFolder) -> Resolved:
    """What the last start of a run came to. Raises BadInput."""
    return load_file(folder.run_file)


def load_file(path: Path) -> Resolved:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Resolved)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadInput(f"{path} is no file of a run ({error}): start a new run with --new") from error


def _filled(raw: dict[str, Any], ports: dict[str, int], folder: RunFolder) -> dict[str, Any]:
    """The config with what only the local stack can know; what a person set stays as it was set."""
    server = f"http://127.0.0.1:{ports['vllm.port']}"
    known: dict[str, dict[str, Any]] = {
        "vllm": {"port": ports["vllm.port"], "folder": str(folder.path / "state" / "vllm")},
        "reloader": {"servers": [server], "folder": str(folder.path / "state" / "reloader")},
        "rollouts": {"servers": [server]},
        "streams": {"state_folder": str(folder.path / "state" / "streams")},
        "traces": {"port": ports["traces.port"], "dsn": f"chdb://{folder.path / 'traces'}"},
    }
    filled = {section: known.get(section, {}) | raw.get(section, {}) for section in {**known, **raw}}
    # 0 in the file means any free one: the one that was found takes its place
    for section in ("vllm", "traces"):
        filled[section]["port"] = ports[f"{section}.port"]
    return filled


def _health(program: str) -> str:
    return f"health port of {program}"


def _essence(raw: dict[str, Any]) -> dict[str, Any]:
    return {section: fields for section, fields in raw.items() if section not in ("local", "harness")}


def _is_unfinished(path: Path) -> bool:
    return (path / "version").exists() and not RunFolder(path).is_finished
