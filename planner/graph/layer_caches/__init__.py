"""What a decoder's layers keep of earlier tokens in inference.

its bytes, and which layers decode    kept
a step of decoding, traced            decoding_step
"""
