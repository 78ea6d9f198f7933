"""What a decoder's layers keep of earlier tokens in inference.

a trace that says it                  caches_in_trace
its bytes, and which layers decode    kept
a step of decoding, traced            decoding_step
"""
