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
  const name = [...site.nodes, ...site.made].find((one) => place(`${g}/${one}`));
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
  const own = data.names[site.own];
  const about = [
    facts([["module", site.module], ["your line", own], ["source", own.endsWith(site.at) ? "" : site.at],
      [site.status === "fused" ? "note" : "why", site.reason], ["time", site.estimate], ...Object.entries(site.shapes)]),
    element("p", { class: "dim" }, fusion.about)];
  if (site.instead) about.push(element("h2", {}, "write instead"), element("pre", {}, site.instead));
  about.push(element("h2", {}, "to switch it off"), element("pre", {}, `options={"fusions": ["-${site.fusion}"]}`));
  const test = data.references[site.test];
  if (test) about.push(element("details", {}, element("summary", {}, "a test case"), element("pre", { id: "test" }, test)));
  const reference = data.references[site.reference];
  const columns = [element("section", {}, ...about), element("section", {}, element("h2", {}, "the model"), ...sources(site))];
  if (reference) columns.push(element("section", {}, element("h2", {}, "stands for"),
    listing(reference.replace(/\n+$/, "").split("\n").map((text, n) => [n + 1, text]), (n) => (n === site.line ? "differs" : undefined))));
  columns.push(element("section", {}, element("h2", {}, "around it"), neighborhood(site)));
  const head = element("p", { class: "head" }, element("span", { class: `dot ${site.status}` }), element("strong", {}, site.fusion), ` ${site.status}`);
  if (test) head.append(element("button", { class: "action", id: "copy", on: () => copy(test) }, "copy as a test case"));
  card.replaceChildren(head, element("div", { class: "columns" }, ...columns));
}

async function copy(text) { // where nobody may write to the clipboard, the text is there to be selected
  const button = document.getElementById("copy");
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    const shown = document.getElementById("test");
    shown.parentElement.open = true;
    getSelection().selectAllChildren(shown);
    button.textContent = "selected below: copy it with Ctrl-C";
  }
}

function listing(lines, kind) {
  const indents = lines.map(([, text]) => text).filter((text) => text.trim()).map((text) => text.search(/\S/));
  const indent = Math.min(...indents); // of all of them
  const pre = element("pre", { class: "listing" });
  for (const [number, text] of lines)
    pre.append(element("span", { class: kind(number) }, `${String(number).padStart(3)}  ${text.slice(indent)}`));
  return pre;
}

function sources(site) { // the lines of the model, those that were replaced and the one that differs marked
  const g = graphAt(site.graph);
  const replaced = new Set();
  for (const name of site.nodes) {
    const known = place(`${g}/${name}`);
    if (known) replaced.add(data.names[known.row[5]]);
  }
  const stopped = data.names[site.stopped];
  const calls = site.lines.map((n) => data.names[n]).map((call) => [call.slice(0, call.lastIndexOf(":")), Number(call.slice(call.lastIndexOf(":") + 1))]);
  const made = [], seen = new Set();
  for (const [path, line] of calls) {
    const file = path.split("/").pop();
    const lines = Object.entries(data.sources[path] || {}).map(([n, text]) => [Number(n), text])
      .filter(([n]) => calls.some(([other, middle]) => other === path && Math.abs(middle - line) <= 8 && Math.abs(n - middle) <= 5) && !seen.has(`${path}:${n}`));
    for (const [n] of lines) seen.add(`${path}:${n}`);
    if (!lines.length && made.length) continue; // shown with another
    made.push(element("h3", { title: path }, `${file}:${line}`));
    if (lines.length) made.push(listing(lines, (n) =>
      (`${path}:${n}` === stopped ? "differs" : replaced.has(`${file}:${n}`) || n === line ? "mark" : undefined)));
  }
  return made;
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

function neighborhood(site) { // what it reads, the site, what reads it
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
