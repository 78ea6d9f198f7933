"""The service under load: `cached` measures its throughput, `unkind` what one token's attacks take from another's work.

`attacks` has the attacks.
"""
