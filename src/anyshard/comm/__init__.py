"""Wires: how bytes leave a rank, and the only place that counts them."""
