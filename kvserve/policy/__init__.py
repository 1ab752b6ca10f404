"""Decisions about capacity, pure: who may store how much, who must give, which goes first."""
