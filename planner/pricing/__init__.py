"""Prices of choices, in seconds and bytes: of strategies, redistributions and stored layouts.

a redistribution                    redistribution_costs.RedistributionPricer.both_ways
a strategy of a region              region_costs.RegionPricer.price
an op on one device's shards        op_times.OpTimes.op_time
a stored parameter, and its use     parameter_costs.ParameterPricer.storage, .use
an FSDP group's collectives         fsdp_group_costs.FsdpGroupPricer
overlap with compute, with GEMMs    overlap.Overlap, async_tp
the stored layouts to choose from   storage_options.storage_options
the run that is priced              run_spec.Run
"""
