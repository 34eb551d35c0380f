"""What every other folder may use: counters, units, clocks, canonical JSON, events, the environment. No torch."""
