"""`python -m kvserve`."""

from kvserve.cli import main

main()
