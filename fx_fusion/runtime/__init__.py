"""Run around a compiled graph: tensors that compute themselves when read, graphs with assumptions."""
