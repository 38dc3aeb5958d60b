// Draws the figures of a report from the data in the page.

"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  // Each kind of point has another shape, so that colour is never the only difference. The most important first.
  const LOOKS = {
    plan: [1, "diamond"], run: [4, "triangle"], baseline: [5, "square"], peer: [2, "cross"], landmark: [7, "circle"],
  };

  /** The part of the bound near the points; the rest, useful beside stragglers, may be many times as long. */
  function nearPoints({ times_s: times, energies_j: energies, points }) {
    const end = 1.15 * Math.max(...points.map((point) => point.time_s));
    const count = times.filter((time) => time <= end).length;
    const [x, y] = [times.slice(0, count), energies.slice(0, count)];
    if (count > 0 && count < times.length) {
      const part = (end - times[count - 1]) / (times[count] - times[count - 1]);
      x.push(end);
      y.push(energies[count - 1] + part * (energies[count] - energies[count - 1]));
    }
    return { x, y };
  }

  function frontier(place, chart) {
    const peers = chart.points.filter((point) => point.kind === "peer").map((point) => point.name);
    const colours = { 0: 2, 1: 8, 2: 6 };
    const rank = (point) => Object.keys(LOOKS).indexOf(point.kind);
    const marks = [...chart.points].sort((a, b) => rank(a) - rank(b)).map((point) => {
      const [color, shape] = LOOKS[point.kind];
      const distinct = point.kind === "peer" ? colours[peers.indexOf(point.name)] ?? color : color;
      const label = point.kind === "landmark" ? point.name.replace("bound, ", "") : point.name;
      const title = `${point.name}: ${charts.quantity(point.time_s, "s")}, ${charts.quantity(point.energy_j, "J")} (${point.origin})`;
      return { name: point.name, color: distinct, shape, x: point.time_s, y: point.energy_j, label, title };
    });
    const shown = nearPoints(chart);
    const series = chart.times_s.length ? [{ name: "bound: least energy of any plan of that time", color: 1, ...shown }] : [];
    charts.line(place, {
      description: `Energy of an iteration against its time: ${marks.map((mark) => mark.title).join("; ")}`,
      x: { label: "iteration time", unit: "s" }, y: { label: "energy per iteration, all GPUs of a pipeline", unit: "J" },
      series, marks, table: true,
    });
  }

  /** Draws joules of computing and of waiting on top, side by side for each iteration, of ranks or of phases. */
  function energies(place, part, x, names, height) {
    const shown = data.where.filter((each) => each[part].length);
    const series = shown.flatMap((each) => ["computing", "waiting"].map((what) => ({
      name: `${what}, ${each.name}`, color: LOOKS[each.kind][0], hatched: what === "waiting", onto: what === "waiting",
      y: each[part].map((use) => use[`${what}_j`]),
    })));
    charts.bars(place, {
      description: `Energy of computing and waiting of each ${x} per iteration: ${shown.map((each) => each.name).join(", ")}; the table below has the numbers`,
      x: { label: x, unit: "" }, y: { label: "energy per iteration", unit: "J" }, names, series, table: true, height,
    });
  }

  function changes(place, ranks) {
    charts.bars(place, {
      description: "Clock changes of each rank per iteration; the table below has the numbers",
      x: { label: "rank", unit: "" }, y: { label: "clock changes per iteration", unit: "" },
      names: ranks[0].ranks.map((rank) => `${rank.rank}`),
      series: ranks.map((plan, order) => ({ name: plan.name, color: (order % 8) + 1, y: plan.ranks.map((rank) => rank.clock_changes) })),
      height: 220,
    });
  }

  /** Draws a small chart; those of one kind of computation share their axes, so that stages can be compared. */
  function curve(place, each) {
    const known = each.points.some((point) => point.energy_stderr_j !== null);
    const hull = each.points.filter((point) => each.hull.includes(point.clock)).sort((a, b) => a.time_s - b.time_s);
    const of = (points, key) => points.map((point) => point[key]);
    const alike = data.curves.filter((other) => other.computation === each.computation).flatMap((other) => other.points);
    charts.line(place, {
      description: `Energy against time of ${each.computation} of stage ${each.stage} at ${each.points.length} clocks, from ${each.points[0].clock} to ${each.points[each.points.length - 1].clock} ${data.unit}`,
      x: { label: "time", unit: "s", range: charts.range(of(alike, "time_s")) }, y: { label: "energy", unit: "J", range: charts.range(of(alike, "energy_j")) },
      series: [
        { name: "lower hull", color: 2, x: of(hull, "time_s"), y: of(hull, "energy_j") },
        {
          name: "measured point", color: 1, line: false, dots: true, x: of(each.points, "time_s"), y: of(each.points, "energy_j"),
          errors: known ? of(each.points, "energy_stderr_j") : undefined, xErrors: known ? of(each.points, "time_stderr_s") : undefined,
        },
      ],
      legend: false, height: 130, compact: true,
    });
  }

  /** Adds the table of a kind of computation when it is opened: it may have thousands of rows. */
  function numbers(details) {
    details.addEventListener("toggle", () => {
      const rows = data.curves.filter((each) => each.computation === details.dataset.computation)
        .flatMap((each) => each.points.map((point) => [String(each.stage), point.clock, point.time_s, point.energy_j]));
      details.append(charts.table(["stage", data.unit, "time (s)", "energy (J)"], rows).querySelector(".scroll"));
    }, { once: true });
  }

  /** Draws small charts a few at a time, so that the page answers meanwhile; all of them before the page is printed. */
  function inTurn(draws) {
    const some = (count) => draws.splice(0, count).forEach((draw) => draw());
    const next = () => { some(8); if (draws.length) setTimeout(next); };
    setTimeout(next);
    addEventListener("beforeprint", () => some(draws.length));
  }

  if (at("energy-ranks")) {
    energies(at("energy-ranks"), "ranks", "rank", data.where[0].ranks.map((_, rank) => String(rank)));
    if (at("energy-phases")) energies(at("energy-phases"), "phases", "phase", data.phases, 240);
  }
  if (at("frontier")) frontier(at("frontier"), data.frontier);
  if (at("timelines")) timelines.show(at("timelines"), data.iterations, data.unit);
  if (at("changes")) changes(at("changes"), data.ranks);
  inTurn(data.curves.flatMap((each, index) => at(`curve-${index}`) ? [() => curve(at(`curve-${index}`), each)] : []));
  for (const details of document.querySelectorAll("[data-computation]")) numbers(details);
})();
