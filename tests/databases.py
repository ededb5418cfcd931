"""A real PostgreSQL server for the tests: an ordinary user's, on loopback, gone afterwards."""

import itertools
import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
USER, PASSWORD, DATABASE = "fulmen", "not to be written down", "runs"

_numbers = itertools.count(1)


def binaries() -> Path:
    """Folder of PostgreSQL's programs; the test fails if there is none."""
    found = [path.parent for path in ROOT.glob(".postgres-*/usr/lib/postgresql/*/bin/initdb")]
    found += [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    found.sort(key=lambda path: float(path.parent.name))
    if in_path := shutil.which("initdb"):
        found.append(Path(in_path).resolve().parent)
    if not found:
        pytest.fail(
            "no PostgreSQL to test with; `bash tests/postgres.sh` brings it from Debian's packages,"
            " without root"
        )
    return found[-1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


class Postgres:
    """A server with a database of its own."""

    def __init__(self) -> None:
        self._programs = binaries()
        self._folder = Path(tempfile.mkdtemp(prefix="fulmen-postgres-"))
        self._user: str | None = None
        if os.geteuid() == 0:  # which PostgreSQL refuses to run as
            self._user = "nobody"
            owner = pwd.getpwnam(self._user)
            os.chown(self._folder, owner.pw_uid, owner.pw_gid)
        self.port = free_port()
        word = self._folder / "password"
        word.write_text(PASSWORD)
        word.chmod(0o644)  # in a folder that is for its owner only
        self._run(
            *("initdb", "--username", USER, "--auth", "scram-sha-256", "--pwfile", str(word)),
            *("--no-sync", "--encoding", "UTF8", "--locale", "C.UTF-8"),
            *("--pgdata", str(self._data)),
        )
        self.start()
        self.sql(f"CREATE DATABASE {DATABASE}", database="postgres")

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def url(self, schema: str | None = None, *, port: int | None = None) -> str:
        """Where a store may be; with a schema that no other test has, unless one is given."""
        place = f"127.0.0.1:{port or self.port}/{DATABASE}"
        name = schema or f"test_{next(_numbers)}_{secrets.token_hex(3)}"
        return f"postgresql://{USER}:{PASSWORD.replace(' ', '%20')}@{place}?schema={name}"

    def sql(self, statement: str, *, database: str = DATABASE) -> list[tuple[object, ...]]:
        import psycopg

        with psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user=USER,
            password=PASSWORD,
            dbname=database,
            autocommit=True,
        ) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def start(self) -> None:
        # Data need not survive a power cut, only the server's own end.
        options = f"-p {self.port} -k {self._folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        log = self._folder / "log"
        self._run("pg_ctl", "start", "-w", "-D", str(self._data), "-l", str(log), "-o", options)

    def stop(self) -> None:
        """End all its processes at once, as a crash would."""
        self._run("pg_ctl", "stop", "-w", "-m", "immediate", "-D", str(self._data))

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def _run(self, program: str, *arguments: str) -> None:
        packed = re.match(r".*/\.postgres-[^/]+", str(self._programs))
        libraries = (
            [str(path) for path in Path(packed[0]).glob("usr/lib/*-linux-*")] if packed else []
        )
        done = subprocess.run(
            [str(self._programs / program), *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if program == "initdb" else subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._folder,
            user=self._user,
            group="nogroup" if self._user else None,
            extra_groups=[] if self._user else None,
            env={**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)} if libraries else None,
        )
        if done.returncode:
            log = self._folder / "log"
            pytest.fail(f"{program}: {done.stdout}\n{log.read_text() if log.exists() else ''}")


class Proxy:
    """A way to the server that can be cut: at once, or just before an answer to a commit, or
    whatever else an answer to be lost holds."""

    def __init__(self, port: int, answer: bytes = b"COMMIT\0") -> None:
        self._server_port, self._answer = port, answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._commits_to_hide = 0
        self.hidden = 0
        self._closed = False
        self.open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def hide_commits(self, number: int) -> None:
        """Lose the connections over which the next answers to a COMMIT come."""
        self._commits_to_hide = number

    def cut(self) -> None:
        """Lose all connections, and refuse others until `open` is set."""
        self.open = False
        for pair in self._pairs:
            _shut(pair)

    def close(self) -> None:
        self.cut()
        self._closed = True
        self._listening.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listening.accept()
            except OSError:
                continue  # closed
            try:
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                client.close()
                continue
            pair = (client, server)
            if not self.open:
                _shut(pair)
                continue
            self._pairs.append(pair)
            threading.Thread(target=self._pass, args=(client, server, pair), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, pair), daemon=True).start()

    def _pass(
        self,
        source: socket.socket,
        target: socket.socket,
        pair: tuple[socket.socket, socket.socket],
    ) -> None:
        try:
            while data := source.recv(65536):
                if source is pair[1] and self._commits_to_hide and self._answer in data:
                    self._commits_to_hide -= 1
                    self.hidden += 1
                    break
                target.sendall(data)
        except OSError:
            pass
        _shut(pair)


def _shut(pair: tuple[socket.socket, socket.socket]) -> None:
    for end in pair:
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
        finally:
            end.close()
