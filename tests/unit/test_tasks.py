"""Tasks from any source: the same rows are the same tasks, and what is wrong is one line."""

import json
import sys
import tracemalloc
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import islice
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulmen.launch.api import _plain
from fulmen.schema.errors import AgentError, DataError
from fulmen.schema.training import TrainConfig
from fulmen.trainer.rollouts import train_rollouts
from fulmen.trainer.tasks import read_tasks, task_order
from sources import (
    write_csv,
    write_data_set,
    write_jsonl,
    write_parquet,
    write_splits,
)

COLUMNS = st.from_regex(r"[a-z]{1,4}( [a-z])?", fullmatch=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@st.composite
def text_rows(draw):
    """Rows of a table of texts, some with ids, some with metadata."""
    names = draw(st.lists(COLUMNS, min_size=1, max_size=3, unique=True))
    names += draw(st.sampled_from([[], ["metadata.answer"], ["metadata.a b", "metadata.c"]]))
    values = st.fixed_dictionaries(dict.fromkeys(names, TEXT))
    rows = draw(st.lists(values, min_size=1, max_size=9, unique_by=json.dumps))
    if draw(st.booleans()):
        rows = [{"id": f"n{number}"} | row for number, row in enumerate(rows)]
    return rows


def refused(source) -> str:
    with pytest.raises(DataError) as caught:
        read_tasks(source)
    text = str(caught.value)
    assert "\n" not in text
    return text


def refused_api(tasks) -> str:
    with pytest.raises((DataError, AgentError)) as caught:
        _plain({"tasks": tasks})
    return str(caught.value)


@given(text_rows())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_the_same_rows_are_the_same_tasks_rollouts_and_order_in_every_format(
    tmp_path_factory, rows
):
    folder = tmp_path_factory.mktemp("rows")
    table = pa.Table.from_pylist(rows)
    (folder / "load.py").write_text(f"def load():\n    yield from {rows!r}\n")
    expected = read_tasks(write_jsonl(rows, folder / "t.jsonl"))
    config = TrainConfig(agent="a", tasks="t", model="m", group_size=2, seed=5)
    order = list(islice(task_order(expected, config.seed), 2 * len(rows)))
    for source in (
        write_csv(rows, folder / "t.csv"),
        write_csv(rows, folder / "t.tsv"),
        write_parquet(table, folder / "t.parquet"),
        write_data_set(table, folder / "set", shards=min(2, len(rows))),
        f"{write_splits({'train': table, 'test': table.slice(0, 1)}, folder / 'sets')}:train",
        f"{folder}/load.py:load",
        _plain({"tasks": iter(rows)})["tasks"],
    ):
        tasks = read_tasks(source)
        assert tasks == expected, source
        again = list(islice(task_order(tasks, config.seed), 2 * len(rows)))
        assert train_rollouts(config, 1, again) == train_rollouts(config, 1, order)


def test_values_of_a_table_are_the_json_that_a_line_would_hold(tmp_path):
    moment = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    table = pa.table(
        {
            "id": pa.array([1, None]),
            "when": pa.array([moment, None], pa.timestamp("us", tz="UTC")),
            "pandas": pa.array([moment, moment], pa.timestamp("ns")),
            "day": [date(2026, 1, 2)] * 2,
            "took": [timedelta(seconds=1.5)] * 2,
            "price": [Decimal("1.50")] * 2,
            "turns": [[{"role": "user", "seen": [1, None]}], []],
            "kind": pa.array(["a", "b"]).dictionary_encode(),
            "scores": pa.array([[("x", 0.5)], []], pa.map_(pa.string(), pa.float64())),
            "metadata": [{"answer": 4, "hint": None}, None],
        }
    )
    first, second = read_tasks(write_parquet(table, tmp_path / "t.parquet"))
    assert first.id == "1"
    assert first.metadata == {"answer": 4, "hint": None}
    assert first.input == {
        "when": "2026-01-02T03:04:05.000006+00:00",
        "pandas": "2026-01-02T03:04:05.000006",
        "day": "2026-01-02",
        "took": 1.5,
        "price": "1.50",
        "turns": [{"role": "user", "seen": [1, None]}],
        "kind": "a",
        "scores": {"x": 0.5},
    }
    assert second.metadata == {}
    assert len(second.id) == 12
    assert second.input["when"] is None
    assert read_tasks(write_data_set(table, tmp_path / "set")) == [first, second]
    lines = [{"id": t.id, **t.input, "metadata": t.metadata} for t in (first, second)]
    assert read_tasks(write_jsonl(lines, tmp_path / "t.jsonl")) == [first, second]


def test_json_columns_of_datasets_are_read_as_json(tmp_path):
    texts = pa.array(['{"x": 1}', '{"y": [1, "s"]}', None], pa.json_())
    lists = pa.ListArray.from_arrays([0, 1, 1, 3], pa.array(["1", "[]", None], pa.json_()))
    table = pa.table({"q": ["a", "b", "c"], "metadata": texts, "k": lists})
    for source in (
        write_data_set(table, tmp_path / "set"),
        write_parquet(table, tmp_path / "t.parquet"),
    ):
        tasks = read_tasks(source)
        assert [task.metadata for task in tasks] == [{"x": 1}, {"y": [1, "s"]}, {}]
        assert [task.input["k"] for task in tasks] == [[1], [], [[], None]]


def test_values_of_a_csv_file_stay_text_and_may_hold_anything(tmp_path):
    long = "x" * 200_000
    file = tmp_path / "t.csv"
    lines = ["\ufeffn,metadata", '007,"{""a"": [1]}"', "", '"a ""b"",\nc",', f"{long},", ""]
    file.write_text("\r\n".join(lines), encoding="utf-8")
    first, second, third = read_tasks(file)
    assert (first.input, first.metadata) == ({"n": "007"}, {"a": [1]})
    assert (second.input, second.metadata) == ({"n": 'a "b",\nc'}, {})
    assert third.input == {"n": long}


def test_an_empty_or_null_id_is_no_id_and_the_name_is_the_content_s(tmp_path):
    lines = [{"q": 1}, {"q": 2, "id": None}, {"id": "", "q": 3, "metadata": None}]
    tasks = read_tasks(write_jsonl(lines, tmp_path / "t.jsonl"))
    assert len({task.id for task in tasks}) == 3
    bare = read_tasks(write_jsonl([{"q": 2}, {"q": 3}], tmp_path / "b.jsonl"))
    assert [task.id for task in bare] == [task.id for task in tasks[1:]]


def test_the_name_of_a_task_does_not_depend_on_the_order_of_its_keys(tmp_path):
    (one,) = read_tasks(write_jsonl([{"a": 1, "b": {"c": 1, "d": 2}}], tmp_path / "one.jsonl"))
    (two,) = read_tasks(write_jsonl([{"b": {"d": 2, "c": 1}, "a": 1}], tmp_path / "two.jsonl"))
    assert one.id == two.id


def test_a_line_may_hold_any_separator_that_json_allows(tmp_path):
    file = tmp_path / "t.ndjson"
    file.write_bytes('\ufeff{"q": "a\u2028b\u0085c"}\r\n\r\n{"q": 2}'.encode())
    assert [task.input for task in read_tasks(file)] == [{"q": "a\u2028b\u0085c"}, {"q": 2}]


def test_columns_that_were_chosen_in_a_data_set_are_those_of_its_tasks(tmp_path):
    table = pa.table({"q": ["a", "b"], "image": [b"\0", b"\1"]})
    folder = write_data_set(table, tmp_path / "set", columns=["q"])
    assert [task.input for task in read_tasks(folder)] == [{"q": "a"}, {"q": "b"}]
    other = write_data_set(table, tmp_path / "other")
    assert "other: row 1, 'image': bytes are no JSON; leave it out" in refused(other)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "", "t.csv: holds no task"),
        ("t.csv", "q,a\n", "t.csv: holds no task"),
        ("t.csv", "q,,a\n1,2,3\n", "t.csv:1: column 2 has no name; the first line is to name"),
        ("t.csv", "2+2?,4\n1+1?,2\n", "t.csv:1: column 2 is named '4', a number; the first line"),
        ("t.csv", "q,q\n1,2\n", "t.csv:1: 2 columns are named 'q'; rename one"),
        ("t.csv", 'q,a\n"x\ny",1\n3\n', "t.csv:4: 1 values for 2 columns, 'a' has none; quote"),
        ("t.csv", "q,a\n1,2,3\n", "t.csv:2: 3 values for 2 columns; quote"),
        ("t.csv", 'q\nx\n"open\n\n', "t.csv:3: not valid CSV (unexpected end of data)"),
        ("t.tsv", 'q\ta\n"x"y\t1\n', "t.tsv:2: not valid TSV ("),
        ("t.csv", "q,metadata\nx,{\n", "t.csv:2: metadata is no JSON ("),
        ("t.csv", "q,metadata\nx,3\n", "t.csv:2: metadata is a int, not an object; write {…}"),
        (
            "t.csv",
            'metadata.a,metadata\n1,"{""a"": 2}"\n',
            "t.csv:2: metadata has 'a' twice; leave out metadata.a",
        ),
        ("t.csv", "id,q\n1,a\n2,b\n1,c\n", "t.csv:2 and {}t.csv:4 have the same id '1'; make ids"),
        ("t.csv", "q\na\na\n", "t.csv:2 and {}t.csv:3 have the same id"),
        ("t.csv", "q\n\udcff\n", "t.csv: not UTF-8 (invalid start byte); save it as UTF-8"),
        ("t.jsonl", '{"q": 1}\n\n{"q": "\udcff"}', "t.jsonl:3: not valid JSON ("),
        ("t.jsonl", '{"id": true}', "t.jsonl:1: id is True; use a string or an integer"),
        ("t.jsonl", '{"id": 1.5}', "t.jsonl:1: id is 1.5; use a string or an integer"),
        ("t.json", "[]", "t.json: tasks are not read from .json files; write one task a line, as"),
        ("t.xlsx", "", "t.xlsx: tasks are not read from .xlsx files; known: .csv, .jsonl,"),
        ("t.parquets", "", "are not read from .parquets files; did you mean '.parquet'?"),
        ("t.py", "", "t.py: tasks are not read from .py files; name the function, as"),
        ("t.parquet", "PAR1, not", "t.parquet: cannot be read as Parquet ("),
        ("t.parquet", "", "t.parquet: cannot be read as Parquet ("),
    ],
)
def test_a_bad_file_is_refused_by_place_reason_and_what_to_do(tmp_path, name, text, message):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert message.replace("{}", f"{tmp_path}/") in refused(file)


