"""Hypothesis without its deadline: a busy machine is no failed test."""

from hypothesis import settings

settings.register_profile("kvserve", deadline=None)
settings.load_profile("kvserve")
