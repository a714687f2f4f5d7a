"""Reading a graph that Dynamo captured: what each node means, what may not be reordered. Changes nothing."""
