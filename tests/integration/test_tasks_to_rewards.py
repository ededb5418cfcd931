"""A task's metadata on its whole way: source, queue, agent, grader, store."""

from pathlib import Path

import pyarrow as pa
import pytest

from fulmen.runner.agents import parse_agent
from fulmen.runner.pool import Pool
from fulmen.schema.records import Task
from fulmen.schema.training import TrainConfig
from fulmen.store.open import open_store
from fulmen.trainer.collect import Collector, Judge
from fulmen.trainer.grading import AgentErrors
from fulmen.trainer.rollouts import train_rollouts
from fulmen.trainer.tasks import kind_of, read_tasks
from sources import write_csv, write_data_set, write_jsonl, write_parquet

ROWS = [
    {"id": "one", "question": "1+1?", "metadata.answer": "2", "metadata.kind": "sum"},
    {"id": "two", "question": "2*3?", "metadata.answer": "6", "metadata.kind": "product"},
]
NESTED = [
    {
        "id": row["id"],
        "question": row["question"],
        "metadata": {"answer": row["metadata.answer"], "kind": row["metadata.kind"]},
    }
    for row in ROWS
]
AGENT = "def solve(task):\n    return {'seen': sorted(task), 'said': task['question'][:3]}\n"


def source(kind: str, folder: Path) -> Path:
    match kind:
        case "jsonl":
            return write_jsonl(NESTED, folder / "t.jsonl")
        case "csv":
            return write_csv(ROWS, folder / "t.csv")
        case "parquet":
            return write_parquet(pa.Table.from_pylist(NESTED), folder / "t.parquet")
    return write_data_set(pa.Table.from_pylist(NESTED), folder / "set")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "set"])
async def test_metadata_reaches_the_grader_and_the_store_and_never_the_agent(tmp_path, kind):
    (tmp_path / "agent.py").write_text(AGENT)
    tasks = read_tasks(source(kind, tmp_path))
    config = TrainConfig(agent="a", tasks="t", model="m", group_size=2)
    rollouts = train_rollouts(config, 1, tasks)

    def score(task, output):
        assert output["seen"] == ["question"]
        return {"right": eval(output["said"]) == int(task["answer"]), "keys": len(task)}

    store = open_store(tmp_path / "run.db")
    try:
        agent = parse_agent(f"{tmp_path}/agent.py:solve")
        url = "http://127.0.0.1:9"
        async with Pool(store, agent, base_url=url, workers=2, processes=1) as pool:
            judge = Judge(score, "score", AgentErrors())
            collector = Collector(store, pool, judge, lambda _: None)
            graded = await collector.collect(rollouts, "collect", 1)
        assert [item.reward for item in graded] == [4.0] * 4
        results = await store.results([rollout.id for rollout in rollouts[::2]])
        kept = [result.rollout.task for result in results]
    finally:
        await store.close()
    assert kept == tasks
    assert kept[0] == Task(
        id="one", input={"question": "1+1?"}, metadata={"answer": "2", "kind": "sum"}
    )
    assert [kind_of(task, "kind") for task in kept] == ["sum", "product"]
