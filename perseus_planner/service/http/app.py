"""The service over HTTP: the FastAPI application, put together."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from perseus_planner import __version__
from perseus_planner.service.dashboard import routes as dashboard
from perseus_planner.service.http import energy_routes
from perseus_planner.service.http.auth import Access, Guard, Limits
from perseus_planner.service.http.errors import add_refusals
from perseus_planner.service.http.longpoll import AsyncService
from perseus_planner.service.http.metrics import Metrics
from perseus_planner.service.http.routes import router
from perseus_planner.service.planning.solving import Solver

if TYPE_CHECKING:
    from perseus_planner.service.service import Service

_ROUTERS = (router, energy_routes.router, dashboard.router)
_DESCRIPTION = """
Report that a rank, a GPU, a node, a stage or a pipeline of a training job is slow, and all its other pipelines get
plans that save energy meanwhile; and back. Times are in seconds, powers in watts. Every request that is not done is
answered with `{"error": {"code", "message"}}`. What is answered with 2xx is on disk.
"""


def create_app(service: Service, access: Access, limits: Limits, *, now_s: Callable[[], float] = time.time) -> FastAPI:
    """The application that serves `service`; its lifespan must run, as every ASGI server has it.

    Args:
        service: what answers; it is not closed.
        access: who may come in.
        limits: what one client may use.
        now_s: the clock of `service`, seconds since the epoch.
    """
    live = AsyncService(service, limits, now_s)
    metrics = Metrics(lambda: live.waiting, now_s())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.solver = Solver(limits.solve_s)
        async with live.running():
            yield

    routes = [route for each in _ROUTERS for route in each.routes]
    app = FastAPI(
        title="perseus-planner",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # its pages load scripts of a host elsewhere
        redoc_url=None,
        routes=routes,  # `include_router` would look at every route twice for every request
    )
    app.state.service, app.state.metrics = live, metrics
    app.state.now_s = now_s
    add_refusals(app, routes)
    app.add_middleware(Guard, access=access, limits=limits)
    app.add_middleware(metrics.counting)
    return app
