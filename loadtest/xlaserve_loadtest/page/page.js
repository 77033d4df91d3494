"use strict";
(() => {
  const PRINT_WIDTH_PX = 670;
  const PRINT_HEIGHT_PX = 270;
  const tables = [...document.querySelectorAll("table")];
  const fit = () => {
    tables.forEach((table) => table.classList.remove("stacked"));
    tables.filter((table) => table.scrollWidth > table.parentElement.clientWidth).forEach((table) => table.classList.add("stacked"));
  };
  document.querySelectorAll("details").forEach((details) => details.addEventListener("toggle", fit));
  addEventListener("resize", fit);
  fit();

  const plots = [];
  for (const source of document.querySelectorAll("script.chart")) {
    const { traces, layout } = JSON.parse(source.textContent);
    const plot = source.previousElementSibling;
    plots.push(plot);
    const keys = [...plot.closest("figure").querySelectorAll(".legend button")];
    for (const key of keys) {
      key.addEventListener("click", () => {
        key.setAttribute("aria-pressed", key.getAttribute("aria-pressed") !== "true");
        const hidden = new Set(keys.filter((one) => one.getAttribute("aria-pressed") !== "true").map((one) => one.dataset.key));
        Plotly.restyle(plot, { visible: traces.map((trace) => !trace.meta.some((name) => hidden.has(name))) });
      });
    }
    Plotly.newPlot(plot, traces, layout, { responsive: true, displayModeBar: false, scrollZoom: false });
  }
  // Paper is narrower than most windows, and printing does not ask charts to fit. Curves lose nothing by being lower;
  // bars, a name each, would.
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((details) => { details.open = true; });
    plots.forEach((plot) => resize(plot, PRINT_WIDTH_PX, PRINT_HEIGHT_PX));
  });
  addEventListener("afterprint", () => plots.forEach((plot) => resize(plot, null, Infinity)));
  function resize(plot, width, most) {
    const own = Number(plot.dataset.height ??= plot.layout.height);
    const isBars = plot.data.some((trace) => trace.type === "bar");
    const height = isBars ? own : Math.min(own, most);
    plot.style.height = `${height}px`;
    // It remembers the width that it was first drawn in.
    Plotly.relayout(plot, { width, height, autosize: width === null }).then(() => width ?? Plotly.Plots.resize(plot));
  }
})();
