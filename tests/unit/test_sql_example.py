"""The SQL example: databases, tasks, grader, loader, agent, and the base model's format."""

import importlib
import itertools
import json
import random
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from langchain_core.messages import AIMessage

SQL = Path(__file__).resolve().parents[2] / "examples" / "sql"
MODULES = tuple(path.stem for path in SQL.glob("*.py"))


@pytest.fixture(scope="module", autouse=True)
def own_modules():
    """The SQL example's modules can be imported by name, in place of other examples'."""
    kept = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    path = sys.path[:]
    sys.path[:] = [str(SQL), *(folder for folder in path if not folder.startswith(str(SQL.parent)))]
    yield
    sys.path[:] = path
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(kept)


load = importlib.import_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The databases of SQL-mini."""
    folder = tmp_path_factory.mktemp("databases")
    load("tasks").make_databases(folder)
    return folder


@pytest.fixture
def people(tmp_path) -> Path:
    """A small database: ann 30, bob 40, cid without an age."""
    path = tmp_path / "people.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE people (name TEXT, age REAL)")
        rows = [("ann", 30), ("bob", 40), ("cid", None)]
        connection.executemany("INSERT INTO people VALUES (?, ?)", rows)
    return path


@pytest.mark.parametrize(
    ("gold", "query", "right"),
    [
        ("SELECT name FROM people", "SELECT name FROM people ORDER BY name DESC", True),
        ("SELECT name, age FROM people", "SELECT age, name FROM people", True),
        ("SELECT name FROM people ORDER BY age", "SELECT name FROM people ORDER BY age", True),
        ("SELECT name FROM people ORDER BY age", "SELECT name FROM people", False),
        ("SELECT name, age FROM people order  by age", "SELECT age, name FROM people", True),
        ("SELECT name FROM people", "SELECT DISTINCT name FROM people LIMIT 2", False),
        ("SELECT 1 FROM people", "SELECT 1", False),
        ("SELECT 1.0 / 3", "SELECT 0.3333333333", True),
        ("SELECT 1.0 / 3", "SELECT 0.33333", False),
        ("SELECT COUNT(*) FROM people", "SELECT 3.0", True),
        ("SELECT 3", "SELECT '3'", False),
        ("SELECT age FROM people WHERE age > 99", "SELECT 1, 2 WHERE 0", True),
        ("SELECT age FROM people WHERE name = 'cid'", "SELECT NULL", True),
        ("SELECT age FROM people WHERE name = 'cid'", "SELECT 0", False),
        ("SELECT name FROM people", "SELECT nothing FROM people", False),
        ("SELECT name FROM people", "Here it is: SELECT name FROM people", False),
        ("SELECT name FROM people", "", False),
        ("SELECT name FROM people", None, False),
        ("SELECT name FROM people", "SELECT name FROM people; SELECT 1", False),
        ("SELECT name FROM people", "SELECT '\x00", False),
    ],
)
def test_a_query_is_right_if_it_returns_what_the_reference_returns(people, gold, query, right):
    task = {"database": str(people), "query": gold}
    assert load("grader").score(task, query) is right


@pytest.mark.parametrize(
    ("left", "right", "ordered", "equal"),
    [
        ([(1, 2), (3, 4)], [(4, 3), (2, 1)], False, True),
        ([(1, 2), (3, 4)], [(4, 3), (2, 1)], True, False),
        ([(1, 2), (2, 1)], [(1, 1), (2, 2)], False, False),
        ([(1, 1, 2)], [(1, 2, 2)], False, False),
        ([(1, 1, 2)], [(2, 1, 1)], False, True),
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False, False),
        ([(1_000_000,)], [(1_000_000.5,)], False, True),
        ([(1_000_000,)], [(1_000_002,)], False, False),
        ([(b"a", None)], [(None, b"a")], False, True),
        ([(1, 2)], [(1, 2, 3)], False, False),
    ],
)
def test_results_are_equal_under_one_order_of_columns_for_all_rows(left, right, ordered, equal):
    assert load("grader").same(left, right, ordered=ordered) is equal


def test_a_reference_query_that_fails_is_an_error_and_not_a_zero(people):
    grader = load("grader")
    with pytest.raises(grader.BadTask, match="no such column: size"):
        grader.score({"database": str(people), "query": "SELECT size FROM people"}, "SELECT 1")


@pytest.mark.parametrize(
    "query",
    [
        "INSERT INTO people VALUES ('dan', 1)",
        "UPDATE people SET age = 1",
        "DELETE FROM people",
        "DROP TABLE people",
        "CREATE TABLE more (x)",
        "CREATE TEMP TABLE more (x)",
        "ATTACH 'other.sqlite' AS other",
        "VACUUM INTO 'other.sqlite'",
        "PRAGMA query_only = OFF",
        "PRAGMA table_info(people)",
        "SELECT load_extension('x')",
        "WITH x AS (SELECT 1) INSERT INTO people SELECT 'dan', 1 FROM x",
    ],
)
def test_a_query_can_only_read(people, query, monkeypatch):
    monkeypatch.chdir(people.parent)
    before = people.read_bytes()
    answer = load("database").run_query(people, query)
    assert isinstance(answer, load("database").Failure)
    assert people.read_bytes() == before
    assert [path.name for path in people.parent.iterdir()] == ["people.sqlite"]


def test_a_query_without_end_is_stopped(people):
    database = load("database")
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT MAX(x) FROM n"
    assert database.run_query(people, endless, timeout_s=0.05) == database.Failure(
        "took more than 0.05 s"
    )


def test_a_query_that_returns_without_end_is_refused(people):
    database = load("database")
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT {} FROM n"
    many, long = endless.format("x"), endless.format("printf('%1000000d', x)")
    refused = database.Failure("more rows or text than can be read")
    assert database.run_query(people, many) == refused
    assert database.run_query(people, long) == refused


def test_a_database_that_does_not_exist_is_an_error_and_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such database"):
        load("database").run_query(tmp_path / "none.sqlite", "SELECT 1")
    assert not list(tmp_path.iterdir())


def test_every_template_s_query_runs_and_no_other_query_is_right_by_chance(folder):
    tasks, grader, database = load("tasks"), load("grader"), load("database")
    seen = set()
    for question in itertools.islice(tasks.questions(3, "train", folder), 200):
        file = folder / question.world.file
        task = {"database": file, "query": question.query}
        assert database.run_query(file, question.query).rows
        assert grader.score(task, question.query)
        assert not any(grader.score(task, rival) for rival in question.rivals())
        seen.add(question.template)
    assert seen == set(tasks.TEMPLATES)


def test_held_out_questions_are_never_training_questions(folder):
    tasks = load("tasks")
    texts = {
        split: {q.text for q in itertools.islice(tasks.questions(7, split, folder), 600)}
        for split in ("train", "val")
    }
    assert len(texts["val"]) > 100
    assert not texts["train"] & texts["val"]


def test_the_same_seed_writes_the_same_tasks(tmp_path, folder):
    tasks = load("tasks")
    for name in ("one", "two"):
        tasks.write_tasks(tmp_path / name, count=40, seed=7, split="val", folder=folder)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    made = [json.loads(line) for line in (tmp_path / "one").read_text().splitlines()]
    assert len({task["id"] for task in made}) == 40
    assert all("query" not in task and "query" in task["metadata"] for task in made)


class Scripted:
    """A chat model that says given lines, and keeps what it was asked."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.asked: list[tuple[str, str]] = []

    async def ainvoke(self, messages: list[tuple[str, str]]) -> AIMessage:
        (_, instructions), (_, text) = messages
        self.asked.append((instructions, text))
        return AIMessage(self.lines.pop(0))


