"""Agreement of ranks: that they hold what the plan needs, before a module is sharded and in some of its calls.

Ranks exchange short texts through the store of the default process group, not by collectives: no rank waits longer than
a time limit, the error names the ranks that did not come, and nothing is counted as communication of a plan.

all ranks shard the same                  before_sharding.ShardingAgreement
all ranks pass what the plan needs        batches.attach_batch_check
what a rank holds, as text                statement
texts of all ranks, and one verdict       exchange.Exchange
"""