@pytest.mark.parametrize("name", ["no.csv", "no.parquet", "no", "C:/no.jsonl", "no/where:train"])
def test_a_source_that_is_not_there_is_named(name):
    assert f"{name}: no such file; check the path of the tasks" in refused(name)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([b"x"]), "'v': bytes are no JSON; leave it out, or store text"),
        (pa.array([{"a": {"b": [b"x"]}}]), "'v.a.b': bytes are no JSON"),
        (pa.array([float("nan")]), "'v': nan is no number; write a number or null"),
        (pa.array([[float("-inf")]]), "'v': -inf is no number"),
        (pa.array([1], pa.timestamp("ns")), "'v': has nanoseconds; round it to microseconds"),
        (pa.array([10**18], pa.timestamp("ms")), "'v': "),
        (pa.array([[(1, 2)]], pa.map_(pa.int8(), pa.int8())), "'v': the key 1 is no text"),
        (
            pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int8())),
            "'v': ",
        ),
        (pa.array(["{"], pa.json_()), "'v': not valid JSON (Input data was truncated)"),
    ],
)
def test_a_value_that_is_no_json_is_refused_by_row_and_column(tmp_path, column, message):
    fine = pa.nulls(1, column.type)
    table = pa.table({"q": ["a"] * 300 + ["b"], "v": pa.chunked_array([fine] * 300 + [column])})
    table = table.append_column("id", [[str(number) for number in range(301)]])
    for source in (
        write_parquet(table, tmp_path / "t.parquet"),
        write_data_set(table, tmp_path / "set", shards=2),
    ):
        assert f"{source}: row 301, {message}" in refused(source)


