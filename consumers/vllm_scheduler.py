"""A scheduler for vLLM that starts paused and lets a probe through a pause.

The reloader must see a server's own log-probabilities before the server may sample (P10), but a paused vLLM holds back
every new request. vLLM makes one exception: a request that holds KV cache blocks goes on, so that a pause can drain.
Here a request whose id marks it as a probe counts as one of those. Loaded by `--scheduler-cls`; imported inside vLLM
only.

A pause by mode "keep" stops requests in the middle. When their cache is reset they wait without blocks, like new ones,
and the scheduler goes over to the state in which probes are admitted.
"""

import ctypes
import signal
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

# The same as in consumers.vllm_admin, which must not import vLLM.
PROBE_MARK = "replayground-probe"
_PR_SET_PDEATHSIG = 1


class ProbeScheduler(Scheduler):
    """vLLM's scheduler, which starts paused and admits probes during a pause."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # Not PAUSED_ALL, under which vLLM schedules no waiting request at all, not even a probe.
        self.set_pause_state(PauseState.PAUSED_NEW)
        # This is the engine's process. Its parent, the API server, may be killed: an engine without it would never end.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        is_reset = super().reset_prefix_cache(reset_running_requests, reset_connector)
        # Nothing is running any more, so this admits probes alone.
        if reset_running_requests and self.pause_state == PauseState.PAUSED_ALL:
            self.set_pause_state(PauseState.PAUSED_NEW)
        return bool(is_reset)

    @staticmethod
    def _holds_kv_blocks(request: Request) -> bool:
        return PROBE_MARK in request.request_id or Scheduler._holds_kv_blocks(request)
