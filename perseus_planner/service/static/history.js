// What has happened to a job, in words and as marks on how its power, iteration time and saving went.

import { byId, html, keyed, say, show } from "./dom.js";
import { moment } from "./format.js";

let drawn = ""; // the content of the charts, so that they are only drawn again after a change
let last = null; // what was shown last
byId("history-range").addEventListener("change", () => showHistory(...last));

export function showHistory({ points, events }, job) {
  last = [{ points, events }, job];
  show(byId("no-events"), events.length === 0);
  keyed(byId("events"), [...events].reverse(), (event) => `${event.at_s} ${event.text}`, made, () => {});
  show(byId("history"), points.length > 1);
  const range_s = Number(byId("history-range").value);
  const now = JSON.stringify([points, events, job.power_w, range_s]);
  if (now === drawn || points.length < 2) return;
  drawn = now;
  const since_s = Math.max(job.since_s, range_s ? points.at(-1).at_s - range_s : 0);
  const [unit_s, unit] = (points.at(-1).at_s - since_s) / 3600 >= 2 ? [3600, "hours"] : [60, "minutes"];
  const place = (each) => (each.at_s - since_s) / unit_s;
  const x = { label: `${unit} since ${moment(since_s)}`, unit: "", range: [0, 1.02 * Math.max(...[points.at(-1), ...events].map(place))] };
  const marks = events.filter((event) => event.at_s >= since_s).map((event) => ({ x: place(event), text: `${moment(event.at_s)} ${event.text}` }));
  const draw = (at, name, y, color, value, budget = null) => {
    const known = points.filter((point) => point.at_s >= since_s && value(point) !== null);
    const [xs, values] = [known.map(place), known.map(value)];
    const series = [{ name, color, x: xs, y: values }];
    if (budget !== null && known.length) series.push({ name: "budget", color: 7, dashed: true, x: [xs[0], xs.at(-1)], y: [budget, budget] });
    const all = series.flatMap((each) => each.y);
    charts.line(byId(at), {
      description: `${name} over time: ${known.length ? `${charts.quantity(values[0], y.unit)} first and ${charts.quantity(values.at(-1), y.unit)} now` : "not known"}`,
      x, y: { ...y, range: [1.05 * Math.min(0, ...all), 1.05 * Math.max(0, ...all) || 1] }, series, events: marks, legend: series.length > 1, height: 200, table: true,
    });
  };
  draw("history-power", "Power", { label: "power", unit: "kW" }, 2, (point) => (point.power_w === null ? null : point.power_w / 1000), job.power_w === null ? null : job.power_w / 1000);
  draw("history-time", "Iteration time", { label: "iteration", unit: "s" }, 1, (point) => point.iteration_s);
  draw("history-saved", "Saved", { label: "saved", unit: "kWh" }, 3, (point) => (point.saved_j === null ? null : point.saved_j / 3.6e6));
}

function made(event) {
  const time = html("time", { datetime: new Date(event.at_s * 1000).toISOString() });
  say(time, moment(event.at_s));
  return html("li", {}, time, " ", event.text);
}
