"""Products with a weight in float8: found in the joint graph, decided by their time, written anew."""
