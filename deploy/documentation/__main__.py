"""Generates docs/reference and docs/topics.md from source: `python -m replayground.deploy.documentation`."""

from pathlib import Path

from replayground.deploy.documentation.reference import pages
from replayground.schemas.programs import topics_page

DOCS = Path(__file__).resolve().parents[2] / "docs"


def main() -> None:
    (DOCS / "topics.md").write_text(topics_page())
    for name, text in pages().items():
        path = DOCS / "reference" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
