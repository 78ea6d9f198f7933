"""The cost of folding equal blocks: `compare` solves folded and unfolded programs, `tied` ties a problem's nodes."""
