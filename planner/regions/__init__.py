"""Regions, inside which layouts cannot change, and the repeated blocks of a model.

regions, and the links between them    regions.build_regions, .RegionGraph
the repeated blocks                    blocks.find_blocks
blocks that share their decisions      block_grouping.group_blocks
"""
