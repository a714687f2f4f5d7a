"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const HEIGHT = 20;
const [graph, space, card, search, found] = ["graph", "space", "card", "search", "found"].map((id) => document.getElementById(id));
const state = { off: new Set(), open: new Set(), site: -1, row: null, hits: [], hit: -1 };

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") made.addEventListener("click", value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children); // strings become text, never HTML
  return made;
}

// -- lines: what the middle shows, one after the other ----------------------------------------------------------------
let lines = [];
const place = new Map(); // "graph/row name" -> its row, and where it stands

function build() {
  lines = [];
  data.graphs.forEach((g, i) => {
    lines.push({ kind: "title", text: `graph ${g.index}` });
    for (const note of g.notes) lines.push({ kind: "note", text: note });
    for (let b = 0; b < g.blocks.length; ) {
      const block = g.blocks[b];
      let end = b + 1; // equal blocks that follow are folded into this line
      while (block.like >= 0 && end < g.blocks.length && g.blocks[end].like === block.like) end++;
      const same = block.like >= 0 ? g.blocks[block.like].title : "";
      const first = block.title, last = g.blocks[end - 1].title;
      const key = `${i}/${b}`;
      const folded = block.like >= 0 && !state.open.has(key);
      const text = same === "" && block.like < 0 ? first || "outside of layers"
        : `${first || "outside of layers"}${end - b > 1 ? ` to ${last}` : ""}: ${end - b} × the same as ${same || "above"}`;
      lines.push({ kind: "block", text: `${folded ? "▸" : "▾"} ${text}`, key: block.like >= 0 ? key : null });
      for (let at = b; at < end; at++) {
        g.blocks[at].rows.forEach((row, n) => {
          const known = place.get(`${i}/${row[1]}`) || { row, graph: i, block: key };
          known.line = folded ? -1 : lines.length;
          if (row[1]) place.set(`${i}/${row[1]}`, known);
          if (!folded) lines.push({ kind: "row", row, graph: i });
        });
      }
      b = end;
    }
  });
  space.style.height = `${lines.length * HEIGHT}px`;
  const widest = lines.reduce((most, line) => Math.max(most, line.kind === "row" ? textOf(line.row).length : 0), 0);
  space.style.width = `${widest + 4}ch`;
  draw();
}

const KINDS = { "-": "minus", "+": "plus", "~": "changed", "=": "" };

function textOf(row) {
  const [sign, , before, after] = row;
  return `${sign === "=" ? " " : sign} ${sign === "~" || sign === "+" ? after || before : before}`;
}

function sitesOf(row) {
  return row[6].filter((i) => !state.off.has(data.sites[i].status));
}

function draw() {
  const first = Math.max(0, Math.floor(graph.scrollTop / HEIGHT) - 10);
  const last = Math.min(lines.length, first + Math.ceil(graph.clientHeight / HEIGHT) + 20);
  const linked = new Set();
  if (state.row) for (const n of state.row.row[7]) linked.add(`${state.row.graph}/${numbered(state.row.graph)[n]}`);
  const made = [];
  for (let i = first; i < last; i++) {
    const line = lines[i];
    let names = `row ${line.kind}`;
    let text = line.text;
    let hint;
    if (line.kind === "row") {
      const seen = sitesOf(line.row);
      names = `row ${KINDS[line.row[0]]}`;
      if (seen.length) names += ` site ${data.sites[seen[0]].status}`;
      if (seen.includes(state.site)) names += " picked";
      if (state.row && state.row.row === line.row) names += " picked";
      if (linked.has(`${line.graph}/${line.row[1]}`)) names += " linked";
      if (state.hits[state.hit] && state.hits[state.hit].row === line.row) names += " hit";
      text = textOf(line.row);
      if (line.row[0] === "~") hint = `before: ${line.row[2]}`;
    }
    made.push(element("div", { class: names, title: hint, role: "listitem", style: `top:${i * HEIGHT}px`, "data-line": i }, text));
  }
  space.replaceChildren(...made);
}

function graphAt(index) { // graphs are numbered in the process, not in this page
  return data.graphs.findIndex((one) => one.index === index);
}

