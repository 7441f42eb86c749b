"""A scheduler for vLLM that starts paused and lets a probe through a pause.

The reloader must see a server's own log-probabilities before it lets it sample (P10), but a paused vLLM holds back
every new request. vLLM already makes one exception: a request that holds cache blocks goes on, so that a pause can
drain. Here a request whose id says that it is a probe counts as one of those. Loaded by `--scheduler-cls`; this file is
imported inside vLLM only.
"""

import ctypes
import signal
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

PROBE_MARK = "replayground-probe"
_PR_SET_PDEATHSIG = 1


class ProbeScheduler(Scheduler):
    """vLLM's scheduler; paused until its weights are verified, with probes admitted."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.set_pause_state(PauseState.PAUSED_NEW)
        # we run in the engine's process, whose parent may be killed: an engine without a server would stay for ever
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    @staticmethod
    def _holds_kv_blocks(request: Request) -> bool:
        return PROBE_MARK in request.request_id or Scheduler._holds_kv_blocks(request)
