"""Runs one vLLM server as a child process, started from the newest weights on the log.

The server starts paused (consumers.vllm_scheduler): the reloader verifies its weights and resumes it. What suits a
device is in the settings.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO

import structlog

from replayground.consumers.config import VllmSettings
from replayground.consumers.vllm_admin import VllmAdmin
from replayground.consumers.weights_files import WeightsFolder
from replayground.schemas.blobs import open_blobs
from replayground.schemas.errors import BadInput, ReplaygroundError
from replayground.schemas.events import WeightsPublished
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run
from replayground.streams.log.connect import open_log
from replayground.streams.log.protocol import Log
from replayground.streams.log.weights import newest_weights_from

HOST = "127.0.0.1"
MODEL_NAME = "policy"
"name of the model in requests"
PLUGIN = "replayground"
"name of consumers.vllm_endpoints among the plugins of vLLM (pyproject.toml)"
_END_SECONDS_MAX = 15.0

_log = structlog.get_logger(__name__)


class ServerDied(ReplaygroundError):
    """vLLM exited, or did not become healthy in time."""


def run(run: Run, settings: VllmSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Waits for the first weights, then serves until `stop` is set. Raises ServerDied when vLLM exits: the supervisor
    then starts this program again."""
    # The log is needed only to find the weights: the reloader follows it from then on.
    log = open_log(run)
    try:
        program_metrics.detail = "waiting for the first weights"
        published = newest_weights(log, run, stop)
    finally:
        log.close()
    if published is None:
        return
    program_metrics.gauge("version", published.version)
    with tempfile.TemporaryDirectory(prefix="replayground-vllm-") as temporary:
        root = Path(settings.folder or temporary)
        folder = WeightsFolder(root, open_blobs(run))
        model = folder.unpack(published)
        folder.keep_newest(1)
        serve(model, settings, program_metrics, stop)


def newest_weights(log: Log, run: Run, stop: threading.Event) -> WeightsPublished | None:
    """The newest version of the run. Blocks until there is one; None when `stop` is set before."""
    reader = log.reader(["weights"], start=newest_weights_from(log, run)[0], run_id=run.run_id)
    newest: WeightsPublished | None = None
    try:
        while not stop.is_set():
            for delivery in reader.poll(events_max=100, timeout_seconds=0.5):
                event = delivery.event
                if isinstance(event, WeightsPublished) and event.meta.run_id == run.run_id:
                    newest = event if newest is None or event.version > newest.version else newest
            # Not the first one found: with an older version the server would start and be reloaded at once.
            if newest is not None and reader.caught_up():
                return newest
    finally:
        reader.close()
    return None


