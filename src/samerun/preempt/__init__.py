"""Being told to stop: handlers that only set a flag and a time; everything else happens at an edge. No torch."""
