"""Where `make setup` installs the Python packages that tools import inside a sandbox (listed in libraries.in)."""

from pathlib import Path

# deploy/install.py repeats this path: it runs before the environment exists and imports nothing of ours.
LIBRARIES = Path(__file__).resolve().parents[1] / ".tools" / "sandbox-libraries"
