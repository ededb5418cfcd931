"""A dense index: passages found by meaning, among as many as Wikipedia has.

    python dense.py --corpus wiki.jsonl --out wiki.faiss --encoder BAAI/bge-base-en-v1.5 \\
        --factory IVF65536,PQ96

Needs `faiss-cpu`. Beside the index `wiki.faiss` stands `wiki.faiss.json`: the encoder that made it,
so that queries are encoded as the passages were. The passages stay in their file; in memory is only
where each line begins.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import faiss  # pyright: ignore[reportMissingImports] - optional
import numpy as np
from retrieval import BadCorpus, Passage, parse_passage, read_passages

FLAT = "Flat"
"""FAISS's name of an exact index; wants 4 bytes a number, 65 GB for all of Wikipedia."""


class Encoder(Protocol):
    """Texts as directions: near ones mean alike."""

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """Shape `(texts, d)`, float32, each of length 1."""
        ...

    def query(self, text: str) -> np.ndarray:
        """Shape `(d,)`, float32, of length 1."""
        ...


@dataclass(frozen=True)
class HuggingFaceEncoder:
    """An encoder of the BGE kind: the first token's state, made of length 1.

    Source: S. Xiao et al., C-Pack: Packed Resources for General Chinese Embeddings, SIGIR 2024,
    and the card of BAAI/bge-base-en-v1.5, which gives the query's prefix.
    """

    model: str
    prefix: str = "Represent this sentence for searching relevant passages: "
    device: str = "cpu"
    longest: int = 512
    """Tokens of a text that are read."""

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        import torch

        tokenizer, model = self._loaded
        given = tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self.longest,
            return_tensors="pt",
        ).to(self.device)
        with torch.inference_mode():
            first = model(**given).last_hidden_state[:, 0].float()
        return torch.nn.functional.normalize(first, dim=-1).cpu().numpy()

    def query(self, text: str) -> np.ndarray:
        return self.passages([self.prefix + text])[0]

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        from transformers import AutoModel, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model)
        return tokenizer, AutoModel.from_pretrained(self.model).to(self.device).eval()


class PassageFile:
    """The passages of a JSONL file by number, without having them in memory."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                ends = np.cumsum([0, *(len(line) for line in file)], dtype=np.int64)
        except OSError as error:
            raise BadCorpus(f"{path}: cannot be read ({error.strerror})") from None
        self._path, self._starts = path, ends[:-1]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Passage:
        # Opened for each passage: a shared position would not do for agents in threads.
        with self._path.open("rb") as file:
            file.seek(int(self._starts[number]))
            return parse_passage(file.readline().decode(), f"{self._path}:{number + 1}")


class DenseIndex:
    """Passages by inner product with the query."""

    def __init__(self, index: Any, passages: PassageFile, encoder: Encoder) -> None:  # noqa: ANN401 - FAISS has no types
        self._index, self._passages, self._encoder = index, passages, encoder

    @classmethod
    def open(cls, corpus: Path, path: Path, encoder: Encoder | None = None) -> "DenseIndex":
        """An index that `build` wrote, with the encoder it was built with.

        The file is mapped, not read: processes that search it share its memory.

        Raises:
            BadCorpus: a file is missing, or the index is not of this corpus.
        """
        try:
            about = json.loads(_about(path).read_text(encoding="utf-8"))
            index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
        except (OSError, ValueError, RuntimeError) as error:
            raise BadCorpus(f"{path}: not an index of dense.py ({error})") from None
        passages = PassageFile(corpus)
        if index.ntotal != len(passages):
            raise BadCorpus(
                f"{path}: made of {index.ntotal} passages, but {corpus} has {len(passages)}; "
                "build it again"
            )
        return cls(index, passages, encoder or HuggingFaceEncoder(**about))

    def search(self, query: str, k: int) -> list[Passage]:
        """The `k` passages nearest in meaning, nearest first."""
        _, found = self._index.search(self._encoder.query(query)[None], k)
        return [self._passages[number] for number in found[0] if number >= 0]


def build(
    corpus: Path, encoder: Encoder, *, factory: str = FLAT, size: int = 256, sample: int = 2_000_000
) -> Any:  # noqa: ANN401 - FAISS has no types
    """The FAISS index of a corpus, passages numbered by line.

    Args:
        corpus: JSONL of passages.
        encoder: what turns them into vectors.
        factory: FAISS's description of the index; all but flat ones are trained first.
        size: passages encoded at once.
        sample: passages, the first ones, that it is trained on.
    """
    vectors = _vectors(corpus, encoder, size)
    first = [next(vectors)]
    index = faiss.index_factory(first[0].shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:
        first += islice(vectors, max(0, sample // size - 1))
        index.train(np.concatenate(first))
    for block in chain(first, vectors):
        index.add(block)
    return index


def _vectors(corpus: Path, encoder: Encoder, size: int) -> Iterator[np.ndarray]:
    passages = read_passages(corpus)
    while block := list(islice(passages, size)):
        yield encoder.passages([f"{passage.title} {passage.text}" for passage in block])


def _about(index: Path) -> Path:
    return index.with_name(index.name + ".json")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build a dense index.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--encoder", default="BAAI/bge-base-en-v1.5")
    parser.add_argument("--factory", default=FLAT)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    encoder = HuggingFaceEncoder(options.encoder, device=options.device)
    try:
        index = build(options.corpus, encoder, factory=options.factory)
    except BadCorpus as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    faiss.write_index(index, str(options.out))
    about = {"model": encoder.model, "prefix": encoder.prefix}
    _about(options.out).write_text(json.dumps(about) + "\n", encoding="utf-8")
    print(f"{index.ntotal} passages indexed in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
