"""Report: sites, tables, diffs, JSON, trace artifacts."""
