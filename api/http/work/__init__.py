"""What requests have parsed, checked and computed, in processes of its own: reads and probes never wait for it.

the processes, and whose turn it is    pool
what they do                           functions
"""
