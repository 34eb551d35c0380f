"""What a run puts on storage while it trains: its checkpoints, and the ledger of samples that they rest on."""
