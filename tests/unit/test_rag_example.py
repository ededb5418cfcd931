"""The RAG example: grader, retrieval, questions, loader, and the base model's format."""

import doctest
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from rag import RAG, load

pytestmark = pytest.mark.usefixtures("rag")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("answer", "right", "f1"),
    [
        ("Rome", "Rome", 1.0),
        ("the Rome.", "rome", 1.0),
        ("A U.S. city", "us City", 1.0),
        ("in  Rome,\nItaly", "Rome", 0.5),
        ("Rome Rome", "Rome", 2 / 3),
        ("New York City", "York", 0.5),
        ("Romes", "Rome", 0.0),
        ("Rome", "Oslo", 0.0),
        ("the", "a", 1.0),
        ("the", "Rome", 0.0),
        ("anthem", "them", 0.0),
    ],
)
def test_f1_counts_words_without_case_punctuation_and_articles(answer, right, f1):
    assert load("grader").f1(answer, right) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("output", "f1", "form"),
    [
        ("<answer> Rome</answer>", 1.0, 1.0),
        ("It is <answer>the Eternal City</answer>.", 1.0, 1.0),
        ("<answer>Eternal Rome</answer>", 2 / 3, 1.0),
        ("<answer>Oslo</answer>", 0.0, 1.0),
        ("Rome", 0.0, 0.0),
        ("<answer> </answer>", 0.0, 0.0),
        ("<answer>Oslo</answer><answer>Rome</answer>", 0.0, 0.0),
        ("<answer>Rome", 0.0, 0.0),
        (None, 0.0, 0.0),
        (7, 0.0, 0.0),
    ],
)
def test_the_reward_is_nine_tenths_f1_of_the_best_alias_and_one_tenth_format(output, f1, form):
    task = {"question": "?", "answer": "Rome", "aliases": ["Eternal City", "Roma"]}
    expected = {"f1": f1, "format": form, "reward": 0.9 * f1 + 0.1 * form}
    assert load("grader").score(task, output) == pytest.approx(expected)


def test_bm25_scores_are_those_worked_out_by_hand():
    retrieval = load("retrieval")
    passages = [
        retrieval.Passage("", "red red fox"),
        retrieval.Passage("", "a blue fox sleeps"),
        retrieval.Passage("", "snow falls"),
    ]
    index = retrieval.Bm25(passages, k1=1.5, b=0.75)
    # Three passages of 3, 4 and 2 words, so 3 on average; "red" is in one of them, twice.
    red = math.log(1 + 2.5 / 1.5) * 2 * 2.5 / (2 + 1.5)
    fox = math.log(1 + 1.5 / 2.5) * 1 * 2.5 / (1 + 1.5)
    longer = math.log(1 + 1.5 / 2.5) * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 4 / 3))
    assert index.scores("Red fox?") == pytest.approx([red + fox, longer, 0.0])
    assert index.scores("Red fox?") == pytest.approx([1.871189, 0.408698, 0.0], abs=1e-6)
    assert index.search("red fox", 3) == passages[:2]
    assert index.search("green", 3) == []


def test_of_equally_good_passages_the_earlier_comes_first():
    retrieval = load("retrieval")
    passages = [retrieval.Passage("", f"fox number {n}") for n in range(9)]
    assert retrieval.Bm25(passages).search("fox", 3) == passages[:3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"title": "a", "text": "b"}\n{"title"', ":2: not valid JSON"),
        ("[]", ":1: a passage has a title and a text"),
        ('{"title": "a", "text": 1}', ":1: a passage has a title and a text"),
    ],
)
def test_a_broken_corpus_is_refused_by_line(tmp_path, text, message):
    retrieval = load("retrieval")
    (tmp_path / "corpus.jsonl").write_text(text)
    with pytest.raises(retrieval.BadCorpus, match=f"corpus.jsonl{message}"):
        retrieval.open_index(tmp_path / "corpus.jsonl")


def test_every_answer_is_two_searches_away_and_no_single_one_finds_it():
    tasks, retrieval = load("tasks"), load("retrieval")
    world = tasks.World(0)
    index = retrieval.Bm25(world.passages)
    questions = list(world.questions())
    assert len(questions) == 1200
    for question in questions:
        first, *_ = index.search(f"{question.role.word} {question.company}", 2)
        assert question.person in first.text
        second, *_ = index.search(f"{question.life.word} {question.person}", 2)
        assert question.answer in second.text
        assert question.person not in question.text
        assert question.answer not in question.text
        assert second not in index.search(question.text, 2)