@pytest.fixture
def talk(people, monkeypatch):
    agent = load("agent")

    async def run(*lines: str) -> tuple[str, Scripted]:
        model = Scripted(*lines)
        monkeypatch.setattr(agent, "_model", lambda: model)
        task = {"question": "How old is bob?", "schema": "people(name, age)"}
        return await agent.solve({**task, "database": str(people)}), model

    return run


async def test_a_query_that_the_checker_accepts_is_the_answer(talk):
    answer, model = await talk("SELECT age FROM people WHERE name = 'bob'", "RIGHT")
    agent = load("agent")
    assert answer == "SELECT age FROM people WHERE name = 'bob'"
    assert model.asked == [
        (agent.WRITER, "people(name, age)\nHow old is bob?"),
        (agent.CHECKER, f"How old is bob?\n{answer}\n40"),
    ]


async def test_the_rewriter_is_told_query_result_and_verdict(talk):
    good = "SELECT age FROM people WHERE name = 'bob'"
    answer, model = await talk("SELECT years", "WRONG: an error", f"```sql\n{good};\n```", "RIGHT")
    agent = load("agent")
    assert answer == good
    assert model.asked[2] == (
        agent.REWRITER,
        "people(name, age)\nHow old is bob?\n"
        "SELECT years\nerror: no such column: years\nWRONG: an error",
    )