def test_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["q", "q"])
    assert ": 2 columns are named 'q'; rename one" in refused(write_data_set(table, tmp_path / "s"))


def test_a_folder_of_splits_needs_one_that_is_there(tmp_path):
    table = pa.table({"q": ["a"]})
    folder = write_splits({"train": table, "test": table}, tmp_path / "sets")
    known = f"(there are: train, test); write {folder}:train"
    assert refused(folder) == f"{folder}: holds splits {known}"
    assert refused(f"{folder}:val") == f"{folder}: has no split 'val' {known}"
    single = write_data_set(table, tmp_path / "set")
    assert refused(f"{single}:train") == f"{single}: holds one data set, no splits; write {single}"


def test_a_folder_that_is_no_data_set_or_a_broken_one_is_refused(tmp_path):
    assert "holds no data set (state.json is not there); give a file" in refused(tmp_path)
    folder = write_data_set(pa.table({"q": ["a"]}), tmp_path / "set")
    (folder / "data-00000-of-00001.arrow").write_bytes(b"\xff\xff\xff\xff\x10\0\0\0")
    assert "arrow: cannot be read as an Arrow stream (" in refused(folder)
    (folder / "data-00000-of-00001.arrow").unlink()
    assert "arrow: cannot be read as an Arrow stream (" in refused(folder)
    (folder / "state.json").write_text("{}")
    assert "state.json: cannot be read (Object missing required field `_data_files`" in refused(
        folder
    )
    empty = write_data_set(pa.table({"q": pa.array([], pa.string())}), tmp_path / "empty")
    assert refused(empty) == f"{empty}: holds no task; write at least one"


