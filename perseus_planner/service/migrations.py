"""The layout of the service's database, and the numbered steps from earlier ones to it.

Layout 2 is that of version 0.2. Each step takes the tables of its layout to the next one, inside
one transaction.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Execute = Callable[..., list[Any]]
"""Runs a statement with a value for each `?`, and returns its rows."""

LAYOUT = 4
TABLES = (
    """CREATE TABLE frontiers (
    digest TEXT PRIMARY KEY, content BYTEA NOT NULL, curve TEXT NOT NULL)""",
    """CREATE TABLE jobs (
    name TEXT PRIMARY KEY, frontier TEXT NOT NULL, registration TEXT NOT NULL,
    state TEXT NOT NULL)""",
    """CREATE TABLE reports (
    job TEXT NOT NULL, key TEXT NOT NULL, number BIGINT NOT NULL, counts INTEGER NOT NULL,
    content TEXT NOT NULL, PRIMARY KEY (job, key))""",
    "CREATE TABLE totals (job TEXT PRIMARY KEY, content TEXT NOT NULL)",
    """CREATE TABLE versions (
    job TEXT NOT NULL, version BIGINT NOT NULL, content TEXT NOT NULL,
    PRIMARY KEY (job, version))""",
    """CREATE TABLE plans (
    job TEXT NOT NULL, digest TEXT NOT NULL, version BIGINT NOT NULL, text TEXT NOT NULL,
    PRIMARY KEY (job, digest))""",
    "CREATE TABLE ended (id BIGINT PRIMARY KEY, totals TEXT NOT NULL)",
)


def _from_2(execute: Execute) -> None:
    """What a running job counted becomes an account."""
    for name, text in execute("SELECT name, telemetry FROM jobs WHERE telemetry IS NOT NULL"):
        tally = json.loads(text)
        latest = tally["latest"]
        kept = ("iteration_s", "power_w", "set_p50_s", "set_p99_s", "observed_s", "earlier")
        account = {
            **_account(tally, latest["metered_s"]),
            **{key: tally[key] for key in kept},
            "latest": {"run": latest["run"], **_account(latest, latest["metered_s"])},
            "plans": [
                {key: value for key, value in plan.items() if key != "baseline_j"}
                for plan in tally["plans"]
            ],
            "points": tally["points"],
        }
        execute("UPDATE jobs SET telemetry = ? WHERE name = ?", json.dumps(account), name)


def _account(counted: dict[str, Any], metered_s: float) -> dict[str, Any]:
    named = {name: counted[name] for name in ("iterations", "time_s", "energy_j", "energy_is")}
    return {
        **named,
        "saved_j": counted.get("saved_j", 0.0),
        "metered_s": metered_s,
        "changes_late": counted["late_changes"],
    }


def _from_3(execute: Execute) -> None:
    """Reports and totals become rows of their own, and plans those of their job."""
    for table in ("frontiers", "jobs", "versions", "plans", "ended"):
        execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    for statement in TABLES:
        execute(statement)
    execute("INSERT INTO frontiers SELECT digest, content, curve FROM old_frontiers")
    execute("INSERT INTO ended SELECT id, totals FROM old_ended")
    rows = execute("SELECT name, frontier, registration, state, telemetry FROM old_jobs")
    number = 0
    for name, frontier, registration, state, telemetry in rows:
        content = json.loads(state)
        for counts, kind in enumerate(("past", "reports")):
            for report in content.pop(kind):
                number += 1
                execute(
                    "INSERT INTO reports VALUES (?, ?, ?, ?, ?)",
                    name,
                    report["key"],
                    number,
                    counts,
                    json.dumps(report),
                )
        execute(
            "INSERT INTO jobs VALUES (?, ?, ?, ?)",
            name,
            frontier,
            registration,
            json.dumps(content),
        )
        if telemetry is not None:
            execute("INSERT INTO totals VALUES (?, ?)", name, telemetry)
    for job, version, text in execute("SELECT job, version, content FROM old_versions"):
        content = json.loads(text)
        content |= {"version": version, "own": None, "digests": content.pop("plans")}
        execute("INSERT INTO versions VALUES (?, ?, ?)", job, version, json.dumps(content))
    execute(
        "INSERT INTO plans SELECT of.job, of.plan, MAX(of.version), old_plans.text "
        "FROM version_plans AS of JOIN old_plans ON old_plans.digest = of.plan GROUP BY 1, 2, 4"
    )
    budget = dict(execute("SELECT name, value FROM meta WHERE name LIKE 'power%'"))
    if budget:
        steps = json.loads(budget.get("power_schedule", "{}")).get("schedule", [])
        power_w = float(budget["power_w"]) if "power_w" in budget else None
        content = json.dumps({"power_w": power_w, "schedule": steps})
        execute("INSERT INTO meta VALUES ('budget', ?)", content)
    execute("DELETE FROM meta WHERE name LIKE 'power%'")
    for table in ("jobs", "versions", "plans", "ended", "frontiers"):
        execute(f"DROP TABLE old_{table}")
    execute("DROP TABLE version_plans")
    execute("DROP TABLE IF EXISTS learnt")


MIGRATIONS: dict[int, Callable[[Execute], None]] = {2: _from_2, 3: _from_3}
"""Layout -> the step from it to the next one."""
