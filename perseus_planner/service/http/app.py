"""The FastAPI application of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from perseus_planner.base import __version__
from perseus_planner.service.dashboard import routes as dashboard
from perseus_planner.service.http.auth import Access, Guard, Limits
from perseus_planner.service.http.errors import add_error_handlers
from perseus_planner.service.http.longpoll import AsyncService
from perseus_planner.service.http.metrics import Metrics
from perseus_planner.service.http.pages import StatusPages
from perseus_planner.service.http.routes import router

if TYPE_CHECKING:
    from perseus_planner.service.service import Service

_DESCRIPTION = """
Report that a rank, a GPU, a node, a stage or a pipeline of a training job is slow, and all other
pipelines of the job get plans that save energy in the meantime, until it has recovered. Times are
in seconds, powers in watts. Every request that is not carried out is answered with `{"error":
{"code", "message"}}`. What is answered with 2xx is on disk.
"""


def create_app(
    service: Service, access: Access, limits: Limits, *, now_s: Callable[[], float] | None = None
) -> FastAPI:
    """Return the application that serves `service`. Its lifespan must run, as ASGI servers have it.

    Args:
        service: The service, which the application does not close.
        access: Who may send requests.
        limits: How large requests may be, and how many may wait.
        now_s: The clock in place of that of `service`, seconds since the epoch.
    """
    now_s = now_s or service.now_s
    live = AsyncService(service, limits, now_s)
    metrics = Metrics(lambda: live.waiting, now_s())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with live.running():
            yield

    routes = [*router.routes, *dashboard.router.routes]
    app = FastAPI(
        title="perseus-planner",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # its pages load scripts from another host
        redoc_url=None,
        routes=routes,
    )
    app.state.service, app.state.metrics = live, metrics
    app.state.now_s, app.state.pages = now_s, StatusPages()
    add_error_handlers(app, routes)
    app.add_middleware(Guard, access=access, limits=limits)
    app.add_middleware(metrics.counting)
    return app
