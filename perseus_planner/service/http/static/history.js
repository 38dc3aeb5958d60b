// What has happened to a job, in words, and how its power, iteration time and saving went.

import { byId, html, keyed, say, show } from "./dom.js";
import { moment } from "./format.js";

let drawn = ""; // the content of the charts, so that they are only drawn again after a change

export function showHistory({ points, events }, since_s) {
  show(byId("no-events"), events.length === 0);
  keyed(byId("events"), [...events].reverse(), (event) => `${event.at_s} ${event.text}`, made, () => {});
  show(byId("history"), points.length > 1);
  const now = JSON.stringify(points);
  if (now === drawn || points.length < 2) return;
  drawn = now;
  const hours = (points.at(-1).at_s - since_s) / 3600 >= 2;
  const x = { label: `${hours ? "hours" : "minutes"} since it was registered`, unit: "" };
  const draw = (place, name, y, color, value) => {
    const known = points.filter((point) => value(point) !== null);
    const at = known.map((point) => (point.at_s - since_s) / (hours ? 3600 : 60));
    const most = Math.max(0, ...known.map(value)), least = Math.min(0, ...known.map(value));
    charts.line(byId(place), {
      description: `${name} over time: ${known.length ? `${charts.quantity(value(known[0]), y.unit)} first and ${charts.quantity(value(known.at(-1)), y.unit)} now` : "not known"}`,
      x, y: { ...y, range: [1.05 * least, 1.05 * most || 1] }, series: [{ name, color, x: at, y: known.map(value) }], legend: false, height: 200, table: true,
    });
  };
  draw("history-power", "Power", { label: "power", unit: "kW" }, 2, (point) => (point.power_w === null ? null : point.power_w / 1000));
  draw("history-time", "Iteration time", { label: "iteration", unit: "s" }, 1, (point) => point.iteration_s);
  draw("history-saved", "Saved", { label: "saved", unit: "kWh" }, 3, (point) => (point.saved_j === null ? null : point.saved_j / 3.6e6));
}

function made(event) {
  const time = html("time", { datetime: new Date(event.at_s * 1000).toISOString() });
  say(time, moment(event.at_s));
  return html("li", {}, time, " ", event.text);
}
