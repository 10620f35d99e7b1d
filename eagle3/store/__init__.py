"""Bytes at rest: rows of tokens and hidden states in Zarr. The only user of zarr."""
