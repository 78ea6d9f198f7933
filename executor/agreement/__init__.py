"""Agreement of ranks: that they hold what the plan needs, before a module is sharded and in its first calls.

Ranks exchange short texts through the store of the default process group, not by collectives: no rank waits longer than
a time limit, the error names the ranks that did not come, and nothing is counted as communication of a plan.
"""