def test_the_shipped_tasks_and_corpus_are_those_that_the_script_makes():
    tasks, retrieval = load("tasks"), load("retrieval")
    world = tasks.World(0)
    assert list(retrieval.read_passages(RAG / "corpus.jsonl")) == world.passages
    answers = {question.text: question.answer for question in world.questions()}
    train, val = lines(RAG / "train.jsonl"), lines(RAG / "val.jsonl")
    assert {t["question"]: t["metadata"]["answer"] for t in train + val} == answers
    assert (len(train), len(val)) == (1002, 198)


@pytest.mark.parametrize("name", ["grader", "retrieval", "build_base"])
def test_the_examples_in_the_documentation_hold(name):
    outcome = doctest.testmod(load(name))
    assert (outcome.failed, outcome.attempted > 0) == (0, True)


def test_held_out_questions_are_never_training_questions():
    train = {line["question"] for line in lines(RAG / "train.jsonl")}
    val = {line["question"] for line in lines(RAG / "val.jsonl")}
    assert not train & val


def musique_row(**changes) -> dict:
    """A row in the published format."""
    row = {
        "id": "2hop__13548_13529",
        "paragraphs": [
            {
                "idx": 0,
                "title": "Lilli's Marriage",
                "paragraph_text": "Lilli's Marriage is a 1919 film.",
                "is_supporting": True,
            },
            {
                "idx": 1,
                "title": "Jaap Speyer",
                "paragraph_text": "Jaap Speyer was a Dutch director.",
                "is_supporting": False,
            },
        ],
        "question": "When was the person who directed Lilli's Marriage born?",
        "question_decomposition": [
            {
                "id": 13548,
                "question": "Who directed it?",
                "answer": "Jaap Speyer",
                "paragraph_support_idx": 0,
            },
            {
                "id": 13529,
                "question": "#1 >> born",
                "answer": "1891",
                "paragraph_support_idx": 1,
            },
        ],
        "answer": "29 November 1891",
        "answer_aliases": ["1891"],
        "answerable": True,
    }
    return row | changes


def test_musique_files_become_tasks_and_a_corpus_without_repeated_paragraphs(tmp_path):
    musique, retrieval = load("musique"), load("retrieval")
    rows = [musique_row(), musique_row(id="3hop1__2"), musique_row(id="x", answerable=False)]
    source = tmp_path / "musique_ans_v1.0_train.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, corpus = tmp_path / "train.jsonl", tmp_path / "corpus.jsonl"
    assert musique.convert([source], out, corpus) == (2, 2, 1)
    first, second = lines(out)
    assert first == {
        "id": "2hop__13548_13529",
        "question": "When was the person who directed Lilli's Marriage born?",
        "metadata": {"answer": "29 November 1891", "aliases": ["1891"], "hops": 2},
    }
    assert second["id"] == "3hop1__2"
    assert load("grader").score(first["metadata"], "<answer>1891</answer>")["f1"] == 1.0
    assert [p.title for p in retrieval.read_passages(corpus)] == ["Lilli's Marriage", "Jaap Speyer"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 1', ":1: not valid JSON"),
        ("[]", ":1: not an object"),
        ("{}", ":1: no field 'paragraphs'; is this a file of MuSiQue"),
        (json.dumps(musique_row(paragraphs=[3])), r":1: paragraphs\[0\]: not an object"),
        (json.dumps(musique_row(paragraphs=[{}])), r":1: paragraphs\[0\]: no field 'title'"),
        (json.dumps(musique_row(answer=None)), ":1: answer is null, not a str"),
        (json.dumps(musique_row()) + "\n" + json.dumps(musique_row(id=5)), ":2: id is 5"),
    ],
)
def test_a_file_that_is_not_musique_is_refused_by_line(tmp_path, text, message):
    musique = load("musique")
    source = tmp_path / "rows.jsonl"
    source.write_text(text)
    with pytest.raises(musique.BadFile, match=message):
        musique.convert([source], tmp_path / "out.jsonl", tmp_path / "corpus.jsonl")


