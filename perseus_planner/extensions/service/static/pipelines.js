// The pipelines of a job, on their frontier and in a table, grouped if they are equal.

import { byId, html, keyed, part, say } from "./dom.js";
import { joules, number, profileText, ranges, seconds } from "./format.js";
import { slownessText, scopeText } from "./reports.js";

const MOST_LABELS = 8;
const BEYOND = 1.25; // times the slowest point; the curve continues to where slowing down saves nothing more

let drawn = ""; // the content of the chart, so that it is only drawn again after a change
let placed = new Map(); // pipeline -> last position of its point

/** Group equal pipelines: {numbers, time_s, energy_j, target_s, slow_stages, report}. */
export function groups(pipelines) {
  const found = new Map();
  for (const { pipeline, ...rest } of pipelines) {
    const key = JSON.stringify(rest);
    if (!found.has(key)) found.set(key, { numbers: [], ...rest });
    found.get(key).numbers.push(pipeline);
  }
  return [...found.values()];
}

/** Forget the positions of points, so that those of another job do not move from there. */
export function forget() {
  [drawn, placed] = ["", new Map()];
  byId("frontier").replaceChildren();
}

export function showPipelines(status, frontier, grouped) {
  const reports = new Map(status.reports.map((report) => [report.key, report]));
  keyed(byId("pipelines").tBodies[0], grouped, (group) => group.numbers[0], row, (element, group) => fill(element, group, status, frontier, reports));
  draw(status, frontier, grouped);
}

function row() {
  const cell = (name, label, type = "number") => html("td", { class: type, "data-part": name, "data-label": label });
  return html("tr", {}, html("th", { scope: "row", "data-part": "numbers" }), cell("time", "Iteration"), cell("energy", "Energy"), cell("why", "Reason", "why"));
}

function fill(element, group, status, frontier, reports) {
  const { numbers } = group;
  say(part(element, "numbers"), numbers.length > 2 ? `${ranges(numbers)} (${number(numbers.length)})` : ranges(numbers));
  say(part(element, "time"), seconds(group.time_s));
  say(part(element, "energy"), joules(group.energy_j));
  say(part(element, "why"), why(group, reports.get(group.report), status.job));
}

const WHY = {
  straggler: "runs slower to save energy, as it would wait for the slowest",
  "job budget": "runs slower to keep the power budget of its job",
  "cluster budget": "runs slower to keep the power budget of all jobs",
  "GPU limit": "keeps the power limit of its GPUs",
  deadline: "at the deadline of its job",
};

function why(group, report, job) {
  const coming = Math.abs(group.target_s - group.time_s) > 0.01 * group.time_s ? `; target ${seconds(group.target_s)}` : "";
  const slow = Object.entries(group.slow_stages).map(([stage, slowdown]) => `stage ${stage} × ${number(slowdown)}`).join(", ");
  if (report) return `slow: ${scopeText(report)}, ${slownessText(report)}${slow ? ` (planned with ${slow})` : ""}${coming}`;
  const stops = group.reason === "deadline" && group.target_s < (1 - 1e-6) * job.deadline_s;
  return (stops ? "at its least energy, as its deadline would be slower and cost more" : WHY[group.reason] ?? "at its target") + coming;
}

function draw(status, frontier, grouped) {
  const now = JSON.stringify([status.decision.straggler_time_s, frontier, grouped]);
  if (now === drawn) return;
  drawn = now;
  const marks = grouped.map(mark);
  const slowest_s = status.decision.straggler_time_s;
  const most_s = BEYOND * Math.max(slowest_s, frontier.baseline_time_s, ...marks.map((each) => each.x));
  const shown = Math.max(2, frontier.times_s.filter((time_s) => time_s <= most_s).length);
  const [times_s, energies_j] = [frontier.times_s.slice(0, shown), frontier.energies_j.slice(0, shown)];
  const highs = [...energies_j, frontier.baseline_j, ...marks.map((each) => each.y)];
  const yRange = charts.range(highs, 0.08);
  charts.line(byId("frontier"), {
    description: description(frontier, grouped, slowest_s),
    x: { label: "Iteration time", unit: "s" },
    y: { label: "Energy of one pipeline's iteration", unit: "J", range: yRange },
    series: [
      { name: "Least energy for each iteration time", color: 1, x: times_s, y: energies_j },
      { name: `Iteration time: ${seconds(slowest_s)}`, color: 7, dashed: true, x: [slowest_s, slowest_s], y: yRange },
    ],
    marks: [{ name: "All clocks at maximum", color: 7, shape: "diamond", x: frontier.baseline_time_s, y: frontier.baseline_j }, ...marks],
  });
  placed = new Map(grouped.flatMap((group) => group.numbers.map((each) => [each, { x: group.time_s, y: group.energy_j }])));
  say(byId("frontier-caption"), `One pipeline, replayed from a ${profileText(frontier.origin)}. Energy is until the iteration's end: of the curve at the time shown, of a point and in the table when its own plan ends, before it waits for slower pipelines. The curve continues to ${seconds(frontier.times_s.at(-1))}. Pipelines with slow stages may lie off the curve, which is for pipelines without.`);
}

function mark(group, index) {
  const name = `${group.numbers.length > 1 ? "Pipelines" : "Pipeline"} ${ranges(group.numbers)}`;
  const isSlow = group.report !== null;
  const from = group.numbers.map((each) => placed.get(each)).find(Boolean) ?? null;
  const shown = index < MOST_LABELS;
  return { name, color: isSlow ? 2 : 3, shape: isSlow ? "triangle" : "circle", x: group.time_s, y: group.energy_j, from,
    label: shown ? ranges(group.numbers) : null, title: shown ? `${name}${isSlow ? " (slow)" : ""}` : null };
}

function description(frontier, grouped, slowest_s) {
  const points = grouped.slice(0, MOST_LABELS).map((group) => `pipelines ${ranges(group.numbers)} at ${seconds(group.time_s)} and ${joules(group.energy_j)}`);
  return `The least energy of an iteration, from ${seconds(frontier.times_s[0])} to ${seconds(frontier.times_s.at(-1))}. Iterations take ${seconds(slowest_s)}. ${points.join("; ")}.`;
}
