"""Regions, inside which layouts cannot change, and the repeated blocks of a model.

regions, and the links between them    regions.build_regions, .RegionGraph
who reads each parameter               parameter_readers.find_parameter_readers
the repeated blocks                    blocks.find_blocks
blocks that share their decisions      block_grouping.group_blocks
"""
