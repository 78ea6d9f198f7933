"""Rows of the jobs as values: a job with its result, which of two results is better, and the place of a waiting job.

a job                                        job.JobRecord
results that the time limit cut short        results.is_cut_short, results.is_better
the place of a waiting job in the queue      places.place_of
"""
