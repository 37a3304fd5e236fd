// The graph of a profile's layers, their details and their table, from the data in the page. Texts come from files of
// others: they enter the page as text only.
"use strict";
(() => {
  const { layers, columns, colorings, edges, sortedBy } = JSON.parse(document.getElementById("data").textContent);
  if (!layers.length) return;
  const MOST_HITS = 40;
  const MOST_ROWS = 200; // with 500, a sort takes twice as long
  const byId = (id) => document.getElementById(id);
  const shown = (cell) => (Array.isArray(cell) ? cell[0] : cell);
  const make = (tag, text = "", className = "") => {
    const element = document.createElement(tag);
    element.textContent = text;
    if (className) element.className = className;
    return element;
  };
  // A name breaks after its dots and slashes, as the template breaks others.
  const breaking = (element) => {
    const parts = element.textContent.split(/(?<=[./])(?=[^./])/);
    element.replaceChildren(...parts.flatMap((part, index) => (index ? [make("wbr"), part] : [part])));
    return element;
  };
  const number = (count) => `${count} layer${count === 1 ? "" : "s"}`;

  // The graph.
  let coloring = colorings[0];
  let chosen = null;
  const groupOf = (node) => coloring.groups[coloring.of_layer[node.id()]];
  const foreground = () => getComputedStyle(document.documentElement).getPropertyValue("--fg").trim();
  const line = ([source, target, bends], index) => {
    // Cytoscape wants a bend as its share of the way from end to end and its distance from the straight line.
    const [x, y] = layers[source].at;
    const [dx, dy] = [layers[target].at[0] - x, layers[target].at[1] - y];
    const length = Math.hypot(dx, dy);
    return {
      group: "edges",
      classes: bends.length ? "bent" : "",
      data: {
        id: `e${index}`,
        source: `${source}`,
        target: `${target}`,
        weights: bends.map(([px, py]) => ((px - x) * dx + (py - y) * dy) / length ** 2),
        distances: bends.map(([px, py]) => ((py - y) * dx - (px - x) * dy) / length),
      },
    };
  };
  const cy = cytoscape({
    container: byId("graph"),
    elements: [
      ...layers.map(({ at: [x, y], label }, index) => ({ data: { id: `${index}`, label }, position: { x, y } })),
      ...edges.map(line),
    ],
    layout: { name: "preset", padding: 20 },
    minZoom: 0.02,
    maxZoom: 3,
    autoungrabify: true,
    autounselectify: true,
    boxSelectionEnabled: false,
    userZoomingEnabled: false, // until a click: the wheel scrolls the page
    style: [
      {
        selector: "node",
        style: {
          shape: "round-rectangle",
          width: 160,
          height: 38,
          "background-color": (node) => groupOf(node).color,
          color: (node) => groupOf(node).ink,
          label: "data(label)",
          "text-wrap": "wrap",
          "text-valign": "center",
          "font-size": 12,
          "line-height": 1.2,
          "font-family": "system-ui, sans-serif",
          "min-zoomed-font-size": 6,
        },
      },
      {
        selector: "edge",
        style: {
          events: "no",
          width: 1.5,
          "line-color": "#8a8f98",
          "target-arrow-color": "#8a8f98",
          "target-arrow-shape": "triangle",
          "arrow-scale": 0.7,
          "curve-style": "straight",
          "source-endpoint": "0 50%",
          "target-endpoint": "0 -50%",
        },
      },
      {
        selector: "edge.bent",
        style: {
          "curve-style": "segments",
          "edge-distances": "node-position",
          "segment-weights": "data(weights)",
          "segment-distances": "data(distances)",
        },
      },
      { selector: ".miss", style: { opacity: 0.25 } },
      { selector: ".chosen", style: { "border-width": 4, "border-color": foreground, "z-index": 1 } },
    ],
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => cy.style().update());
  byId("graph").addEventListener("pointerdown", () => cy.userZoomingEnabled(true));
  byId("graph").addEventListener("mouseleave", () => cy.userZoomingEnabled(false));
  cy.on("tap", "node", (event) => show(Number(event.target.id())));
  const zoom = (factor) => {
    cy.zoom({ level: cy.zoom() * factor, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } });
  };
  byId("closer").addEventListener("click", () => zoom(1.5));
  byId("farther").addEventListener("click", () => zoom(1 / 1.5));
  byId("whole").addEventListener("click", () => cy.fit(undefined, 20));
  const centre = (nodes) => {
    cy.fit(nodes, 40);
    if (cy.zoom() > 1) cy.zoom(1);
    cy.center(nodes);
  };

  // Colours.
  const recolor = () => {
    coloring = colorings[byId("coloring").value];
    cy.style().update();
    byId("legend").replaceChildren(
      ...coloring.groups.map(({ color, text, note }) => {
        const item = make("li");
        const swatch = make("i");
        swatch.style.background = color;
        item.append(swatch, `${text}: `, make("span", note, "quiet"));
        return item;
      }),
    );
  };
  byId("coloring").append(...colorings.map(({ title }, index) => new Option(title, index)));
  byId("coloring").addEventListener("change", recolor);
  recolor();

  // The details of a layer.
  const LISTED = ["layer", "reasons", "reads", "writes", "nodes", "modules"]; // not among the pairs of name and value
  const list = (title, items) => {
    if (!items.length) return [];
    const body = make("ul");
    body.append(...items.map((item) => make("li", item || "(no name)")));
    return [make("h4", `${title} (${items.length})`), body];
  };
  const show = (index) => {
    const layer = layers[index];
    if (chosen !== null) cy.getElementById(`${chosen}`).removeClass("chosen");
    chosen = index;
    cy.getElementById(`${index}`).addClass("chosen");
    const reasons = make("ul", "", "reasons");
    for (const [reason, time, message, finding] of layer.reasons) {
      const item = make("li");
      const pill = make(finding ? "a" : "span", reason, "pill warning");
      if (finding) pill.href = `#${finding}`;
      item.append(pill, time ? ` ${time}: ` : " ", message);
      reasons.append(item);
    }
    const values = make("dl");
    columns.forEach(([title], place) => {
      const value = shown(layer.cells[place]);
      if (value && !LISTED.includes(title)) values.append(make("dt", title), make("dd", value));
    });
    byId("details").replaceChildren(
      make("h3", layer.name || "(no name)"),
      reasons,
      values,
      ...list("ONNX nodes", layer.nodes),
      ...list("modules", layer.modules),
      ...list("reads", layer.reads),
      ...list("writes", layer.writes),
      ...list("constants", layer.constants),
    );
    byId("details").scrollTop = 0;
    byId("layers")
      .querySelectorAll("tbody tr")
      .forEach((row) => row.toggleAttribute("aria-selected", Number(row.dataset.layer) === index));
    byId("hits")
      .querySelectorAll("button")
      .forEach((button) => button.toggleAttribute("aria-current", Number(button.dataset.layer) === index));
  };
  const visit = (index) => {
    show(index);
    centre(cy.getElementById(`${index}`));
  };
  const bring = (index) => {
    visit(index);
    document.querySelector(".map").scrollIntoView({ block: "start" });
    byId("details").focus({ preventScroll: true });
  };

  // Search.
  const texts = layers.map(({ name, nodes, modules, cells }) =>
    [name, ...nodes, ...modules, cells[columns.findIndex(([title]) => title === "kernel")]].join("\n").toLowerCase(),
  );
  let hits = [];
  byId("find").addEventListener("input", () => {
    const wanted = byId("find").value.trim().toLowerCase();
    hits = wanted ? [...layers.keys()].filter((index) => texts[index].includes(wanted)) : [];
    const found = new Set(hits);
    cy.batch(() => cy.nodes().forEach((node) => node.toggleClass("miss", wanted && !found.has(Number(node.id())))));
    const more = hits.length > MOST_HITS ? `, the first ${MOST_HITS} of them:` : "";
    byId("found").textContent = wanted ? number(hits.length) + more : "";
    byId("hits").hidden = !hits.length;
    byId("hits").replaceChildren(
      ...hits.slice(0, MOST_HITS).map((index) => {
        const button = make("button", layers[index].name || "(no name)");
        button.type = "button";
        button.dataset.layer = index;
        button.addEventListener("click", () => visit(index));
        const item = make("li");
        item.append(button);
        return item;
      }),
    );
    if (hits.length) {
      show(hits[0]);
      centre(cy.nodes().filter((node) => found.has(Number(node.id()))));
    }
  });
  byId("find").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !hits.length) return;
    visit(hits[(hits.indexOf(chosen) + 1) % hits.length]);
  });
  // A name in a finding shows the layers that have it.
  document.querySelectorAll("button[data-find]").forEach((button) => {
    button.addEventListener("click", () => {
      byId("find").value = button.dataset.find;
      byId("find").dispatchEvent(new Event("input"));
      document.querySelector(".map").scrollIntoView({ block: "start" });
    });
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.closest("input, select, textarea")) return;
    event.preventDefault();
    byId("find").focus();
  });

  // The table.
  let [sorted, down] = [sortedBy, true];
  const rowTexts = layers.map(({ cells }) => cells.map(shown).join("\n").toLowerCase());
  const fill = () => {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const key = (index) => layers[index].cells[sorted];
    const isNumber = columns[sorted][1] === "number";
    const order = isNumber
      ? (a, b) => (key(a)?.[1] ?? -Infinity) - (key(b)?.[1] ?? -Infinity)
      : (a, b) => key(a).localeCompare(key(b));
    const rows = [...layers.keys()]
      .filter((index) => words.every((word) => rowTexts[index].includes(word)))
      .sort((a, b) => (down ? order(b, a) : order(a, b)));
    const cut = rows.length > MOST_ROWS ? `, the first ${MOST_ROWS} of them` : "";
    byId("shown").textContent = `${number(rows.length)} of ${layers.length}${cut}`;
    byId("layers").tBodies[0].replaceChildren(...rows.slice(0, MOST_ROWS).map(row));
    [...byId("layers").tHead.rows[0].cells].forEach((heading, place) => {
      if (used[place] === sorted) heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
    });
  };
  const used = [...columns.keys()].filter((place) => layers.some(({ cells }) => shown(cells[place])));
  const row = (index) => {
    const line = make("tr");
    line.dataset.layer = index;
    line.toggleAttribute("aria-selected", index === chosen);
    used.forEach((place) => {
      const text = shown(layers[index].cells[place]);
      const cell = make("td", place ? text : "", columns[place][1]);
      if (!place) cell.append(Object.assign(breaking(make("button", text)), { type: "button" }));
      line.append(cell);
    });
    return line;
  };
  const headings = make("tr");
  used.forEach((place) => {
    const [title, style] = columns[place];
    const heading = make("th", "", style);
    heading.scope = "col";
    const button = Object.assign(make("button", title), { type: "button" });
    button.addEventListener("click", () => {
      down = place === sorted ? !down : style === "number";
      sorted = place;
      fill();
    });
    heading.append(button);
    headings.append(heading);
  });
  byId("layers").tHead.append(headings);
  byId("layers").tBodies[0].addEventListener("click", (event) => bring(Number(event.target.closest("tr").dataset.layer)));
  byId("filter").addEventListener("input", fill);

  show(layers.reduce((best, layer, index) => (layer.cells[sortedBy][1] > layers[best].cells[sortedBy][1] ? index : best), 0));
  fill();
  for (const plot of [byId("scatter"), byId("roofline"), byId("order")]) {
    plot?.on("plotly_click", ({ points: [{ customdata }] }) => customdata !== undefined && bring(customdata));
  }
})();
