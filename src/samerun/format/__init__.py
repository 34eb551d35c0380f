"""The on-disk format `ckpt.v1`: names, schema, typed plain values, layouts, digests. No torch."""