const orders = [];
function numbered(g) { // names of rows by the numbers that operands are given as
  if (!orders[g]) {
    const names = new Set();
    for (const block of data.graphs[g].blocks) for (const row of block.rows) names.add(row[1]);
    orders[g] = [...names];
  }
  return orders[g];
}

graph.addEventListener("scroll", draw);
addEventListener("resize", draw);
graph.addEventListener("click", (event) => {
  const at = event.target.closest(".row");
  if (!at) return;
  const line = lines[Number(at.dataset.line)];
  if (line.kind === "block" && line.key) toggle(line.key);
  if (line.kind === "row") pickRow(line);
});

function toggle(key) {
  if (!state.open.delete(key)) state.open.add(key);
  build();
}

function show(key) { // scroll to a row by "graph/name", unfolding what it is in
  let known = place.get(key);
  if (!known) return;
  if (known.line < 0) { state.open.add(known.block); build(); known = place.get(key); }
  graph.scrollTop = Math.max(0, known.line * HEIGHT - graph.clientHeight / 3);
  draw();
}

// -- choosing -----------------------------------------------------------------------------------------------------------
function pickRow(line) {
  state.row = line;
  const sites = sitesOf(line.row); // chosen again: the next of them
  state.site = sites.length ? sites[(sites.indexOf(state.site) + 1) % sites.length] : -1;
  if (sites.length) drawSite(state.site);
  else drawRow(line);
  draw();
  mark();
}

function pickSite(i) {
  state.site = i;
  state.row = null;
  const site = data.sites[i];
  const g = graphAt(site.graph);
  drawSite(i);
  const name = [...site.nodes, ...site.made].find((one) => place.has(`${g}/${one}`));
  if (name !== undefined) show(`${g}/${name}`);
  draw();
  mark();
}

function mark() {
  for (const one of document.querySelectorAll("nav button[data-sites]"))
    one.classList.toggle("picked", JSON.parse(one.dataset.sites).includes(state.site));
}

function facts(pairs) {
  const list = element("dl");
  for (const [name, value] of pairs) if (value) list.append(element("dt", {}, name), element("dd", {}, value));
  return list;
}

function drawSite(i) {
  const site = data.sites[i];
  const fusion = data.fusions[site.fusion];
  const parts = [
    element("h2", {}, "site"),
    element("p", {}, element("span", { class: `dot ${site.status}` }), element("strong", {}, site.fusion), ` ${site.status}`),
    facts([["module", site.module], ["source", site.at], [site.status === "fused" ? "note" : "why", site.reason],
      ["time", site.estimate], ...Object.entries(site.shapes)]),
    element("p", { class: "dim" }, fusion.about),
  ];
  for (const n of site.lines) parts.push(...source(data.names[n], site));
  parts.push(element("h2", {}, "around it"), neighbourhood(site));
  if (site.status === "near" && fusion.instead) parts.push(element("h2", {}, "write instead"), element("pre", {}, fusion.instead));
  if (fusion.reference) parts.push(element("h2", {}, "stands for"), element("pre", {}, fusion.reference));
  parts.push(element("h2", {}, "to switch it off"), element("pre", {}, `options={"fusions": ["-${site.fusion}"]}`));
  card.replaceChildren(...parts);
}

function source(call, site) {
  const cut = call.lastIndexOf(":");
  const path = call.slice(0, cut);
  const lines = data.sources[path];
  if (!lines) return [element("h3", {}, call)];
  const file = path.split("/").pop();
  const g = graphAt(site.graph);
  const about = new Set([call.slice(cut + 1)]);
  for (const name of site.nodes) {
    const known = place.get(`${g}/${name}`);
    const at = known ? data.names[known.row[5]] : "";
    if (at.startsWith(`${file}:`)) about.add(at.slice(file.length + 1));
  }
  const middle = Number(call.slice(cut + 1));
  const pre = element("pre");
  for (const [number, text] of Object.entries(lines)) {
    if (Math.abs(number - middle) > 6) continue;
    pre.append(element("span", { class: about.has(number) ? "mark" : undefined }, `${number.padStart(5)}  ${text}`), "\n");
  }
  return [element("h3", { title: path }, `${file}:${middle}`), pre];
}