@pytest.mark.parametrize("name", ["t.parquet", "set"])
def test_without_pyarrow_one_line_says_what_to_install(tmp_path, monkeypatch, name):
    table = pa.table({"q": ["a"]})
    write_parquet(table, tmp_path / "t.parquet")
    write_data_set(table, tmp_path / "set")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    source = tmp_path / name
    assert refused(source) == (
        f'{source}: reading it needs the package pyarrow; pip install "fulmen[data]"'
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def load():\n    return 3", "load: is a int, not an iterable of tasks; give a list"),
        ("def load():\n    return 'ab'", "load: is a str, not an iterable"),
        ("def load():\n    return {'train': []}", "load: is a dict, not an iterable"),
        ("def load():\n    return []", "load: holds no task"),
        ("def load(path):\n    return []", "cannot be called without arguments (missing a requ"),
        ("async def load():\n    return []", "load: is async; write it with def"),
        (
            "def load():\n    yield 1\n    raise KeyError('x')",
            "load raised KeyError: 'x' (loading.py:3)",
        ),
        ("def load():\n    yield 1\n    yield {'a': {'b': {2}}}", "item 2, 'a.b': set is no kind"),
        ("def load():\n    yield {'a': '\\ud800'}", "item 1, 'a': no Unicode text (surrogates"),
        ("def lod():\n    return []", "has no 'load'; did you mean 'lod'?"),
        ("import nowhere", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_a_function_that_gives_no_tasks_is_refused(tmp_path, monkeypatch, body, message):
    (tmp_path / "loading.py").write_text(body + "\n")
    monkeypatch.delitem(sys.modules, "loading", raising=False)
    assert message in refused(f"{tmp_path}/loading.py:load")


def load_two():
    return [{"q": date(2026, 1, 2)}, "plain"]


class Frame(list):
    """What a data frame has in common with others of its kind."""

    columns = ("q",)


def test_the_python_api_takes_iterables_of_anything_that_can_be_json():
    identity = UUID("12345678123456781234567812345678")
    given = ({"q": n, "u": identity, "t": (1, 2)} for n in range(2))
    tasks = read_tasks(_plain({"tasks": given})["tasks"])
    assert [t.input for t in tasks] == [{"q": n, "u": str(identity), "t": [1, 2]} for n in range(2)]


def test_the_python_api_takes_a_function_by_its_name():
    name = _plain({"val": load_two})["val"]
    assert name.endswith("test_tasks.py:load_two")
    assert [task.input for task in read_tasks(name)] == [{"q": "2026-01-02"}, "plain"]


def test_the_python_api_refuses_what_is_no_list_of_tasks():
    assert refused_api({"train": []}) == "tasks: is a dict, not an iterable of tasks; give a list"
    assert refused_api(3).startswith("tasks: is a int, not an iterable")
    assert refused_api(Frame()).endswith("not an iterable of tasks; give its rows as dicts")
    assert refused_api([{"q": b"x"}]).startswith("tasks: item 1, 'q': bytes are no JSON")
    assert "cannot be imported by worker processes" in refused_api(lambda: [1])


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "set", "function", "api"])
def test_reading_needs_little_more_memory_than_the_tasks(tmp_path, kind):
    rows = [{"id": str(n), "q": f"{n} " * 200} for n in range(4000)]
    (tmp_path / "many.py").write_text(
        "def load():\n    for n in range(4000):\n        yield {'id': n, 'q': f'{n} ' * 200}\n"
    )
    table = pa.Table.from_pylist(rows)
    source = {
        "jsonl": lambda: write_jsonl(rows, tmp_path / "t.jsonl"),
        "csv": lambda: write_csv(rows, tmp_path / "t.csv"),
        "parquet": lambda: write_parquet(table, tmp_path / "t.parquet"),
        "set": lambda: write_data_set(table, tmp_path / "set"),
        "function": lambda: f"{tmp_path}/many.py:load",
        "api": lambda: (row for row in rows),
    }[kind]()
    read_tasks(write_jsonl([1], tmp_path / "warm.jsonl"))
    tracemalloc.start()
    try:
        if kind == "api":
            before = tracemalloc.get_traced_memory()[0]
            _plain({"tasks": source})
            assert tracemalloc.get_traced_memory()[1] - before < 500_000
        else:
            tasks = read_tasks(source)
            kept, peak = tracemalloc.get_traced_memory()
            assert len(tasks) == 4000
            assert peak < 1.5 * kept
    finally:
        tracemalloc.stop()
