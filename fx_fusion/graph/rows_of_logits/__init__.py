"""Find the part of a graph that treats each row of logits by itself.

Between a language-model head and the first op that mixes rows (tokens), a loss reads one row at a time. ``finder.region_of``
follows the logits of a linear layer through the nodes that read them, below autograd, and labels the dims of each value:

    Rows(a, b)   the axes a..b of the rows of the logits, as one dim
    CLASS        the classes
    FEW          a few numbers a row: the k of a top-k, a stack of two
    ONE          size 1

Each rule also writes its op for rows in one dim: (rows, few ..., classes). These ops are the *body* of the region. It has no
shape of the batch in it, so it runs on any chunk of rows. A value without classes that an op without a rule reads is a
*seam*: the body returns it, and what follows stays an ordinary graph. Where a value with classes meets such an op, the
region is opaque.

Values that the logits do not reach (labels, a teacher's logits) are inputs of the body. Their labels follow from the first
op that combines them with a labeled value. Tensors as large as the logits are followed backwards: what makes them is part of
the body where the rules allow it.
"""