function drawRow(line) {
  const [sign, name, before, after, module, at, , operands] = line.row;
  const names = numbered(line.graph);
  card.replaceChildren(
    element("h2", {}, "node"), element("p", {}, element("strong", {}, name || "")),
    facts([["module", data.names[module]], ["source", data.names[at]],
      ["status", { "=": "unchanged", "~": "changed", "-": "removed", "+": "inserted" }[sign]],
      ["before", before], ["after", after], ["reads", operands.map((n) => names[n]).join(", ")]]),
    element("p", { class: "dim" }, "No fusion is about this node: Inductor compiles it."));
}

function neighbourhood(site) { // what it reads, the site, what reads it
  const g = graphAt(site.graph);
  const names = numbered(g);
  const inside = new Set([...site.nodes, ...site.made]);
  const reads = new Set(), readers = new Set();
  for (const block of data.graphs[g].blocks) for (const row of block.rows) {
    const sources = row[7].map((n) => names[n]);
    if (inside.has(row[1])) { for (const one of sources) if (!inside.has(one)) reads.add(one); }
    else if (sources.some((one) => inside.has(one))) readers.add(row[1]);
  }
  const columns = [[...reads].slice(0, 8), null, [...readers].slice(0, 8)];
  const tall = Math.max(1, columns[0].length, columns[2].length) * 26 + 8;
  const NS = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(NS, "svg");
  const put = (tag, attributes, text) => {
    const made = document.createElementNS(NS, tag);
    for (const [k, v] of Object.entries(attributes)) made.setAttribute(k, v);
    if (text !== undefined) made.textContent = text;
    svg.append(made);
    return made;
  };
  svg.setAttribute("viewBox", `0 0 400 ${tall}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${site.fusion} reads ${columns[0].join(", ") || "inputs"}; ${columns[2].join(", ") || "nothing"} reads it`);
  const middle = tall / 2;
  columns.forEach((column, c) => (column || []).forEach((name, n) => {
    const y = 4 + n * 26;
    put("path", { d: c === 0 ? `M130 ${y + 10} C150 ${y + 10} 140 ${middle} 155 ${middle}` : `M245 ${middle} C260 ${middle} 250 ${y + 10} 270 ${y + 10}` });
    put("rect", { x: c === 0 ? 2 : 270, y, width: 128, height: 20, rx: 3 });
    put("text", { x: c === 0 ? 7 : 275, y: y + 14 }, name.length > 18 ? `${name.slice(0, 17)}…` : name);
  }));
  put("rect", { class: "site", x: 155, y: middle - 12, width: 90, height: 24, rx: 3 });
  put("text", { x: 161, y: middle + 4 }, site.fusion.length > 13 ? `${site.fusion.slice(0, 12)}…` : site.fusion);
  return svg;
}

// -- the left: sites, modules, what nothing is said of ------------------------------------------------------------------
function folded(modules) { // layers.0.norm, layers.1.norm -> layers.{0-1}.norm
  const patterns = new Map();
  for (const module of modules) {
    const number = module.match(/\d+/);
    const key = number ? module.replace(/\d+/, "{}") : module;
    patterns.set(key, [...(patterns.get(key) || []), number ? Number(number[0]) : -1]);
  }
  return [...patterns].map(([key, all]) => {
    const [least, most] = [Math.min(...all), Math.max(...all)];
    return key.replace("{}", least === most ? String(least) : `{${least}-${most}}`);
  }).join(" ");
}

function drawSites() {
  const groups = new Map();
  data.sites.forEach((site, i) => {
    if (state.off.has(site.status)) return;
    const key = JSON.stringify([site.status, site.fusion, site.reason.replace(/_\d+\b/g, ""), site.at]);
    groups.set(key, [...(groups.get(key) || []), i]);
  });
  const rank = ([key]) => data.statuses.indexOf(JSON.parse(key)[0]);
  const items = [...groups].sort((a, b) => rank(a) - rank(b)).map(([key, sites]) => {
    const [status, fusion, reason, at] = JSON.parse(key);
    const where = folded(sites.map((i) => data.sites[i].module).filter(Boolean)) || at;
    return element("button", {
      class: "item", title: [reason, where].filter(Boolean).join("\n"), "data-sites": JSON.stringify(sites),
      on: () => pickSite(sites[(sites.indexOf(state.site) + 1) % sites.length]),
    }, element("span", { class: `dot ${status}` }), `${sites.length} × ${fusion} `, element("span", { class: "dim" }, where));
  });
  document.getElementById("sites").replaceChildren(element("h2", {}, "sites"), ...items);
  mark();
}

