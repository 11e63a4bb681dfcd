"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tooltip = document.getElementById("tooltip");
  const hidden = new Set();
  const WIDTH = 560, HEIGHT = 330, LEFT = 58, RIGHT = 12, TOP = 10, BOTTOM = 36;

  const element = (parent, name, attributes = {}, text = null) => {
    const svg = parent.namespaceURI.endsWith("svg") || name === "svg";
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    // As text, never as markup: names come from files.
    if (text !== null) made.textContent = text;
    return parent.appendChild(made);
  };

  const stroke = method => ({
    stroke: method.color,
    "stroke-width": method.width,
    "stroke-dasharray": method.dash.map(length => length * method.width).join(" "),
    fill: "none",
  });

  const superscript = number => String(number).replace(/./g, c => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻");
  const format = value => value === 0 ? "0" : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3
    ? value.toExponential(3) : String(Number(value.toPrecision(5)));

  // Round numbers inside [low, high], about `count` of them.
  function linearTicks(low, high, count) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(factor => factor * power).find(candidate => candidate >= raw * 0.999);
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) ticks.push(k * step);
    return ticks.map(value => ({ value, label: String(Number(value.toPrecision(6))) }));
  }

  function logTicks(low, high, count) {
    const first = Math.ceil(low - 1e-9), last = Math.floor(high + 1e-9), ticks = [];
    const step = Math.max(1, Math.ceil((last - first) / count));
    for (let power = first; power <= last; power += step) {
      ticks.push({ value: 10 ** power, label: "10" + superscript(power) });
    }
    return ticks;
  }

  function draw(chart, svg) {
    svg.replaceChildren();
    const shown = chart.series.filter(series => !hidden.has(series.method));
    const usable = value => value !== null && (!chart.log || value > 0);
    const values = shown.flatMap(s => [s.mean, s.low ?? [], s.high ?? []].flat().filter(usable));
    const rounds = shown.flatMap(series => series.rounds);
    chart.x = null;
    if (!values.length) {
      element(svg, "text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing to show");
      return;
    }
    const extent = list => list.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    const scale = chart.log ? Math.log10 : value => value;
    let [low, high] = extent(values.map(scale));
    const margin = (high - low) * 0.04 || Math.abs(high) * 0.1 || 1;
    [low, high] = [low - margin, high + margin];
    let [first, last] = extent(rounds);
    if (first === last) [first, last] = [first - 1, last + 1];
    const x = round => LEFT + (round - first) / (last - first) * (WIDTH - LEFT - RIGHT);
    const y = value => HEIGHT - BOTTOM - (scale(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM);

    let ticks = chart.log ? logTicks(low, high, 7) : linearTicks(low, high, 6);
    // Less than a decade: powers of ten would leave the axis bare.
    if (chart.log && ticks.length < 2) ticks = linearTicks(10 ** low, 10 ** high, 5).filter(t => t.value > 0);
    for (const tick of ticks) {
      element(svg, "line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick.value), y2: y(tick.value) });
      element(svg, "text", { x: LEFT - 6, y: y(tick.value) + 4, "text-anchor": "end" }, tick.label);
    }
    for (const tick of linearTicks(first, last, 6).filter(t => Number.isInteger(t.value))) {
      element(svg, "text", { x: x(tick.value), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, tick.label);
    }
    element(svg, "text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "round");

    const at = (series, list, i) => `${x(series.rounds[i]).toFixed(1)} ${y(list[i]).toFixed(1)}`;
    for (const series of shown) {
      const method = data.methods[series.method];
      const indices = [...series.rounds.keys()];
      if (series.low) {
        const inside = indices.filter(i => usable(series.low[i]) && usable(series.high[i]));
        const edge = [...inside.map(i => at(series, series.high, i)), ...inside.reverse().map(i => at(series, series.low, i))];
        if (edge.length) element(svg, "path", { class: "band", d: `M${edge.join("L")}Z`, fill: method.color, opacity: 0.18 });
      }
      const line = list => {
        let path = "", pen = false;
        for (const i of indices) {
          if (usable(list[i])) path += (pen ? "L" : "M") + at(series, list, i);
          pen = usable(list[i]);
        }
        return path;
      };
      if (series.smooth) {
        element(svg, "path", { class: "raw", d: line(series.mean), stroke: method.color, fill: "none", opacity: 0.2 });
      }
      element(svg, "path", { class: "curve", d: line(series.smooth ?? series.mean), "data-method": method.name, ...stroke(method) });
      if (indices.length === 1 && usable(series.mean[0])) {
        element(svg, "circle", { cx: x(series.rounds[0]), cy: y(series.mean[0]), r: 3, fill: method.color });
      }
    }
    chart.cursor = element(svg, "line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    chart.x = x;
    chart.rounds = [...new Set(rounds)].sort((a, b) => a - b);
  }

  function hover(chart, svg, event) {
    if (!chart.x) return;
    const box = svg.getBoundingClientRect();
    const pointer = (event.clientX - box.left) * WIDTH / box.width;
    const round = chart.rounds.reduce((a, b) => Math.abs(chart.x(b) - pointer) < Math.abs(chart.x(a) - pointer) ? b : a);
    for (const end of ["x1", "x2"]) chart.cursor.setAttribute(end, chart.x(round));
    chart.cursor.setAttribute("visibility", "visible");
    const rows = [];
    for (const series of chart.series) {
      const i = series.rounds.indexOf(round);
      if (i < 0 || hidden.has(series.method) || series.mean[i] === null) continue;
      const band = series.low && series.low[i] !== null && series.high[i] !== null
        ? `  [${format(series.low[i])}, ${format(series.high[i])}]` : "";
      rows.push({ method: data.methods[series.method], value: series.mean[i], text: format(series.mean[i]) + band });
    }
    rows.sort((a, b) => b.value - a.value);
    tooltip.replaceChildren();
    element(tooltip, "strong", {}, `round ${round}`);
    const table = element(tooltip, "table");
    for (const row of rows) {
      const line = element(table, "tr"), cell = element(line, "td");
      element(cell, "i").style.background = row.method.color;
      cell.append(row.method.name);
      element(line, "td", {}, row.text);
    }
    tooltip.hidden = false;
    const left = event.clientX + 16, width = tooltip.offsetWidth;
    tooltip.style.left = `${left + width > innerWidth - 8 ? Math.max(0, event.clientX - 16 - width) : left}px`;
    tooltip.style.top = `${Math.max(0, Math.min(event.clientY + 12, innerHeight - tooltip.offsetHeight - 8))}px`;
  }

  const redraws = data.charts.map(chart => {
    const figure = element(document.getElementById("charts"), "figure", { "data-metric": chart.metric });
    const caption = element(figure, "figcaption", {}, chart.title);
    const button = element(caption, "button", { type: "button" });
    const svg = element(figure, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${chart.title} over rounds` });
    const redraw = () => {
      button.textContent = chart.log ? "logarithmic" : "linear";
      draw(chart, svg);
    };
    button.addEventListener("click", () => {
      chart.log = !chart.log;
      redraw();
    });
    svg.addEventListener("pointermove", event => hover(chart, svg, event));
    svg.addEventListener("pointerleave", () => {
      tooltip.hidden = true;
      chart.cursor?.setAttribute("visibility", "hidden");
    });
    redraw();
    return redraw;
  });

  const legend = document.getElementById("legend");
  const any = key => data.charts.some(chart => chart.series.some(series => series[key]));
  element(legend, "span", {}, "Click a method to hide or show it; point at a chart for its values."
    + (any("low") ? " Shaded: one standard deviation over seeds, on logarithmic axes that of the logarithm." : "")
    + (any("smooth") ? " Over what jumps from round to round lies its running median." : ""));
  data.methods.forEach((method, index) => {
    const button = element(legend, "button", { type: "button", "aria-pressed": "true", title: method.panel });
    const sample = element(button, "svg", { width: 34, height: 10, style: "width:34px" });
    element(sample, "line", { x1: 0, x2: 34, y1: 5, y2: 5, ...stroke(method) });
    button.append(method.name);
    button.addEventListener("click", () => {
      if (!hidden.delete(index)) hidden.add(index);
      button.setAttribute("aria-pressed", String(!hidden.has(index)));
      redraws.forEach(redraw => redraw());
    });
  });
})();
