"""Engines and models inside a service: one call, from many threads and event loops."""
