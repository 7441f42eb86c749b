"""Attempts as OpenTelemetry traces: OTLP as JSON, one request a line, with the attributes of the GenAI conventions.

A trace is an attempt: a span `invoke_agent`, and in it a span `chat` for each turn and `execute_tool` for each result of
a tool. Texts are left out, as the conventions advise; ids lead back to the log. Ids of traces and spans are derived from
those of the events, so the same log gives the same spans.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from replayground.schemas.events import Event, RolloutEnded, RolloutStarted, ToolObserved, TurnGenerated
from replayground.schemas.packed import token_count
from replayground.streams.log.protocol import Log

_TOPIC = "messages"
_ATTEMPTS_OPEN_MAX = 100_000
"attempts without an end, such as those of a killed worker, are forgotten from here on, the oldest first"
_POLL_EVENTS_MAX, _POLL_SECONDS = 1000, 1.0
_CLIENT, _INTERNAL = 3, 1
_FAILED = {"code": 2}
_INFRA = "infra_error"


def export_spans(log: Log, output: Path, runs: frozenset[str], progress: Callable[[int, int], None]) -> int:
    """Writes the ended attempts of these runs, all without any; returns how many. The file is complete or not there.
    Raises LogUnavailable."""
    total = sum(end.offset for end in log.end_positions([_TOPIC]))
    draft = output.with_name(f".{output.name}.tmp")
    attempts: dict[str, list[Event]] = {}
    written = read = 0
    reader = log.reader([_TOPIC], run_id=runs or None)
    try:
        with draft.open("wb") as file:
            while not reader.caught_up():
                deliveries = reader.poll(_POLL_EVENTS_MAX, _POLL_SECONDS)
                for event in (delivery.event for delivery in deliveries):
                    if event is None or event.meta.attempt_id is None or (runs and event.meta.run_id not in runs):
                        continue
                    attempts.setdefault(event.meta.attempt_id, []).append(event)
                    if isinstance(event, RolloutEnded):
                        file.write(msgspec.json.encode(trace(attempts.pop(event.meta.attempt_id))) + b"\n")
                        written += 1
                    elif len(attempts) > _ATTEMPTS_OPEN_MAX:
                        del attempts[next(iter(attempts))]
                read += len(deliveries)
                progress(read, max(read, total))
            file.flush()
            os.fsync(file.fileno())
    finally:
        reader.close()
    draft.replace(output)
    return written


def trace(events: list[Event]) -> dict[str, Any]:
    """An ExportTraceServiceRequest of one attempt, from its messages in order."""
    meta = events[-1].meta
    trace_id = _trace_id(events)
    root = _id(f"attempt {meta.attempt_id}", 8)
    spans = [span for event in events if (span := _span(event, trace_id, root)) is not None]
    resource = {"attributes": _attributes({"service.name": "replayground", "replayground.run_id": meta.run_id})}
    scope = {"name": "replayground", "version": "1"}
    whole = [_root(events, trace_id, root), *spans]
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": scope, "spans": whole}]}]}


def _root(events: list[Event], trace_id: str, span_id: str) -> dict[str, Any]:
    first, last = events[0], events[-1]
    agent = first.task.agent if isinstance(first, RolloutStarted) else "agent"
    about: dict[str, Any] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": agent,
        "gen_ai.conversation.id": last.meta.trajectory_id or "",
        "replayground.attempt_id": last.meta.attempt_id or "",
        "replayground.task_id": last.meta.task_id or "",
        "replayground.purpose": last.meta.purpose or "",
    }
    failed = False
    if isinstance(last, RolloutEnded):
        about |= {
            "gen_ai.usage.input_tokens": last.tokens_read,
            "gen_ai.usage.output_tokens": last.tokens_sampled,
            "replayground.ended_by": last.ended_by,
        }
        failed = last.ended_by in (_INFRA, "agent_error")
        if failed:
            about["error.type"] = last.ended_by
    began, ended = first.meta.timestamp * 1000, last.meta.timestamp * 1000
    return _made(trace_id, span_id, "", f"invoke_agent {agent}", _INTERNAL, began, ended, about, failed)


def _span(event: Event, trace_id: str, root: str) -> dict[str, Any] | None:
    ended = event.meta.timestamp * 1000
    span_id = _id(event.meta.id, 8)
    if isinstance(event, TurnGenerated):
        about = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": f"{event.meta.run_id}:{event.meta.policy_version}",
            "gen_ai.agent.name": event.agent,
            "gen_ai.request.temperature": event.sampling.temperature,
            "gen_ai.request.top_p": event.sampling.top_p,
            "gen_ai.request.max_tokens": event.sampling.max_tokens_per_turn,
            "gen_ai.response.finish_reasons": [event.finish_reason],
            "gen_ai.usage.output_tokens": token_count(event.tokens),
        }
        began = ended - round(event.milliseconds * 1e6)
        return _made(trace_id, span_id, root, "chat", _CLIENT, began, ended, about, False)
    if isinstance(event, ToolObserved):
        about = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": event.tool,
            "gen_ai.tool.call.id": event.call_id,
        }
        if event.is_error:
            about["error.type"] = event.error_kind or "tool"
        began = ended - round(event.milliseconds * 1e6)
        name = f"execute_tool {event.tool}"
        return _made(trace_id, span_id, root, name, _INTERNAL, began, ended, about, event.is_error)
    return None


def _made(
    trace_id: str,
    span_id: str,
    parent: str,
    name: str,
    kind: int,
    began: int,
    ended: int,
    about: dict[str, Any],
    failed: bool,
) -> dict[str, Any]:
    """A span. Times are nanoseconds; OTLP as JSON writes 64-bit integers as text."""
    return {
        "traceId": trace_id,
        "spanId": span_id,
        "parentSpanId": parent,
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(min(began, ended)),
        "endTimeUnixNano": str(ended),
        "attributes": _attributes(about),
        "status": _FAILED if failed else {},
    }


def _attributes(named: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in named.items()]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [_value(part) for part in value]}}
        case _:
            return {"stringValue": str(value)}


def _trace_id(events: list[Event]) -> str:
    """The trace of the W3C traceparent that the attempt carries, else one of its own."""
    parent = events[0].meta.headers.get("traceparent", "").split("-")
    if len(parent) == 4 and len(parent[1]) == 32 and all(letter in "0123456789abcdef" for letter in parent[1]):
        return parent[1]
    return _id(f"trace {events[-1].meta.attempt_id}", 16)


def _id(text: str, size: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * size]
