"""Model folders that `prefetch` makes of what others ship: from GGUF files, with fewer entries."""