async def test_the_third_query_is_the_last(talk):
    answer, model = await talk("SELECT 1", "WRONG", "SELECT 2", "WRONG", "SELECT 3")
    assert (answer, model.lines) == ("SELECT 3", [])


def test_the_model_s_calls_come_from_nodes_of_three_names():
    agent = load("agent")
    names = set(agent.graph().get_graph().nodes)
    assert names == {"__start__", "writer", "execute", "checker", "rewriter", "__end__"}


@pytest.fixture
def spider(tmp_path) -> Path:
    """A folder in the published form of Spider, with one database."""
    schema = {
        "db_id": "concert",
        "table_names": ["singer", "concert"],
        "table_names_original": ["singer", "concert"],
        "column_names": [[-1, "*"], [0, "singer id"], [0, "name"], [1, "singer id"], [1, "year"]],
        "column_names_original": [
            [-1, "*"],
            [0, "Singer_ID"],
            [0, "Name"],
            [1, "Singer_ID"],
            [1, "Year"],
        ],
        "column_types": ["text", "number", "text", "number", "number"],
        "foreign_keys": [[3, 1]],
    }
    (tmp_path / "tables.json").write_text(json.dumps([schema]))
    item = {
        "db_id": "concert",
        "question": "How many singers do we have?",
        "query": "SELECT count(*) FROM singer",
        "query_toks": ["SELECT"],
        "sql": {"from": {}},
    }
    (tmp_path / "dev.json").write_text(json.dumps([item, {**item, "question": "Count them."}]))
    made = tmp_path / "database" / "concert" / "concert.sqlite"
    made.parent.mkdir(parents=True)
    with closing(sqlite3.connect(made)) as connection, connection:
        connection.execute("CREATE TABLE singer (Singer_ID INTEGER, Name TEXT)")
        connection.execute("INSERT INTO singer VALUES (1, 'Ann')")
    return tmp_path


def test_spider_s_files_become_tasks_that_can_be_graded(spider, tmp_path):
    out = tmp_path / "val.jsonl"
    assert load("spider").convert(spider / "dev.json", out) == 2
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first == {
        "id": "dev-0",
        "question": "How many singers do we have?",
        "schema": "singer(Singer_ID, Name)\nconcert(Singer_ID, Year)\n"
        "concert.Singer_ID = singer.Singer_ID",
        "database": str(spider / "database" / "concert" / "concert.sqlite"),
        "metadata": {"query": "SELECT count(*) FROM singer"},
    }
    assert second["id"] == "dev-1"
    task = {**first, **first["metadata"]}
    assert load("grader").score(task, "SELECT COUNT(Name) FROM singer")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("dev.json", "[", "dev.json: not valid JSON"),
        ("dev.json", "{}", "dev.json: not a list"),
        ("dev.json", "[3]", "dev.json, item 0: not an object"),
        ("dev.json", '[{"db_id": "a", "question": "q"}]', "dev.json, item 0: no 'query'"),
        (
            "dev.json",
            '[{"db_id": "a", "question": "q", "query": "s"}]',
            "dev.json, item 0: database 'a' is not in",
        ),
        ("tables.json", '[{"db_id": "a"}]', "tables.json, item 0: no 'table_names_original'"),
        (
            "tables.json",
            '[{"db_id": "a", "table_names_original": [], "column_names_original": [[0, "x"]], '
            '"foreign_keys": []}]',
            "tables.json, item 0: not a schema",
        ),
    ],
)
def test_a_file_that_is_not_spider_is_refused_by_item(spider, file, text, message):
    (spider / file).write_text(text)
    with pytest.raises(load("spider").BadFile, match=message):
        load("spider").convert(spider / "dev.json", spider / "out.jsonl")