function branch(node, depth) {
  const made = [];
  for (const child of node.children) {
    const sites = child.sites.filter((i) => !state.off.has(data.sites[i].status));
    const dots = [...new Set(sites.map((i) => data.sites[i].status))];
    made.push(element("button", {
      class: "item", style: `padding-left:${4 + 12 * depth}px`, "data-sites": JSON.stringify(sites),
      on: () => sites.length && pickSite(sites[(sites.indexOf(state.site) + 1) % sites.length]),
    }, ...(dots.length ? dots.map((status) => element("span", { class: `dot ${status}` })) : [element("span", { class: "dot" })]), child.name));
    made.push(...branch(child, depth + 1));
  }
  return made;
}

function drawRest() {
  document.getElementById("modules").replaceChildren(element("h2", {}, "modules"), ...branch(data.tree, 0));
  const items = data.unsaid.map((one) => element("button", {
    class: "item", title: `${one.module} ${one.at}`,
    on: () => { const g = graphAt(one.graph); show(`${g}/${one.row}`);
      const known = place.get(`${g}/${one.row}`); if (known) pickRow({ row: known.row, graph: g }); },
  }, `${one.op} `, element("span", { class: "dim" }, one.module || one.at)));
  if (items.length) document.getElementById("unsaid").replaceChildren(element("h2", {}, "nothing said of"), ...items);
}

function drawFilters() {
  document.getElementById("filters").replaceChildren(...data.statuses.map((status) => {
    const count = data.sites.filter((site) => site.status === status).length;
    return element("button", { class: state.off.has(status) ? "off" : "", "aria-pressed": String(!state.off.has(status)),
      on: () => { if (!state.off.delete(status)) state.off.add(status); drawFilters(); drawSites(); drawRest(); draw(); } },
    element("span", { class: `dot ${status}` }), `${status} ${count}`);
  }));
}

// -- searching, keys ----------------------------------------------------------------------------------------------------
function find(next) {
  const wanted = search.value.trim().toLowerCase();
  if (!next) {
    state.hits = [];
    state.hit = -1;
    if (wanted) data.graphs.forEach((g, i) => g.blocks.forEach((block) => block.rows.forEach((row) => {
      const all = `${row[2]} ${row[3]} ${data.names[row[4]]} ${data.names[row[5]]}`.toLowerCase();
      if (all.includes(wanted)) state.hits.push({ row, graph: i });
    })));
  }
  if (state.hits.length) {
    state.hit = (state.hit + 1) % state.hits.length;
    const hit = state.hits[state.hit];
    show(`${hit.graph}/${hit.row[1]}`);
  }
  found.textContent = wanted ? `${state.hits.length ? state.hit + 1 : 0} of ${state.hits.length}` : "";
  draw();
}

search.addEventListener("input", () => find(false));
addEventListener("keydown", (event) => {
  if (event.target === search) {
    if (event.key === "Enter") find(true);
    if (event.key === "Escape") { search.value = ""; find(false); search.blur(); }
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const visible = data.sites.map((_, i) => i).filter((i) => !state.off.has(data.sites[i].status));
  const at = visible.indexOf(state.site);
  if (event.key === "/") { event.preventDefault(); search.focus(); }
  else if (event.key === "j" && visible.length) pickSite(visible[(at + 1) % visible.length]);
  else if (event.key === "k" && visible.length) pickSite(visible[(at - 1 + visible.length) % visible.length]);
  else if (event.key === "f") {
    const keys = data.graphs.flatMap((g, i) => g.blocks.map((block, b) => (block.like >= 0 ? `${i}/${b}` : null))).filter(Boolean);
    if (state.open.size) state.open.clear(); else for (const key of keys) state.open.add(key);
    build();
  }
});

function start() {
  drawFilters();
  drawSites();
  drawRest();
  build();
  card.replaceChildren(element("h2", {}, "what this is"),
    element("p", {}, "Every row is a node of the graph, before (−), after (+) or in both. Choose a site on the left, or a row."),
    facts(Object.entries(data.environment)));
}
start();
