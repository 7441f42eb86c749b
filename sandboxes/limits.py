"""What one sandbox may use. Backends enforce these; each backend's docstring says which it cannot."""

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
        return self.disk_bytes_max + 2048 * self.inodes_max + 16 * 1024
