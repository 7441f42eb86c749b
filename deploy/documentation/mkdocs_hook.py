"""Hooks of MkDocs: the site has the layout of the repository, so pages and links need not be copied or rewritten.

on_files            adds pages outside of docs/ that the navigation names, and every source file that a page links to
on_page_markdown    turns a link to a folder, which a static site cannot show, into a link to its README.md or text
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Gives files of docs/ their paths in the repository and adds files from outside of docs/."""
    # MkDocs names files relative to docs/; links such as ../deploy/runbook.md need the path from the root.
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
        _add(files, config, f"docs/{file.src_uri}")
    for path in _named(config.nav):
        _add(files, config, path)
    # Pages are added by the navigation alone: a page that is only linked would be built without a place in it.
    for page in list(files.documentation_pages()):
        for path in _linked(page.src_uri, page.content_string):
            if not path.endswith(".md"):
                _add(files, config, path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces links to folders."""
    folder = posixpath.dirname(page.file.src_uri)

    def resolve(link: re.Match[str]) -> str:
        target = link["target"]
        if "://" in target or not (ROOT / folder / target).is_dir():
            return link[0]
        if (ROOT / folder / target / "README.md").is_file():
            return f"[{link['text']}]({target.rstrip('/')}/README.md)"
        return link["text"]

    return _LINK.sub(resolve, markdown)


def _add(files: Files, config: MkDocsConfig, path: str) -> None:
    if files.get_file_from_path(path) is None and (ROOT / path).is_file():
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))


def _named(nav: Any) -> Iterator[str]:
    """Every path in the navigation."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for inner in nav.values():
            yield from _named(inner)
    elif nav is not None:
        for inner in nav:
            yield from _named(inner)


def _linked(page: str, markdown: str) -> Iterator[str]:
    """Every relative link of a page, as a path in the repository."""
    for link in _LINK.finditer(markdown):
        if "://" not in link["target"]:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(page), link["target"]))
