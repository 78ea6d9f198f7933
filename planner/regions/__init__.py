"""Where may layouts change? The ops between module boundaries, grouped into regions and blocks.

regions, and the links between them    regions.build_regions, .RegionGraph
the repeated blocks                    blocks.find_blocks
blocks that share their decisions      block_grouping.group_blocks
"""
