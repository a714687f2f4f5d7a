"""Logits and targets of any shape as rows, for a kernel; and its results in the shape of the site."""

from __future__ import annotations

import torch
from torch import fx

from fx_fusion.graph.terms import example, same_shape
from fx_fusion.patterns.sites.loss import LossSite
from fx_fusion.rewrite.editor import Editor


def one_a_row(editor: Editor, site: LossSite) -> fx.Node:
    """A target (m), from 0 on, for a site's targets of any shape."""
    target, root = site.target, site.root
    if site.from_end:
        classes = example(site.logits).shape[-1]
        below, moved = (editor.call(f, (target, n), like=root) for f, n in ((torch.lt, 0), (torch.add, classes)))
        target = editor.call(torch.where, (below, moved, target), like=root)
    return target if example(target).dim() == 1 else editor.method("reshape", (target, -1), like=root)


def rows_of(editor: Editor, logits: fx.Node, site: LossSite) -> tuple[fx.Node, fx.Node]:
    """Logits (m, v) and a target (m) for the logits of a site, and targets of any shape."""
    shape = example(logits).shape
    rows = logits if len(shape) == 2 else editor.method("reshape", (logits, -1, shape[-1]), like=site.root)
    return rows, one_a_row(editor, site)


def shaped_as(editor: Editor, losses: fx.Node, site: LossSite, root: fx.Node) -> fx.Node:
    """One number a row (m), in the shape of ``root``. Read off the targets where it is theirs: a symbolic shape can't be
    written into a graph."""
    wanted, target = example(root), example(site.target)
    if same_shape(wanted, example(losses)):
        return losses
    if wanted.dim() == target.dim() + 1 and same_shape(wanted[..., 0], target):
        return editor.method("unsqueeze", (editor.method("view_as", (losses, site.target), like=root), -1), like=root)
    if same_shape(wanted, target):
        return editor.method("view_as", (losses, site.target), like=root)
    if target.dim() == wanted.dim() + 1 and same_shape(target[..., 0], wanted):
        return editor.method("squeeze", (editor.method("view_as", (losses, site.target), like=root), -1), like=root)
    return editor.method("view", (losses, tuple(wanted.shape)), like=root)