def test_an_item_without_its_database_file_is_refused(spider):
    (spider / "database" / "concert" / "concert.sqlite").unlink()
    with pytest.raises(load("spider").BadFile, match=r"dev.json, item 0: no file .*concert.sqlite"):
        load("spider").convert(spider / "dev.json", spider / "out.jsonl")


def test_the_configuration_for_a_gpu_is_one_that_fulmen_reads():
    from fulmen.cli.options import load_settings
    from fulmen.schema.training import TrainConfig

    loaded = load_settings(TrainConfig, {}, str(SQL / "config-gpu.toml"))
    assert loaded.config.model == "meta-llama/Llama-3.2-3B-Instruct"
    for target in (loaded.config.agent, loaded.config.grader):
        assert target is not None
        file, name = target.split(":")
        assert callable(getattr(load(Path(file).stem), name))


@pytest.fixture(scope="module")
def sql_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SQL / "base")


def test_warm_start_conversations_are_exactly_what_the_gateway_renders(folder, sql_tokenizer):
    from fulmen.gateway.render import make_renderer

    build, tasks = load("build_base"), load("tasks")
    renderer = make_renderer(sql_tokenizer, "qwen3")
    question = next(tasks.questions(1, "train", folder))
    for reply, instructions, *parts in build.exchanges(random.Random(0), question, folder):
        asked = [
            {"role": "system", "content": instructions},
            {"role": "user", "content": "\n".join(parts)},
        ]
        prompt = renderer.render(asked, [], {})
        said = build.Format(sql_tokenizer).conversation(reply, instructions, *parts).ids
        assert tuple(said[: len(prompt)]) == prompt
        answer = renderer.parse(prompt, said[len(prompt) :], [])
        assert (answer.content, answer.tool_calls) == (reply, ())


def test_every_word_of_the_tasks_is_one_token(sql_tokenizer):
    tasks = load("tasks")
    words = {*tasks.NAMES}
    for subject in tasks.SUBJECTS:
        words |= {subject.things, subject.group, *subject.numbers, subject.groups, subject.fact}
        words |= {*subject.values, *subject.facts}
    split = [w for w in words if len(sql_tokenizer.encode(w, add_special_tokens=False)) != 1]
    assert not split


def test_the_warm_start_never_shows_the_task(folder):
    """What a query asks is chance: about one in ten is right."""
    build, tasks = load("build_base"), load("tasks")
    rng = random.Random(0)
    asked = list(itertools.islice(tasks.questions(5, "train", folder), 2000))
    right = sum(build.random_query(rng, question) == question.query for question in asked)
    assert 0.04 < right / len(asked) < 0.14


def test_the_habits_of_the_warm_start_are_right_for_one_wording_of_fourteen(folder):
    build, tasks = load("build_base"), load("tasks")
    asked = itertools.islice(tasks.questions(5, "train", folder), 600)
    right = {q.template for q in asked if q.fill(build.habit(q)) == q.query}
    assert right == {"members"}


def test_the_shipped_base_is_small():
    assert sum(path.stat().st_size for path in (SQL / "base").iterdir()) < 2_000_000


@pytest.mark.parametrize(
    ("query", "fails"),
    [
        ("SELECT name FROM ships WHERE port = 'Oslo'", False),
        ("```sql\nSELECT COUNT(*) FROM ships JOIN ports USING (port);\n```", False),
        ("SELECT weight FROM ships", True),
        ("SELEC name", True),
        ("", True),
    ],
)
def test_the_rule_finds_queries_that_do_not_fit_the_schema(query, fails):
    schema = "ships(name, port, speed)\nports(port, mayor)"
    asked = {"messages": [{"role": "user", "content": f"{schema}\nWhich ships?"}]}
    call = SimpleNamespace(request=asked, response={"role": "assistant", "content": query})
    assert load("checks").does_not_compile(call, []) is fails
