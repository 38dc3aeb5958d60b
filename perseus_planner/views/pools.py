"""The report of a plan for inference: one HTML file without scripts that opens offline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, SubElement, tostring

from perseus_planner.inference.plan import BASELINE
from perseus_planner.views.inference import AGAINST, plan_sheets, plan_text
from perseus_planner.views.report import content_policy
from perseus_planner.views.web import page_file

if TYPE_CHECKING:
    from perseus_planner.views.savings import EnergyCost, EnergyRates

_STYLE = """
.bars { width: 100%; min-width: 32rem; max-width: 46rem; height: auto; }
.bars rect { fill: var(--series-7); }
.bars .plan { fill: var(--good); }
.bars text { fill: var(--ink); font-size: 13px; }
.panel p { white-space: pre-line; }
"""
_ROW = 26  #: height of a bar with its gap


@dataclass(frozen=True)
class PoolsReport:
    """A plan for inference with what it costs and saves."""

    file: str  #: name of the plan
    rates: EnergyRates  #: what a kilowatt-hour costs
    cost: EnergyCost  #: of all periods of the plan
    saved: EnergyCost | None  #: against the baseline; None if that cannot meet the objectives
    plan: dict[str, Any]  #: the plan


def make_pools_report(file: str, plan: dict[str, Any], rates: EnergyRates) -> PoolsReport:
    """Return the report of a plan."""
    baseline_j = next(row["energy_j"] for row in plan["policies"] if row["policy"] == BASELINE)
    saved = None if baseline_j is None else rates.cost(baseline_j - plan["energy_j"])
    return PoolsReport(file, rates, rates.cost(plan["energy_j"]), saved, plan)


def pools_text(report: PoolsReport) -> str:
    """Return the text that `planner report` prints."""
    return f"{plan_text(report.plan)}\n{_headline(report)}\n{_assumed(report)}\n"


def pools_page(report: PoolsReport) -> str:
    """Return the page of a report. Names are escaped, whatever they contain."""
    html = Element("html", lang="en")
    styles = [page_file("theme.css"), page_file("report.css"), _STYLE]
    head = SubElement(html, "head")
    SubElement(head, "meta", charset="utf-8")
    SubElement(
        head,
        "meta",
        {"http-equiv": "Content-Security-Policy", "content": content_policy([], styles)},
    )
    SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    SubElement(head, "title").text = f"Pools for inference: {report.file}"
    body = SubElement(html, "body")
    header = SubElement(body, "header", {"class": "wide"})
    SubElement(header, "h1").text = "Energy of pools for inference"
    main = SubElement(body, "main", {"class": "wide"})
    first = _panel(main, "Where the energy goes")
    SubElement(first, "p", {"class": "lead"}).text = _headline(report)
    bars = _bars([row for row in report.plan["policies"] if row["energy_j"] is not None])
    _scrolling(first, "Energy of each way to choose pools").append(bars)
    SubElement(first, "p", {"class": "small soft"}).text = _assumed(report)
    for sheet in plan_sheets(report.plan)[::-1]:
        _scrolling(_panel(main, sheet.title), sheet.title).append(sheet.html())
    text = tostring(html, encoding="unicode", method="html")
    styled = "".join(
        f"<style>{style}</style>" for style in styles
    )  # written as they are, which their digests need
    return f"<!doctype html>\n{text.replace('<title>', f'{styled}<title>', 1)}\n"


def _panel(main: Element, title: str) -> Element:
    panel = SubElement(main, "section", {"class": "panel"})
    SubElement(panel, "h2").text = title
    return panel


def _scrolling(panel: Element, name: str) -> Element:
    region = SubElement(panel, "div", {"class": "scroll", "tabindex": "0", "role": "region"})
    region.set("aria-label", name)
    return region


def _headline(report: PoolsReport) -> str:
    plan, hours = report.plan, sum(epoch["length_s"] for epoch in report.plan["epochs"]) / 3600
    said = f"{plan['energy_j'] / 3.6e6:.4g} kWh of {plan['gpus']} GPUs in {hours:.3g} h."
    if report.saved is None or plan["saved_share"] is None:
        return f"{said} The baseline violates the latency objective of a class."
    saved = report.saved
    return (
        f"{said} That is {100 * plan['saved_share']:.1f} % less than with {AGAINST}: "
        f"{saved.kwh:.4g} kWh at the meter, {saved.usd:.4g} USD, {saved.co2e_kg:.4g} kg of CO2e."
    )


def _assumed(report: PoolsReport) -> str:
    rates = report.rates
    return (
        f"Replayed from the inference profile. Assumed: {rates.price_usd_per_kwh:g} USD and "
        f"{rates.carbon_kg_per_kwh:g} kg of CO2e per kWh, PUE {rates.pue:g}."
    )


def _bars(rows: list[dict[str, Any]]) -> Element:
    """Return a bar for the energy of each policy."""
    most = max(row["energy_j"] or 0.0 for row in rows)
    told = ", ".join(
        f"{row['description']} {(row['energy_j'] or 0.0) / 3.6e6:.4g} kWh" for row in rows
    )
    svg = Element("svg", {"class": "bars", "role": "img", "viewBox": f"0 0 640 {_ROW * len(rows)}"})
    svg.set("aria-label", f"Energy: {told}")
    for number, row in enumerate(rows):
        kwh, width = (row["energy_j"] or 0.0) / 3.6e6, 300 * (row["energy_j"] or 0.0) / most
        place = {
            "x": "250",
            "y": str(_ROW * number + 3),
            "width": f"{width:.1f}",
            "height": str(_ROW - 8),
        }
        SubElement(
            svg, "rect", {**place, "class": "plan" if row["policy"] == "planner" else "other"}
        )
        line = str(_ROW * number + 17)
        SubElement(svg, "text", {"x": "242", "y": line, "text-anchor": "end"}).text = row[
            "description"
        ]
        SubElement(svg, "text", {"x": f"{256 + width:.1f}", "y": line}).text = f"{kwh:.4g} kWh"
    return svg
