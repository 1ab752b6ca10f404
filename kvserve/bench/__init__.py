"""Speed against ceilings taken in the same run; `docs/benchmarks.md` says what each figure means.

One round runs every case once, then the next round begins, so that all cases of a report have met
the same state of the machine. Only ratios inside one report carry over to another machine.
"""
