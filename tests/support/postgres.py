"""A server of PostgreSQL in a temporary folder, as another user where this one is root."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from launching import free_port
from waiting import eventually

_USERS = ("postgres", "nobody")


@cache
def programs() -> Path | None:
    """The folder of the server's programs; None if there are none."""
    found = shutil.which("initdb")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return Path(found).parent if found else folders[-1].parent if folders else None


@contextmanager
def postgres() -> Iterator[str]:
    """Run a server and give the URL of its database; the test is skipped where there is none."""
    psycopg = pytest.importorskip("psycopg", reason="needs psycopg")
    folder = programs()
    if folder is None:
        pytest.skip("needs a server of PostgreSQL; install Debian's package postgresql")
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as name:
        user = _user()
        if user is not None:
            os.chown(name, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
        data = f"{name}/data"
        subprocess.run(
            [folder / "initdb", "-D", data, "-A", "trust", "-U", "planner", "--no-sync"],
            check=True,
            capture_output=True,
            user=user,
            cwd=name,
        )
        port = free_port()
        where = ["-h", "127.0.0.1", "-p", str(port), "-k", name]
        with subprocess.Popen(
            [folder / "postgres", "-D", data, *where],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=user,
            cwd=name,
        ) as server:
            try:
                url = f"postgresql://planner@127.0.0.1:{port}/postgres"

                def answers() -> bool:
                    try:
                        psycopg.connect(url).close()
                    except psycopg.OperationalError:
                        return False
                    return True

                eventually(answers)
                yield url
            finally:
                server.send_signal(signal.SIGQUIT)


def _user() -> str | None:
    if os.geteuid():
        return None
    known = {each.pw_name for each in pwd.getpwall()}
    return next(name for name in _USERS if name in known)