def serve(model: Path, settings: VllmSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Runs `vllm serve` on a model folder until `stop` is set. Raises ServerDied."""
    _require_plugin(settings)
    # A session of its own: vLLM starts further processes, which are ended together as one process group (_end).
    child = subprocess.Popen(
        command(model, settings),
        env=environment(settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert child.stdout is not None
    # A thread reads its output all the time: a full pipe would block vLLM.
    forwarder = threading.Thread(target=_forward, args=(child.stdout,), daemon=True)
    forwarder.start()
    try:
        program_metrics.detail = "vLLM starts"
        _await_health(child, settings, stop)
        program_metrics.detail = f"serving on port {settings.port}"
        while not stop.wait(0.5):
            _require_alive(child)
    finally:
        _end(child)
        forwarder.join(timeout=2.0)


def _require_plugin(settings: VllmSettings) -> None:
    # vLLM would start all the same, and the reloader would be answered 404.
    if not settings.development_mode and not entry_points(group="vllm.endpoint_plugins", name=PLUGIN):
        raise BadInput(
            f"vLLM cannot find the plugin {PLUGIN}: this installation of replayground is older than it. Run `make setup`, "
            "or set [vllm] development_mode = true"
        )


def command(model: Path, settings: VllmSettings) -> list[str]:
    """The command line of `vllm serve`, run by this Python and not by whatever `vllm` is first in the PATH."""
    return [
        sys.executable,
        *("-m", "replayground.consumers.vllm_child", "serve", str(model)),
        *("--served-model-name", MODEL_NAME, "--host", HOST, "--port", str(settings.port)),
        *("--dtype", settings.dtype, "--max-model-len", str(settings.tokens_max)),
        *("--max-num-seqs", str(settings.sequences_max)),
        # Token ids in, token ids out, by /inference/v1/generate: no tokenizer is loaded and no text is made.
        "--tokens-only",
        # Log-probabilities of the distribution that was sampled from, after temperature and the like. `vllm`: sampling
        # defaults of vLLM, not those of the model's generation_config.json.
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--scheduler-cls", "replayground.consumers.vllm_scheduler.ProbeScheduler"),
        *("--worker-extension-cls", "replayground.consumers.vllm_worker.ReloadingWorker"),
        *(
            "--no-use-tqdm-on-load",
            "--disable-log-stats",
            "--disable-uvicorn-access-log",
            "--uvicorn-log-level",
            "warning",
        ),
        *_device_flags(settings),
        # Last, so that a user's argument wins over the ones above.
        *settings.arguments,
    ]


def _device_flags(settings: VllmSettings) -> list[str]:
    flags = ["--enforce-eager"] if settings.eager else []
    # By its class and not as "uni", which vLLM on CPU replaces by "mp".
    flags += ["--distributed-executor-backend", settings.executor] if settings.executor else []
    flags += ["--tensor-parallel-size", str(settings.tensor_parallel)] if settings.tensor_parallel > 1 else []
    flags += ["--gpu-memory-utilization", str(settings.gpu_memory_share)] if settings.gpu_memory_share else []
    return flags


def _device_environment(settings: VllmSettings) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": str(settings.threads)} if settings.threads else {}
    cache = {"VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gibibytes)} if settings.kv_cache_gibibytes else {}
    return {**threads, **cache, **settings.environment}


def environment(settings: VllmSettings) -> dict[str, str]:
    # vLLM imports our scheduler and worker by name, in processes of its own.
    project = str(Path(__file__).resolve().parent.parent)
    return {
        **os.environ,
        "REPLAYGROUND_PARENT": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, (project, os.environ.get("PYTHONPATH")))),
        # Pause, reload and version label: all endpoints of the development mode, or those of our plugin.
        "VLLM_SERVER_DEV_MODE": str(int(settings.development_mode)),
        # Plugins that nobody named are left out: that of ms-swift, for one, loads its whole library.
        "VLLM_PLUGINS": ",".join(filter(None, (os.environ.get("VLLM_PLUGINS"), PLUGIN))),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        **_device_environment(settings),
    }


def _forward(output: IO[bytes]) -> None:
    """Copies vLLM's output into our log; returns when every process of the child has closed it."""
    with output:
        for line in output:
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                _log.info("vllm_output", line=text)


def _await_health(child: subprocess.Popen[bytes], settings: VllmSettings, stop: threading.Event) -> None:
    admin = VllmAdmin(f"http://{HOST}:{settings.port}", timeout_seconds=5.0)
    deadline = time.monotonic() + settings.start_seconds_max
    try:
        while not stop.wait(0.25):
            # A vLLM that has exited must not be waited for until the deadline.
            _require_alive(child)
            if admin.healthy():
                return
            if time.monotonic() > deadline:
                raise ServerDied(f"vLLM is not healthy after {settings.start_seconds_max:.0f} s: see its lines above")
    finally:
        admin.close()


def _require_alive(child: subprocess.Popen[bytes]) -> None:
    code = child.poll()
    if code is not None:
        raise ServerDied(f"vLLM ended by itself with code {code}: see its lines above")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the process group: SIGTERM, then SIGKILL after 15 s or as soon as the server has exited."""
    _signal_group(child.pid, signal.SIGTERM)
    try:
        child.wait(timeout=_END_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        _log.warning("vllm_did_not_end", seconds=_END_SECONDS_MAX)
    # Also when the server has exited: its engine may outlive it.
    _signal_group(child.pid, signal.SIGKILL)
    child.wait()


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)
