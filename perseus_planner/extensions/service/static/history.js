// What has happened to a job, in words and as marks on how its power, iteration time and saving went; which ranks wait.

import { byId, html, keyed, say, show } from "./dom.js";
import { moment, number, watts } from "./format.js";

let drawn = ""; // the content of the charts, so that they are only drawn again after a change
let last = null; // what was shown last
let chosen = null; // [from, to] in seconds since the epoch: what was dragged over
let waited = null; // what the ranks' chart shows
const range = byId("history-range");
range.addEventListener("change", () => choose(null));

/** Show that part of the curves; for null, what the list says. */
function choose(part) {
  chosen = part;
  if (part !== null) range.value = "chosen";
  showHistory(...last);
}

/** Forget the curves and what was chosen of them, so that nothing of them is left for another job. */
export function forgetHistory() {
  if (chosen !== null) range.value = "0";
  [drawn, last, chosen, waited] = ["", null, null, null];
  for (const place of ["history-power", "history-time", "history-saved", "waiting-ranks", "waiting-caption", "events"]) byId(place).replaceChildren();
}

export function showHistory({ points, events, budgets, waiting }, job) {
  last = [{ points, events, budgets, waiting }, job];
  showWaiting(waiting);
  show(byId("no-events"), events.length === 0);
  keyed(byId("events"), [...events].reverse(), (event) => `${event.at_s} ${event.text}`, made, () => {});
  show(byId("history"), points.length > 1);
  const now = JSON.stringify([points, events, budgets, range.value, chosen]);
  if (now === drawn || points.length < 2 || document.querySelector("#history .chosen")) return; // not during a drag
  drawn = now;
  const newest_s = Math.max(...[points.at(-1), ...events.slice(-1)].map((each) => each.at_s));
  const range_s = Number(range.value);
  const [since_s, until_s] = chosen ?? [Math.max(job.since_s, range_s ? points.at(-1).at_s - range_s : 0), newest_s];
  const [unit_s, unit] = (until_s - since_s) / 3600 >= 2 ? [3600, "hours"] : [60, "minutes"];
  const place = (each) => (each.at_s - since_s) / unit_s;
  const isShown = (each) => each.at_s >= since_s && each.at_s <= until_s;
  const zoom = (from, to) => choose([since_s + from * unit_s, since_s + to * unit_s]);
  const x = { label: `${unit} since ${moment(since_s)}`, unit: "", range: [0, (chosen ? 1 : 1.02) * place({ at_s: until_s })] };
  const marks = events.filter(isShown).map((event) => ({ x: place(event), text: `${moment(event.at_s)} ${event.text}` }));
  const draw = (at, name, y, color, value, steps = []) => {
    const known = points.filter((point) => isShown(point) && value(point) !== null);
    const [xs, values] = [known.map(place), known.map(value)];
    const series = [{ name, color, x: xs, y: values, dots: known.length < 20 }];
    if (known.length) series.push(...steps);
    const all = series.flatMap((each) => each.y);
    charts.line(byId(at), {
      description: `${name} over time: ${known.length ? `${charts.quantity(values[0], y.unit)} first and ${charts.quantity(values.at(-1), y.unit)} now` : "not known"}`,
      x, y: { ...y, range: chosen ? charts.range(all) : [1.05 * Math.min(0, ...all), 1.05 * Math.max(0, ...all) || 1] }, series, events: marks, zoom, legend: series.length > 1, height: 200, table: true,
    });
  };
  draw("history-power", "Power", { label: "power", unit: "kW" }, 2, (point) => (point.power_w === null ? null : point.power_w / 1000), budgetLines(budgets, since_s, until_s, place));
  draw("history-time", "Iteration time", { label: "iteration", unit: "s" }, 1, (point) => point.iteration_s);
  draw("history-saved", "Saved", { label: "saved", unit: "kWh" }, 3, (point) => (point.saved_j === null ? null : point.saved_j / 3.6e6));
}

/** A line for each budget, from when it was set until the next one was. */
function budgetLines(budgets, since_s, until_s, place) {
  const ends = budgets.slice(1).map((each) => each.start_s);
  const held = budgets.map(({ start_s, power_w }, index) => ({ power_w, from: Math.max(start_s, since_s), to: Math.min(ends[index] ?? until_s, until_s) }));
  const shown = held.filter(({ power_w, from, to }) => power_w !== null && from <= to);
  return shown.map(({ power_w, from, to }) => ({
    name: `budget of ${watts(power_w)}`, color: 7, dashed: true, x: [from, to].map((at_s) => place({ at_s })), y: [power_w / 1000, power_w / 1000],
  }));
}

/** Show the share of the recent time in which each rank computed nothing. */
function showWaiting(waiting) {
  show(byId("waiting"), waiting.length > 0);
  const now = JSON.stringify(waiting);
  if (now === waited || waiting.length === 0) return;
  waited = now;
  const [least, most] = [Math.min(...waiting), Math.max(...waiting)].map((share) => `rank ${waiting.indexOf(share)} (${number(100 * share, 1)}\u00a0%)`);
  say(byId("waiting-caption"), `Recently, ${least} waited least and ${most} most. A rank waits while it computes nothing: for its neighbours, transfers, data or the optimizer.`);
  charts.bars(byId("waiting-ranks"), {
    description: `Share of the recent time in which each rank waits: least for ${least}, most for ${most}`,
    x: { label: "rank", unit: "" }, y: { label: "waits", unit: "% of its time" }, names: waiting.map((_, rank) => `${rank}`),
    series: [{ name: "waits", color: 2, y: waiting.map((share) => 100 * share) }], legend: false, height: 180, table: true,
  });
}

function made(event) {
  const time = html("time", { datetime: new Date(event.at_s * 1000).toISOString() });
  say(time, moment(event.at_s));
  return html("li", {}, time, " ", event.text);
}
