"""What the backends and the jail of outside tools ask of this machine alike."""

import shutil
from collections.abc import Mapping

from sandboxes.protocol import SandboxUnavailable

SYSTEM_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
"where programs of the system are, whatever PATH says"
DEVICES = ("null", "zero", "full", "random", "urandom")
"the devices below /dev that untrusted code gets"


def require_installed(packages: Mapping[str, str]) -> None:
    """Takes the package of each program. Raises SandboxUnavailable, with what to do, when a program is missing."""
    for program, package in packages.items():
        if shutil.which(program, path=SYSTEM_PATH) is None:
            raise SandboxUnavailable(f"{package} is not installed: apt-get install {package}")
