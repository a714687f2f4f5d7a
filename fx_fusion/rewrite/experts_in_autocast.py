"""Grouped products of float32 weights under autocast, in autocast's dtype, where the user asks for it.

Autocast knows no grouped products. transformers multiplies float32 weights expert by expert then, in float32 and with a wait
for the GPU. With ``options={"experts": "autocast"}`` they are cast and multiplied by ``F.grouped_mm``, as autocast
casts the weights of linear layers; the result is float32 as before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

from fx_fusion.graph.effects import autocast_of
from fx_fusion.graph.routing import grouped_product
from fx_fusion.graph.terms import example
from fx_fusion.graph.view import View
from fx_fusion.rewrite.editor import Editor, Mismatch

ADVICE = (
    "experts with float32 weights are multiplied one by one in float32, with a wait for the GPU, as autocast knows no "
    'grouped products: make the model bfloat16, or options={"experts": "autocast"} casts them as autocast does for '
    "linear layers"
)


def multiply_experts_in_autocast(gm: fx.GraphModule) -> int:
    """Rewrite such products in place, those of bodies too. Returns how many there were."""
    count = 0
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            editor = Editor(View(module.graph))
            found = [node for node in module.graph.nodes if is_cast_by_nobody(editor.view, node)]
            count += sum(_cast(editor, node) for node in found)
            if found:
                module.graph.lint()
                module.recompile()
    return count


def is_cast_by_nobody(view: View, node: fx.Node) -> bool:
    """Return True for a grouped product of transformers, of float32, where autocast makes linear layers bfloat16."""
    product = grouped_product(view, node)
    if product is None or product.of_torch or example(product.x).dtype != torch.float32:
        return False
    return autocast_of(view.effects.region[node], example(node).device.type)[1:] == (torch.bfloat16, True)


def _cast(editor: Editor, node: fx.Node) -> bool:
    product = grouped_product(editor.view, node)
    assert product is not None
    known = set(editor.graph.nodes)
    try:
        with editor.graph.inserting_before(node):
            operands = [editor.cast(n, torch.bfloat16, like=node) for n in (product.x, product.weight)]
            rows = editor.call(F.grouped_mm, tuple(operands), {"offs": product.offsets}, like=node)
            editor.replace(node, editor.cast(rows, torch.float32, like=node))
    except Mismatch:
        editor.erase(n for n in list(editor.graph.nodes) if n not in known)
        return False
    editor.graph.erase_node(node)
    return True
