"""What was said: sites, tables, diffs, JSON, trace artifacts."""
