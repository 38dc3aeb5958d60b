"""The service: takes reports of stragglers and gives every pipeline a plan at the point of its
frontier that fits; its commands; and its part in a training job, `agent`.

Others use `client.Client` and the values in `models`; `planner serve` uses `service.Service`,
`store.Storage` and `serve.serve`.
"""

from __future__ import annotations

from perseus_planner.base.extensions import Extension

EXTENSION = Extension(
    commands={
        "Serve": {
            "serve": "perseus_planner.extensions.service.serve_command:serve",
            "status": "perseus_planner.extensions.service.commands:status",
            "straggler": "perseus_planner.extensions.service.commands:straggler",
            "budget": "perseus_planner.extensions.service.commands:budget",
        }
    },
    offers={
        "client": "perseus_planner.extensions.service.client:Client",
        "service link": "perseus_planner.extensions.service.agent.agent:begin_link",
    },
)
