"""Measures: benchmarks of the engine beside its peers. Nothing here is part of the service."""
