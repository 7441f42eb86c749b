"""`vllm`, ended by the kernel when the program that started it is gone: `python -m consumers.vllm_child serve …`."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(os.environ.pop("REPLAYGROUND_PARENT", "0"))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if parent and os.getppid() != parent:
        sys.exit("the program that started vLLM is gone already")
    from vllm.entrypoints.cli.main import main as vllm  # after the lines above: it takes seconds to import

    vllm()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
