"""The results table: columns, storage and comparison statistics."""
