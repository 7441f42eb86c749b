"""`replayground init`: makes a folder with a small job that runs unchanged, from the files in deploy/templates/job."""

import re
import shutil
from pathlib import Path
from string import Template

from replayground.schemas.errors import BadInput

TEMPLATES = Path(__file__).parent / "templates" / "job"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def make_job(folder: Path) -> list[Path]:
    """Makes the folder with all files or not at all; returns the files. Raises BadInput for an invalid name and for a
    folder that is not empty."""
    name = folder.name
    if _NAME.fullmatch(name) is None:
        raise BadInput(
            f"{str(folder)!r} does not end in a name for a job: letters, digits, - and _, a letter first, at most 64"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} exists and is not an empty folder: choose another name")
    try:
        # Written beside the target and renamed, so that a failure leaves no half-made job.
        unfinished = folder.with_name(f".{name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for template in _templates():
            text = template.read_text()
            # Python files are copied without substitution: as templates they are linted and type-checked like all code.
            filled = text if template.suffix == ".py" else Template(text).substitute(name=name)
            (unfinished / template.name).write_text(filled)
        # rename(2) also replaces a folder if it is empty.
        unfinished.replace(folder)
    except OSError as error:
        raise BadInput(f"{folder} cannot be made ({error.strerror}): choose another place") from error
    return [folder / template.name for template in _templates()]


def _templates() -> list[Path]:
    return sorted(path for path in TEMPLATES.iterdir() if path.is_file())
