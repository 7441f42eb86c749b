"""Searches arguments for the pattern of a perturbation rule, in a process that a search without end does not outlive.

The pattern comes from the world, the text from the agent, up to some MiB of it: `a.*b` takes hours on a text of many
a's. So each search has a budget of CPU time, after which the kernel ends this process (SIGPROF).

    python -I pattern_search.py        one request a line: [pattern, text]; one answer a line: true or false
"""

import json
import re
import signal
import sys

CPU_SECONDS_MAX = 0.5


def main() -> None:
    # The default action of SIGPROF ends the process, also in the middle of a search.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # Ctrl-C is for the worker; the end of its input ends this program.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        # CPU time of this process and not wall time: a busy machine is nobody's fault.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS_MAX)
        pattern, text = json.loads(line)
        found = re.search(pattern, text) is not None
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
