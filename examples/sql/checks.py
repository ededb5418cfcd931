"""What an intermediate reward of the SQL agent looks at (`air.toml`)."""

import re
import sqlite3
from contextlib import closing
from typing import Any

from agent import query_of

_TABLE = re.compile(r"^\w+\([\w, ]+\)$", re.MULTILINE)


def does_not_compile(call: Any, tools: list) -> bool:  # noqa: ANN401, ARG001 - as rules are given them
    """Whether a query cannot be run on the tables that the question is about.

    They are made anew, empty, from the schema in the request.
    """
    asked = call.request["messages"][-1]["content"]
    with closing(sqlite3.connect(":memory:")) as database:
        for table in _TABLE.findall(asked):
            database.execute(f"CREATE TABLE {table}")
        try:
            database.execute(f"EXPLAIN {query_of(call.response['content'] or '')}")
        except (sqlite3.Error, sqlite3.Warning):
            return True
    return False
