// Draws the report's figures from the data that is in the page.

"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  // Each kind of point has a shape of its own, so that colour is never all that tells them apart.
  // The most important first.
  const LOOKS = {
    plan: [3, "diamond"], run: [4, "triangle"], baseline: [5, "square"], peer: [2, "cross"], landmark: [7, "circle"],
  };

  /** The bound as far as iterations are that someone may want; where stragglers are, it goes on far beyond. */
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

  function frontier(place, points) {
    const peers = points.points.filter((point) => point.kind === "peer").map((point) => point.name);
    const colours = { 0: 2, 1: 8, 2: 6 };
    const rank = (point) => Object.keys(LOOKS).indexOf(point.kind);
    const marks = [...points.points].sort((a, b) => rank(a) - rank(b)).map((point) => {
      const [color, shape] = LOOKS[point.kind];
      const own = point.kind === "peer" ? colours[peers.indexOf(point.name)] ?? color : color;
      const label = point.kind === "landmark" ? point.name.replace("bound, ", "") : point.name;
      const title = `${point.name}: ${charts.quantity(point.time_s, "s")}, ${charts.quantity(point.energy_j, "J")} (${point.origin})`;
      return { name: point.name, color: own, shape, x: point.time_s, y: point.energy_j, label, title };
    });
    const shown = nearPoints(points);
    const series = points.times_s.length ? [{ name: "bound: the least energy that any plan of that time can have", color: 1, ...shown }] : [];
    charts.line(place, {
      description: `Energy of an iteration against its time: ${marks.map((mark) => mark.title).join("; ")}`,
      x: { label: "iteration time", unit: "s" }, y: { label: "energy of an iteration, all GPUs of a pipeline", unit: "J" },
      series, marks, table: true,
    });
  }

  function changes(place, ranks) {
    charts.bars(place, {
      description: "Clock changes of each rank in an iteration; the table below has the numbers",
      x: { label: "rank", unit: "" }, y: { label: "clock changes in an iteration", unit: "" },
      names: ranks[0].ranks.map((rank) => `${rank.rank}`),
      series: ranks.map((plan, order) => ({ name: plan.name, color: (order % 8) + 1, y: plan.ranks.map((rank) => rank.clock_changes) })),
      height: 220,
    });
  }

  function curve(place, each) {
    const known = each.points.filter((point) => point.energy_stderr_j !== null).length > 0;
    const hull = each.points.filter((point) => each.hull.includes(point.clock)).sort((a, b) => a.time_s - b.time_s);
    const of = (points, key) => points.map((point) => point[key]);
    charts.line(place, {
      description: `Energy against time of ${each.computation} of stage ${each.stage} at ${each.points.length} clocks, from ${each.points[0].clock} to ${each.points[each.points.length - 1].clock} ${data.unit}`,
      x: { label: "time", unit: "s" }, y: { label: "energy", unit: "J" },
      series: [
        { name: "lower hull", color: 2, x: of(hull, "time_s"), y: of(hull, "energy_j") },
        {
          name: "measured point", color: 1, line: false, dots: true, x: of(each.points, "time_s"), y: of(each.points, "energy_j"),
          errors: known ? of(each.points, "energy_stderr_j") : undefined, xErrors: known ? of(each.points, "time_stderr_s") : undefined,
        },
      ],
      legend: false, height: 200, table: true,
    });
  }

  /** Draws what is far below only when it comes near, or is to be printed. */
  function lazily(draws) {
    const left = new Map(draws);
    const watch = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) if (isIntersecting) now(target);
    }, { rootMargin: "400px" });
    function now(place) {
      const draw = left.get(place);
      left.delete(place);
      watch.unobserve(place);
      draw?.();
    }
    for (const place of left.keys()) watch.observe(place);
    addEventListener("beforeprint", () => [...left.keys()].forEach(now));
  }

  if (at("frontier")) frontier(at("frontier"), data.points);
  if (at("timelines")) timelines.show(at("timelines"), data.timelines, data.unit);
  if (at("changes")) changes(at("changes"), data.ranks);
  lazily(data.curves.map((each, index) => [at(`curve-${index}`), () => curve(at(`curve-${index}`), each)]));
})();
