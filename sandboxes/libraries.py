"""Where `make setup` puts the Python packages that tools import inside a sandbox (libraries.in names them)."""

from pathlib import Path

LIBRARIES = Path(__file__).resolve().parents[1] / ".tools" / "sandbox-libraries"
