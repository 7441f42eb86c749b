"""Checks arguments against JSON schemas, in a process that a check without end does not outlive.

A schema comes from whoever wrote the MCP server, arguments from the agent; a `pattern` can make Python's `re` run for
years on 30 characters, and other keywords are quadratic or worse. So the check has a budget of CPU time, after which
the kernel ends this process (SIGPROF): a regular expression cannot be interrupted by anything less.

    python -I schema_check.py        one request a line: {"schema": …, "arguments": …}; one answer a line: text or null
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

import jsonschema
import referencing
import referencing.exceptions

CPU_SECONDS_MAX = 2.0
MEMORY_BYTES_MAX = 2 << 30
MESSAGE_CHARACTERS_MAX = 500
NOTHING_TO_FETCH: referencing.Registry[Any] = referencing.Registry()
"""Resolves no remote $ref: otherwise a schema could make this program fetch any URL."""


def main() -> None:
    # The default action of SIGPROF ends the process, also in the middle of a regular expression.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # Ctrl-C is for the worker; the end of its input ends this program.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    for line in sys.stdin.buffer:
        # CPU time of this process and not wall time: a busy machine is nobody's fault.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS_MAX)
        answer = json.dumps(answer_to(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


def answer_to(line: bytes) -> str | None:
    try:
        request = json.loads(line)
        if "arguments" not in request:
            return schema_fault(request["schema"])
        return schema_complaint(request["schema"], request["arguments"])
    except (RecursionError, MemoryError):
        return "the arguments do not fit: they are nested too deeply or too large"


def schema_fault(schema: Mapping[str, Any]) -> str | None:
    """What is wrong with a schema itself; None when it is valid."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.exceptions.SchemaError as error:
        return str(error.message)[:MESSAGE_CHARACTERS_MAX]
    return None


def schema_complaint(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments; None when they fit, or when the schema has a remote $ref."""
    validator = jsonschema.Draft202012Validator(schema, registry=NOTHING_TO_FETCH)
    try:
        error = jsonschema.exceptions.best_match(validator.iter_errors(dict(arguments)))
    except referencing.exceptions.Unresolvable:
        # Left to the server to check.
        return None
    if error is None:
        return None
    # Cut: a path has names of the agent's choice, and an answer is one line of limited length.
    where = ".".join(str(part) for part in error.absolute_path)[:MESSAGE_CHARACTERS_MAX]
    return f"the arguments do not fit: {f'{where}: ' if where else ''}{error.message[:MESSAGE_CHARACTERS_MAX]}"


if __name__ == "__main__":
    main()
