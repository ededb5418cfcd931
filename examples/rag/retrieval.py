"""Finding passages: BM25 for a small corpus, a dense index (FAISS) for all of Wikipedia.

    python retrieval.py --corpus corpus.jsonl "founder Velto"

A corpus is a JSONL file, one passage a line: `{"title": …, "text": …}`.
"""

import argparse
import heapq
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

_WORD = re.compile(r"\w+")


class BadCorpus(Exception):
    """A corpus that cannot be read, or does not fit its index."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A few sentences under a title."""

    title: str
    text: str

    def __str__(self) -> str:
        """The text, under its title if it does not name it.

        >>> print(Passage("Velto", "Velto sells tea."), Passage("Velto", "It is in Rome."))
        Velto sells tea. Velto: It is in Rome.
        """
        return self.text if self.title in self.text else f"{self.title}: {self.text}"


class Index(Protocol):
    """Passages that can be searched."""

    def search(self, query: str, k: int) -> list[Passage]:
        """The `k` best passages, best first; fewer if fewer fit at all."""
        ...


def words(text: str) -> list[str]:
    """The words of a text in lower case.

    >>> words("Where's Velto?")
    ['where', 's', 'velto']
    """
    return _WORD.findall(text.lower())


class Bm25:
    """Okapi BM25 over a corpus in memory.

        score(q, d) = Σ_{t in q} idf(t) · f(t, d) · (k1 + 1) / (f(t, d) + K(d))
        K(d) = k1 · (1 − b + b · |d| / mean |d|)
        idf(t) = ln(1 + (N − n(t) + ½) / (n(t) + ½))

    f is how often a word occurs in a passage, n in how many of the N passages it does. All but the
    sum is worked out when the index is made.

    Source: S. Robertson and H. Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond,
    Foundations and Trends in Information Retrieval 3(4), 2009; the idf, which is never negative,
    is Lucene's.
    """

    def __init__(self, passages: Sequence[Passage], *, k1: float = 1.5, b: float = 0.75) -> None:
        self._passages = list(passages)
        texts = [words(f"{passage.title} {passage.text}") for passage in self._passages]
        lengths = np.array([len(text) for text in texts], dtype=np.float64)
        norms = k1 * (1 - b + b * lengths / (lengths.mean() if len(texts) else 1.0))
        found: dict[str, list[tuple[int, int]]] = {}
        for place, text in enumerate(texts):
            for word, count in Counter(text).items():
                found.setdefault(word, []).append((place, count))
        self._postings: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        """Of each word: the passages it is in, and what it adds to their scores."""
        for word, entries in found.items():
            places, counts = (np.array(column) for column in zip(*entries, strict=True))
            idf = math.log1p((len(texts) - len(entries) + 0.5) / (len(entries) + 0.5))
            self._postings[word] = places, idf * counts * (k1 + 1) / (counts + norms[places])

    def scores(self, query: str) -> np.ndarray:
        """The score of every passage; shape `(passages,)`, float64."""
        total = np.zeros(len(self._passages))
        for word in words(query):
            if word in self._postings:
                places, added = self._postings[word]
                total[places] += added
        return total

    def search(self, query: str, k: int) -> list[Passage]:
        """Of equal scores the earlier is first; what has no word in common is left out."""
        scores = self.scores(query)
        best = heapq.nsmallest(k, np.flatnonzero(scores), key=lambda place: (-scores[place], place))
        return [self._passages[place] for place in best]


def open_index(corpus: Path, dense: Path | None = None) -> Index:
    """The passages of a JSONL file, searched by words, or by meaning with the index `dense`.

    Raises:
        BadCorpus: in one line, what cannot be read.
    """
    if dense is None:
        return Bm25(list(read_passages(corpus)))
    from dense import DenseIndex

    return DenseIndex.open(corpus, dense)


def read_passages(path: Path) -> Iterator[Passage]:
    """The passages of a JSONL file, in its order.

    Raises:
        BadCorpus: in one line, file, line and what is wrong.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                yield parse_passage(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise BadCorpus(f"{path}: cannot be read ({error})") from None


def parse_passage(line: str, where: str) -> Passage:
    """Raises BadCorpus unless the line is a passage."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadCorpus(f"{where}: not valid JSON ({error})") from None
    match row:
        case {"title": str(title), "text": str(text)}:
            return Passage(title, text)
    raise BadCorpus(f"{where}: a passage has a title and a text, both strings")


def write_passages(path: Path, passages: Iterable[Passage]) -> None:
    """Write a corpus."""
    with path.open("w", encoding="utf-8") as file:
        for passage in passages:
            file.write(json.dumps({"title": passage.title, "text": passage.text}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Search a corpus with BM25.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("-k", type=int, default=2)
    parser.add_argument("query")
    options = parser.parse_args()
    for passage in Bm25(list(read_passages(options.corpus))).search(options.query, options.k):
        print(passage)


if __name__ == "__main__":
    main()