def test_wikipedia_s_passages_become_a_corpus(tmp_path):
    source = tmp_path / "psgs_w100.tsv"
    source.write_text('id\ttext\ttitle\n1\t"Aaron is a ""prophet""."\tAaron\n2\tHe spoke.\tAaron\n')
    retrieval = load("retrieval")
    assert list(load("wikipedia").read_tsv(source)) == [
        retrieval.Passage("Aaron", 'Aaron is a "prophet".'),
        retrieval.Passage("Aaron", "He spoke."),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", ":1: the columns are not"), ("id\ttext\ttitle\n1\tx\n", ":2: 2 columns instead of 3")],
)
def test_a_file_that_is_not_dpr_s_wikipedia_is_refused_by_line(tmp_path, text, message):
    source = tmp_path / "psgs_w100.tsv"
    source.write_text(text)
    with pytest.raises(load("retrieval").BadCorpus, match=message):
        list(load("wikipedia").read_tsv(source))


class LetterEncoder:
    """Texts as the counts of their letters: alike if spelt alike."""

    def passages(self, texts):
        counts = np.array([[text.lower().count(chr(97 + n)) for n in range(26)] for text in texts])
        return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)

    def query(self, text):
        return self.passages([text])[0]


def dense_index(folder: Path, texts: list[str], factory: str = "Flat"):
    """An index as `python dense.py` leaves it, and its corpus."""
    faiss = pytest.importorskip("faiss")
    dense, retrieval = load("dense"), load("retrieval")
    corpus, path = folder / "corpus.jsonl", folder / "corpus.faiss"
    retrieval.write_passages(corpus, [retrieval.Passage("", text) for text in texts])
    index = dense.build(corpus, LetterEncoder(), factory=factory, size=3, sample=6)
    faiss.write_index(index, str(path))
    (folder / "corpus.faiss.json").write_text('{"model": "letters", "prefix": ""}')
    return dense, corpus, path


@pytest.mark.parametrize("factory", ["Flat", "IVF1,Flat"])
def test_a_dense_index_finds_what_is_nearest_and_reads_it_from_the_file(tmp_path, factory):
    texts = ["aaab", "bbba", "ccccé", "cccd", "eeee", "ffff", "gggg"]
    dense, corpus, path = dense_index(tmp_path, texts, factory)
    index = dense.DenseIndex.open(corpus, path, LetterEncoder())
    assert [passage.text for passage in index.search("ab a", 2)] == ["aaab", "bbba"]
    assert [passage.text for passage in index.search("c", 2)] == ["ccccé", "cccd"]
    assert len(index.search("a", 99)) == len(texts)


def test_a_dense_index_of_another_corpus_is_refused(tmp_path):
    dense, corpus, path = dense_index(tmp_path, ["aa", "bb"])
    with corpus.open("a") as file:
        file.write('{"title": "", "text": "cc"}\n')
    with pytest.raises(load("retrieval").BadCorpus, match=r"made of 2 passages, but .* has 3"):
        dense.DenseIndex.open(corpus, path, LetterEncoder())


def test_the_warm_start_never_shows_the_task():
    """Words and names are chance: one attempt in twenty is right."""
    build, tasks, retrieval = load("build_base"), load("tasks"), load("retrieval")
    world = tasks.World(5)
    index, questions = retrieval.Bm25(world.passages), list(world.questions())
    rng = random.Random(0)
    right = 0
    for _ in range(4000):
        question = rng.choice(questions)
        right += build.random_attempt(rng, index, question).answer == question.answer
    assert 0.03 < right / 4000 < 0.07


def test_the_warm_start_s_worlds_are_others_than_that_of_the_tasks():
    build, tasks = load("build_base"), load("tasks")
    facts = {str(passage) for passage in tasks.World(0).passages}
    shown = {str(passage) for passage in tasks.World(build.WORLDS).passages}
    assert len(facts & shown) / len(facts) < 0.03


def test_the_shipped_base_is_small():
    assert sum(path.stat().st_size for path in (RAG / "base").iterdir()) < 2_000_000


def test_the_gpu_configuration_is_one_that_fulmen_reads():
    from fulmen.cli.options import load_settings
    from fulmen.schema.training import TrainConfig

    loaded = load_settings(TrainConfig, {}, str(RAG / "config-gpu.toml"))
    assert loaded.config.model == "meta-llama/Llama-3.2-3B-Instruct"
    assert loaded.config.grader == "grader.py:score"
