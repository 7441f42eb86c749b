"""One vLLM server, as a child of this program, started from the newest weights on the log.

It starts paused (consumers.vllm_scheduler): the reloader verifies it and lets it sample. Flags are chosen for a small
model on few shared cores, where vLLM's own work per token costs more than the model's.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import structlog

from consumers.config import VllmSettings
from consumers.vllm_admin import VllmAdmin
from consumers.weights_files import WeightsFolder
from schemas.blobs import open_blobs
from schemas.errors import ReplaygroundError
from schemas.events import WeightsPublished
from schemas.metrics import ProgramMetrics
from schemas.run import Run
from streams.log.connect import open_log
from streams.log.protocol import Log
from streams.log.weights import newest_weights_from

HOST = "127.0.0.1"
MODEL_NAME = "policy"
"the name under which requests ask for the model"
_END_SECONDS_MAX = 15.0

_log = structlog.get_logger(__name__)


class ServerDied(ReplaygroundError):
    """vLLM ended by itself, or never became healthy."""


def run(run: Run, settings: VllmSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Waits for weights, serves until stopped. Raises ServerDied when vLLM ends by itself: whoever watches starts us again."""
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
    """The newest version of the run; waits for the first one. None when stopped before."""
    reader = log.reader(["weights"], start=newest_weights_from(log, run)[0], run_id=run.run_id)
    newest: WeightsPublished | None = None
    try:
        while not stop.is_set():
            for delivery in reader.poll(events_max=100, timeout_seconds=0.5):
                event = delivery.event
                if isinstance(event, WeightsPublished) and event.meta.run_id == run.run_id:
                    newest = event if newest is None or event.version > newest.version else newest
            if newest is not None and reader.caught_up():
                return newest
    finally:
        reader.close()
    return None


def serve(model: Path, settings: VllmSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Runs `vllm serve` on a model folder until stopped."""
    child = subprocess.Popen(
        command(model, settings),
        env=environment(settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert child.stdout is not None
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


def command(model: Path, settings: VllmSettings) -> list[str]:
    """`vllm serve` by this very Python, so that no other installation is picked up from the PATH."""
    return [
        sys.executable,
        *("-m", "consumers.vllm_child", "serve", str(model)),
        *("--served-model-name", MODEL_NAME, "--host", HOST, "--port", str(settings.port)),
        *("--dtype", settings.dtype, "--max-model-len", str(settings.tokens_max)),
        *("--max-num-seqs", str(settings.sequences_max)),
        # token ids in, token ids out, by /inference/v1/generate: no tokenizer is loaded and no text is made
        "--tokens-only",
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--scheduler-cls", "consumers.vllm_scheduler.ProbeScheduler"),
        *("--worker-extension-cls", "consumers.vllm_worker.ReloadingWorker"),
        # the model runs inside the engine's process: a process and its busy waiting less, 28 % less processor per token.
        # By its dotted name, since vLLM on CPU replaces the short name "uni" by "mp"
        *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
        *("--enforce-eager", "--no-use-tqdm-on-load", "--disable-log-stats"),
        *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
        *settings.arguments,
    ]


def environment(settings: VllmSettings) -> dict[str, str]:
    project = str(Path(__file__).resolve().parent.parent)
    return {
        **os.environ,
        "REPLAYGROUND_PARENT": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, (project, os.environ.get("PYTHONPATH")))),
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gibibytes),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are shared: the kernel places threads better than vLLM
        "OMP_NUM_THREADS": str(settings.threads),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # or the first request compiles C++ for 17 s, and needs a compiler
    }


def _forward(output: IO[bytes]) -> None:
    """vLLM's lines into our log; ends when every process of the child has closed its output."""
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
    """Asks the whole process group to end, then makes it."""
    _signal_group(child.pid, signal.SIGTERM)
    try:
        child.wait(timeout=_END_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        _log.warning("vllm_did_not_end", seconds=_END_SECONDS_MAX)
    _signal_group(child.pid, signal.SIGKILL)  # its helpers too: the engine may outlive the server
    child.wait()


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)
