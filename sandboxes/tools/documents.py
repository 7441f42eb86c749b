"""The tool `read_document`: pdf, docx, pptx, csv and html as text, part by part.

A part is a page of a pdf, a slide of a pptx, a row of a csv, or a section of a docx or html: from one heading to the
next. Not covered: text inside pictures (image_text reads it), passwords, .doc and .ppt, and headers, footers and
comments of a docx.
"""

from collections.abc import Callable, Iterator
from typing import Any

from replayground.sandboxes.tools.paths import existing_file, replace_file, work_path
from replayground.sandboxes.tools.tool import ToolError, tool

CHARACTERS_MAX = 12_000
PARTS = {
    ".pdf": "page",
    ".docx": "section",
    ".pptx": "slide",
    ".csv": "row",
    ".tsv": "row",
    ".html": "section",
    ".htm": "section",
}


@tool(needs=frozenset({"files"}), call_timeout_seconds=60.0)
def read_document(path: str, first: int = 1, last: int | None = None, save_as: str | None = None) -> str:
    """Read the text of a pdf, docx, pptx, csv or html file. Parts are counted from 1: pages, slides, rows, or sections.

    path: relative to /work, for example report.pdf
    first: the first page, slide, row or section
    last: the last one; the default is as many as can be shown
    save_as: writes the text of these parts, however long, to this file instead of showing it
    """
    import os

    absolute = existing_file(path)
    kind = os.path.splitext(absolute)[1].lower()
    if kind not in PARTS:
        hint = "excel_read reads workbooks, read_file plain text" if kind != ".txt" else "read_file reads plain text"
        raise ToolError(f"{path} is not one of {', '.join(PARTS)}; {hint}")
    if first < 1 or (last is not None and last < first):
        raise ToolError("parts are counted from 1, and last is not before first")
    parts = guarded(path, kind, READERS[kind], absolute)
    if first > len(parts) > 0:
        raise ToolError(f"{path} has only {len(parts)} {PARTS[kind]}s")
    numbers = range(first, min(last or len(parts), len(parts)) + 1)
    # A generator: pages beyond those shown are never extracted.
    texts = (guarded(path, kind, part_text, parts, number, PARTS[kind]) for number in numbers)
    if save_as is not None:
        replace_file(work_path(save_as), "\n".join(texts).encode("utf-8", "replace"))
        return f"wrote {len(numbers)} {PARTS[kind]}s of {path} to {save_as}"
    return "\n".join([f"{path}: {len(parts)} {PARTS[kind]}s", *fitting(texts, first, PARTS[kind])])


def guarded(path: str, kind: str, read: Callable[..., Any], *arguments: Any) -> Any:
    """Call `read`. Any exception that a damaged file makes a library raise becomes a ToolError."""
    import warnings

    # Warnings of the libraries about the file would go into the output; the agent can do nothing about them.
    warnings.simplefilter("ignore")
    try:
        return read(*arguments)
    except (ToolError, MemoryError):
        raise
    except Exception as error:
        raise ToolError(f"{path} cannot be read as {kind[1:]}: {type(error).__name__}: {error}") from None


def part_text(parts: list[Any], number: int, part: str) -> str:
    """One part with its number."""
    # Pages of a pdf are objects, extracted only here because that takes long.
    text = parts[number - 1] if isinstance(parts[number - 1], str) else parts[number - 1].extract_text()
    return f"{number}: {text}" if part == "row" else f"--- {part} {number} ---\n{text.strip() or '(no text)'}"


def fitting(texts: Iterator[str], first: int, part: str) -> Iterator[str]:
    """As many parts as fit into one result, then a note on how to read the rest."""
    characters = 0
    for number, text in enumerate(texts, first):
        characters += len(text)
        # The first part is always shown, cut if it must be: otherwise the agent could not get on.
        if characters > CHARACTERS_MAX and number > first:
            yield f"[cut: go on with first={number}, or use save_as and search_files]"
            return
        yield text[:CHARACTERS_MAX]
        if len(text) > CHARACTERS_MAX:
            yield f"[cut: {part} {number} has {len(text)} characters: use save_as and read_file, or first={number + 1}]"
            return


def pdf_pages(absolute: str) -> list[Any]:
    import logging

    import pypdf

    # pypdf logs every oddity of a file to stderr, which is output of the tool.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    reader = pypdf.PdfReader(absolute)
    # A pdf may be encrypted with an empty password, which every viewer opens.
    if reader.is_encrypted and not reader.decrypt(""):
        raise ToolError("the pdf is protected by a password")
    return list(reader.pages)


def docx_sections(absolute: str) -> list[str]:
    import docx

    sections: list[list[str]] = [[]]
    for block in docx.Document(absolute).iter_inner_content():
        # A table; everything else here is a paragraph.
        if hasattr(block, "rows"):
            sections[-1].extend(table_lines(block))
        elif block.text.strip():
            is_heading = (block.style.name or "").startswith(("Heading", "Title"))
            if is_heading and sections[-1]:
                sections.append([])
            sections[-1].append(f"# {block.text}" if is_heading else block.text)
    return ["\n".join(lines) for lines in sections]


def pptx_slides(absolute: str) -> list[str]:
    import pptx

    slides: list[str] = []
    for slide in pptx.Presentation(absolute).slides:
        lines = [line for shape in slide.shapes for line in shape_lines(shape)]
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            lines.append(f"Notes: {slide.notes_slide.notes_text_frame.text}")
        slides.append("\n".join(lines))
    return slides


def shape_lines(shape: Any) -> list[str]:
    """Text lines of a shape and of the shapes in a group; for a picture, its name."""
    if hasattr(shape, "shapes"):
        return [line for inner in shape.shapes for line in shape_lines(inner)]
    if getattr(shape, "has_table", False):
        return table_lines(shape.table)
    if shape.has_text_frame:
        return [paragraph.text for paragraph in shape.text_frame.paragraphs if paragraph.text.strip()]
    return [f"(picture {shape.name})"] if hasattr(shape, "image") else []


def table_lines(table: Any) -> list[str]:
    return [" | ".join(cell.text.replace("\n", " ") for cell in row.cells) for row in table.rows]


def csv_rows(absolute: str) -> list[str]:
    """Rows with fields separated by |. The separator of the file is detected; a line end in a field becomes a space."""
    import csv

    # utf-8-sig: spreadsheet programs write a byte order mark.
    with open(absolute, encoding="utf-8-sig", errors="replace", newline="") as file:
        sample = file.read(64 * 1024)
        file.seek(0)
        try:
            dialect: Any = csv.Sniffer().sniff(sample, ",;\t|")
        # One column only, or too little text to detect a separator.
        except csv.Error:
            dialect = csv.excel
        return [" | ".join(field.replace("\n", " ") for field in row) for row in csv.reader(file, dialect)]


def html_sections(absolute: str) -> list[str]:
    """The visible text as Markdown, split before each heading."""
    import re

    import bs4
    import markdownify

    with open(absolute, "rb") as file:
        soup = bs4.BeautifulSoup(file.read(), "lxml")
    for hidden in soup(["script", "style", "template", "noscript", "head"]):
        hidden.decompose()
    text = markdownify.MarkdownConverter(heading_style="ATX", bullets="-").convert_soup(soup)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    return [section for section in re.split(r"\n(?=#{1,6} )", text) if section.strip()]


READERS: dict[str, Callable[[str], list[Any]]] = {
    ".pdf": pdf_pages,
    ".docx": docx_sections,
    ".pptx": pptx_slides,
    ".csv": csv_rows,
    ".tsv": csv_rows,
    ".html": html_sections,
    ".htm": html_sections,
}
