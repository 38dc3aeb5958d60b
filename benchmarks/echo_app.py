"""A plain FastAPI application to compare the service with: one route, which checks a small body and
returns it.

Run as a program, by service_load.py; says its port.
"""

# ruff: noqa: TID253 - the process in which this runs is there for them

from __future__ import annotations

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from perseus_planner.service.serve import Address, listening


class Body(BaseModel):
    """What a report says, its scope without a model of its own."""

    key: str
    source: str
    scope: dict[str, str | int]
    slowdown: float
    ttl_s: float


app = FastAPI()


@app.post("/echo")
async def echo(body: Body) -> Body:
    """What was sent."""
    return body


def main() -> None:
    """Serve as the service does: the same kind of socket and the same settings of uvicorn."""
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
