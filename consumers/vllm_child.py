"""`vllm`, ended by the kernel when its parent dies: `python -m replayground.consumers.vllm_child serve …`."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(os.environ.pop("REPLAYGROUND_PARENT", "0"))
    # In this order: if the parent died before prctl, no signal will come, and only its pid shows it. The signal alone,
    # or the check alone, would leave a gap in which vLLM outlives its parent.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if parent and os.getppid() != parent:
        sys.exit("the program that started vLLM is gone already")
    # After the lines above: the import takes seconds, in which the parent may die.
    from vllm.entrypoints.cli.main import main as vllm

    vllm()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
