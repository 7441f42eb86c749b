"""Resource limits of one sandbox, and of all on a machine together. Backends enforce them; a backend's docstring lists
those that it cannot."""

from typing import Annotated

import msgspec

MEBIBYTE = 1024 * 1024


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ceilings of one sandbox. A field ends in its unit; the default suits small tool calls on a shared machine."""

    cpu_seconds: int = 20
    """CPU time of any one process in the sandbox."""
    cpu_cores_max: float = 1.0
    """CPU time of all processes together in a second of wall time, where there is a cgroup."""
    memory_bytes_max: int = 512 * MEBIBYTE
    """Address space of any one process; where there is a cgroup, memory of all processes together as well."""
    disk_bytes_max: int = 32 * MEBIBYTE
    """All writable files together; also the longest single file."""
    inodes_max: int = 4096
    """Files, directories and links together."""
    processes_max: int = 32
    """Processes and threads alive at the same time."""
    open_files_max: int = 256
    """Open descriptors of any one process."""
    output_bytes_max: int = 16 * 1024
    """Length of a tool result as the agent sees it; what is longer is cut, and says so."""
    call_timeout_seconds: float = 10.0
    """Wall time of one tool call, unless the tool sets its own."""

    @property
    def snapshot_bytes_max(self) -> int:
        """Length of a snapshot: a full disk, and what a tar adds for every file."""
        # A tar adds a header of 512 bytes to each entry and pads its data to 512; a PAX header for a long name costs
        # two more blocks. The constant covers the end-of-archive padding.
        return self.disk_bytes_max + 2048 * self.inodes_max + 16 * 1024


class Totals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ceilings of all sandboxes on this machine together, where there is a cgroup. What is left is for everything else:
    the broker, the model server, the trainer. A lease waits while another sandbox may not fit."""

    memory_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    """Of the memory of this machine, or of the cgroup that this program is in if that is less."""
    cpu_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.75
    """Of the time of all cores."""
    processes_max: Annotated[int, msgspec.Meta(ge=1)] = 8192
    """Processes and threads alive at the same time."""
    disk_read_bytes_per_second_max: Annotated[int, msgspec.Meta(ge=1)] = 256 * MEBIBYTE
    """From the disk that /usr is on, where the cgroup controller for block devices is there."""
