"""Where bytes live: one file a store."""
