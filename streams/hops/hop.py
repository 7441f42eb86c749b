"""A hop is a pure fold over one topic: step(state, event, address) -> Outcome. No clock, no random numbers, no client.

The Faust app, the driver and the simulator run the same hops from one list (streams.hops.flow). State is kept per key
and must be serialisable; a hop that keeps none has `state_class` None.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct

from replayground.schemas.events import Address, Event


class Outcome(Struct, frozen=True):
    """The result of a step: the new state (None = forget the key), new events, or why the event is rejected."""

    state: Any = None
    events: Sequence[Event] = ()
    refused: str | None = None


class Hop(Protocol):
    """One stage of the flow."""

    @property
    def name(self) -> str: ...

    @property
    def reads(self) -> str:
        """The topic that it reads."""

    @property
    def state_class(self) -> type[Struct] | None: ...

    @property
    def keys_remembered(self) -> int:
        """How many of the newest keys of a partition are remembered after they are closed (streams.horizon)."""

    def is_closed(self, state: Any) -> bool:
        """Whether no further event is expected for a key in this state (streams.horizon)."""

    def key(self, event: Event) -> str | None:
        """Which state the event belongs to; None when the hop ignores the event."""

    def step(self, state: Any, event: Event, address: Address) -> Outcome:
        """Never raises, for any event of its topic. The same input always gives the same outcome, so a repeat after a
        crash gives events with the same ids."""
