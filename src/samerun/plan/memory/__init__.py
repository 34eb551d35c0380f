"""Memory of one rank, bounded from below and above before anything is launched."""
