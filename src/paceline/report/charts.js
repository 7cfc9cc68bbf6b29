"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const NAMESPACE = "http://www.w3.org/2000/svg";
  const REDRAW = [];

  const svg = (parent, name, attributes, text) => {
    const node = document.createElementNS(NAMESPACE, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };
  const html = (parent, name, className, text) => {
    const node = document.createElement(name);
    node.className = className;
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };

  const group = (value, digits) =>
    value.toLocaleString("en-US", { minimumFractionDigits: 0, maximumFractionDigits: digits }).replaceAll(",", "\u202f");
  const exact = (value) => {
    const size = Math.abs(value);
    if (size > 0 && size < 0.001) return value.toExponential(2);
    return group(value, size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 4);
  };
  const short = (value, step) => {
    const size = Math.abs(value);
    if (size >= 1e6) return group(value / 1e6, step < 1e5 ? 2 : 1) + "M";
    if (size >= 1e4) return group(value / 1e3, step < 1e3 ? 1 : 0) + "k";
    if (value === 0) return "0";
    if (step < 1e-4) return value.toExponential(1);
    return group(value, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9) + (step * 10 ** Math.ceil(-Math.log10(step) - 1e-9) % 1 ? 1 : 0)));
  };

  /* Round ticks that lie within [low, high]. */
  const ticksOf = (low, high, count, whole) => {
    const rough = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
    if (whole) step = Math.max(1, Math.round(step));
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step + 0);
    return { ticks, step };
  };

  const finite = (values) => values.filter((value) => value !== null && value !== undefined);

  const rangeOf = (figure) => {
    const lines = figure.series.filter((one) => one.style !== "bars");
    const bars = figure.series.filter((one) => one.style === "bars");
    const stacked = bars.length ? bars[0].y.map((_, i) => bars.reduce((sum, one) => sum + (one.y[i] ?? 0), 0)) : [];
    const ys = finite([...lines.flatMap((one) => [...one.y, ...(one.low ?? [])]), ...stacked]);
    const xs = figure.edges ?? lines.flatMap((one) => one.x);
    const marks = (figure.marks ?? []).flatMap((mark) => [mark.x, mark.until ?? mark.x]);
    const bounds = (axis, values, zero) => {
      let low = axis.low ?? values.reduce((a, b) => Math.min(a, b), zero ? 0 : Infinity);
      let high = axis.high ?? values.reduce((a, b) => Math.max(a, b), -Infinity);
      if (!Number.isFinite(low)) low = 0;
      if (!Number.isFinite(high) || high <= low) high = low + (axis.floating && low ? Math.abs(low) * 0.1 : 1);
      return [low, high];
    };
    const [x0, x1] = bounds(figure.x, [...xs, ...marks], false);
    let [y0, y1] = bounds(figure.y, ys, !figure.y.floating);
    if (figure.y.floating && figure.y.low === undefined) y0 -= (y1 - y0) * 0.06;
    return { x0, x1, y0, y1: y1 + (y1 - y0) * 0.06, stacked };
  };

  /* Paths skip what is unknown. */
  const pathOf = (xs, ys, X, Y) => {
    let path = "", pen = false;
    xs.forEach((x, i) => {
      if (ys[i] === null) { pen = false; return; }
      path += `${pen ? "L" : "M"}${X(x).toFixed(1)} ${Y(ys[i]).toFixed(1)}`;
      pen = true;
    });
    return path;
  };
  const filledOf = (xs, upper, lower, X, Y) => {
    const known = xs.map((_, i) => i).filter((i) => upper[i] !== null && lower[i] !== null);
    if (!known.length) return "";
    const there = known.map((i) => `${X(xs[i]).toFixed(1)} ${Y(upper[i]).toFixed(1)}`);
    const back = known.reverse().map((i) => `${X(xs[i]).toFixed(1)} ${Y(lower[i]).toFixed(1)}`);
    return `M${there.join("L")}L${back.join("L")}Z`;
  };

  const legend = (holder, series) => {
    const list = html(holder, "ul", "legend");
    for (const one of series) html(list, "li", `c${one.colour ?? 1}`, one.name);
  };

  const axes = (root, figure, box, scale, X, Y) => {
    const yTicks = ticksOf(scale.y0, scale.y1, box.height / 46, figure.y.whole);
    for (const tick of yTicks.ticks) {
      svg(root, "line", { class: "grid", x1: box.left, x2: box.right, y1: Y(tick), y2: Y(tick) });
      svg(root, "text", { x: box.left - 7, y: Y(tick) + 4, "text-anchor": "end" }, short(tick, yTicks.step));
    }
    svg(root, "line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
    if (figure.y.label) svg(root, "text", { x: 0, y: 12 }, figure.y.label);
    const middle = { y: box.bottom + 18, "text-anchor": "middle" };
    if (figure.named) {
      const room = (box.right - box.left) / figure.names.length;
      figure.names.forEach((name, i) => {
        if (room > 34 || i % 2 === 0) svg(root, "text", { x: X(i + 0.5), ...middle }, name);
      });
    } else {
      const xTicks = ticksOf(scale.x0, scale.x1, (box.right - box.left) / 80, figure.x.whole);
      for (const tick of xTicks.ticks) {
        svg(root, "line", { class: "axis", x1: X(tick), x2: X(tick), y1: box.bottom, y2: box.bottom + 4 });
        svg(root, "text", { x: X(tick), ...middle }, short(tick, xTicks.step));
      }
    }
    const unit = figure.x.unit ? `, ${figure.x.unit}` : "";
    svg(root, "text", { x: box.right, y: box.bottom + 36, "text-anchor": "end" }, figure.x.label + unit);
  };

  const marks = (root, figure, box, X) => {
    let busyUntil = [-Infinity, -Infinity, -Infinity];
    for (const mark of figure.marks ?? []) {
      const at = X(mark.x);
      if (mark.until !== undefined) {
        svg(root, "rect", { class: "tail", x: at, width: Math.max(1, X(mark.until) - at), y: box.top, height: box.bottom - box.top });
      }
      svg(root, "line", { class: "mark", x1: at, x2: at, y1: box.top, y2: box.bottom });
      const width = 7 * mark.label.length + 8;
      const row = Math.max(0, busyUntil.findIndex((until) => at > until));
      const left = at + 5 + width > box.right + 8;
      busyUntil[row] = at + width;
      svg(root, "text", { class: "halo", x: left ? at - 5 : at + 5, y: box.top + 11 + 15 * row, "text-anchor": left ? "end" : "start" }, mark.label);
    }
  };

  const lines = (root, figure, X, Y, scale) => {
    for (const one of figure.series) {
      const colour = `c${one.colour ?? 1}`;
      const style = one.style ?? "line";
      if (style === "bars") continue;
      if (style === "band") {
        svg(root, "path", { class: `band ${colour}`, d: filledOf(one.x, one.y, one.low, X, Y) });
        continue;
      }
      if (style === "area") svg(root, "path", { class: `area ${colour}`, d: filledOf(one.x, one.y, one.y.map(() => Math.max(0, scale.y0)), X, Y) });
      svg(root, "path", { class: `${style === "thin" ? "thin" : "line"} ${colour}`, d: pathOf(one.x, one.y, X, Y) });
      if ((style === "points" && one.x.length <= 60) || one.x.length === 1) {
        one.x.forEach((x, i) => {
          if (one.y[i] !== null) svg(root, "circle", { class: `dot ${colour}`, cx: X(x), cy: Y(one.y[i]), r: 4 });
        });
      }
    }
  };

  const bars = (root, figure, X, Y, scale) => {
    const series = figure.series.filter((one) => one.style === "bars");
    const base = new Array(scale.stacked.length).fill(Math.max(0, scale.y0));
    const columns = base.map(() => []);
    const floor = Math.max(0, scale.y0);
    for (const one of series) {
      one.y.forEach((value, i) => {
        if (value === null || value <= 0) return;
        const from = base[i], to = floor > 0 ? value : from + value;
        base[i] = to;
        const left = X(figure.edges[i]), right = X(figure.edges[i + 1]);
        const gap = Math.min(figure.named ? 14 : 2, (right - left) * 0.15);
        const top = Y(to), height = Math.max(0.5, Y(from) - top - (series.length > 1 && right - left > 6 ? 0.75 : 0));
        columns[i].push(svg(root, "rect", { class: `bar c${one.colour ?? 1}`, x: left + gap, width: Math.max(0.5, right - left - 2 * gap), y: top, height }));
      });
    }
    if (figure.named) {
      series[0].y.forEach((value, i) => {
        if (value !== null) svg(root, "text", { class: "direct", x: X(i + 0.5), y: Y(value) - 6, "text-anchor": "middle" }, value.toFixed(2));
      });
    }
    return columns;
  };

  /* The name of each line at its right end, moved apart where they would overlap. */
  const directLabels = (root, figure, box, X, Y) => {
    const labels = figure.series.filter((one) => (one.style ?? "line") !== "band").map((one) => {
      let last = one.y.length - 1;
      while (last > 0 && one.y[last] === null) last--;
      return { one, y: Y(one.y[last] ?? 0) };
    }).sort((a, b) => a.y - b.y);
    labels.forEach((label, i) => { if (i) label.y = Math.max(label.y, labels[i - 1].y + 15); });
    let lowest = box.bottom;
    for (const label of [...labels].reverse()) {
      label.y = Math.min(label.y, lowest);
      lowest = label.y - 15;
    }
    for (const { one, y } of labels) {
      svg(root, "text", { class: `direct c${one.colour ?? 1}`, x: box.right + 8, y: y + 4 }, one.name);
    }
  };

  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };

  const tipFor = (holder) => {
    const tip = html(holder, "div", "tip");
    tip.hidden = true;
    return {
      show(x, y, title, rows, detail) {
        tip.replaceChildren();
        html(tip, "b", "", title);
        for (const [name, value, colour] of rows) {
          tip.append("\n");
          html(tip, "span", `key c${colour}`, "■ ");
          tip.append(`${name}  ${value}`);
        }
        if (detail) tip.append(`\n${detail}`);
        tip.hidden = false;
        const room = holder.clientWidth - tip.offsetWidth;
        tip.style.left = `${Math.max(0, Math.min(room, x > holder.clientWidth / 2 ? x - tip.offsetWidth - 14 : x + 14))}px`;
        tip.style.top = `${Math.max(0, y - tip.offsetHeight - 8)}px`;
      },
      hide() { tip.hidden = true; },
    };
  };

  const withUnit = (value, unit) => exact(value) + (unit ? ` ${unit}` : "");

  const hover = (holder, root, figure, box, X, invert, Y, columns) => {
    const tip = tipFor(holder);
    const cursor = svg(root, "line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
    const dots = figure.series.map((one) => svg(root, "circle", { class: `dot c${one.colour ?? 1}`, r: 3.5, visibility: "hidden" }));
    const leave = () => {
      tip.hide();
      cursor.setAttribute("visibility", "hidden");
      dots.forEach((dot) => dot.setAttribute("visibility", "hidden"));
      columns.flat().forEach((bar) => bar.classList.remove("on"));
    };
    const overBars = (x, y) => {
      let i = figure.edges.findIndex((edge) => edge > x) - 1;
      if (i < 0) i = x < figure.edges[0] ? 0 : figure.edges.length - 2;
      columns.forEach((column, j) => column.forEach((bar) => bar.classList.toggle("on", i === j)));
      const rows = figure.series.map((one) => [one.name, one.y[i] === null ? "–" : withUnit(one.y[i], one.unit), one.colour ?? 1]);
      tip.show(X((figure.edges[i] + figure.edges[i + 1]) / 2), y, figure.named ? `${figure.names[i]} decoding` : figure.names[i], rows.reverse(), (figure.details ?? [])[i]);
    };
    const overLines = (x, y) => {
      const longest = figure.series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
      const at = longest.x[nearest(longest.x, x)];
      const rows = [];
      figure.series.forEach((one, s) => {
        const i = nearest(one.x, at);
        const value = one.y[i];
        const far = Math.abs(X(one.x[i]) - X(at)) > 24;
        const shown = value !== null && value !== undefined && !far;
        dots[s].setAttribute("visibility", shown && one.style !== "band" ? "visible" : "hidden");
        if (!shown) return;
        dots[s].setAttribute("cx", X(one.x[i]));
        dots[s].setAttribute("cy", Y(value));
        const text = one.style === "band" ? `${exact(one.low[i])} to ${exact(value)}` : withUnit(value, one.unit);
        rows.push([one.name, text, one.colour ?? 1]);
      });
      cursor.setAttribute("visibility", "visible");
      cursor.setAttribute("x1", X(at));
      cursor.setAttribute("x2", X(at));
      const title = figure.x.unit ? `${exact(at)} ${figure.x.unit}` : `${figure.x.label} ${exact(at)}`;
      tip.show(X(at), y, title, rows);
    };
    root.addEventListener("pointerleave", leave);
    for (const name of ["pointermove", "pointerdown"]) {
      root.addEventListener(name, (event) => {
        const frame = root.getBoundingClientRect();
        const x = invert(event.clientX - frame.left);
        (figure.edges ? overBars : overLines)(x, event.clientY - frame.top);
      });
    }
  };

  const draw = (holder, figure, small) => {
    holder.replaceChildren();
    const width = holder.clientWidth;
    const many = figure.series.filter((one) => one.style !== "band").length > 1;
    const isBars = Boolean(figure.edges);
    const direct = many && !isBars && width >= 520;
    if (many && !direct) legend(holder, figure.series.filter((one) => one.style !== "band"));
    const height = small ? 170 : width < 520 ? 250 : 290;
    const scale = rangeOf(figure);
    const longest = direct ? Math.max(...figure.series.filter((one) => one.style !== "band").map((one) => one.name.length)) : 0;
    const tickWidth = Math.max(...((t) => t.ticks.map((tick) => short(tick, t.step).length))(ticksOf(scale.y0, scale.y1, (height - 70) / 46, figure.y.whole)));
    const box = { left: 14 + 7.2 * tickWidth, right: width - (direct ? 14 + 7.4 * longest : 10), top: figure.y.label ? 26 : 8, bottom: height - 44 };
    box.height = box.bottom - box.top;
    const X = (x) => box.left + ((x - scale.x0) / (scale.x1 - scale.x0)) * (box.right - box.left);
    const Y = (y) => box.bottom - ((y - scale.y0) / (scale.y1 - scale.y0)) * box.height;
    const invert = (px) => scale.x0 + ((px - box.left) / (box.right - box.left)) * (scale.x1 - scale.x0);
    const root = svg(holder, "svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": figure.summary });
    axes(root, figure, box, scale, X, Y);
    const columns = isBars ? bars(root, figure, X, Y, scale) : [];
    lines(root, figure, X, Y, scale);
    marks(root, figure, box, X);
    if (direct) directLabels(root, figure, box, X, Y);
    hover(holder, root, figure, box, X, invert, Y, columns);
  };

  for (const holder of document.querySelectorAll(".chart")) {
    const data = DATA[holder.dataset.figure];
    const small = holder.closest(".small") !== null;
    const choose = document.querySelector(`input[data-choose="${holder.dataset.figure}"]`);
    const redraw = () => {
      const figure = choose ? data.figures[Number(choose.value)] : data;
      if (choose) {
        choose.parentElement.querySelector("output").textContent = data.names[Number(choose.value)];
        holder.parentElement.querySelector(".summary").textContent = figure.summary;
        document.querySelectorAll(`[data-chosen-by="${holder.dataset.figure}"] > *`).forEach((one, i) => {
          one.hidden = i !== Number(choose.value);
        });
      }
      draw(holder, figure, small);
    };
    if (choose) choose.addEventListener("input", redraw);
    REDRAW.push(redraw);
    redraw();
  }

  let drawnAt = document.documentElement.clientWidth;
  window.addEventListener("resize", () => {
    if (document.documentElement.clientWidth === drawnAt) return;
    drawnAt = document.documentElement.clientWidth;
    REDRAW.forEach((redraw) => redraw());
  });
})();
