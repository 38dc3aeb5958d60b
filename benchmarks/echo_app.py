"""A plain FastAPI application to compare the service with: it checks a small body and returns it;
at `/kept`, once it is on disk.

Run as a program, by service_load.py, with the path of an SQLite file; says its port.
"""

# ruff: noqa: TID253 - the process in which this runs is there for them

from __future__ import annotations

import sqlite3
import sys
import threading

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from perseus_planner.extensions.service.serve import Address, listening


class Body(BaseModel):
    """What a report says, its scope without a model of its own."""

    key: str
    source: str
    scope: dict[str, str | int]
    slowdown: float
    ttl_s: float


app = FastAPI()
writing = threading.Lock()
database = sqlite3.connect(sys.argv[1], check_same_thread=False)


@app.post("/echo")
async def echo(body: Body) -> Body:
    """What was sent."""
    return body


@app.post("/kept")
def kept(body: Body) -> Body:
    """What was sent, once it is on disk; on one of FastAPI's threads."""
    with writing, database:
        database.execute(
            "INSERT OR REPLACE INTO bodies VALUES (?, ?)", (body.key, body.model_dump_json())
        )
    return body


def main() -> None:
    """Serve as the service does: the same kind of socket, and the same settings of uvicorn and
    SQLite.
    """
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE bodies (key TEXT PRIMARY KEY, content TEXT NOT NULL)")
    with listening(Address(port=0)) as listener:
        print(listener.socket.getsockname()[1], flush=True)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            backlog=2048,
        )
        uvicorn.Server(config).run(sockets=[listener.socket])


if __name__ == "__main__":
    main()
