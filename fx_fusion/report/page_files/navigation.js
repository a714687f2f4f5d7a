// -- the left: sites, modules, what nothing is said of ------------------------------------------------------------------
function folded(modules) { // layers.0.norm, layers.1.norm -> layers.{0-1}.norm
  const patterns = new Map();
  for (const module of modules) {
    const number = module.match(/\d+/);
    const key = number ? module.replace(/\d+/, "{}") : module;
    if (!patterns.has(key)) patterns.set(key, []);
    patterns.get(key).push(number ? Number(number[0]) : -1);
  }
  return [...patterns].map(([key, all]) => {
    const [least, most] = [Math.min(...all), Math.max(...all)];
    return key.replace("{}", least === most ? String(least) : `{${least}-${most}}`);
  }).join(" ");
}

function drawSites() {
  const groups = new Map();
  data.sites.forEach((site, i) => {
    if (!visible(i)) return;
    const key = JSON.stringify([site.status, site.fusion, site.reason.replace(/_\d+\b/g, ""), site.at]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(i);
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
    const sites = child.sites.filter(visible);
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
      const known = place(`${g}/${one.row}`); if (known) pickRow({ row: known.row, graph: g }); },
  }, `${one.op} `, element("span", { class: "dim" }, one.module || one.at)));
  if (items.length) document.getElementById("unsaid").replaceChildren(element("h2", {}, "nothing said of"), ...items);
}

function filtered() {
  drawFilters();
  drawSites();
  drawRest();
  draw();
}

function drawFilters() {
  const statuses = data.statuses.map((status) => {
    const count = data.sites.filter((site) => site.status === status).length;
    return element("button", { class: state.off.has(status) ? "off" : "", "aria-pressed": String(!state.off.has(status)),
      on: () => { if (!state.off.delete(status)) state.off.add(status); filtered(); } },
    element("span", { class: `dot ${status}` }), `${status} ${count}`);
  });
  const all = element("option", { value: "" }, "all fusions");
  const fusions = element("select", { id: "fusion", "aria-label": "Fusion" }, all, ...Object.keys(data.fusions).map((name) =>
    element("option", { value: name, selected: name === state.fusion && "" }, name)));
  fusions.addEventListener("change", () => { state.fusion = fusions.value; filtered(); });
  document.getElementById("filters").replaceChildren(...statuses, fusions);
}

// -- searching, keys ----------------------------------------------------------------------------------------------------
function find(next) {
  if (!data) return;
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
  if (!data) return; // still being unpacked
  if (event.target === search) {
    if (event.key === "Enter") find(true);
    if (event.key === "Escape") { search.value = ""; find(false); search.blur(); }
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const shown = data.sites.map((_, i) => i).filter(visible);
  const at = shown.indexOf(state.site);
  if (event.key === "/") { event.preventDefault(); search.focus(); }
  else if (event.key === "j" && shown.length) pickSite(shown[(at + 1) % shown.length]);
  else if (event.key === "k" && shown.length) pickSite(shown[(at - 1 + shown.length) % shown.length]);
  else if (event.key === "f") {
    const keys = data.graphs.flatMap((g, i) => g.blocks.map((block, b) => (block.like >= 0 ? `${i}/${b}` : null))).filter(Boolean);
    if (state.open.size) state.open.clear(); else for (const key of keys) state.open.add(key);
    build();
  }
});

// -- the whole report ---------------------------------------------------------------------------------------------------
function download(name, type, text) {
  const link = element("a", { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function drawAbout() {
  const parts = [element("h2", {}, "what this is"),
    element("p", {}, "Every row is a node of the graph, before (−), after (+) or in both. Choose a site on the left, or a row."),
    facts(Object.entries(data.environment))];
  for (const [index, options] of Object.entries(data.options))
    parts.push(element("h2", {}, `options of graph ${index}`), element("pre", { class: "options" }, JSON.stringify(options, null, 1)));
  card.replaceChildren(...parts);
}

function drawDiff() {
  const pre = element("pre", { class: "diff" });
  for (const line of data.diff.split("\n")) {
    const kind = line.startsWith("@@") ? "head" : { "-": "minus", "+": "plus" }[line[0]];
    pre.append(element("span", { class: kind }, line), "\n");
  }
  card.replaceChildren(element("h2", {}, "diff of the graphs"),
    element("button", { class: "action", on: () => download("fx_fusion.diff", "text/plain", data.diff) }, "download"), pre);
}

function drawTools() {
  const tools = [element("button", { class: "action", on: drawAbout }, data.options && Object.keys(data.options).length ? "options" : "about"),
    element("button", { class: "action", on: drawDiff }, "diff")];
  if (data.whole)
    tools.push(element("button", { class: "action",
      on: async () => download("fx_fusion.json", "application/json", await unpacked("document")) }, "JSON"));
  document.getElementById("tools").replaceChildren(...tools);
}

async function start() {
  await read();
  drawTools();
  drawFilters();
  drawSites();
  drawRest();
  build();
  drawAbout();
}
start();
