"""Shipped test doubles and harnesses: a real server process, fakes that keep the contracts."""
