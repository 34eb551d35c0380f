"""Loaders that people have, as sources, each with the guarantee that it can honestly give."""
