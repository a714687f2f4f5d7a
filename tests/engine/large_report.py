"""A report of 126 layers and 20 000 nodes, without a model of that size: one layer of a small one, again and again."""

import re
from dataclasses import replace

from fx_fusion.report.report import Report

LAYERS = 126


def large(report, nodes=20_000):
    """A report whose one graph has ``LAYERS`` layers like the second of ``report``, and at least so many nodes."""
    (graph,) = report.graphs
    start, end = (next(i for i, row in enumerate(graph.rows_before) if f".layers.{n}" in row.module) for n in (1, 2))
    layer = graph.rows_before[start:end]
    first, last = (next(i for i, row in enumerate(graph.rows_after) if f".layers.{n}" in row.module) for n in (1, 2))
    layer_after = graph.rows_after[first:last]
    copies = -(-nodes // len(layer))
    before, after, sites = list(graph.rows_before[:start]), list(graph.rows_after[:first]), []
    known = {row.name for row in (*layer, *layer_after)}
    of_layer = [site for site in report.sites if ".layers.1." in site.module]
    for copy in range(copies):
        number = copy * LAYERS // copies
        names = {name: f"{re.sub(r'_[0-9]+$', '', name)}_{i}_{copy}" for i, name in enumerate(sorted(known))}
        before += [_renamed(row, names, number) for row in layer]
        after += [_renamed(row, names, number) for row in layer_after]
        for site in of_layer:
            nodes_of, made = (tuple(names.get(n, n) for n in given) for given in (site.nodes, site.made))
            sites.append(replace(site, nodes=nodes_of, made=made, module=_numbered(site.module, number)))
    before += graph.rows_before[end:]
    after += graph.rows_after[last:]
    made = Report()
    made.add(replace(graph, rows_before=tuple(before), rows_after=tuple(after), nodes_before=len(before)), sites)
    return made


def _renamed(row, names, number):
    text = re.sub(r"[A-Za-z_]\w*", lambda word: names.get(word[0], word[0]), row.text)
    operands = tuple(names.get(name, name) for name in row.operands)
    return row._replace(name=names[row.name], text=_numbered(text, number), operands=operands, module=_numbered(row.module, number))


def _numbered(path, number):
    return re.sub(r"\blayers\.1\b", f"layers.{number}", path)
