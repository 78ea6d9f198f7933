"""Verification: a step of a plan is run on fake processes, before the plan is given.

the run, compared with the plan        verify_plan.verification_of
equal blocks in the lists of a module  block_runs.find_block_runs
a copy with fewer of them              shortened.shortened_copy
"""
