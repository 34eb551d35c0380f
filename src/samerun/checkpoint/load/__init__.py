"""Loading: an opened checkpoint, its components as sources, and verified reading by slices."""
