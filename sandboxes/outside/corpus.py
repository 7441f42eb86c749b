"""A set of documents in memory, searched by BM25 (bm25s)."""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from replayground.sandboxes.outside.search_recordings import SearchResult

SNIPPET_CHARACTERS = 300
WORD = re.compile(r"\w+")


class Document(msgspec.Struct, frozen=True):
    """One document of a JSONL file."""

    title: str
    text: str
    url: str = ""


class Corpus:
    """Documents and their index. Building it takes time in proportion to the text: do it in a thread."""

    def __init__(self, documents: tuple[Document, ...]) -> None:
        self.documents = {document.title: document for document in documents}
        self._titles = list(self.documents)
        # Imported here: it takes a second and 100 MB, which programs without search need not pay.
        import bm25s

        self._tokenize = partial(bm25s.tokenize, stopwords="en", return_ids=False, show_progress=False)
        texts = [f"{document.title}\n{document.text}" for document in self.documents.values()]
        tokens = self._tokenize(texts)
        self._index = bm25s.BM25()
        # bm25s raises ValueError when no document has a word.
        if any(tokens):
            self._index.index(tokens, show_progress=False)
        self._words = {word for words in tokens for word in words}

    def search(self, query: str, count: int) -> tuple[SearchResult, ...]:
        """The documents with a word of the query, best first; of equal scores, the earlier document first."""
        (words,) = self._tokenize([query])
        # Without a known word every score is 0, and there may be no index at all.
        known = [word for word in words if word in self._words]
        if not known:
            return ()
        scores = self._index.get_scores(known)
        order = sorted(range(len(self._titles)), key=lambda number: (-scores[number], number))
        best = [self.documents[self._titles[number]] for number in order[:count] if scores[number] > 0]
        return tuple(SearchResult(document.title, document.url, snippet(document.text, known)) for document in best)


def corpus_of_world(documents: Mapping[str, str]) -> Corpus:
    return Corpus(tuple(Document(title, text) for title, text in documents.items()))


def corpus_from(path: Path) -> Corpus:
    """Read a folder of .txt and .md files, titled by their paths, or a JSONL file. OSError; ValueError with the line
    number for a line that is not a document."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md") and file.is_file())
        return Corpus(
            tuple(
                Document(file.relative_to(path).with_suffix("").as_posix(), file.read_text(errors="replace"))
                for file in files
            )
        )
    documents = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                documents.append(msgspec.json.decode(line, type=Document))
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return Corpus(tuple(documents))


def snippet(text: str, words: list[str]) -> str:
    """The part of a text with the most different words of the query, on one line."""
    wanted = set(words)
    hits = [match for match in WORD.finditer(text) if match.group().casefold() in wanted]
    start, most = 0, 0
    for first, hit in enumerate(hits):
        covered = {
            later.group().casefold()
            # At most 50: a text that repeats one word would take quadratic time.
            for later in hits[first : first + 50]
            if later.end() - hit.start() < SNIPPET_CHARACTERS
        }
        if len(covered) > most:
            start, most = hit.start(), len(covered)
    # Some words before the first hit, for context.
    begin = max(0, start - 60)
    cut = text[begin : begin + SNIPPET_CHARACTERS]
    return f"{'…' if begin else ''}{' '.join(cut.split())}{'…' if begin + SNIPPET_CHARACTERS < len(text) else ''}"
